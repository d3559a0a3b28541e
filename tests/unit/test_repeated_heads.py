# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold one head of an unknown number of heads: judged by where vLLM puts the heads."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

import kvhma
from kvhma.errors import GeometryError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.oracle import Oracle
from kvhma.oracle.settled import settled
from support import reference

SIZES = (1, 2, 4, 8)
BLOCKS, BLOCK, WIDTH, ITEM = 4, 4, 6, 2


def held(total: int, rank: int, size: int) -> range:
    """Heads of one rank: an equal share; with fewer heads than ranks, a head that neighbours have too."""
    each = max(1, total // size)
    first = rank * each if total >= size else rank // (size // total)
    return range(first, first + each)


def geometry(heads: dict[str, Axis], rank: int, size: int) -> Geometry:
    """Layers of blocks (heads, tokens, content), one after the other."""
    layers, at = [], 0
    for name, axis in heads.items():
        axes = (axis, Axis("tokens", BLOCK, WIDTH * ITEM), Axis("content", WIDTH, ITEM))
        part = Part("kv", "bfloat16", ITEM, 0, axes)
        layers.append(Layer(name, 0, 0, at, BLOCKS, part.nbytes, Page((part,))))
        at += BLOCKS * part.nbytes
    region = Region((1 + rank + 64 * size) << 32, at)
    return Geometry((region,), (Group("full", BLOCK),), tuple(layers), rank, size)


def true(totals: dict[str, int], rank: int, size: int) -> Geometry:
    """A rank with full knowledge."""
    heads = {name: held(total, rank, size) for name, total in totals.items()}
    axes = {name: Axis("heads", totals[name], BLOCK * WIDTH * ITEM, has.start, len(has)) for name, has in heads.items()}
    return geometry(axes, rank, size)


def seen(totals: dict[str, int], rank: int, size: int) -> Geometry:
    """A rank as it knows itself: how many heads it holds, and that vLLM repeats heads only where it has to."""
    axes = {}
    for name, total in totals.items():
        each = len(held(total, rank, size))
        may_repeat = each == 1 and size > 1
        axes[name] = Axis("heads", each * size, BLOCK * WIDTH * ITEM, rank * each, each, may_repeat=may_repeat)
    return geometry(axes, rank, size)


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(SIZES, SIZES)))
def test_every_pair_of_ranks_reads_the_right_heads(mine: int, theirs: int) -> None:
    totals = {f"layer.{total}": total for total in SIZES}
    tokens = 2 * BLOCK - 1
    spans = [[Span(0, [1, 2])]], [[Span(0, [3, 1])]]
    sources = [seen(totals, rank, theirs) for rank in range(theirs)]
    for rank in range(mine):
        local = seen(totals, rank, mine)
        plan = kvhma.plan(local, sources)
        transfer = plan.transfer(tokens, spans[0][0], [spans[1][0]] * theirs)
        oracle = Oracle(true(totals, rank, mine), [true(totals, at, theirs) for at in range(theirs)])
        report = oracle.check(tokens, spans[0][0], spans[1][0], transfer)
        assert (
            report.moved - report.excess == sum(len(held(total, rank, mine)) for total in SIZES) * tokens * WIDTH * ITEM
        )
        slow = reference.transfer(local, sources, tokens, spans[0][0], spans[1][0])
        assert slow.bytes == transfer.bytes - transfer.excess_bytes
        assert "layer.1" in plan.explain()


def test_sources_of_other_engines_count_for_themselves() -> None:
    """Ranks of two and of four: any source with the head is right."""
    totals = {"layer": 2}
    for rank in range(8):
        local = seen(totals, rank, 8)
        for sources in ([(0, 2), (1, 4), (2, 4), (3, 4)], [(3, 4), (0, 4), (1, 2)]):
            plan = kvhma.plan(local, [seen(totals, *source) for source in sources])
            transfer = plan.transfer(4, [Span(0, [1])], [[Span(0, [2])]] * len(sources))
            Oracle(true(totals, rank, 8), [true(totals, *source) for source in sources]).check(
                4, [Span(0, [1])], [Span(0, [2])], transfer
            )


@pytest.mark.parametrize(("known", "ranks"), [(4, 2), (3, 4), (16, 8)])
def test_heads_that_cannot_be_the_same_are_refused(known: int, ranks: int) -> None:
    alone, shared = true({"layer": known}, 0, 1), seen({"layer": 1}, 0, ranks)
    for local, remote in ((alone, shared), (shared, alone)):
        with pytest.raises(UnsupportedPairError, match=rf"extent.*{known} with a divisor of {ranks}"):
            kvhma.plan(local, remote)


def test_only_one_index_may_repeat() -> None:
    heads = Axis("heads", 4, BLOCK * WIDTH * ITEM, 0, 2, may_repeat=True)
    with pytest.raises(GeometryError, match=r"length is 2, has to be 1 on an axis that may repeat"):
        geometry({"layer": heads}, 0, 2)
    whole = seen({"layer": 1}, 0, 2)
    part = whole.layers[0].page.parts[0]
    tokens = replace(part.axes[1], length=1, extent=1, may_repeat=True)
    with pytest.raises(GeometryError, match="may repeat"):
        replace(
            whole,
            groups=(Group("full", 1),),
            layers=(replace(whole.layers[0], page=Page((replace(part, axes=(part.axes[0], tokens, part.axes[2])),))),),
        )


def test_json_has_the_field_only_for_repeated_heads() -> None:
    alone, shared = seen({"layer": 1}, 0, 1), seen({"layer": 1}, 1, 2)
    assert b"may_repeat" not in alone.to_json()
    axes = json.loads(shared.to_json())["pages"][0]["parts"][0]["axes"]
    assert [axis.get("may_repeat") for axis in axes] == [True, None, None]
    assert Geometry.from_json(shared.to_json()) == shared


def test_what_ranks_can_only_mean_together() -> None:
    two, four, one = seen({"layer": 1}, 1, 2), seen({"layer": 1}, 3, 4), true({"layer": 1}, 0, 1)
    heads = [each.layers[0].page.parts[0].axes[0] for each in settled([two, four])]
    assert [(axis.extent, axis.start, axis.may_repeat) for axis in heads] == [(2, 1, False), (2, 1, False)]
    heads = [each.layers[0].page.parts[0].axes[0] for each in settled([two, one, four])]
    assert [(axis.extent, axis.start) for axis in heads] == [(1, 0), (1, 0), (1, 0)]
