# SPDX-License-Identifier: Apache-2.0
"""Tickets: a proxy draws one for a request, and asks P and D at once; D follows the request at P by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvhma.errors import RequestError
from kvhma.text import quote
from kvhma.vllm.wire.params import Address, read_address

TICKET = "kvhma_ticket"
"""Key of the ticket that a proxy draws when it asks P and D at once."""

_TICKET = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Ticket(NamedTuple):
    """A request that a proxy has given to P and to D at once.

    Attributes:
        id: random, 16 bytes. Who knows it may follow the request.
        address: P's scheduler.
    """

    id: bytes
    address: Address


def read_ticket_id(params: Mapping[str, Any]) -> bytes | None:
    """Return the id of the ticket in ``kv_transfer_params``; None without one.

    Raises:
        RequestError: it is none.
    """
    text = params.get(TICKET)
    if text is None:
        return None
    if not isinstance(text, str) or _TICKET.fullmatch(text) is None:
        raise RequestError(f"kv_transfer_params: {TICKET} is {quote(text)}, expected 32 hexadecimal digits")
    return bytes.fromhex(text)


def read_ticket(params: Mapping[str, Any]) -> Ticket | None:
    """Return the ticket in the ``kv_transfer_params`` of a decode request; None without one.

    Raises:
        RequestError: it is none, or does not say where P listens.
    """
    found = read_ticket_id(params)
    if found is None:
        return None
    return Ticket(found, read_address(params))
