# SPDX-License-Identifier: Apache-2.0
"""A pair costs only what its requests use, however many ways its kernel blocks cut each other."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.errors import LayoutError, UnsupportedPairError
from kvhma.models import models
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.limits import cost_of

MEGABYTES = 10
"""The limits for a plan of a built-in model, and for a request of one token."""


def attention(block: int, base: int, *, layers: int = 64, blocks: int = 5, packed: bool = False) -> Geometry:
    """Layers with heads outside of tokens, each in a separate region or all layers of a block one after the other."""
    page_bytes = 2 * block * 8
    axes = (Axis("heads", 2, block * 8), Axis("tokens", block, 8), Axis("content", 4, 2))
    page = Page((Part("kv", "bfloat16", 2, 0, axes),))
    size = page_bytes * blocks
    if packed:
        regions: tuple[Region, ...] = (Region(base, size * layers),)
        places = [(0, index * page_bytes, page_bytes * layers) for index in range(layers)]
    else:
        regions = tuple(Region(base + index * (size + 4096), size) for index in range(layers))
        places = [(index, 0, page_bytes) for index in range(layers)]
    rows = tuple(
        Layer(f"l{index}", 0, region, offset, blocks, stride, page)
        for index, (region, offset, stride) in enumerate(places)
    )
    return Geometry(regions, (Group("full", block),), rows)


def one_token(blocks: tuple[int, int]) -> int:
    plan = kvhma.plan(attention(blocks[0], 1 << 40), attention(blocks[1], 1 << 50), descriptor_bytes=0)
    return plan.transfer(1, [Span(0, [1])], [Span(0, [2])]).descriptors


@pytest.mark.parametrize("blocks", [(2048, 2048), (2047, 2048), (2095, 2096), (2096, 2112)])
def test_one_token_takes_one_cut(blocks: tuple[int, int]) -> None:
    # When all cuts were made with the plan, 2047 and 2048 took 2 seconds, 193 MB and 68 ms for each request.
    cost = cost_of(one_token, blocks)
    assert cost.result == 64 * 2
    assert cost.megabytes < MEGABYTES


def sides() -> Iterator[tuple[str, LayoutOptions]]:
    for tp, order, kernel in itertools.product((1, 2, 4, 8), ("LBHNC", "LBNHC"), ("flashinfer", None)):
        options = LayoutOptions(num_blocks=20, tp_size=tp, order=order, kernel_block=kernel)
        yield f"tp={tp} {order} {kernel}", options


def planned(name: str) -> tuple[int, list[str]]:
    """Plan rank 0 of each way to serve a model from each other way: how many plans, and the errors in them."""
    one, ranks = models()[name], {}
    for text, options in sides():
        with suppress(LayoutError):
            ranks[text] = [layout(one, replace(options, tp_rank=rank)) for rank in range(options.tp_size)]
    count, wrong = 0, []
    for (here, mine), (there, theirs) in itertools.product(ranks.items(), ranks.items()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            plan = kvhma.plan(mine[0], theirs)
        except UnsupportedPairError as error:
            said = [finding.text for source in theirs for finding in kvhma.validate(mine[0], source)]
            if str(error) not in said:
                wrong.append(f"{here} from {there}: {error}")
            continue
        count += 1
        span = [Span(0, [1 + group]) for group in range(len(mine[0].groups))]
        plan.transfer(1, span, span)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > MEGABYTES << 10:
            wrong.append(f"{here} from {there}: {grown} KiB")
    return count, wrong


@pytest.mark.parametrize("name", [name for name, one in models().items() if one.state is not None])
def test_no_pair_of_a_hybrid_model_is_refused_or_dear(name: str) -> None:
    count, wrong = cost_of(planned, name).result
    assert count > 10
    assert not wrong


def requests(tokens: int, blocks: int) -> Iterator[tuple[int, list[Span], list[Span]]]:
    """Requests of these lengths, one after the other."""
    for last in range(tokens, tokens + blocks):
        yield last, [Span(0, [3, 1, 2])], [Span(0, [1, 4, 2])]


def moved(plan: kvhma.Plan, request: tuple[int, list[Span], list[Span]]) -> tuple[object, ...]:
    (read,) = plan.transfer(*request).reads
    return read.local.tobytes(), read.remote.tobytes(), tuple(read.descriptors_by_group)


@pytest.mark.parametrize("packed", [False, True])
def test_evicted_cuts_are_made_again(packed: bool) -> None:
    # Block-major on both sides, the cuts of these requests have more pieces than a plan keeps.
    local, remote = (attention(tokens, tokens << 40, layers=256, packed=packed) for tokens in (37, 36))
    plan = kvhma.plan(local, remote, descriptor_bytes=0)
    asked = list(requests(73, 35))
    alone = [moved(kvhma.plan(local, remote, descriptor_bytes=0), request) for request in asked]
    for _ in range(3):
        assert [moved(plan, request) for request in asked] == alone


def test_threads_share_a_plan() -> None:
    plan = kvhma.plan(attention(37, 1 << 40), attention(36, 1 << 50, packed=True), descriptor_bytes=0)
    asked = list(requests(73, 35))
    alone = [moved(plan, request) for request in asked]
    fresh = kvhma.plan(attention(37, 1 << 40), attention(36, 1 << 50, packed=True), descriptor_bytes=0)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: [moved(fresh, request) for request in asked], range(8)):
            assert found == alone


def far_apart(block: int, order: tuple[str, ...]) -> Geometry:
    """One layer whose blocks are of two heads and two items, with the axes in this order, outermost first."""
    lengths = {"heads": 2, "tokens": block, "content": 2}
    axes, stride = [], 1
    for name in reversed(order):
        axes.append(Axis(name, lengths[name], stride))
        stride *= lengths[name]
    page = Page((Part("kv", "uint8", 1, 0, tuple(axes)),))
    return Geometry((Region(1 << 30, 2 * stride),), (Group("full", block),), (Layer("a", 0, 0, 0, 2, stride, page),))


@pytest.mark.parametrize(
    ("block", "order", "code", "field"),
    [
        (1 << 20, ("heads", "content", "tokens"), "split-items", "stride"),
        (1 << 21, ("tokens", "heads", "content"), "pieces", "strides"),
    ],
)
def test_validate_also_reports_the_cost_of_a_block(block: int, order: tuple[str, ...], code: str, field: str) -> None:
    pair = far_apart(block, ("heads", "tokens", "content")), far_apart(block, order)
    for local, remote in (pair, pair[::-1]):
        (finding,) = kvhma.validate(local, remote)
        assert (finding.code, finding.field, finding.layer, finding.part) == (code, field, "a", "kv")
        assert finding.local != finding.remote
        with pytest.raises(UnsupportedPairError) as refused:
            kvhma.plan(local, remote)
        assert str(refused.value) == finding.text
        assert (refused.value.local, refused.value.remote) == (finding.local, finding.remote)
    assert kvhma.validate(*pair)[0].text == kvhma.validate(*pair[::-1])[0].text


def test_a_request_is_refused_for_its_own_cost() -> None:
    # Nearly every one of 140,000 pairs of blocks is cut differently.
    blocks = 70_000
    local, remote = (
        attention(tokens, base, layers=1, blocks=blocks + 2) for tokens, base in ((69_997, 1 << 40), (70_001, 1 << 50))
    )
    plan = kvhma.plan(local, remote)
    assert plan.transfer(1000, [Span(0, [1])], [Span(0, [1])]).descriptors == 2
    spans = [Span(0, np.arange(1, blocks + 1, dtype=np.int32))]
    with pytest.raises(kvhma.RequestError, match="ways to cut blocks, at most 131072: kernel blocks of the two sides"):
        plan.transfer(69_997 * blocks - 5, spans, spans)
