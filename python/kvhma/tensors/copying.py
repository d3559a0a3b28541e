# SPDX-License-Identifier: Apache-2.0
"""Copies rows between memory that this process has mapped: another way to carry out a plan's reads, without NIXL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import RequestError

_LONG_BYTES = 64 << 10
"""Rows from this size on are copied one by one: finding the next one takes less time than a copy of it."""

_ASIDE_BYTES = 256 << 10
"""Number of bytes that are copied aside at a time. They stay in a core's cache."""

_PIECE_BYTES = 16 << 10
"""Most bytes that one program of the device copies."""


class Piece(NamedTuple):
    """Memory, and where its owner has it.

    Attributes:
        address: of its first byte in the process that owns it, as rows name it.
        content: its bytes here: uint8 of shape (n,), an array or a tensor on a device.
    """

    address: int
    content: NDArray[np.uint8] | torch.Tensor


class Pieces:
    """Memory of one process, found by the addresses that it has there."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        """Order them. They must not overlap."""
        ordered = sorted(pieces, key=lambda piece: piece.address)
        self.contents = [piece.content for piece in ordered]
        self._starts = np.array([piece.address for piece in ordered], np.uint64)
        self._ends = self._starts + np.array([len(content) for content in self.contents], np.uint64)

    def has(self, address: int, nbytes: int) -> bool:
        """Return whether all bytes from an address on are in one piece."""
        try:
            self.find(np.array([[address, nbytes, 0]], np.uint64))
        except RequestError:
            return False
        return True

    def find(self, rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the piece of each row and its offset there.

        Args:
            rows: shape (n, 3), address, length in bytes, device.

        Raises:
            RequestError: a row is not within one piece.
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


def copy_rows(to: Pieces, source: Pieces, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    """Copy rows on the host. Finished when it returns.

    Args:
        to: arrays of this process.
        source: arrays of the owner of the rows.
        local: shape (n, 3), address, length in bytes, device: where to write.
        remote: the same, with equal lengths row by row: what to read.

    Raises:
        RequestError: lengths differ, or a row is not within one piece. Nothing was copied.
    """
    (to_piece, to_offset), (source_piece, source_offset) = _found(to, source, local, remote)
    lengths = local[:, 1].astype(np.int64)
    keys = np.stack([to_piece, source_piece, lengths])
    order = np.lexsort(keys)
    cuts = np.flatnonzero(np.diff(keys[:, order]).any(axis=0)) + 1
    for rows in np.split(order, cuts):
        if not len(rows) or not (length := int(lengths[rows[0]])):
            continue
        written = np.asarray(to.contents[to_piece[rows[0]]])
        read = np.asarray(source.contents[source_piece[rows[0]]])
        starts, origins = to_offset[rows], source_offset[rows]
        if length >= _LONG_BYTES:
            for start, origin in zip(starts.tolist(), origins.tolist(), strict=True):
                written[start : start + length] = read[origin : origin + length]
            continue
        # Item i has the bytes from i on, so an offset is an index, and numpy checks it.
        items, of = _items(written, length), _items(read, length)
        at_once = _ASIDE_BYTES // length
        for at in range(0, len(rows), at_once):
            items[starts[at : at + at_once]] = of[origins[at : at + at_once]]


def _items(content: NDArray[np.uint8], length: int) -> NDArray[np.void]:
    return np.ndarray((len(content) - length + 1,), f"V{length}", content, strides=(1,))


def launch_copy(to: Pieces, source: Pieces, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    """Copy rows in one launch on the current stream of the device of `to`.

    Args:
        to: tensors of this process, on the device.
        source: tensors of the owner of the rows, which the device can read.
        local: as for :func:`copy_rows`.
        remote: as for :func:`copy_rows`.

    Raises:
        RequestError: lengths differ, or a row is not within one piece. Nothing was copied.
        ImportError: Triton is not installed.
    """
    from kvhma.tensors.copy_kernel import copy_pieces

    found = [
        _addresses(pieces, *at) for pieces, at in zip((to, source), _found(to, source, local, remote), strict=True)
    ]
    lengths = local[:, 1].astype(np.int64)
    number = -(-lengths // _PIECE_BYTES)
    if not (total := int(number.sum())):
        return
    before = np.arange(total) - np.repeat(np.cumsum(number) - number, number)
    offsets = before * _PIECE_BYTES
    rest = np.minimum(np.repeat(lengths, number) - offsets, _PIECE_BYTES)
    table = np.stack([*(np.repeat(addresses, number) + offsets for addresses in found), rest])
    # The largest power of two that divides all of them.
    both = int(np.bitwise_or.reduce(table, axis=None)) | 16
    on_device = torch.from_numpy(table).to(to.contents[0].device)
    copy_pieces(*on_device, unit=both & -both, most_bytes=min(_PIECE_BYTES, int(rest.max())))


def _addresses(pieces: Pieces, index: NDArray[np.intp], offset: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where rows are here."""
    starts = [content.data_ptr() for content in pieces.contents if isinstance(content, torch.Tensor)]
    return np.array(starts, np.int64)[index] + offset


def _found(
    to: Pieces, source: Pieces, local: NDArray[np.uint64], remote: NDArray[np.uint64]
) -> tuple[tuple[NDArray[np.intp], NDArray[np.int64]], tuple[NDArray[np.intp], NDArray[np.int64]]]:
    if len(local) != len(remote) or (differ := local[:, 1] != remote[:, 1]).any():
        text = f"{len(local)} local and {len(remote)} remote rows"
        if len(local) == len(remote):
            row = int(np.argmax(differ))
            text = f"row {row} has {local[row, 1]} local and {remote[row, 1]} remote bytes"
        raise RequestError(text)
    return to.find(local), source.find(remote)
