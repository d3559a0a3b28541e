# SPDX-License-Identifier: Apache-2.0
"""Permutes bytes that were read in the order of the source's blocks into the order of the local blocks."""

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
"""Number of bytes that are copied aside at a time."""


def permute(permutes: NDArray[np.uint64], tensors: Iterable[torch.Tensor]) -> None:
    """Permute ranges of tensors' storages. Finished when it returns, on a device too.

    Args:
        permutes: shape (k, 5), address, device, blocks, heads, bytes: :attr:`kvhma.permute.PermutedRead.permutes`.
        tensors: tensors whose storages have all of the ranges.

    Raises:
        GeometryError: a range is in no storage. Nothing was changed.
    """
    caches = {str(index): tensor for index, tensor in enumerate(tensors)}
    launch_permute(permutes, Storages(caches))
    for device in {tensor.device for tensor in caches.values()}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def launch_permute(permutes: NDArray[np.uint64], storages: Storages) -> None:
    """Launch the permutation: two launches for a batch of ranges in a storage."""
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
        raise GeometryError("bytes to permute are in two storages")
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
    """Yield a storage as rows of equal bytes, the rows to write, and the rows that belong there.

    A row is the largest size that divides the offset of every range and every head in it.
    """
    unit = math.gcd(*shapes[:, 2].tolist(), *(offsets - offsets[0]).tolist())
    first = int(offsets[0]) % unit
    rows = whole[first : first + (len(whole) - first) // unit * unit].view(-1, unit)
    to: list[NDArray[np.int64]] = []
    start: list[NDArray[np.int64]] = []
    size = 0
    for offset, (blocks, heads, nbytes) in zip(offsets.tolist(), shapes.tolist(), strict=True):
        places = (offset - first) // unit + np.arange(blocks * heads * nbytes // unit)
        to.append(places)
        start.append(places.reshape(blocks, heads, -1).swapaxes(0, 1).ravel())
        size += blocks * heads * nbytes
        if size >= _BATCH_BYTES:
            yield rows, np.concatenate(to), np.concatenate(start)
            to, start, size = [], [], 0
    if to:
        yield rows, np.concatenate(to), np.concatenate(start)
