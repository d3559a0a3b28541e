# SPDX-License-Identifier: Apache-2.0
"""Batches are the rows of a transfer, in their order and without a copy, so many at a time as a transport takes."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, RequestError, Span, Transfer

BLOCKS, BYTES = 16, 64
Copy = tuple[int, int, int, int, int]


def side(base: int, rank: int = 0, size: int = 1) -> Geometry:
    """Return a cache of two layers, whose regions follow each other in memory."""
    heads = Axis("heads", 4, 16, rank * 4 // size, 4 // size)
    page = Page((Part("kv", "uint8", 1, 0, (heads, Axis("tokens", 4, 4), Axis("content", 4, 1))),))
    step = BYTES // size
    layers = tuple(Layer(f"layer.{at}", 0, at, 0, BLOCKS, step, page) for at in range(2))
    regions = tuple(Region(base + at * BLOCKS * step, BLOCKS * step) for at in range(2))
    return Geometry(regions, (Group("full", 4),), layers, tp_rank=rank, tp_size=size, null_block=None)


ENDS = {1 << 20, (1 << 20) + BLOCKS * BYTES, 1 << 30, (1 << 30) + BLOCKS * BYTES}
"""Where a region of a pair without ranks begins."""
WHOLE = kvhma.plan(side(1 << 20), side(1 << 30))
RANKS = kvhma.plan(side(1 << 20), [side((1 << 30) + (rank << 20), rank, 2) for rank in range(2)])

blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True)


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    local, remote = draw(blocks), draw(blocks)
    count = min(len(local), len(remote))
    tokens = draw(st.integers(1, 4 * count))
    return draw(st.sampled_from((WHOLE, RANKS))).transfer(tokens, [Span(0, local[:count])], [Span(0, remote[:count])])


def copies(reads: list[kvhma.Read]) -> list[tuple[int, list[Copy]]]:
    """Return what reads copy, source by source: a row of both sides for each descriptor."""
    rows = [
        (read.source, (*local, *remote[::2]))
        for read in reads
        for local, remote in zip(read.local.tolist(), read.remote.tolist(), strict=True)
    ]
    return [(source, [row for _, row in of]) for source, of in groupby(rows, key=lambda row: row[0])]


@given(transfers(), st.integers(1, 40))
def test_batches_are_the_reads_in_order(transfer: Transfer, limit: int) -> None:
    batches = transfer.batches(limit)
    assert copies(batches) == copies(transfer.reads)
    whole = {read.source: read for read in transfer.reads}
    for batch in batches:
        assert 1 <= batch.descriptors == len(batch.local) == len(batch.remote) <= limit
        assert batch.bytes == batch.local[:, 1].sum()
        assert np.shares_memory(batch.local, whole[batch.source].local)
        assert np.shares_memory(batch.remote, whole[batch.source].remote)
        assert batch.local.flags.c_contiguous
        assert (batch.bytes_by_group, batch.descriptors_by_group) == ([], [])
    for batch, following in pairwise(batches):
        assert batch.descriptors == limit or batch.source != following.source  # no more batches than needed


@given(transfers())
def test_neighbours_in_a_region_are_one_descriptor(transfer: Transfer) -> None:
    for _, rows in copies(transfer.batches(1)):
        for (local, size, _, remote, _), (next_local, _, _, next_remote, _) in pairwise(rows):
            touch = local + size == next_local and remote + size == next_remote
            assert not touch or next_local in ENDS


def test_neighbours_in_two_regions_stay_two() -> None:
    """A transport registers each region, and may refuse a descriptor across both."""
    everything = [Span(0, range(BLOCKS))]
    (batch,) = WHOLE.transfer(4 * BLOCKS, everything, everything).batches(1 << 62)
    assert batch.local.tolist() == [[start, BLOCKS * BYTES, 0] for start in sorted(ENDS)[:2]]


def test_wrong_limits_and_ids_are_refused() -> None:
    request = 4, [Span(0, [1])], [Span(0, [2])]
    transfer = WHOLE.transfer(*request)
    for limit in (0, -1, 1.0, None, True):
        with pytest.raises(RequestError, match="limit"):
            transfer.batches(limit)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"reads\.local: expected a uint64 array of shape \(n, 3\)"):
        WHOLE.ids(*request).batches(8)


def test_sides_of_different_length_are_refused() -> None:
    rows = np.ones((3, 3), np.uint64)
    read = kvhma.Read(0, rows, rows[:2], 3, 3, [], [])
    with pytest.raises(RequestError, match="reads: have 3 local and 2 remote descriptors"):
        Transfer([read], rows[:0], 3, 3, 0, [], [], []).batches(2)
