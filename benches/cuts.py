# SPDX-License-Identifier: Apache-2.0
"""Count instructions of a transfer over pairs whose kernel blocks cut each other in one way to thousands.

Callgrind counts them in two runs of a process each, which differ in how often the request is planned: so neither the
interpreter's start nor the plan counts. The numbers do not depend on the load of the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from pathlib import Path

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span

LAYERS = 64
FEW, MORE = 2, 6
"""How often a request is planned in each of the two runs."""
PAIRS = ((2048, 2048), (2048, 1024), (2048, 2016), (2048, 2040), (2047, 2048), (2089, 2088))


@dataclass(frozen=True)
class Count:
    """What a request costs.

    Attributes:
        descriptors: descriptors of the transfer.
        cuts: ways to cut a kernel block that the request uses.
        instructions: of one `Plan.transfer`.
    """

    descriptors: int
    cuts: int
    instructions: int


def side(block: int, base: int, tokens: int) -> Geometry:
    """64 layers in as many regions, 4 heads of 64 bytes outside of the tokens of a block."""
    blocks = -(-tokens // block) + 2
    axes = (Axis("heads", 4, block * 64), Axis("tokens", block, 64), Axis("content", 32, 2))
    page, stride = Page((Part("kv", "bfloat16", 2, 0, axes),)), 4 * block * 64
    regions = tuple(Region(base + index * (stride * blocks + 4096), stride * blocks) for index in range(LAYERS))
    layers = tuple(Layer(f"layers.{index}", 0, index, 0, blocks, stride, page) for index in range(LAYERS))
    return Geometry(regions, (Group("full", block),), layers)


def span(block: int, tokens: int) -> list[Span]:
    """Blocks in an order in which no two are neighbours."""
    count = -(-tokens // block)
    return [Span(0, [*range(1, count + 1, 2), *range(2, count + 1, 2)])]


def ways(pair: tuple[int, int]) -> int:
    """Return in how many ways whole kernel blocks of two sizes cut each other."""
    step = gcd(*pair)
    return pair[0] // step + pair[1] // step - 1


def used(pair: tuple[int, int], tokens: int) -> int:
    """Return how many cuts a request uses."""
    ends = sorted({end for block in pair for end in range(0, tokens, block)} | {tokens})
    return len({(start % pair[0], start % pair[1], end - start) for start, end in pairwise(ends)})


def request(pair: tuple[int, int], tokens: int, times: int) -> int:
    """Plan one request so many times, in the process that callgrind watches."""
    local, remote = side(pair[0], 1 << 40, tokens), side(pair[1], 1 << 50, tokens)
    plan = kvhma.plan(local, remote, descriptor_bytes=0)
    spans = span(pair[0], tokens), span(pair[1], tokens)
    descriptors = 0
    for _ in range(times):
        descriptors = plan.transfer(tokens, *spans).descriptors
    return descriptors


def instructions(pair: tuple[int, int], tokens: int, times: int) -> tuple[int, int]:
    """Return the descriptors and all instructions of such a process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "callgrind.out"
        watched = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={output}", sys.executable, __file__]
        arguments = [str(number) for number in (*pair, tokens, times)]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run([*watched, *arguments], check=True, capture_output=True, text=True, env=environment)
        found = re.search(r"^(?:summary|totals): (\d+)", output.read_text(), re.MULTILINE)
    assert found is not None
    return int(done.stdout), int(found[1])


def count(pair: tuple[int, int], tokens: int) -> Count:
    descriptors, few = instructions(pair, tokens, FEW)
    _, more = instructions(pair, tokens, MORE)
    return Count(descriptors, used(pair, tokens), (more - few) // (MORE - FEW))


def main() -> None:
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed: it counts the instructions")
    print(
        "## Instructions of a request over the ways in which kernel blocks cut each other\n\n"
        "Made by `benches/cuts.py`: callgrind, the second and later times that a plan is asked. 64 layers, each in a "
        "region, 4 heads outside of tokens; no two blocks of a request are neighbours in memory.\n"
    )
    print("| kernel blocks | ways | tokens | cuts of the request | descriptors | instructions | for a descriptor |")
    print("|---|---|---|---|---|---|---|")
    for tokens in (1, 16_384):
        for pair in PAIRS:
            found = count(pair, tokens)
            each = found.instructions / found.descriptors
            cells = (ways(pair), tokens, found.cuts, found.descriptors, found.instructions)
            print(f"| {pair[0]}, {pair[1]} | {' | '.join(f'{cell:,}' for cell in cells)} | {each:,.0f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        first, second, length, repeats = map(int, sys.argv[1:])
        print(request((first, second), length, repeats))
    else:
        main()
