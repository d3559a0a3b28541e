# SPDX-License-Identifier: Apache-2.0
"""The storages behind tensors, as bytes at addresses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError


class Storages:
    """The storages of caches, as bytes. Storages may overlap, or contain each other."""

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Store each storage that no other storage contains, in the order of their addresses."""
        found = {_storage_key(cache): cache for cache in caches.values()}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bytes: list[torch.Tensor] = []
        for start, nbytes in sorted(found, key=lambda key: (key[0], -key[1])):
            if self._ends and start + nbytes <= self._ends[-1]:
                continue
            cache = found[start, nbytes]
            self._starts.append(start)
            self._ends.append(start + nbytes)
            self._bytes.append(cache.new_empty(0, dtype=torch.uint8).set_(cache.untyped_storage()))

    def pieces(self, rows: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Return ranges (rows of address, length and device) as tensors of bytes: one or more for each range.

        ::

            range            |=======|==============|
            storage    |-------------|
            another        |-----|          is in the first one, so it is not stored
            the next             |--------------------|    begins later, so it extends further

        Raises:
            GeometryError: a range is not in the storages.
        """
        found = []
        for address, length, _ in rows.tolist():
            at, end = address, address + length
            while at < end:
                rest = self.from_address(at)
                if not len(rest):
                    raise GeometryError(f"bytes {at:#x}..{end:#x} are in no storage of the caches")
                found.append(rest[: end - at])
                at += len(found[-1])
        return found

    def from_address(self, address: int) -> torch.Tensor:
        """Return the bytes from an address to the end of its storage; empty if it is in no storage."""
        # Of the storages that begin at or before the address, this one ends last.
        index = bisect_right(self._starts, address) - 1
        start = self._starts[max(0, index)]
        return self._bytes[index][address - start :] if index >= 0 else self._bytes[0][:0]


def _storage_key(cache: torch.Tensor) -> tuple[int, int]:
    """Address and bytes: of two storages with the same start, one may be longer."""
    storage = cache.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
