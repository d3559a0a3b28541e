# SPDX-License-Identifier: Apache-2.0
"""The plainest geometry: every array is a region with one layer of opaque pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region


def flat_geometry(*arrays: NDArray[Any], page: int = 4096) -> Geometry:
    """Describe arrays of whole pages of `page` bytes as one layer each."""
    part = Part("bytes", "uint8", 1, 0, (Axis("bytes", page, 1),))
    return Geometry(
        regions=tuple(Region(array.ctypes.data, array.nbytes) for array in arrays),
        groups=(Group("opaque", 1),),
        layers=tuple(
            Layer(f"layer.{at}", 0, at, 0, array.nbytes // page, page, Page((part,))) for at, array in enumerate(arrays)
        ),
    )


def rows_of(array: NDArray[Any], blocks: list[int], page: int = 4096) -> NDArray[np.uint64]:
    """Return descriptors ``(addr, len, device)`` of blocks of an array."""
    return np.array([(array.ctypes.data + block * page, page, 0) for block in blocks], dtype=np.uint64).reshape(-1, 3)


def views_of(*arrays: NDArray[Any], page: int = 4096) -> NDArray[np.uint64]:
    """Return one dense view ``(addr, len, device, stride, count)`` per array."""
    rows = [(array.ctypes.data, page, 0, page, array.nbytes // page) for array in arrays]
    return np.array(rows, dtype=np.uint64)


def labelled(pages: int, page: int = 4096, seed: int = 0) -> NDArray[np.uint8]:
    """Return `pages` pages of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, pages * page, dtype=np.uint8)
