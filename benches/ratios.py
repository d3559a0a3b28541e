# SPDX-License-Identifier: Apache-2.0
"""Measure both sides in one run and print ratios as Markdown, which is benches/RESULTS.md.

Times are the best of several repeats, because machines are noisy; only ratios and counts are meaningful.
"""

from __future__ import annotations

import mmap
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvhma
from counts import POOLS, block_tables, pool_blocks
from harness import in_turns, section
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span, lowlevel
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.vllm.prompts.prompt import prompt_digest

NORESERVE = 0x4000
"""``MAP_NORESERVE`` of Linux, which Python has no name for: the caches are larger than the memory."""
MAPPED: list[mmap.mmap] = []


def micros(*calls: Callable[[], Any], rounds: int = 200) -> list[float]:
    """Return the fastest mean time of each call, in microseconds."""
    return [1e6 * seconds for seconds in in_turns(dict(enumerate(calls)), rounds).values()]


def attention(regions: int, blocks: int, base: int, groups: int = 1, heads: int = 8, window: int = 1024) -> Geometry:
    """Groups of `regions` layers each that share regions: the first is full, the others slide."""
    page = heads * 16 * 512
    axes = (Axis("heads", heads, 16 * 512), Axis("tokens", 16, 512), Axis("content", 256, 2))
    part = Page((Part("kv", "bfloat16", 2, 0, axes),))
    kinds = (Group("full", 16), *(Group("sliding", 16, window=window) for _ in range(groups - 1)))
    places = tuple(Region(base + index * (page * blocks + 4096), page * blocks) for index in range(regions))
    layers = tuple(
        Layer(f"layers.{group}.{index}", group, index, 0, blocks, page, part)
        for group in range(groups)
        for index in range(regions)
    )
    return Geometry(places, kinds, layers)


def plan_of(regions: int, blocks: int, **more: Any) -> kvhma.Plan:
    return kvhma.plan(attention(regions, blocks, 1 << 30, **more), attention(regions, blocks, 1 << 45, **more))


def gemma_lists(blocks: int, seed: int) -> tuple[list[list[int]], list[Span]]:
    """The 902 blocks of an 8k prompt: 512 of the full group, 65 of each of six sliding ones."""
    ids = random.Random(seed).sample(range(1, blocks), 902)
    tables = [ids[:512], *(ids[512 + 65 * g : 577 + 65 * g] for g in range(6))]
    return tables, [Span(0, tables[0]), *(Span(447, rest) for rest in tables[1:])]


def ids() -> None:
    # One token less than 8,192 attends to the previous block: all 65 blocks are live.
    blocks, tokens, window = 3000, 8192, 1040
    plan = plan_of(10, blocks, groups=7, window=window)
    (mine, local), (theirs, remote) = gemma_lists(blocks, 1), gemma_lists(blocks, 2)
    starts = np.arange(10, dtype=np.int32)[:, None] * np.int32(blocks)

    def read(tables: list[list[int]]) -> Any:
        return np.concatenate([np.asarray(table, dtype=np.int32) for table in tables])

    def bare() -> Any:
        return (starts + read(mine)).ravel(), (starts + read(theirs)).ravel()

    def same() -> Any:
        sides = read(mine), read(theirs)
        for side in sides:
            if side.min() < 1 or side.max() >= blocks or len(np.unique(side)) != len(side):
                raise ValueError
        order = np.argsort(sides[0], kind="stable")
        return tuple((starts + side[order]).ravel() for side in sides)

    def ours() -> Any:
        return plan.ids(tokens, local, remote)

    got, expected = ours().reads[0], same()
    assert np.array_equal(got.local, expected[0])
    assert np.array_equal(got.remote, expected[1])
    assert len(got.local) == 9020
    arrays = [[Span(span.first, np.asarray(span.ids, dtype=np.int32)) for span in side] for side in (local, remote)]
    flat = [block for table in mine + theirs for block in table]
    times = in_turns(
        {
            "kvhma, lists in": ours,
            "kvhma, int32 arrays in": lambda: plan.ids(tokens, *arrays),
            "numpy: the same (range and doubles checked, pairs sorted)": same,
            "numpy: ids only": bare,
            "floor: kvhma reads 1,804 ints from lists": lambda: lowlevel.expand_blocks(flat, 1),
            "floor: numpy reads them": lambda: np.asarray(flat, dtype=np.int32),
        }
    )
    first = times["kvhma, lists in"]
    section(
        "gemma-3-27b, 8k prompt: lists in, both int32 arrays out (902 blocks, 10 regions, 9,020 ids a side)",
        ("", "time", "of kvhma"),
        [(name, f"{value * 1e6:.1f} µs", f"{value / first:.1f}×") for name, value in times.items()],
    )


