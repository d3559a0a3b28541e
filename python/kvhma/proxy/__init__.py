# SPDX-License-Identifier: Apache-2.0
"""A small proxy for tickets and the next turns of chats, which no router has; see `kvhma.proxy.app`."""

from kvhma.proxy.app import PREFILL_PARAMS, make_app, parser
from kvhma.proxy.bodies import is_computed_by_decode
from kvhma.proxy.turns import Turns

__all__ = ["PREFILL_PARAMS", "Turns", "is_computed_by_decode", "make_app", "parser"]
