# SPDX-License-Identifier: Apache-2.0
"""The cost of a peer's geometry: time, memory, and other threads' turns. Refused with the numbers, or cheap.

Before there were bounds, a peer could claim that its pages of gemma-3-4b were transposed. This cost D 1.1 million
descriptors for 16 tokens, 36 million and a minute for 512, and an abort for 5,000.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

import kvhma
from kvhma import Geometry, KvhmaError, RequestError, Span
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.limits import cost_of

SECONDS, MEGABYTES = 1, 512
"""Seconds of the processor, some hundred times what they need."""
BLOCKS = 1100


def gemma(base: int, tp_rank: int = 0, tp_size: int = 1, order: str = "LBHNC") -> Geometry:
    return layout(
        model("gemma-3-4b"),
        LayoutOptions(num_blocks=BLOCKS, base=base, tp_rank=tp_rank, tp_size=tp_size, order=order),
    )


def transposed(geometry: Geometry) -> Geometry:
    """Transpose the content of each page outside of its tokens: as many bytes, every item separate."""
    form = json.loads(geometry.to_json())
    for page in form["pages"]:
        for part in page["parts"]:
            by_name = {axis["name"]: axis for axis in part["axes"]}
            if {"tokens", "content"} <= by_name.keys():
                tokens, content = by_name["tokens"], by_name["content"]
                tokens["stride"], content["stride"] = part["item_bytes"], part["item_bytes"] * tokens["extent"]
    return Geometry.from_json(json.dumps(form))


def moved(local: Geometry, remote: Geometry, tokens: int, how: str) -> str:
    """Return the cost of a request with this many tokens."""

    def spans(geometry: Geometry) -> list[Span]:
        found = []
        for group in geometry.groups:
            window = group.window or tokens
            first = max(0, tokens - window) // group.block_size
            count = -(-tokens // group.block_size) - first
            found.append((first, count))
        ids = iter(range(1, BLOCKS))
        return [Span(first, [next(ids) for _ in range(count)]) for first, count in found]

    try:
        transfer = getattr(kvhma.plan(local, remote), how)(tokens, spans(local), spans(remote))
    except KvhmaError as error:
        return f"{type(error).__name__}: {error}"
    return f"{sum(read.descriptors for read in transfer.reads)} descriptors"


def transposed_pages(tokens: int, how: str) -> str:
    return moved(gemma(1 << 40), transposed(gemma(1 << 42)), tokens, how)


@pytest.mark.parametrize("tokens", [16, 512, 5000])
@pytest.mark.parametrize("how", ["transfer", "ids"])
def test_transposed_pages_are_refused_when_the_plan_is_made(tokens, how):
    cost = cost_of(transposed_pages, tokens, how)
    assert cost.result.startswith("UnsupportedPairError: ")
    assert 'part "kv" axis "content": stride cannot be paired: 2 bytes from index to index with 32' in cost.result
    assert cost.seconds < SECONDS
    assert cost.megabytes < MEGABYTES


def small_pages(base: int, order: tuple[str, ...], blocks: int = 1 << 17) -> Geometry:
    """One layer with 4 heads, 4 tokens and content of 64 bytes: as bytes, in an order of axes, outermost first."""
    stride, axes = 1, []
    lengths = {"heads": 4, "tokens": 4, "content": 64}
    for name in reversed(order):
        axes.append(kvhma.Axis(name, lengths[name], stride))
        stride *= lengths[name]
    page = kvhma.Page((kvhma.Part("kv", "u8", 1, 0, tuple(axes)),))
    region = kvhma.Region(base, stride * blocks)
    return Geometry((region,), (kvhma.Group("full", 4),), (kvhma.Layer("a", 0, 0, 0, blocks, stride, page),))


def small(order: tuple[str, ...], blocks: int, how: str) -> str:
    local, remote = small_pages(1 << 40, ("heads", "tokens", "content")), small_pages(1 << 42, order)
    spans = [Span(0, range(1, blocks + 1))]
    try:
        transfer = getattr(kvhma.plan(local, remote), how)(4 * blocks, spans, spans)
    except KvhmaError as error:
        return f"{type(error).__name__}: {error}"
    return f"{transfer.bytes} bytes"


@pytest.mark.parametrize("how", ["transfer", "ids"])
def test_a_request_with_more_descriptors_than_layouts_explain_is_refused_before_they_are_made(how):
    cost = cost_of(small, ("content", "heads", "tokens"), 4096, how)
    # 1,024 items in each of 4,096 blocks; engines' orders make at most 16 pieces of a block.
    assert "RequestError: the request takes 4194304 descriptors, at most 1048576: " in cost.result
    assert cost.seconds < SECONDS
    assert cost.megabytes < MEGABYTES


@pytest.mark.parametrize("how", ["transfer", "ids"])
def test_odd_layouts_are_moved_while_that_is_cheap(how):
    assert small(("content", "heads", "tokens"), 100, how) == "102400 bytes"


@pytest.mark.parametrize("how", ["transfer", "ids"])
def test_an_order_of_an_engine_is_never_refused(how):
    # 2 million descriptors of 64 bytes.
    assert small(("tokens", "heads", "content"), 131_000, how) == f"{131_000 * 1024} bytes"


MOST = 1 << 22
"""The default of `max_descriptors`."""


def dear(tokens: int, order: str, options: dict[str, int]) -> int:
    """Return the descriptors of `NHD` against `HND`: one for each token and head, of blocks that are never adjacent."""
    blocks = -(-tokens // 4)
    local = small_pages(1 << 40, ("heads", "tokens", "content"), blocks + 1)
    remote = small_pages(1 << 42, ("tokens", "heads", "content"), blocks + 1)
    ids = list(range(1, blocks + 1))
    if order == "shuffled":
        random.Random(5).shuffle(ids)
    plan = kvhma.plan(local, remote, descriptor_bytes=0, **options)
    (read,) = plan.transfer(tokens, [Span(0, ids)], [Span(0, range(blocks, 0, -1))]).reads
    return len(read.local)


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_the_dearest_request_that_is_allowed_takes_little_memory(order):
    # Before there was `max_descriptors`, a peer that claimed this layout got 32 times as many: 6 GiB.
    cost = cost_of(dear, MOST // 4, order, {})
    assert cost.result == MOST
    assert cost.megabytes < MEGABYTES


def test_one_descriptor_more_is_refused_before_any_is_made():
    with pytest.raises(AssertionError) as refused:
        cost_of(dear, MOST // 4 + 1, "ascending", {})
    text = f"the request takes {MOST + 4} descriptors, at most {MOST}: max_descriptors is the most that may be made"
    assert f"RequestError: {text}" in str(refused.value)


@pytest.mark.parametrize("how", ["transfer", "ids"])
def test_max_descriptors_is_of_all_sources_together(how):
    local = small_pages(1 << 40, ("heads", "tokens", "content"), 20)
    halves = [half_of_the_heads(base, rank) for rank, base in enumerate((1 << 42, 1 << 43))]
    spans = [Span(0, range(1, 11))]
    # 10 blocks of 4 tokens with 2 heads, from each of two sources.
    assert sum(read.descriptors for read in asked(local, halves, 160, how)(40, spans, spans).reads) <= 160
    with pytest.raises(RequestError, match="takes 160 descriptors, at most 159: max_descriptors") as refused:
        asked(local, halves, 159, how)(40, spans, spans)
    assert (refused.value.code, refused.value.field, refused.value.value) == ("too-many", "descriptors", 160)


def half_of_the_heads(base: int, rank: int) -> Geometry:
    axes = (
        kvhma.Axis("tokens", 4, 128),
        kvhma.Axis("heads", 4, 64, start=2 * rank, length=2),
        kvhma.Axis("content", 64, 1),
    )
    page = kvhma.Page((kvhma.Part("kv", "u8", 1, 0, axes),))
    layer = kvhma.Layer("a", 0, 0, 0, 20, 512, page)
    return Geometry((kvhma.Region(base, 20 * 512),), (kvhma.Group("full", 4),), (layer,), tp_rank=rank, tp_size=2)


def asked(
    local: Geometry, remotes: list[Geometry], max_descriptors: int, how: str
) -> Callable[..., kvhma.Transfer[Any]]:
    return getattr(kvhma.plan(local, remotes, max_descriptors=max_descriptors), how)


def longest_hold(work: Callable[[], object]) -> float:
    """Run a function in another thread; return the longest share of it in which this thread got no turn.

    A share of the processor time of that thread: other load of the machine adds nothing to it.
    """
    done, ends = threading.Event(), threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            done.set()
            ends.wait()  # the clock of a thread ends with the thread

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    thread.start()
    clock = time.pthread_getcpuclockid(cast("int", thread.ident))
    turns = [0.0]
    while not done.is_set():
        turns.append(time.clock_gettime(clock))
        time.sleep(0)
    turns.append(time.clock_gettime(clock))
    ends.set()
    thread.join()
    sys.setswitchinterval(interval)
    return max(after - before for before, after in pairwise(turns)) / turns[-1]


def large() -> Geometry:
    """Many layers, each with its own page and many parts: about 10 MiB of JSON."""

    def axes(index: int) -> tuple[kvhma.Axis, ...]:
        return (kvhma.Axis("tokens", 4, 8), kvhma.Axis("content", 8, 1))

    pages = [
        kvhma.Page(tuple(kvhma.Part(f"p{part}", "u8", 1, 32 * part + 4096 * index, axes(index)) for part in range(32)))
        for index in range(1500)
    ]
    layers = tuple(kvhma.Layer(f"layer.{index}", 0, 0, 0, 1, 1 << 30, page) for index, page in enumerate(pages))
    return Geometry((kvhma.Region(1 << 40, 1 << 30),), (kvhma.Group("full", 4),), layers)


def holds_of_large() -> dict[str, float]:
    geometry = large()
    text = geometry.to_json()
    return {
        "from_json": longest_hold(lambda: Geometry.from_json(text)),
        "validate": longest_hold(lambda: kvhma.validate(geometry, geometry)),
        "plan": longest_hold(lambda: kvhma.plan(geometry, geometry)),
        "explain": longest_hold(kvhma.plan(geometry, geometry).explain),
    }


def test_other_threads_have_their_turns():
    # Code that holds the interpreter's lock holds it each time; a busy machine takes the turns of a thread at times.
    tries = []
    for _ in range(4):
        tries.append(cost_of(holds_of_large).result)
        if all(min(holds[name] for holds in tries) < 0.5 for name in tries[0]):
            return
    pytest.fail(f"other threads have no turns: {tries}")


def parsed(text: bytes) -> int:
    return len(Geometry.from_json(text).layers)


def test_the_longest_geometry_is_read_soon():
    cost = cost_of(parsed, large().to_json())
    assert cost.result == 1500
    assert cost.seconds < 10 * SECONDS
    assert cost.megabytes < MEGABYTES
