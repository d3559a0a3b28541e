# SPDX-License-Identifier: Apache-2.0
"""The arrays that go to NIXL: checks for what NIXL does not check itself.

NIXL copies whatever has the right number of bytes, wraps int64 ids silently, answers some wrong shapes with
None and lets ``addr + len`` wrap around 2**64 past its range check.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import AddressOverflowError, RequestError
from kvhma.geometry import Region

_LAST = np.uint64(2**64 - 1)
_MAX_IDS = 2**31 - 1
_ONE = np.uint64(1)


def check_rows(array: Any, what: str, columns: int = 3) -> None:
    """Check that `array` is C-contiguous uint64 of shape (n, columns) and no row is empty or wraps.

    ::

        (addr, len, device)                  [len)
                                             addr

        (addr, len, device, stride, count)   [len)     [len)     [len)     count = 3
                                             addr      + stride  + 2 * stride
                                                       last byte: addr + (count - 1) * stride + len - 1

    Args:
        array: ``(addr, len, device)`` or ``(addr, len, device, stride, count)`` per row.
        what: what the array is, for the message.
        columns: 3 or 5.

    Raises:
        RequestError: another dtype, shape or order; a length, stride or count of 0; too many entries for an
            int32.
        AddressOverflowError: an entry ends after 2**64.
    """
    _check_form(array, what, np.dtype(np.uint64), 2)
    if array.shape[1] != columns:
        raise RequestError(f"{what}: shape {array.shape}, expected (n, {columns})")
    address, length = array[:, 0], array[:, 1]
    wraps = length > _LAST - address
    if columns == 3:
        empty = length == 0
    else:
        stride, count = array[:, 3], array[:, 4]
        empty = (array[:, (1, 3, 4)] == 0).any(axis=1)
        room = _LAST - address - length
        wraps |= count - _ONE > room // np.maximum(stride, _ONE)
    if empty.any():
        raise RequestError(f"{what}: row {int(empty.argmax())} has a length, stride or count of 0")
    if wraps.any():
        raise AddressOverflowError(f"{what}: row {int(wraps.argmax())} ends after 2**64")
    if columns == 5 and count_entries(array) > _MAX_IDS:
        raise RequestError(f"{what}: {count_entries(array)} entries, ids go to {_MAX_IDS}")


def check_ids(array: Any, what: str) -> None:
    """Check that `array` is C-contiguous int32 of shape (n,), which NIXL takes without a conversion.

    Raises:
        RequestError: another dtype, shape or order.
    """
    _check_form(array, what, np.dtype(np.int32), 1)


def row_of(region: Region, nbytes: int | None = None) -> NDArray[np.uint64]:
    """Return a region, or its first `nbytes` bytes, as uint64 of shape (1, 3): ``(addr, len, device)``."""
    return np.array([[region.base, region.bytes if nbytes is None else nbytes, region.device]], dtype=np.uint64)


def count_entries(views: NDArray[np.uint64]) -> int:
    """Return how many descriptors the rows of shape (n, 5) stand for, without wrapping."""
    return sum(views[:, 4].tolist())


def _check_form(array: Any, what: str, dtype: np.dtype[Any], ndim: int) -> None:
    if not isinstance(array, np.ndarray):
        raise RequestError(f"{what}: {type(array).__name__}, expected a numpy array")
    if array.dtype != dtype or array.ndim != ndim:
        raise RequestError(f"{what}: {array.dtype} of {array.ndim} dimensions, expected {dtype} of {ndim}")
    if not array.flags.c_contiguous:
        raise RequestError(f"{what}: not C-contiguous")
