# SPDX-License-Identifier: Apache-2.0
"""Counts by group, compared with the group of every byte that is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

import kvhma
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.generate import generate
from support.recipe import AXES, EQUAL_RANK, draw
from support.tries import TRIES
from support.where import addresses, places


def numbers(geometry: Geometry, spans: list[Span], reads: Sequence[kvhma.Read]) -> tuple[list[int], list[int]]:
    """Count bytes and descriptors by the group whose block they are written into."""
    group_of_layer = {layer.name: layer.group for layer in geometry.layers}
    group_of = {address: group_of_layer[place.content.layer] for address, place in places(geometry, spans).items()}
    moved: Counter[int] = Counter()
    began: Counter[int] = Counter()
    for read in reads:
        moved.update(group_of[address] for address in addresses(read.local))
        began.update(group_of[start] for start in read.local[:, 0].tolist())
    groups = range(len(geometry.groups))
    return [moved[group] for group in groups], [began[group] for group in groups]


@given(st.integers(0, 1 << 32), st.sampled_from([EQUAL_RANK, AXES]), st.sampled_from([0, DEFAULT_DESCRIPTOR_BYTES]))
@settings(max_examples=100 * TRIES)
def test_of_generated_engines(seed: int, axes: dict[str, tuple[str, ...]], descriptor_bytes: int) -> None:
    case = generate(seed, draw(seed, axes), max_tokens=64)
    plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes)
    transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
    expected = numbers(case.local, list(case.local_spans), transfer.reads)
    assert (transfer.bytes_by_group, transfer.descriptors_by_group) == expected
    assert sum(transfer.bytes_by_group) == transfer.bytes
    assert sum(transfer.descriptors_by_group) == transfer.descriptors
    for read in transfer.reads:
        of_read = numbers(case.local, list(case.local_spans), [read])
        assert (read.bytes_by_group, read.descriptors_by_group) == of_read


def shared(base: int, *, layers: int, heads_first: bool) -> Geometry:
    """Three groups whose layers share regions, 100 blocks of 4 tokens."""
    heads, tokens = (16, 4) if heads_first else (4, 8)
    axes = (Axis("heads", 2, heads), Axis("tokens", 4, tokens), Axis("content", 4, 1))
    page = Page((Part("kv", "u8", 1, 0, axes),))
    regions = tuple(Region(base + 10_000 * index, 3200) for index in range(layers))
    groups = (Group("full", 4), Group("sliding", 4, window=9), Group("full", 4))
    placed = [Layer(f"{g}.{index}", g, index, 0, 100, 32, page) for g in range(3) for index in range(layers)]
    return Geometry(regions, groups, tuple(placed), null_block=None)


@given(st.permutations(range(100)), st.permutations(range(100)), st.integers(1, 120), st.integers(1, 3), st.booleans())
@settings(max_examples=100 * TRIES)
def test_of_groups_in_one_region(
    local: list[int], remote: list[int], num_tokens: int, layers: int, heads_first: bool
) -> None:
    # Sorted ids make descriptors that continue from group to group, and from layer to layer.
    blocks = -(-num_tokens // 4)
    for order in (list, sorted):
        spans = [
            [
                Span(0, order(ids[:blocks])),
                Span(max(0, blocks - 3), order(ids[30 : 30 + min(3, blocks)])),
                Span(0, order(ids[33 : 33 + blocks])),
            ]
            for ids in (local, remote)
        ]
        plan = kvhma.plan(
            shared(1 << 20, layers=layers, heads_first=heads_first),
            [shared(1 << 30, layers=layers, heads_first=True)],
            descriptor_bytes=0,
        )
        transfer = plan.transfer(num_tokens, spans[0], [spans[1]])
        expected = numbers(shared(1 << 20, layers=layers, heads_first=heads_first), spans[0], transfer.reads)
        assert (transfer.bytes_by_group, transfer.descriptors_by_group) == expected


def test_a_descriptor_over_two_groups_is_of_the_first() -> None:
    local, remote = (shared(base, layers=1, heads_first=True) for base in (1 << 20, 1 << 30))
    # Blocks 10 and 11 of group 0 and 12 and 13 of group 2 are one descriptor; 40 and 41 of group 1 are another.
    spans = [Span(0, [10, 11]), Span(0, [40, 41]), Span(0, [12, 13])]
    transfer = kvhma.plan(local, [remote]).transfer(8, spans, [spans])
    assert transfer.bytes_by_group == [64, 64, 64]
    assert transfer.descriptors_by_group == [1, 1, 0]
