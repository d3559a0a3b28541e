# SPDX-License-Identifier: Apache-2.0
"""How many calls may wait for other engines at a time, and whose turn is next: the one budget for unknown peers.

An unknown peer has never answered, or did not answer in time the last time. A client may have named it.
"""

from __future__ import annotations

import math
import resource
from collections import Counter

from kvhma.vllm.recent import Recent
from kvhma.vllm.wire.params import Address

MAX_WAITING = 2048
"""Most calls that wait for an answer at a time; at most an eighth of the process's file descriptors, too.

As many connections may be idle, and a process may have two of these: its scheduler's and its worker's.
"""

_UNKNOWN_SHARE = 3 / 4
"""Share of these that may wait for unknown peers."""

_LONG_SHARE = 1 / 2
"""Share of these that may be long: the peer decides when it answers."""

MAX_AT_ADDRESS = 64
"""Most short calls that wait for one responsive engine, and most long ones."""

MAX_AT_UNKNOWN_ADDRESS = 4
"""Most short calls that wait for one unknown peer, and most long ones."""

_MAX_REMEMBERED = 4096
"""Most responsive engines, and most failed peers, that it remembers."""


class Room:
    """Counts calls that wait. Responsive engines have room, also if clients name many silent addresses.

    Attributes:
        limit: most calls that wait, and most connections that are kept without a call.
    """

    def __init__(self) -> None:
        """Start without calls."""
        self.limit = max(4, min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        self._waiting: Counter[tuple[Address, bool]] = Counter()
        """Short and long calls that wait, by address."""
        self._waiting_unknown = self._waiting_long = self._waiting_all = 0
        self._responsive: Recent[Address, None] = Recent(_MAX_REMEMBERED)
        self._failed_at: Recent[Address, float] = Recent(_MAX_REMEMBERED)

    def is_responsive(self, address: Address) -> bool:
        """Return whether the last call was answered in time."""
        return address in self._responsive

    def turn(self, address: Address) -> tuple[bool, float]:
        """Return the key that sorts addresses by turn: responsive ones, those never tried, then those that failed."""
        return address not in self._responsive, self._failed_at.get(address, -math.inf)

    def has_room(self, address: Address, *, is_long: bool) -> bool:
        """Return whether another call may wait for an address."""
        known = address in self._responsive
        return (
            self._waiting_all < self.limit
            and self._waiting[address, is_long] < (MAX_AT_ADDRESS if known else MAX_AT_UNKNOWN_ADDRESS)
            and (known or self._waiting_unknown < self.limit * _UNKNOWN_SHARE)
            and (not is_long or self._waiting_long < self.limit * _LONG_SHARE)
        )

    def note_start(self, address: Address, *, is_long: bool) -> bool:
        """Note a call that waits from now on; return whether its peer is unknown, for :meth:`note_end`."""
        is_unknown = address not in self._responsive
        self._add(address, 1, is_long=is_long, is_unknown=is_unknown)
        return is_unknown

    def note_end(self, address: Address, *, is_long: bool, is_unknown: bool) -> None:
        """Note that a call waits no longer."""
        self._add(address, -1, is_long=is_long, is_unknown=is_unknown)

    def note_answer(self, address: Address) -> None:
        """Note an answer in time."""
        self._failed_at.pop(address, None)
        self._responsive.note(address, None)

    def note_failure(self, address: Address, now: float) -> None:
        """Note an error, or a late answer."""
        self._responsive.pop(address, None)
        self._failed_at.note(address, now)

    def _add(self, address: Address, number: int, *, is_long: bool, is_unknown: bool) -> None:
        self._waiting[address, is_long] += number
        if not self._waiting[address, is_long]:
            del self._waiting[address, is_long]
        self._waiting_all += number
        self._waiting_unknown += number * is_unknown
        self._waiting_long += number * is_long
