# SPDX-License-Identifier: Apache-2.0
"""Blocks of finished requests that this engine holds for readers: vLLM's references, or an extra one on each block.

vLLM itself could hold them (`delay_free_blocks`). But then the request does not end until all workers report it as
sent, and vLLM steps without a pause until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvhma._kvhma import join_tables
from kvhma.vllm.holds.lease_table import Blocks, Ids

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def hold_blocks(
    manager: KVCacheManager,
    request: Request,
    tables: Sequence[Sequence[int]],
    null_block: int | None,
    may_take: Callable[[Request], bool] | None = None,
) -> tuple[Ids, Blocks]:
    """Hold the blocks of a request that ends, of all its groups; return them as :meth:`LeaseTable.hold` takes them.

    If `may_take` of :func:`kvhma.vllm.internals.find_take_check` allows it, the references of the request become those
    of kvhma. vLLM frees the blocks of the request right after, and finds none.
    """
    ids = join_tables(tables, null_block)
    if may_take is not None and may_take(request):
        return ids, manager.pop_blocks_for_free(request)
    pool = manager.block_pool
    blocks = list(map(pool.blocks.__getitem__, ids.tolist()))
    pool.touch(blocks)
    return ids, blocks
