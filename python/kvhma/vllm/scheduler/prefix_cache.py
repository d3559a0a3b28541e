# SPDX-License-Identifier: Apache-2.0
"""D's prefix cache: what of a request it holds already, and what of a load it must never serve.

vLLM gives every full block of a loaded request a hash, and later requests that share its tokens attend to all of them.
A block that was filled only from some token on is right for the request that was loaded, and for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import iter_layer_specs

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.formats import KINDS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def check_manager(manager: KVCacheManager) -> None:
    """Refuse a manager whose blocks could not be kept out of the prefix cache.

    Raises:
        UnsupportedPairError: this version of vLLM counts cached blocks in another way.
    """
    for single in manager.coordinator.single_type_managers:
        if not isinstance(getattr(single, "num_cached_block", None), dict):
            raise UnsupportedPairError(
                f"{type(single).__name__} of this vLLM has no num_cached_block, which keeps blocks that a load has not "
                "filled out of the prefix cache; use a version of docs/compatibility.md"
            )


def has_partial_hits(manager: KVCacheManager) -> bool:
    """Return whether a hit may end inside of a block."""
    return bool(getattr(manager.coordinator, "enable_partial_hash_hits", False))


def hits_may_differ(manager: KVCacheManager) -> bool:
    """Return whether groups may begin with hits of different lengths, of which a load fills what the others lack.

    Where a hit may end inside of a block, vLLM cuts it to whole blocks in favour of a longer load, and takes for
    granted that the hits of all groups but state reach up to the cut. That of a window or a chunk need not: the engine
    would stop.
    """
    if not has_partial_hits(manager):
        return True
    specs = [
        spec for group in manager.kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    return all(KINDS.get(type(spec).__name__) in ("full", "mla", "ssm") for spec in specs)


def hit_blocks(table: Sequence[KVCacheBlock], start: int = 0) -> int:
    """Return how many leading entries of a request's block table are not to be written, `start` or more.

    They are hits of the prefix cache, which other requests may share, and the null blocks before them. vLLM allocates
    the blocks of a load without a hash.
    """
    for index in range(start, len(table)):
        if not table[index].is_null and table[index].block_hash is None:
            return index
    return len(table)


def mark_uncacheable(manager: KVCacheManager, request_id: str, group: int, token: int) -> None:
    """Keep the blocks of a loaded request that begin before a token out of the prefix cache.

    Call it before the load is reported as done: vLLM gives blocks their hashes right after. It takes them for cached
    already, and they are forgotten with the request.

    Args:
        manager: vLLM's.
        request_id: the request.
        group: index of the KV cache group.
        token: first token from which on the blocks are filled.
    """
    single = manager.coordinator.single_type_managers[group]
    blocks = -(-token // single.block_size)
    single.num_cached_block[request_id] = max(blocks, single.num_cached_block.get(request_id, 0))
