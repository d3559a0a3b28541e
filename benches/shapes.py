# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of an id or a descriptor, over blocks, groups, layers, ranks, requests and ways to cut blocks.

    python benches/shapes.py [--picture docs/assets/shapes.svg]

Prints Markdown, which is benches/RESULTS_SHAPES.md. Exit code 1: two adjacent points differ as no machine explains.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kvhma
from drawing import COLUMN, Drawing
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span, lowlevel

REPEATS = 5
SECONDS = 0.01
"""Processor time of a repetition, if a call takes less."""
PASSES = 2
"""How often all points of an axis are measured, so that a busy moment of the machine does not decide one of them."""
LIMIT = 3.0
LEAST_IDS = 1 << 17
"""Below so many ids the system's count of pages says nothing about one of them."""
PRIME = 1_048_583
"""Blocks of a pool: steps modulo a prime make an order in which no two blocks are neighbours."""

PAIRS = ((2048, 2048), (2048, 1024), (2048, 2016), (2048, 2040), (2047, 2048), (2089, 2088), (2095, 2096))
"""Kernel blocks of both sides that cut each other in one way to thousands."""

Call: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """What a function costs at a point of an axis: nanoseconds of a call, and bytes of its peak memory if known."""

    at: str
    ids: int
    ns: float
    peak: int | None = None

    @property
    def ns_per_id(self) -> float:
        """Nanoseconds of an id."""
        return self.ns / self.ids

    def __str__(self) -> str:
        """Return the cell of a table."""
        return f"{self.ns_per_id:,.2f}" + ("" if self.peak is None else f" · {self.peak / self.ids:.0f} B")


@dataclass
class Line:
    """A function over an axis."""

    name: str
    points: list[Point] = field(default_factory=list)

    def cliffs(self) -> list[str]:
        """Say between which adjacent points an id of the larger call, or the whole smaller one, takes too long."""
        found = []
        for pair in pairwise(self.points):
            small, large = sorted(pair, key=lambda point: point.ids)
            if large.ns_per_id > LIMIT * small.ns_per_id or small.ns > LIMIT * large.ns:
                found.append(f"{self.name}: {small.ns:,.0f} ns for {small.at}, {large.ns:,.0f} ns for {large.at}")
        return found


def nanoseconds(call: Call) -> float:
    """Return the least processor time of a call. Other processes take none of it, but caches."""
    call()
    start = time.process_time_ns()
    call()
    count = max(1, int(SECONDS * 1e9 / max(1, time.process_time_ns() - start)))
    fastest = float("inf")
    for _ in range(REPEATS):
        start = time.process_time_ns()
        for _ in range(count):
            call()
        fastest = min(fastest, (time.process_time_ns() - start) / count)
    return fastest


def peak(call: Call) -> int:
    """Return by how many bytes a call raises the peak of the resident memory, its result included."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure(at: str, ids: int, call: Call) -> Point:
    return Point(at, ids, nanoseconds(call), peak(call) if ids >= LEAST_IDS else None)


def scattered(count: int, step: int = 4_099, first: int = 0) -> Any:
    return ((np.arange(first, first + count, dtype=np.int64) * step) % PRIME + 1).astype(np.int32)


def geometry(groups: int, layers: int, base: int, tp: tuple[int, int] = (0, 1), heads: int = 64) -> Geometry:
    """Layers of each group in separate regions, blocks of 16 tokens and a rank's share of the heads."""
    rank, size = tp
    share = heads // size
    page = share * 16 * 8
    axes = (
        Axis("heads", heads, 16 * 8, start=rank * share, length=share),
        Axis("tokens", 16, 8),
        Axis("content", 4, 2),
    )
    part, bytes_of_region = Page((Part("kv", "bfloat16", 2, 0, axes),)), page * (PRIME + 1)
    places = range(groups * layers)
    regions = tuple(Region(base + index * bytes_of_region, bytes_of_region) for index in places)
    all_layers = tuple(Layer(f"l{index}", index % groups, index, 0, PRIME + 1, page, part) for index in places)
    return Geometry(regions, (Group("full", 16),) * groups, all_layers, tp_rank=rank, tp_size=size)


