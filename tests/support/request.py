# SPDX-License-Identifier: Apache-2.0
"""A request between two engines: tokens, positions of its blocks on both sides, ids and addresses."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvhma.geometry import Memory
from support.engine import Placement, Shape
from support.model import Family
from support.recipe import Recipe


def draw_tokens(rng: random.Random, recipe: Recipe, local: Shape, remote: Shape) -> int:
    groups = [group for shape in (local, remote) for group in shape.groups if group.family.attention]
    sizes = [group.block_size for group in groups] or [4]
    most = min(8 * min(sizes), 4 * max(sizes))
    if recipe.tokens == "short":
        return rng.randint(1, max(1, min(sizes) - 1))
    tokens = rng.randint(1, most)
    if recipe.tokens == "aligned":
        unit = rng.choice(sizes)
        tokens = -(-tokens // unit) * unit
    return tokens


def draw_positions(
    rng: random.Random, recipe: Recipe, local: Shape, remote: Shape, tokens: int
) -> tuple[list[list[tuple[int, int]]], set[str]]:
    """Return first entry and number of blocks for each group of D and P, and what to count."""
    extras: set[str] = set()
    hit = rng.randint(0, tokens) if recipe.positions == "prefix" else 0
    sides: list[list[tuple[int, int]]] = [[], []]
    wanted: dict[str, int] = {}
    opaque = rng.randint(0, 3), rng.randint(0, 3)
    for group in local.groups:
        unit = group.block_size * (local.cp if group.cp else 1)
        entries = -(-tokens // unit)
        if group.kind == "ssm":
            sides[0].append((rng.randint(0, 3), _slots(rng, group.family, recipe.positions == "per-group")))
            continue
        if group.kind == "opaque":
            sides[0].append(opaque)
            continue
        first = {
            "start": 0,
            "prefix": hit // unit,
            "per-group": rng.randint(0, entries),
            "clipped": group.needed(tokens) // unit,
        }[recipe.positions]
        more = rng.choice([0, 0, 0, 1, 1, 2])
        if first >= entries:
            extras.add("full hit")
        elif first:
            extras.add("prefix hit")
        if more:
            extras.add("D has more blocks")
        sides[0].append((first, max(0, entries - first) + more))
        wanted |= dict.fromkeys(group.layers, max(first * unit, group.needed(tokens)))
    for group in remote.groups:
        if group.kind == "ssm":
            sides[1].append((rng.randint(0, 3), max(1, _slots(rng, group.family, False))))
            continue
        if group.kind == "opaque":
            before = rng.randint(0, opaque[0])
            sides[1].append((opaque[0] - before, before + opaque[1] + rng.randint(0, 2)))
            continue
        unit = group.block_size * (remote.cp if group.cp else 1)
        entries = -(-tokens // unit)
        # P may have freed blocks that no layer of D needs: those before the window, or those that D holds already.
        latest = min((wanted[name] for name in group.layers if name in wanted), default=0) // unit
        latest = min(latest, entries)
        first = 0 if recipe.positions == "start" else rng.choice([0, latest, rng.randint(0, latest)])
        if first:
            extras.add("P starts later")
        sides[1].append((first, max(0, entries - first) + rng.choice([0, 0, 0, 1])))
    return sides, extras


def _slots(rng: random.Random, family: Family, maybe_none: bool) -> int:
    """Return a number of state slots: the state-bearing one, older ones, speculative ones."""
    if maybe_none and rng.random() < 0.1:
        return 0
    return rng.choice([1, 1, 2, 3]) + family.speculative


def draw_place(rng: random.Random, counts: Sequence[int]) -> Placement:
    """Give blocks ids, and an engine addresses."""
    null = rng.choice([0, 0, 0, None, 1])
    total = sum(counts) + rng.randint(0, 5) + 2
    pool = [i for i in range(total + 1) if i != null]
    style = rng.choice(["ascending", "descending", "scattered", "chunks"])
    if style == "descending":
        pool.reverse()
    elif style == "scattered":
        rng.shuffle(pool)
    elif style == "chunks":
        cut = rng.randint(1, max(1, len(pool) - 1))
        pool = pool[cut:] + pool[:cut]
    ids = []
    for count in counts:
        ids.append(tuple(pool[:count]))
        pool = pool[count:]
    memories: list[Memory] = ["DRAM", "DRAM", "VRAM"]
    memory = rng.choice(memories)
    return Placement(
        ids=tuple(ids),
        null_block=null,
        regions=rng.choice(["each", "one"]),
        base=rng.choice([4096, 1 << 20, 0x7F12_3450_0000, 0x7F12_3450_0001, (1 << 64) - (1 << 30)]),
        gap=rng.choice([0, 0, 64, 5]),
        lead=rng.choice([0, 0, 64, 7]),
        spare=rng.randint(0, 3),
        memory=memory,
        device=0 if memory == "DRAM" else rng.randint(0, 3),
        devices=1 if memory == "DRAM" else rng.choice([1, 1, 1, 2]),
        id_type=rng.choice(["list", "int32", "int64"]),
    )
