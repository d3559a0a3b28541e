# SPDX-License-Identifier: Apache-2.0
"""Blocks of finished requests that this engine holds for readers: vLLM's references, or an extra one on each block.

vLLM itself could hold them (`delay_free_blocks`). But then the request does not end until all workers report it as
sent, and vLLM steps without a pause until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvhma._kvhma import join_tables
from kvhma.vllm.holds.lease_table import Blocks
from kvhma.vllm.internals import take_blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def hold_blocks(
    manager: KVCacheManager,
    request: Request,
    tables: Sequence[Sequence[int]],
    null_block: int | None,
    *,
    takes_blocks: bool = False,
) -> Blocks:
    """Hold the blocks of a request that ends, of all its groups; return their ids, each once.

    With `takes_blocks` the references of the request become those of kvhma, see
    :func:`kvhma.vllm.internals.may_take_blocks`.
    """
    if takes_blocks:
        return np.array(take_blocks(manager, request), np.int64)
    pool, blocks = manager.block_pool, join_tables(tables, null_block)
    pool.touch(list(map(pool.blocks.__getitem__, blocks.tolist())))
    return blocks


def free_blocks(pool: BlockPool, blocks: Blocks) -> None:
    """Free held blocks. As vLLM does with its own requests, it frees the last block first."""
    pool.free_blocks(map(pool.blocks.__getitem__, reversed(blocks.tolist())))
