# SPDX-License-Identifier: Apache-2.0
"""Reads between two processes over real NIXL: one buffer for all layers against a buffer for each.

Both caches hold the same blocks of the same request, and both plans are the shortest possible. Reads of the two
alternate; the ratio of each pair counts. Prints Markdown, which is benches/RESULTS_TORCH.md. Needs torch and nixl.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

import kvhma
from kvhma.models import Model, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.nixl import Agent, Peer
from kvhma.torch import Cache, allocate

MODELS = ("gemma-3-27b", "gpt-oss-120b", "Qwen3-Next-80B-A3B")
BLOCK_SIZES = (16, 64)
ORDERS = {"uniform": "BLHNC", "per layer": "LBHNC"}
CACHE_BYTES = 460 << 20
"""Of one cache; there are four."""

FILLED = 0.6
"""Of a cache's blocks, by the request."""

TURNS = 15
SECONDS = 600.0
"""No answer takes longer, even on a busy machine."""


@dataclass(frozen=True)
class Shape:
    """A model's cache, scaled to fit, and a request in it."""

    model: Model
    block_size: int
    num_blocks: int
    num_tokens: int


def shape_of(one: Model, block_size: int) -> Shape:
    """Use as many blocks as fit and as many tokens as fill them."""
    probe = layout(one, LayoutOptions(num_blocks=1, order="BLHNC", block_size=block_size))
    num_blocks = CACHE_BYTES // sum(region.bytes for region in probe.regions)
    logical = max(group.block_size for group in probe.groups if group.kind != "ssm")
    blocks = 1
    while sum(counts(probe, (blocks + 1) * logical)) <= FILLED * num_blocks:
        blocks += 1
    return Shape(one, block_size, num_blocks, blocks * logical)


