# SPDX-License-Identifier: Apache-2.0
"""Tickets: a proxy draws a ticket for a request and asks P and D at once. D follows the request at P by its ticket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvhma.vllm.wire.params import Address, Hex128, convert_params, read_address

TICKET = "kvhma_ticket"
"""Key of the ticket that a proxy draws when it asks P and D at once."""


class _Ticket(msgspec.Struct):
    kvhma_ticket: Hex128


class Ticket(NamedTuple):
    """A request that a proxy has sent to P and to D at once.

    Attributes:
        id: random, 16 bytes. A peer that knows it may follow the request.
        address: P's scheduler.
    """

    id: bytes
    address: Address


def read_ticket_id(params: Mapping[str, Any]) -> bytes:
    """Return the id of the ticket in ``kv_transfer_params``.

    Raises:
        RequestError: the value is not a ticket.
    """
    return bytes.fromhex(convert_params(params, _Ticket).kvhma_ticket)


def read_ticket(params: Mapping[str, Any]) -> Ticket:
    """Return the ticket in the ``kv_transfer_params`` of a decode request.

    Raises:
        RequestError: the value is not a ticket, or the address of P is missing.
    """
    return Ticket(read_ticket_id(params), read_address(params))