def of_plan(plan: kvhma.Plan, blocks: int, groups: int, *, ids: bool = True) -> dict[str, tuple[int, Call]]:
    """Return `Plan.transfer` and `Plan.ids` of a request whose blocks are scattered on both sides."""
    local, remote = (
        [Span(0, scattered(blocks, step, group * blocks)) for group in range(groups)] for step in (4_099, 8_209)
    )
    made = plan.transfer(blocks * 16, local, remote)
    calls: dict[str, tuple[int, Call]] = {
        "Plan.transfer": (made.descriptors, lambda: plan.transfer(blocks * 16, local, remote))
    }
    if ids:
        count = sum(len(read.local) for read in plan.ids(blocks * 16, local, remote).reads)
        calls["Plan.ids"] = (count, lambda: plan.ids(blocks * 16, local, remote))
    return calls


def of_lowlevel(blocks: int, groups: int, layers: int) -> dict[str, tuple[int, Call]]:
    """Return the functions that need no plan; `layers` views have the blocks of each group."""
    tables = [scattered(blocks, first=group * blocks) for group in range(groups)]
    listed = [table.tolist() for table in tables]
    keep, of_views = [0] * groups, [group for group in range(groups) for _ in range(layers)]
    counts = [PRIME + 1] * len(of_views)
    order = lowlevel.DescriptorOrder(keep, counts, of_views)
    given, made = blocks * groups, blocks * groups * layers
    return {
        "clip_blocks, lists": (given, lambda: lowlevel.clip_blocks(listed, keep)),
        "clip_blocks, arrays (a view)": (groups, lambda: lowlevel.clip_blocks(tables, keep)),
        "expand_blocks × 4": (4 * given, lambda: [lowlevel.expand_blocks(table, 4) for table in tables]),
        "descriptor_ids": (made, lambda: lowlevel.descriptor_ids(tables, counts, of_views)),
        "DescriptorOrder.ids": (made, lambda: order.ids(tables)),
    }


def plan_of(groups: int, layers: int) -> kvhma.Plan:
    return kvhma.plan(geometry(groups, layers, 1 << 40), geometry(groups, layers, 1 << 60), max_descriptors=1 << 25)


Points: TypeAlias = Iterator[tuple[str, dict[str, tuple[int, Call]]]]


def over_blocks() -> Points:
    plan = plan_of(1, 2)
    for blocks in (2**power for power in range(21)):
        yield f"{blocks:,}", of_lowlevel(blocks, 1, 2) | of_plan(plan, blocks, 1)


def over_blocks_of_returned_memory() -> Points:
    plan = plan_of(1, 8)
    for blocks in (2**power for power in range(4, 18)):
        yield f"{blocks:,}", of_plan(plan, blocks, 1)


def over_groups() -> Points:
    for groups in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        blocks = (1 << 18) // groups
        yield f"{groups:,}", of_lowlevel(blocks, groups, 1) | of_plan(plan_of(groups, 1), blocks, groups)


def over_layers() -> Points:
    for layers in (8, 16, 32, 64, 128, 256, 512):
        few = {name: of for name, of in of_lowlevel(4_096, 1, layers).items() if name.startswith(("desc", "Desc"))}
        yield f"{layers}", few | of_plan(plan_of(1, layers), 4_096, 1)


def over_ranks(decode: int) -> Points:
    """D's rank 0 of `decode` ranks reads what it needs from 1 to 64 ranks of P."""
    local = geometry(1, 8, 1 << 40, (0, decode))
    for prefill in (1, 2, 4, 8, 16, 32, 64):
        remotes = [geometry(1, 8, 1 << 60, (rank, prefill)) for rank in range(prefill)]
        plan = kvhma.plan(local, remotes, max_descriptors=1 << 25)
        calls = of_plan(plan, 4_096, 1, ids=False)
        yield f"{prefill}", {f"D TP {decode}": calls["Plan.transfer"]}


def over_requests() -> Points:
    order = lowlevel.DescriptorOrder([0], [PRIME + 1] * 8, [0] * 8)
    for requests in (2**power for power in range(11)):
        rows = np.stack([scattered(128, first=128 * request) for request in range(requests)])
        lengths = np.full(requests, 128)
        call = lambda rows=rows, lengths=lengths: order.batch_ids([rows], [lengths])  # noqa: E731
        yield f"{requests:,}", {"DescriptorOrder.batch_ids": (requests * 128 * 8, call)}


