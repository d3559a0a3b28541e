# SPDX-License-Identifier: Apache-2.0
"""The cost of a digest: microseconds for a MiB of blocks, beside a copy of the same bytes.

Time of one thread; the two alternate over the same blocks, and the ratio within a round counts. Prints Markdown, which is
benches/RESULTS_DIGESTS.md.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.digests import content_digest

MIB = 64
TURNS = 9
TOKENS, HEADS, CONTENT = 64, 8, 128
"""Of a page of attention, in bfloat16: 128 KiB."""

Way = tuple[str, str, Group, Part]


def attention(order: str) -> Part:
    """Return a page of K or V, its axes in an order, outermost first."""
    lengths = {"heads": HEADS, "tokens": TOKENS, "content": CONTENT}
    stride, axes = 2, []
    for letter in reversed(order):
        name = {"H": "heads", "N": "tokens", "C": "content"}[letter]
        axes.append(Axis(name, lengths[name], stride))
        stride *= lengths[name]
    return Part("kv", "bfloat16", 2, 0, tuple(axes))


def ways() -> list[Way]:
    """Return the sums: name, part of the layout, group, part."""
    full, state = Group("full", TOKENS), Group("ssm", 1)
    conv = (Axis("rows", 3, 2), Axis("channels", 8192, 6))
    ssm = (Axis("heads", 64, 128 * 64 * 4), Axis("dim", 64, 128 * 4), Axis("state", 128, 4))
    packed = (Axis("heads", HEADS, TOKENS * CONTENT * 2), Axis("packed", TOKENS * CONTENT, 2))
    latent = (Axis("tokens", TOKENS, 1152), Axis("content", 576, 2))
    return [
        ("attention", "heads outside of tokens", full, attention("HNC")),
        ("attention", "tokens outside of heads", full, attention("NHC")),
        ("attention, K on a CPU", "tokens innermost", full, attention("HCN")),
        ("latent attention", "576 items a token", full, Part("kv", "bfloat16", 2, 0, latent)),
        ("attention, tiles of AMX", "whole blocks", full, Part("kv", "bfloat16/amx", 2, 0, packed)),
        ("state", "float32", state, Part("ssm", "float32", 4, 0, ssm)),
        ("convolution", "rows innermost", state, Part("x", "bfloat16", 2, 0, conv)),
    ]


def request(group: Group, part: Part) -> tuple[Geometry, list[np.ndarray], list[Span], int]:
    """Return a geometry whose blocks have this many MiB, its memory, and a request of scattered blocks."""
    blocks = max(2, (MIB << 20) // part.nbytes)
    is_state = group.kind == "ssm"
    layers = blocks if is_state else 1
    count = 2 if is_state else blocks + 1
    size = count * part.nbytes
    made = tuple(Layer(f"layer.{at}", 0, 0, at * size, count, part.nbytes, Page((part,))) for at in range(layers))
    region = Region(1 << 30, layers * size)
    geometry = Geometry((region,), (group,), made)
    memory = np.random.default_rng(0).integers(0, 256, region.bytes, np.uint8)
    ids = [1] if is_state else random.Random(0).sample(range(1, blocks + 1), blocks)
    return geometry, [memory], [Span(0, ids)], TOKENS * len(ids)


def measure(way: Way) -> dict[str, list[float]]:
    """Return seconds for a MiB of each turn."""
    _, _, group, part = way
    geometry, memory, spans, tokens = request(group, part)
    pages = [
        memory[0][layer.offset + block * layer.block_stride :][: part.nbytes]
        for layer in geometry.layers
        for block in spans[0].ids
    ]
    target = np.empty(part.nbytes * len(pages), np.uint8)
    content = torch.from_numpy(memory[0])

    def copy() -> None:
        for at, page in enumerate(pages):
            target[at * part.nbytes : (at + 1) * part.nbytes] = page

    work: dict[str, Callable[[], Any]] = {
        "digest": lambda: content_digest(geometry, lambda _, offset: content[offset:], tokens, spans, 7),
        "copy": copy,
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(TURNS + 1):
        for name, function in work.items():
            started = time.thread_time()
            function()
            if turn:
                found[name].append((time.thread_time() - started) / (target.nbytes / (1 << 20)))
    return found


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("# Results of digests\n\nMade by `benches/digests.py`; ratios, since the machine is shared and noisy.\n")
    print(f"{MIB} MiB of blocks in scattered order, one thread, medians of {TURNS} turns; {machine()}.\n")
    print("| what | in memory | digest, µs/MiB | copy, µs/MiB | digest / copy |")
    print("|---|---|---:|---:|---:|")
    for way in ways():
        found = measure(way)
        digest, copy = (statistics.median(found[name]) * 1e6 for name in ("digest", "copy"))
        ratio = statistics.median(one / other for one, other in zip(found["digest"], found["copy"], strict=True))
        print(f"| {way[0]} | {way[1]} | {digest:.0f} | {copy:.0f} | {ratio:.1f} |", flush=True)


def machine() -> str:
    """Name the processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
