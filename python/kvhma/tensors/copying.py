# SPDX-License-Identifier: Apache-2.0
"""Copies rows between memory that this process has mapped: another way to carry out a plan's reads, without NIXL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import RequestError

Content: TypeAlias = "NDArray[np.uint8] | torch.Tensor"
"""Bytes of an extent, of shape (n,): an array on the host, or a tensor of uint8 on a device."""

_LONG_BYTES = 64 << 10
"""Rows from this size on are copied one by one: finding the next one takes less time than a copy of it."""

_ASIDE_BYTES = 256 << 10
"""Number of bytes that are copied aside at a time. They stay in a core's cache."""

_CHUNK_BYTES = 16 << 10
"""Most bytes that one program of the device copies."""


class Extents:
    """Memory of one process, found by the addresses that it has there."""

    def __init__(self, extents: Iterable[tuple[int, Content]]) -> None:
        """Order the extents, which must not overlap.

        Args:
            extents: the address of each in the process that owns it, and its bytes here.
        """
        ordered = sorted(extents, key=lambda extent: extent[0])
        self.contents = [content for _, content in ordered]
        self._starts = np.array([address for address, _ in ordered], np.uint64)
        self._ends = self._starts + np.array([len(content) for content in self.contents], np.uint64)

    def has(self, address: int, nbytes: int) -> bool:
        """Return whether all bytes from an address on are in one extent."""
        try:
            self.find(np.array([[address, nbytes, 0]], np.uint64))
        except RequestError:
            return False
        return True

    def find(self, rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the extent of each row and its offset there.

        Args:
            rows: shape (n, 3), address, length in bytes, device.

        Raises:
            RequestError: a row is not within one extent.
        """
        addresses, lengths = rows[:, 0], rows[:, 1]
        index = np.searchsorted(self._starts, addresses, "right") - 1
        inside = index >= 0
        # Ends are compared without a sum: that of an address and a length may be more than 64 bits hold.
        inside[inside] = addresses[inside] <= self._ends[index[inside]]
        inside[inside] = lengths[inside] <= self._ends[index[inside]] - addresses[inside]
        if not inside.all():
            address, length, _ = rows[np.argmin(inside)].tolist()
            raise RequestError(f"a row of {length} bytes at {address:#x} is not in the memory that is mapped")
        return index, (addresses - self._starts[index]).astype(np.int64)


def copy_rows(to: Extents, source: Extents, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    """Copy rows on the host. Finished when it returns.

    Args:
        to: arrays of this process.
        source: arrays of the owner of the rows.
        local: shape (n, 3), address, length in bytes, device: where to write.
        remote: the same, with equal lengths row by row: what to read.

    Raises:
        RequestError: lengths differ, or a row is not within one extent. Nothing was copied.
    """
    (to_extent, to_offset), (source_extent, source_offset) = _find_rows(to, source, local, remote)
    lengths = local[:, 1].astype(np.int64)
    keys = np.stack([to_extent, source_extent, lengths])
    order = np.lexsort(keys)
    cuts = np.flatnonzero(np.diff(keys[:, order]).any(axis=0)) + 1
    for rows in np.split(order, cuts):
        if not len(rows) or not (length := int(lengths[rows[0]])):
            continue
        written = np.asarray(to.contents[to_extent[rows[0]]])
        read = np.asarray(source.contents[source_extent[rows[0]]])
        starts, origins = to_offset[rows], source_offset[rows]
        if length >= _LONG_BYTES:
            for start, origin in zip(starts.tolist(), origins.tolist(), strict=True):
                written[start : start + length] = read[origin : origin + length]
            continue
        # Item i has the bytes from i on, so an offset is an index, and numpy checks it.
        to_items, source_items = _items(written, length), _items(read, length)
        at_once = _ASIDE_BYTES // length
        for at in range(0, len(rows), at_once):
            to_items[starts[at : at + at_once]] = source_items[origins[at : at + at_once]]


def _items(content: NDArray[np.uint8], length: int) -> NDArray[np.void]:
    return np.ndarray((len(content) - length + 1,), f"V{length}", content, strides=(1,))


def launch_copy(to: Extents, source: Extents, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    """Copy rows in one launch on the current stream of the device of `to`.

    Args:
        to: tensors of this process, on the device.
        source: tensors of the owner of the rows, which the device can read.
        local: as for :func:`copy_rows`.
        remote: as for :func:`copy_rows`.

    Raises:
        RequestError: lengths differ, or a row is not within one extent. Nothing was copied.
        ImportError: Triton is not installed.
    """
    from kvhma.tensors.copy_kernel import copy_chunks

    found = zip((to, source), _find_rows(to, source, local, remote), strict=True)
    addresses = [_addresses(extents, *at) for extents, at in found]
    lengths = local[:, 1].astype(np.int64)
    chunks = -(-lengths // _CHUNK_BYTES)
    if not (total := int(chunks.sum())):
        return
    nth = np.arange(total) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    offsets = nth * _CHUNK_BYTES
    rest = np.minimum(np.repeat(lengths, chunks) - offsets, _CHUNK_BYTES)
    table = np.stack([*(np.repeat(starts, chunks) + offsets for starts in addresses), rest])
    bits = int(np.bitwise_or.reduce(table, axis=None)) | 16
    on_device = torch.from_numpy(table).to(to.contents[0].device)
    copy_chunks(on_device[0], on_device[1], on_device[2], bits & -bits)


def _addresses(extents: Extents, index: NDArray[np.intp], offset: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where rows are here."""
    starts = [cast("torch.Tensor", content).data_ptr() for content in extents.contents]
    return np.array(starts, np.int64)[index] + offset


def _find_rows(
    to: Extents, source: Extents, local: NDArray[np.uint64], remote: NDArray[np.uint64]
) -> tuple[tuple[NDArray[np.intp], NDArray[np.int64]], tuple[NDArray[np.intp], NDArray[np.int64]]]:
    """Return extents and offsets on both sides, of rows with equal lengths."""
    if len(local) != len(remote):
        raise RequestError(f"{len(local)} local and {len(remote)} remote rows")
    if (differ := local[:, 1] != remote[:, 1]).any():
        row = int(np.argmax(differ))
        raise RequestError(f"row {row} has {local[row, 1]} local and {remote[row, 1]} remote bytes")
    return to.find(local), source.find(remote)
