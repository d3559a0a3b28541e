# SPDX-License-Identifier: Apache-2.0
"""Transfers carried out over memory: plain arrays of bytes, one for each region, or the addresses as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Geometry
from support.reference import Transfer

Memory = list[NDArray[np.uint8]]


def placed(sketch: Geometry, bases: Iterable[int]) -> Geometry:
    """Return a geometry with its regions at addresses of host memory."""
    regions = zip(sketch.regions, bases, strict=True)
    return replace(sketch, regions=tuple(replace(region, base=at, memory="DRAM", device=0) for region, at in regions))


def empty(geometry: Geometry) -> Memory:
    return [np.empty(region.bytes, np.uint8) for region in geometry.regions]


def bytes_of(geometry: Geometry, memory: Memory, row: Sequence[int]) -> NDArray[np.uint8]:
    """Return the bytes of a descriptor; fail if they are in no region."""
    for region, content in zip(geometry.regions, memory, strict=True):
        if region.base <= row[0] and row[0] + row[1] <= region.base + region.bytes and region.device == row[2]:
            return content[row[0] - region.base : row[0] - region.base + row[1]]
    raise AssertionError(f"{row} is in no region")


def carry_out_in_place(transfer: Any) -> None:
    """Zero and copy what a transfer says, where its addresses are memory of this process."""
    for address, nbytes, _ in transfer.zero.tolist():
        ctypes.memset(address, 0, nbytes)
    for read in transfer.reads:
        for (to, nbytes, _), (source, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            ctypes.memmove(to, source, nbytes)


def carry_out(
    geometry: Geometry, memory: Memory, transfer: Transfer, sources: Sequence[tuple[Geometry, Memory]]
) -> Memory:
    """Zero and copy what a transfer says, from the memory of each source; return the memory."""
    for row in transfer.zero.tolist():
        bytes_of(geometry, memory, row)[:] = 0
    for read in transfer.reads:
        for to, start in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            bytes_of(geometry, memory, to)[:] = bytes_of(*sources[read.source], start)
    return memory