def cut_side(block: int, base: int) -> Geometry:
    """64 layers in as many regions, 4 heads of 64 bytes outside of the tokens of a block."""
    axes = (Axis("heads", 4, block * 64), Axis("tokens", block, 64), Axis("content", 32, 2))
    page, stride = Page((Part("kv", "bfloat16", 2, 0, axes),)), 4 * block * 64
    regions = tuple(Region(base + index * (stride * 3 + 4096), stride * 3) for index in range(64))
    layers = tuple(Layer(f"layers.{index}", 0, index, 0, 3, stride, page) for index in range(64))
    return Geometry(regions, (Group("full", block),), layers)


def over_cuts() -> Points:
    """One token of 64 layers: its plan once searched all ways in which kernel blocks cut each other."""
    one = [Span(0, [1])]
    for pair in PAIRS:
        sides = (cut_side(block, base) for block, base in zip(pair, (1 << 40, 1 << 50), strict=True))
        plan = kvhma.plan(*sides, descriptor_bytes=0)
        call = lambda plan=plan: plan.transfer(1, one, one)  # noqa: E731
        yield f"{pair[0]}, {pair[1]}", {"Plan.transfer": (call().descriptors, call)}


def lines(axis: Callable[[], Points], passes: int = PASSES) -> list[Line]:
    """Measure each function at each point, one after the other, and take the best of the passes."""
    found: dict[tuple[str, str], Point] = {}
    for _ in range(passes):
        for at, calls in axis():
            print(f"  {at}", file=sys.stderr, flush=True)
            for name, (ids, call) in calls.items():
                point = measure(at, ids, call)
                before = found.get((name, at), point)
                found[name, at] = replace(point, ns=min(point.ns, before.ns))
    names = dict.fromkeys(name for name, _ in found)
    return [Line(name, [point for (of, _), point in found.items() if of == name]) for name in names]


@dataclass(frozen=True)
class Sweep:
    """An axis: its title, what stays the same, its points and, once measured, its lines."""

    title: str
    about: str
    points: Callable[[], list[Line]]
    lines: Sequence[Line] = ()

    def markdown(self) -> str:
        """Return a table with a column for each function."""
        head = [self.title, *(line.name for line in self.lines)]
        rows = zip(*(line.points for line in self.lines), strict=True)
        cells = (head, ["---"] * len(head), *([row[0].at, *map(str, row)] for row in rows))
        return f"## {self.title}\n\n{self.about}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


SWEEPS = (
    Sweep("Blocks of a request", "One group of two layers.", lambda: lines(over_blocks)),
    Sweep("Groups", "262,144 blocks in all, a layer for each group.", lambda: lines(over_groups)),
    Sweep("Layers", "4,096 blocks of one group.", lambda: lines(over_layers)),
    Sweep(
        "Ranks of P",
        "`Plan.transfer` of a rank of D, 4,096 blocks, 8 layers, 64 heads. Heads are outside of tokens.",
        lambda: [line for decode in (1, 2, 4, 8, 16, 32, 64) for line in lines(partial(over_ranks, decode))],
    ),
    Sweep("Requests of a batch", "128 blocks each, one group of 8 layers.", lambda: lines(over_requests)),
    Sweep("Kernel blocks of both sides", "One token of 64 layers.", lambda: lines(over_cuts)),
)

RETURNED = Sweep(
    "Blocks of a request, memory returned to the system",
    "8 layers, and the C library's own limits; not checked for cliffs. The C library returns a result of 128 KiB or more\n"
    "after each call, and each call pays for fresh pages. Results of 4 MiB or more have huge pages.",
    lambda: lines(over_blocks_of_returned_memory, passes=1),  # a second pass finds the limits raised by large results
)

_LEFT, _HIGH, _WIDE = 56, 132, 400


def draw(sweeps: Sequence[Sweep]) -> str:
    """Draw a diagram for each axis: nanoseconds of an id, in powers of ten upwards."""
    drawing = Drawing(COLUMN, "Nanoseconds of an id or a descriptor", "Over the size of a request and of its engines.")
    drawing.text(12, 26, "Nanoseconds of an id or a descriptor", "head")
    top = 60.0
    for sweep in sweeps:
        drawing.text(12, top, sweep.title)
        top = _diagram(drawing, sweep, top + 18) + 46
    return drawing.svg(top)


