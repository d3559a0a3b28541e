# SPDX-License-Identifier: Apache-2.0
"""Slots of the pool in host memory through which blocks go where a device's memory cannot be registered."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvhma.errors import RequestError
from kvhma.geometry import Span


@dataclass(frozen=True, slots=True)
class SlotRanges:
    """Which slots are for what.

    Slot 0 is none, as block 0 is no block::

        | 0 | for reads by others, the scheduler's | for own loads, each worker's |

    Attributes:
        reads: for blocks that others read from here.
        loads: for blocks that are read from others.
    """

    reads: range
    loads: range

    @classmethod
    def of(cls, reads: int, loads: int) -> SlotRanges:
        """Return so many slots for each."""
        return cls(range(1, 1 + reads), range(1 + reads, 1 + reads + loads))

    @property
    def count(self) -> int:
        """Slots of the pool, the null slot included."""
        return 1 + len(self.reads) + len(self.loads)


NO_SLOTS = SlotRanges.of(0, 0)


class Slots:
    """Free slots. Safe to use from several threads."""

    def __init__(self, numbers: range) -> None:
        """Begin with all of them free."""
        self._total = len(numbers)
        self._lock = threading.Lock()
        self._free = list(numbers)

    def take(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        """Return slots for blocks, for each group, the lowest free ones; None while there are too few.

        Raises:
            RequestError: there will never be as many.
        """
        count = sum(len(span.ids) for span in spans)
        if count > self._total:
            raise RequestError(f"{count} blocks go through host memory, staging_blocks has room for {self._total}")
        with self._lock:
            if count > len(self._free):
                return None
            return tuple(Span(span.first, [heapq.heappop(self._free) for _ in span.ids]) for span in spans)

    def release(self, places: Sequence[Span]) -> None:
        """Take slots back."""
        with self._lock:
            for span in places:
                for number in span.ids:
                    heapq.heappush(self._free, number)
