# SPDX-License-Identifier: Apache-2.0
"""Block tables of one sequence, as a block manager with a used pool makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, count, islice, pairwise

import kvhma
from support.reference import first_needed_token


def draw_tables(geometry: kvhma.Geometry, num_tokens: int, rng: random.Random, *, ahead: int = 0) -> list[list[int]]:
    """Return a block table for each group.

    No two groups share an id. Ids are in short ascending stretches, the stretches in any order. Blocks before a window
    or chunk are freed. Attention groups have `ahead` blocks more than the tokens fill.
    """
    null = geometry.null_block
    assert null is not None
    lives = [_alive(group, num_tokens, ahead) for group in geometry.groups]
    pool = [block for block in range(min(layer.num_blocks for layer in geometry.layers)) if block != null]
    cuts = sorted({0, len(pool), *(rng.sample(range(len(pool)), len(pool) // 3))})
    stretches = [pool[start:end] for start, end in pairwise(cuts)]
    rng.shuffle(stretches)
    fresh = chain.from_iterable(stretches)
    return [[next(fresh) if alive else null for alive in live] for live in lives]


def count_blocks(geometry: kvhma.Geometry, num_tokens: int, *, ahead: int = 0) -> int:
    """Return how many blocks `draw_tables` takes from the pool."""
    return sum(sum(_alive(group, num_tokens, ahead)) for group in geometry.groups)


def undropped_blocks(geometry: kvhma.Geometry, num_tokens: int) -> list[list[int]]:
    """Return the block tables of a manager that frees nothing before a window: ids from 1 on through all groups."""
    fresh = count(1)
    lengths = (
        1 + group.speculative if group.kind == "ssm" else -(-num_tokens // group.block_size)
        for group in geometry.groups
    )
    return [list(islice(fresh, length)) for length in lengths]


def _alive(group: kvhma.Group, num_tokens: int, ahead: int) -> Sequence[bool]:
    if group.kind == "ssm":
        return [True] * (1 + group.speculative)
    unit = group.block_size * group.cp_size
    dead = first_needed_token(group, num_tokens) // unit
    return [False] * dead + [True] * (-(-num_tokens // unit) - dead + ahead)
