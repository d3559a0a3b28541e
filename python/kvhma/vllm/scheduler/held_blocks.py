# SPDX-License-Identifier: Apache-2.0
"""Blocks of finished requests, kept for other engines beside vLLM's own requests: a count more on each of them.

vLLM would keep them too (`delay_free_blocks`), but then a request has not ended for it until all workers have reported
it as sent, and it steps without a pause until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhma._kvhma import join_tables
from kvhma.vllm.scheduler.lease_table import Blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def hold_blocks(pool: BlockPool, tables: Sequence[Sequence[int]], null_block: int | None) -> Blocks:
    """Keep the blocks of a request that ends, of all its groups; return their ids, each once."""
    blocks = join_tables(tables, null_block)
    pool.touch(list(map(pool.blocks.__getitem__, blocks.tolist())))
    return blocks


def free_blocks(pool: BlockPool, blocks: Blocks) -> None:
    """Keep blocks no more. As with vLLM's own requests, the last of them are the first that others get."""
    pool.free_blocks(map(pool.blocks.__getitem__, reversed(blocks.tolist())))