def counts(geometry: kvhma.Geometry, num_tokens: int) -> list[int]:
    """Return the live blocks of each group."""
    tables = [
        [1] * (1 + group.speculative if group.kind == "ssm" else -(-num_tokens // group.block_size))
        for group in geometry.groups
    ]
    return [len(span.ids) for span in kvhma.live_spans(geometry, num_tokens, tables)]


def spans(geometry: kvhma.Geometry, shape: Shape, style: str, rng: random.Random) -> list[kvhma.Span]:
    """Give the live blocks ids: all in one ascending stretch, or anywhere."""
    sizes = counts(geometry, shape.num_tokens)
    if style == "contiguous":
        start = rng.randrange(1, shape.num_blocks - sum(sizes) + 1)
        pool = iter(range(start, start + sum(sizes)))
    else:
        pool = iter(rng.sample(range(1, shape.num_blocks), sum(sizes)))
    found = []
    for group, size in zip(geometry.groups, sizes, strict=True):
        first = 0 if group.kind == "ssm" else -(-shape.num_tokens // group.block_size) - size
        found.append(kvhma.Span(first, [next(pool) for _ in range(size)]))
    return found


def caches(shape: Shape) -> dict[str, Cache]:
    sizes = {"num_blocks": shape.num_blocks, "block_size": shape.block_size}
    return {name: allocate(layout(shape.model, LayoutOptions(order=order, **sizes))) for name, order in ORDERS.items()}


def pattern(address: int, nbytes: int) -> np.ndarray:
    """Bytes that identify their place; addresses and lengths are multiples of 8."""
    words = np.arange(address, address + nbytes, 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def bytes_at(cache: Cache) -> dict[int, np.ndarray]:
    return {buffer.tensor.data_ptr(): buffer.tensor.view(-1).numpy().view(np.uint8) for buffer in cache.buffers}


def prefill(pipe: Connection, shape: Shape) -> None:
    """Hold both caches until the parent is done."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    by_order = caches(shape)
    for cache in by_order.values():
        for address, memory in bytes_at(cache).items():
            memory[:] = pattern(address, memory.size)
    with Agent("P") as agent:
        for cache in by_order.values():
            agent.register(cache.geometry)
        # The metadata describes everything registered; a payload carries one geometry, the others go through the pipe.
        pipe.send(agent.handshake_payload(by_order["uniform"].geometry))
        pipe.send({name: cache.geometry.to_json() for name, cache in by_order.items()})
        pipe.recv()


def hear(pipe: Connection) -> object:
    if not pipe.poll(SECONDS):
        raise TimeoutError("the other process does not answer")
    return pipe.recv()


def read(agent: Agent, peer: Peer, moved: kvhma.Transfer) -> float:
    """Return the seconds from the post to the end."""
    (one,) = moved.reads
    start = time.perf_counter()
    moving = agent.read(peer, one.local, one.remote)
    if not moving.wait(SECONDS):
        raise TimeoutError("the read does not end")
    seconds = time.perf_counter() - start
    measured = moving.telemetry
    if measured is None or (measured.descriptors, measured.nbytes) != (moved.descriptors, moved.bytes):
        raise AssertionError(f"planned {moved.descriptors} descriptors, {moved.bytes} bytes; NIXL reports {measured}")
    return seconds


def check(cache: Cache, moved: kvhma.Transfer) -> None:
    """Compare everything that was read with the source's pattern."""
    regions = sorted(bytes_at(cache).items())
    (one,) = moved.reads
    for (address, nbytes, _), (source, _, _) in zip(one.local.tolist(), one.remote.tolist(), strict=True):
        base, memory = max((item for item in regions if item[0] <= address), key=lambda item: item[0])
        if not np.array_equal(memory[address - base : address - base + nbytes], pattern(source, nbytes)):
            raise AssertionError(f"wrong bytes at {address:#x}")


def measure(shape: Shape) -> list[list[str]]:
    """Return a row for each style of ids."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=prefill, args=(child, shape), daemon=True)
    process.start()
    child.close()
    by_order = caches(shape)
    rows = []
    try:
        with Agent("D") as agent:
            for cache in by_order.values():
                agent.register(cache.geometry)
            peer = agent.connect(hear(parent))
            remotes = {name: kvhma.Geometry.from_json(text) for name, text in hear(parent).items()}
            plans = {name: kvhma.plan(by_order[name].geometry, remotes[name]) for name in ORDERS}
            for style in ("scattered", "contiguous"):
                rows.append(row(shape, style, agent, peer, by_order, plans))
            parent.send(None)
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
        parent.close()
    return rows


def row(
    shape: Shape, style: str, agent: Agent, peer: Peer, by_order: dict[str, Cache], plans: dict[str, kvhma.Plan]
) -> list[str]:
    rng = random.Random(f"{shape.model.name} {shape.block_size} {style}")
    geometry = by_order["uniform"].geometry
    local, remote = (spans(geometry, shape, style, rng) for _ in range(2))
    moved = {name: planned.transfer(shape.num_tokens, local, remote) for name, planned in plans.items()}
    if len({transfer.bytes for transfer in moved.values()}) != 1:
        raise AssertionError("the two caches do not move the same bytes")
    for name, transfer in moved.items():
        read(agent, peer, transfer)  # touches the pages
        check(by_order[name], transfer)
    ratios = []
    for turn in range(TURNS):
        names = list(ORDERS) if turn % 2 else list(reversed(ORDERS))
        seconds = {name: read(agent, peer, moved[name]) for name in names}
        ratios.append(seconds["per layer"] / seconds["uniform"])
    ratios.sort()
    one, many = moved["uniform"].descriptors, moved["per layer"].descriptors
    quartiles = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
    return [
        shape.model.name,
        f"{shape.block_size}",
        style,
        f"{sum(len(span.ids) for span in local)}",
        f"{moved['uniform'].bytes >> 20}",
        f"{many:,}",
        f"{one:,}",
        f"{many / one:.1f}×",
        f"{statistics.median(ratios):.2f}× ({quartiles[0]:.2f} to {quartiles[1]:.2f})",
    ]


def report(rows: Sequence[Sequence[str]]) -> None:
    # NIXL writes to the standard output too: only lines of the table may be in the file.
    head = [
        "model",
        "block",
        "ids",
        "blocks",
        "MiB",
        "descriptors per layer",
        "uniform",
        "ratio",
        "time per layer / uniform",
    ]
    print(
        "# Results of torch caches\n\nMade by `benches/torch_transfer.py`; ratios, since the machine is shared and noisy.\n"
    )
    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, kvhma {kvhma.__version__}\n"
    )
    print("## Reads between two processes over NIXL, one buffer for all layers against one for each\n")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    print(NOTES)


def main() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    rows = []
    for name in MODELS:
        for block_size in BLOCK_SIZES:
            rows += measure(shape_of(model(name), block_size))
            print(f"{name}, {block_size} tokens a block: done", file=sys.stderr)
    report(rows)


NOTES = f"""
Both engines have the same layout, BLHNC (uniform) or LBHNC (per layer), and read the same blocks of one request.
A time is that of one read, from the post to its end. {TURNS} pairs of reads in turns, the median of their ratios, the
quartiles in brackets. `block` is the requested size: state makes it longer. All bytes that were read were compared once.

Two things leave gaps in a uniform block: a group with fewer layers than others (gemma-3-27b), and a state page with
padding (Qwen3-Next). Such blocks are not joined with their neighbours. Per layer, contiguous blocks are joined."""

if __name__ == "__main__":
    main()
