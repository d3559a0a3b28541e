# SPDX-License-Identifier: Apache-2.0
"""The memory that an agent has registered with NIXL."""

from __future__ import annotations

import contextlib
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Any

from kvhma.errors import RequestError
from kvhma.geometry import Memory, Region
from kvhma.nixl.arrays import row_of
from kvhma.nixl.library import NixlAgent, translate


class RegisteredMemory:
    """Ranges of bytes by kind of memory and device, without overlap. Not thread-safe by itself.

    Attributes:
        longest: bytes of the longest range.
    """

    def __init__(self) -> None:
        """Begin without memory."""
        self._ranges: dict[tuple[Memory, int], list[tuple[int, int]]] = {}
        self.registrations: list[Any] = []
        self.longest = 0

    def covers(self, region: Region) -> bool:
        """Whether all of a region is registered.

        ::

            registered   [=========)         [=====)
            region           [--)                        inside of one: True
                                     [---)               overlaps none: False
                               [--------)                overlaps one in part: RequestError

        Raises:
            RequestError: only a part of the region is registered. NIXL would register the rest, and then not find
                descriptors after the overlap.
        """
        ranges = self._ranges.get((region.memory, region.device), [])
        start, end = region.base, region.base + region.bytes
        after = bisect_right(ranges, start, key=lambda known: known[0])
        before_end = ranges[after - 1][1] if after else 0
        after_start = ranges[after][0] if after < len(ranges) else end
        if end <= before_end:
            return True
        if before_end > start or after_start < end:
            raise RequestError(f"{region} overlaps registered memory without being part of it")
        return False

    def register(self, nixl: NixlAgent, regions: Iterable[Region]) -> None:
        """Register the regions that are not registered yet.

        Raises:
            RequestError: a part of a region is already registered.
            TransferError: NIXL refused a region.
        """
        # Larger regions first, so that a region inside another region is found to be covered.
        for region in sorted(regions, key=lambda r: (r.base, -r.bytes)):
            if self.covers(region):
                continue
            try:
                self.registrations.append(nixl.register_memory(row_of(region), region.memory))
            except Exception as exc:
                raise translate(exc, f"cannot register {region}") from exc
            ranges = self._ranges.setdefault((region.memory, region.device), [])
            insort(ranges, (region.base, region.base + region.bytes))
            self.longest = max(self.longest, region.bytes)

    def deregister_all(self, nixl: NixlAgent) -> None:
        """Deregister everything; memory that NIXL cannot deregister ends with its agent."""
        for registration in self.registrations:
            with contextlib.suppress(Exception):
                nixl.deregister_memory(registration)
        self.registrations.clear()
        self._ranges.clear()
