# SPDX-License-Identifier: Apache-2.0
"""Blocks that are read in P's order and permuted afterwards: every byte ends where the plan's own rows put it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

import kvhma
from kvhma.permute import permuted_reads
from support.generate import generate
from support.recipe import draw
from support.tries import TRIES

CHUNKS = 20
PER_CHUNK = 60 * TRIES
Ints = NDArray[np.int64]


def bytes_of(rows: NDArray[np.uint64]) -> Ints:
    """The address of every byte of some rows."""
    start, size = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    ends = np.cumsum(size)
    return np.repeat(start - (ends - size), size) + np.arange(int(ends[-1]) if len(ends) else 0)


def moved(local: NDArray[np.uint64], remote: NDArray[np.uint64], permutes: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Where each byte that is read ends, and where it comes from; sorted by the former."""
    to, start = bytes_of(local), bytes_of(remote)
    order = np.argsort(to)
    to, start = to[order], start[order]
    for address, _, blocks, heads, nbytes in permutes.astype(np.int64).tolist():
        lies = np.searchsorted(to, address) + np.arange(blocks * heads * nbytes).reshape(blocks, heads, nbytes)
        assert to[lies[-1, -1, -1]] == address + lies.size - 1
        start[np.sort(lies.ravel())] = start[lies.swapaxes(0, 1).ravel()]
    return to, start


def is_within(rows: NDArray[np.uint64], geometry: kvhma.Geometry) -> bool:
    """Whether each row is in one region."""
    return all(
        any(region.base <= start and start + size <= region.base + region.bytes for region in geometry.regions)
        for start, size, _ in rows.tolist()
    )


def compare(plan, transfer, local, remotes, permute_bytes: int) -> tuple[int, int]:
    """Check the reads of a transfer; return how many rows permuting saved, and ranges permuted."""
    saved = ranges = 0
    reads = permuted_reads(transfer, local, remotes, permute_bytes)
    for planned, read in zip(transfer.reads, reads, strict=True):
        nothing = np.empty((0, 5), np.uint64)
        for found, expected in zip(
            moved(read.local, read.remote, read.permutes), moved(planned.local, planned.remote, nothing), strict=True
        ):
            assert np.array_equal(found, expected)
        assert np.array_equal(read.local[:, 1], read.remote[:, 1])
        assert np.all(np.diff(read.local[:, 0].astype(np.int64)) > 0)
        assert is_within(read.local, local)
        assert is_within(read.remote, remotes[read.source])
        least = len(planned.local) - sum(blocks * (heads - 1) for _, _, blocks, heads, _ in read.permutes.tolist())
        assert len(read.local) <= least
        nbytes = int(read.permutes[:, 2:].prod(axis=1).sum())
        assert nbytes <= permute_bytes * (len(planned.local) - len(read.local))
        saved += len(planned.local) - len(read.local)
        ranges += len(read.permutes)
    return saved, ranges


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_byte_of_unequal_engines(chunk: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed))
        plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=0)
        transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
        for permute_bytes in (0, 16, 1 << 40):
            saved, ranges = compare(plan, transfer, case.local, case.remotes, permute_bytes)
            assert permute_bytes or (saved, ranges) == (0, 0), case
            counted[f"pairs with permuted ranges, up to {permute_bytes} bytes a row"] += ranges > 0
    assert counted[f"pairs with permuted ranges, up to {1 << 40} bytes a row"] >= 5, counted
    print(dict(counted))
