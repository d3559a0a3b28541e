# SPDX-License-Identifier: Apache-2.0
"""Block tables of one request, as vLLM's block manager makes them in a fresh pool or in a used pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import first_needed_tokens
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Group

Pool: TypeAlias = Literal["fresh", "used"]
BlockTables: TypeAlias = list[list[int]]

_STRETCHES = (1, 1, 1, 2, 3, 5, 8)


def sequence_blocks(geometry: Geometry, num_tokens: int) -> tuple[NDArray[np.int64], ...]:
    """Return the block tables of a sequence in a fresh pool: ids count up through all groups.

    Blocks before the window or chunk are the null block, because vLLM's manager replaces them once their tokens are
    computed.

    Args:
        geometry: has the groups and block sizes.
        num_tokens: tokens of the sequence.

    Returns:
        Per group the logical blocks, int64, shape ``(n,)``; for state, one block and the speculative slots.

    Raises:
        RequestError: a negative number of tokens.
    """
    if num_tokens < 0:
        raise RequestError(f"num_tokens {num_tokens}: must not be negative")
    tables, first_id = [], 1
    for group, needed in zip(geometry.groups, first_needed_tokens(geometry, num_tokens), strict=True):
        dropped = needed // group.block_size
        count = 1 + group.speculative if group.kind == "ssm" else -(-num_tokens // group.block_size)
        ids = np.arange(first_id, first_id + count - dropped, dtype=np.int64)
        first_id += len(ids)
        if geometry.null_block is not None:
            ids = np.concatenate((np.full(dropped, geometry.null_block, np.int64), ids))
        tables.append(ids)
    return tuple(tables)


def block_tables(geometry: Geometry, num_tokens: int, pool: Pool, seed: int) -> BlockTables:
    """Return the block tables of an engine.

    Args:
        geometry: a rank of the engine.
        num_tokens: tokens of the request.
        pool: ``"fresh"``: ids count up; ``"used"``: see :func:`pool_ids`.
        seed: selects another used pool.

    Raises:
        RequestError: the pool has not enough blocks.
    """
    tables = [table.tolist() for table in sequence_blocks(geometry, num_tokens)]
    blocks = min(layer.num_blocks for layer in geometry.layers)
    largest = max((max(table, default=0) for table in tables), default=0)
    if largest >= blocks:
        raise RequestError(
            f"--tokens {num_tokens} takes {largest} blocks; the geometry has {blocks - 1} besides the null block"
        )
    ids = pool_ids(blocks, pool, seed)
    return [[ids[block] for block in table] for table in tables]


def main_group(geometry: Geometry) -> Group:
    """Return the first attention group, or the first group if there is no attention."""
    return next((group for group in geometry.groups if group.kind != "ssm"), geometry.groups[0])


def pool_ids(num_blocks: int, pool: Pool, seed: int) -> Sequence[int]:
    """Return the ids of a pool in the order in which it allocates them, the null block first.

    A used pool is cut into runs of 1 to 8 blocks in random order. Half of the runs descend, as freed lists do.
    """
    if pool == "fresh":
        return range(num_blocks)
    rng, free = random.Random(seed), list(range(num_blocks - 1, 0, -1))  # noqa: S311 - block ids, not secrets
    stretches = []
    while free:
        stretch = [free.pop() for _ in range(min(rng.choice(_STRETCHES), len(free)))]
        stretches.append(stretch if rng.random() < 0.5 else stretch[::-1])
    rng.shuffle(stretches)
    return [0, *(block for stretch in stretches for block in stretch)]