def beside_the_floor() -> None:
    """Time plans of one group beside what must be read and written: copies of all arrays that go in and come out."""
    regions, rows = 16, []
    for count in (16, 512, 8_192, 131_072):
        blocks = count + count // 8 + 2
        plan = plan_of(regions, blocks)
        alone = [Span(0, np.array([1], np.int32))]
        up = np.arange(1, count + 1, dtype=np.int32)
        rng = np.random.default_rng(3)
        for order, mine, theirs in (
            ("sorted", up, up + 1),
            ("descending", up[::-1].copy(), up[::-1] + 1),
            ("scattered", *(rng.permutation(blocks - 1).astype(np.int32)[:count] + np.int32(1) for _ in range(2))),
        ):
            cells: list[str] = []
            times: list[tuple[float, float]] = []
            for call in (plan.ids, plan.transfer):
                asked = partial(call, count * 16, [Span(0, mine)], [Span(0, theirs)])
                read = asked().reads[0]
                arrays = [array.copy() for array in (mine, theirs, read.local, read.remote)]
                ours, floor, least = micros(
                    asked,
                    lambda arrays=arrays: [array.copy() for array in arrays],
                    partial(call, 16, alone, alone),
                    rounds=max(20, min(400, 400_000 // count)),
                )
                ratio = f"**{ours / floor:.1f}×**"
                cells += [f"{len(read.local):,}", f"{ours:,.1f} µs", f"{floor:,.1f} µs", ratio, f"{least:.1f} µs"]
                times.append((ours, floor))
            (checks,) = micros(partial(checked_by_numpy, mine, theirs, blocks), rounds=max(20, 400_000 // count // 4))
            with_checks = " and ".join(f"{ours / (floor + checks):.1f}×" for ours, floor in times)
            rows.append((f"{count:,}, {order}", *cells, f"{checks:,.1f} µs", with_checks))
    section(
        f"Plans beside the floor: {regions} regions, int32 arrays in",
        (
            "blocks",
            *("ids", "`Plan.ids`", "floor", "of it", "the same of one block"),
            *("rows", "`Plan.transfer`", "floor", "of it", "the same of one block"),
            "numpy checks and sorts",
            "ids and rows, of copies, checks and sorts",
        ),
        rows,
        "The floor is numpy's copy of both arrays of blocks and of both arrays that come out, which are new: four calls. "
        "kvhma also checks each block, finds doubles, pairs and sorts. That is most of the time where many blocks are few "
        "rows. numpy's time for that alone is beside it. The last column is kvhma's time over the sum of both, for ids and "
        "for rows: what numpy needs for the same work. Only for many blocks that rise numpy is quicker: it "
        "pairs nothing. kvhma writes a pair of 8 bytes for each block and reads it twice; AVX2 instructions do not change "
        "that. What a request of one block takes is the floor of a call: it checks spans, and makes a `Transfer` "
        "and a `Read` with their arrays.",
    )


def checked_by_numpy(mine: Any, theirs: Any, blocks: int) -> Any:
    """Find what is not a block or listed twice, and sort the pairs, each only where it has to be done."""
    for side in (mine, theirs):
        later, earlier = side[1:], side[:-1]
        is_ordered = (later > earlier).all() or (later < earlier).all()
        if side.min() < 1 or side.max() >= blocks or not (is_ordered or np.bincount(side).max() == 1):
            raise ValueError
    if (mine[1:] > mine[:-1]).all():
        return mine, theirs
    order = np.argsort(mine, kind="stable")
    return mine[order], theirs[order]


def orders() -> None:
    try:
        from kvhma.nixl import Agent
    except ImportError:
        print("## NIXL\n\nnot installed\n")
        return
    blocks, count, regions, page = 4096, 2048, 4, 4096
    axes = (Axis("tokens", 16, page // 16), Axis("content", page // 16, 1))
    pages = Page((Part("kv", "uint8", 1, 0, axes),))
    memories = [np.ones((regions, blocks * page), dtype=np.uint8) for _ in range(2)]

    def geometry(memory: Any) -> Geometry:
        layers = tuple(Layer(f"l{index}", 0, index, 0, blocks, page, pages) for index in range(regions))
        return Geometry(tuple(Region(row.ctypes.data, row.nbytes) for row in memory), (Group("full", 16),), layers)

    local, remote = (geometry(memory) for memory in memories)
    rows = []
    with Agent("reader") as reader, Agent("source") as source:
        reader.register(local)
        source.register(remote)
        peer = reader.connect(source.handshake_payload(remote))
        source.connect(reader.handshake_payload(local))
        plan = kvhma.plan(local, remote)
        mine, theirs = plan.views(0)
        prepared = reader.prepare(None, mine), reader.prepare(peer, theirs)
        up = list(range(1, count + 1))
        rng = random.Random(5)
        shuffled = rng.sample(up, count)
        scattered = rng.sample(range(1, blocks), count)
        for name, ours, other in (
            ("ascending", up, up),
            ("descending", up[::-1], up[::-1]),
            ("the same random order on both sides", shuffled, shuffled),
            ("random on both sides", scattered, rng.sample(range(1, blocks), count)),
        ):
            counts = [blocks] * regions
            given = [lowlevel.descriptor_ids([ids], counts, [0] * regions) for ids in (ours, other)]
            planned = plan.ids(count * 16, [Span(0, ours)], [Span(0, other)]).reads[0]

            def move(local_ids: Any, remote_ids: Any) -> tuple[int, float]:
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    transfer = reader.read_ids(prepared[0], local_ids, prepared[1], remote_ids)
                    transfer.wait(60)
                    times.append(time.perf_counter() - start)
                return transfer.telemetry.descriptors, min(times) * 1e3

            as_given, sorted_ones = move(*given), move(planned.local, planned.remote)
            assert sorted_ones[0] == planned.descriptors
            rows.append(
                (
                    name,
                    as_given[0],
                    f"{as_given[1]:.1f} ms",
                    sorted_ones[0],
                    f"{sorted_ones[1]:.1f} ms",
                    f"{as_given[1] / sorted_ones[1]:.1f}×",
                )
            )
    note = "Pairs of random lists on both sides have few neighbours: sorting does not help there, and this is a tie."
    section(
        f"Order of the lists on real NIXL: {regions} regions × {count:,} blocks of 4 KiB, two agents in one process",
        ("lists", "posted as given", "time", "posted sorted", "time", "ratio"),
        rows,
        note,
    )


def prepared() -> None:
    """Time a request from its spans to the handle that is posted: as descriptors, and as ids in prepared lists."""
    try:
        from kvhma.nixl import Agent
    except ImportError:
        return
    rows = []
    with Agent("reader") as reader, Agent("source") as source:
        for name, tokens, order in (
            ("gemma-3-27b", 8_192, "LBHNC"),
            ("gpt-oss-120b", 131_072, "LBHNC"),
            ("gpt-oss-120b", 131_072, "BLHNC"),
            ("NVIDIA-Nemotron-3-Nano-30B-A3B", 131_072, "LBHNC"),
        ):
            local, remote = (mapped(name, tokens, order) for _ in range(2))
            reader.register(local)
            source.register(remote)
            peer = reader.connect(source.handshake_payload(remote))
            plan = kvhma.plan(local, remote)
            start = time.perf_counter()
            lists = [reader.prepare(None, plan.views(0)[0]), reader.prepare(peer, plan.views(0)[1])]
            once = (time.perf_counter() - start) * 1e6
            for pool in POOLS:
                tables = [block_tables(geometry, tokens, pool, seed) for seed, geometry in enumerate((local, remote))]
                spans = [kvhma.live_spans(local, tokens, table) for table in tables]
                times = made(reader, plan, (tokens, *spans), lists)
                count = plan.transfer(tokens, *spans).descriptors
                what = (f"{name}, {tokens:,} tokens, {order}, {pool}", f"{count:,}")
                rows.append((*what, *(f"{taken:,.0f} µs" for taken in times), f"{once:,.0f} µs"))
    section(
        "Descriptors or prepared lists: from spans to the handle that NIXL posts",
        ("request", "descriptors", "`transfer`", "+ NIXL", "`ids`", "+ NIXL", "lists, once a pair"),
        rows,
        "Spans are Python lists. Nothing is posted: posting takes as long either way, and moving the bytes is not in it.",
    )


def mapped(name: str, tokens: int, order: Any) -> Geometry:
    """Return a cache in memory that is mapped and never touched."""
    one = model(name)
    blocks = pool_blocks(one, tokens)
    size = sum(region.bytes + 4096 for region in layout(one, LayoutOptions(num_blocks=blocks, order=order)).regions)
    memory = mmap.mmap(-1, size + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    MAPPED.append(memory)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    return layout(one, LayoutOptions(num_blocks=blocks, order=order, base=base, region_align=4096))


def made(reader: Any, plan: kvhma.Plan, request: tuple[Any, ...], lists: list[Any]) -> list[float]:
    """Return microseconds of kvhma and of NIXL, for descriptors and for ids."""
    nixl, peer = reader._session.open(), lists[1].peer
    (read,), (ids,) = plan.transfer(*request).reads, plan.ids(*request).reads

    def descriptors() -> None:
        both = [nixl.get_xfer_descs(rows, "DRAM") for rows in (read.local, read.remote)]
        nixl.initialize_xfer("READ", *both, peer.name, b"").release()

    def chosen() -> None:
        nixl.make_prepped_xfer("READ", lists[0]._handle, ids.local, lists[1]._handle, ids.remote, b"").release()

    return micros(lambda: plan.transfer(*request), descriptors, lambda: plan.ids(*request), chosen)


def digest_row(what: str, ids: list[int]) -> tuple[str, ...]:
    nothing = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    asked: Any = SimpleNamespace(_all_token_ids=ids, **nothing)

    ours, floor = micros(lambda: prompt_digest(asked, len(ids)), lambda: sum(ids))
    return (f"{len(ids):,}, {what}", f"{ours:.0f} µs", f"{floor / ours:.2f}×")


def digests() -> None:
    """The digest of a prompt, which P and D compute once for each request in their schedulers' threads."""
    rows = []
    rng = random.Random(1)
    for tokens in (8_192, 32_768, 131_072):
        rows.append(digest_row("in a row", [rng.randrange(200_000) for _ in range(tokens)]))
        heap = [rng.randrange(200_000) for _ in range(8 * tokens)]
        rows.append(digest_row("spread", [heap[index] for index in rng.sample(range(len(heap)), tokens)]))
    section(
        "The digest of a prompt's tokens",
        ("tokens", "kvhma", "floor: Python adds them up"),
        rows,
        "Each id is a separate object, and reading all of them once is most of the time. For `spread` the heap has eight "
        "times as many ids.",
    )


def main() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it writes to the output
    print("# Results\n\nMade by `make bench`; ratios and counts, since the machine is shared and noisy.\n")
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, kvhma {kvhma.__version__}\n"
    )
    for part in (ids, beside_the_floor, orders, prepared, digests):
        if len(sys.argv) > 1 and part.__name__ not in sys.argv[1:]:
            continue
        print(f"{part.__name__} ...", file=sys.stderr)
        part()


if __name__ == "__main__":
    main()
