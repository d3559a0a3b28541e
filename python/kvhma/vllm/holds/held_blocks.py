# SPDX-License-Identifier: Apache-2.0
"""Blocks of finished requests that this engine holds for readers: an extra reference on each block.

vLLM itself could hold them (`delay_free_blocks`). But then the request does not end until all workers report it as
sent, and vLLM steps without a pause until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhma._kvhma import join_tables
from kvhma.vllm.holds.lease_table import Blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def hold_blocks(pool: BlockPool, tables: Sequence[Sequence[int]], null_block: int | None) -> Blocks:
    """Hold the blocks of a request that ends, of all its groups; return their ids, each once."""
    blocks = join_tables(tables, null_block)
    pool.touch(list(map(pool.blocks.__getitem__, blocks.tolist())))
    return blocks


def free_blocks(pool: BlockPool, blocks: Blocks) -> None:
    """Free held blocks. As vLLM does with its own requests, it frees the last block first."""
    pool.free_blocks(map(pool.blocks.__getitem__, reversed(blocks.tolist())))
