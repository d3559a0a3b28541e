# SPDX-License-Identifier: Apache-2.0
"""The arrays that NIXL gets. :func:`kvhma._kvhma.check_rows` checks rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import RequestError
from kvhma.geometry import Region


def check_ids(array: Any, what: str) -> None:
    """Check that `array` is C-contiguous int32 of shape (n,): NIXL wraps int64 ids silently.

    Raises:
        RequestError: another dtype, shape or memory order.
    """
    if not isinstance(array, np.ndarray):
        raise RequestError(f"{what}: {type(array).__name__}, expected a numpy array")
    if array.dtype != np.int32 or array.ndim != 1:
        raise RequestError(f"{what}: {array.dtype} of {array.ndim} dimensions, expected int32 of 1")
    if not array.flags.c_contiguous:
        raise RequestError(f"{what}: not C-contiguous")


def row_of(region: Region, nbytes: int | None = None) -> NDArray[np.uint64]:
    """Return a region, or its first `nbytes` bytes, as uint64 of shape (1, 3): ``(addr, len, device)``."""
    return np.array([[region.base, region.bytes if nbytes is None else nbytes, region.device]], dtype=np.uint64)
