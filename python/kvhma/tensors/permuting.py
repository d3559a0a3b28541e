# SPDX-License-Identifier: Apache-2.0
"""What was read as it lies in the source's blocks, put into the order of the local ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError
from kvhma.tensors.indices import indices_beside
from kvhma.tensors.storages import Storages

_BATCH_BYTES = 64 << 20
"""Copied aside at a time."""


def permute(permutes: NDArray[np.uint64], tensors: Iterable[torch.Tensor]) -> None:
    """Put ranges of tensors' storages into order. Done when it returns, on a device too.

    Args:
        permutes: shape (k, 5), address, device, blocks, heads, bytes: :attr:`kvhma.permute.PermutedRead.permutes`.
        tensors: that have all of the ranges in their storages.

    Raises:
        GeometryError: a range that is in none. Nothing was changed.
    """
    caches = {str(index): tensor for index, tensor in enumerate(tensors)}
    launch_permute(permutes, Storages(caches))
    for device in {tensor.device for tensor in caches.values()}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def launch_permute(permutes: NDArray[np.uint64], storages: Storages) -> None:
    """Launch it: two launches for a batch of ranges in a storage."""
    batches = [batch for ranges in _by_storage(permutes, storages) for batch in _batches(*ranges)]
    for rows, to, start in batches:
        rows.index_copy_(0, indices_beside(rows, to), rows.index_select(0, indices_beside(rows, start)))


def _by_storage(
    permutes: NDArray[np.uint64], storages: Storages
) -> Iterator[tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the bytes of each storage, and offsets and shapes of the ranges in it."""
    sizes = permutes[:, 2] * permutes[:, 3] * permutes[:, 4]
    pieces = storages.pieces(np.stack([permutes[:, 0], sizes, permutes[:, 1]], axis=1))
    if [len(piece) for piece in pieces] != sizes.tolist():
        raise GeometryError("bytes to be permuted lie in two storages")
    found: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        found.setdefault(piece.untyped_storage().data_ptr(), []).append(index)
    for indices in found.values():
        whole = pieces[indices[0]]
        whole = whole.new_empty(0).set_(whole.untyped_storage())
        offsets = np.array([pieces[index].storage_offset() for index in indices], np.int64)
        yield whole, offsets, permutes[indices, 2:].astype(np.int64)


def _batches(
    whole: torch.Tensor, offsets: NDArray[np.int64], shapes: NDArray[np.int64]
) -> Iterator[tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield a storage as rows of equal bytes, the rows to write, and those that belong there.

    A row is the longest of which every range, and every head in it, is a number of, counted from the same byte.
    """
    unit = math.gcd(*shapes[:, 2].tolist(), *(offsets - offsets[0]).tolist())
    first = int(offsets[0]) % unit
    rows = whole[first : first + (len(whole) - first) // unit * unit].view(-1, unit)
    to: list[NDArray[np.int64]] = []
    start: list[NDArray[np.int64]] = []
    size = 0
    for offset, (blocks, heads, nbytes) in zip(offsets.tolist(), shapes.tolist(), strict=True):
        lies = (offset - first) // unit + np.arange(blocks * heads * nbytes // unit)
        to.append(lies)
        start.append(lies.reshape(blocks, heads, -1).swapaxes(0, 1).ravel())
        size += blocks * heads * nbytes
        if size >= _BATCH_BYTES:
            yield rows, np.concatenate(to), np.concatenate(start)
            to, start, size = [], [], 0
    if to:
        yield rows, np.concatenate(to), np.concatenate(start)