def _diagram(drawing: Drawing, sweep: Sweep, top: float) -> float:
    logs = [np.log10(point.ns_per_id) for line in sweep.lines for point in line.points]
    low, high = int(np.floor(min(logs))), int(np.ceil(max(logs)))
    bottom, step = top + _HIGH, _WIDE / max(1, len(sweep.lines[0].points) - 1)

    def height(ns: float) -> float:
        return bottom - (float(np.log10(ns)) - low) * _HIGH / max(1, high - low)

    apart = -(-(high - low) // 6)
    for power in range(low, high + 1, apart):
        drawing.line([(_LEFT, height(10.0**power)), (_LEFT + _WIDE, height(10.0**power))], "grid")
        drawing.text(_LEFT - 8, height(10.0**power) + 4, f"{10.0**power:,g}", "end small soft")
    for color, line in enumerate(sweep.lines):
        places = [(_LEFT + index * step, height(point.ns_per_id)) for index, point in enumerate(line.points)]
        drawing.line(places, f"s{color}")
        for (x, y), point in zip(places, line.points, strict=True):
            drawing.rect(x - 4, y - 4, 8, 8, f"c{color}", f"{line.name}, {point.at}: {point.ns_per_id:,.2f} ns")
        drawing.rect(_LEFT + _WIDE + 20, top + 18 * color, 10, 10, f"c{color}", line.name)
        drawing.text(_LEFT + _WIDE + 36, top + 9 + 18 * color, line.name, "small")
    every = int(np.ceil(70 / step))
    for index, point in list(enumerate(sweep.lines[0].points))[::every]:
        drawing.text(_LEFT + index * step, bottom + 20, point.at.replace(" ", ""), "mid small soft")
    return bottom + 20


def of_returned_memory() -> str:
    """Return a table of `Plan.transfer` with the C library's own limits for what it returns to the system."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, __file__, "--returned-memory"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settings).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of an id over the size of requests and engines.")
    parser.add_argument("--picture", type=Path, help="SVG to draw")
    parser.add_argument("--returned-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.returned_memory:
        print(replace(RETURNED, lines=RETURNED.points()).markdown())
        return
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        sys.exit("the allocator has to keep its memory, as in `make bench-shapes`")
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    print(HEAD.format(machine=machine, repeats=PASSES * REPEATS, limit=LIMIT, least=LEAST_IDS))
    measured, cliffs = [], []
    for sweep in SWEEPS:
        print(sweep.title, file=sys.stderr, flush=True)
        measured.append(replace(sweep, lines=sweep.points()))
        print(measured[-1].markdown(), flush=True)
        cliffs += [f"{sweep.title}: {cliff}" for line in measured[-1].lines for cliff in line.cliffs()]
    print(of_returned_memory())
    print(f"## Cliffs\n\n{chr(10).join(f'* {cliff}' for cliff in cliffs) or 'None.'}")
    if options.picture:
        options.picture.write_text(draw(measured), encoding="utf-8")
    if cliffs:
        sys.exit("\n".join(cliffs))


HEAD = """\
# Results over the size of requests and engines

Made by `benches/shapes.py` (`make bench-shapes`): nanoseconds of an id or a descriptor that comes out, and bytes of
peak memory of each, results included. Block ids are int32 arrays, except in columns of lists. No two blocks are
neighbours. {machine}.

Times are the least of {repeats} repetitions, in processor time of the process. Other load on the machine makes them a
little high. The memory is the system's count of resident pages, from {least:,} ids on. The C library keeps what is freed
(`MALLOC_TRIM_THRESHOLD_`), so no call pays for fresh pages; the last table shows what they cost.

**No cliff** means two things between adjacent points of an axis. An id of the larger call takes at most {limit:g} times as
long as an id of the smaller one. The smaller call takes at most {limit:g} times as long as the larger one. Leaving a cache
doubles the cost of an id, and small calls share a fixed cost, so an id becomes cheaper with their size. A search of
everything that a plan had stored once took 470 times as long. `make bench-shapes` fails if a pair is beyond the limit.
"""

if __name__ == "__main__":
    main()
