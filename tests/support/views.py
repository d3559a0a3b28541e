# SPDX-License-Identifier: Apache-2.0
"""What ids into prepared views stand for, computed as NIXL does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvhma
from support.reference import Read

Rows = NDArray[np.uint64]


@dataclass(frozen=True)
class Expanded:
    """A transfer by ids, as descriptors: what the oracle takes."""

    reads: tuple[Read, ...]
    zero: Rows
    excess_bytes: int

    @property
    def bytes(self) -> int:
        return sum(read.bytes for read in self.reads)

    @property
    def descriptors(self) -> int:
        return sum(len(read.local) for read in self.reads)


def expand(plan: kvhma.Plan, moved: kvhma.Transfer[np.int32]) -> tuple[Expanded, int]:
    """Return the descriptors that ids stand for, and how many are left after NIXL has joined neighbours."""
    reads, left = [], 0
    for read in moved.reads:
        local_views, remote_views = plan.views(read.source)
        local, local_place = _lookup(local_views, read.local)
        remote, remote_place = _lookup(remote_views, read.remote)
        left += _joined(local_views, local_place, remote_views, remote_place, read)
        order = np.argsort(local[:, 0], kind="stable")
        reads.append(Read(read.source, local[order].copy(), remote[order].copy()))
    return Expanded(tuple(reads), moved.zero, moved.excess_bytes), left


def _lookup(views: Rows, ids: NDArray[np.int32]) -> tuple[Rows, NDArray[np.int64]]:
    """Return the descriptors of flat ids, and the view each is in."""
    ends = np.cumsum(views[:, 4].astype(np.int64))
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    assert not ids.size or (ids.min() >= 0 and ids.max() < ends[-1])
    view = np.searchsorted(ends, ids, side="right")
    entry = (ids - (ends - views[:, 4].astype(np.int64))[view]).astype(np.uint64)
    rows = np.stack([views[view, 0] + entry * views[view, 3], views[view, 1], views[view, 2]], axis=1)
    return np.ascontiguousarray(rows), view


def _joined(
    local: Rows,
    local_place: NDArray[np.int64],
    remote: Rows,
    remote_place: NDArray[np.int64],
    read: kvhma.Read[np.int32],
) -> int:
    """Count descriptors after merging: only ids that follow each other in one dense view on both sides join."""
    if not len(read.local):
        return 0
    dense_local = local[:, 1] == local[:, 3]
    dense_remote = remote[:, 1] == remote[:, 3]
    follows = (np.diff(read.local) == 1) & (np.diff(read.remote) == 1)
    follows &= (np.diff(local_place) == 0) & (np.diff(remote_place) == 0)
    follows &= dense_local[local_place[1:]] & dense_remote[remote_place[1:]]
    return len(read.local) - int(np.count_nonzero(follows))
