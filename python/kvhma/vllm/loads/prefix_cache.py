# SPDX-License-Identifier: Apache-2.0
"""D's prefix cache: which blocks of a request it has already, and which blocks of a load it must never serve.

vLLM gives every full block of a loaded request a hash. Later requests with the same tokens hit it, and attend to all
its tokens. A block that a load has filled only from some token on is right for the loaded request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import iter_layer_specs

from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span
from kvhma.planning import live_entries
from kvhma.vllm.caches.formats import KINDS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def has_partial_hits(manager: KVCacheManager) -> bool:
    """Return whether a hit may end inside a block."""
    return bool(getattr(manager.coordinator, "enable_partial_hash_hits", False))


def hits_may_differ(manager: KVCacheManager) -> bool:
    """Return whether groups may have hits of different lengths, so that a load fills what each group lacks.

    If a hit may end inside a block, vLLM cuts it to whole blocks in favour of a longer load. It assumes that the hits
    of all groups but state reach the cut. A hit of a window or a chunk may be shorter, and then the engine would stop.
    """
    if not has_partial_hits(manager):
        return True
    specs = [
        spec for group in manager.kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    return all(KINDS.get(type(spec).__name__) in ("full", "mla", "ssm") for spec in specs)


def spans_to_fill(geometry: Geometry, num_tokens: int, tables: Sequence[Sequence[KVCacheBlock]]) -> tuple[Span, ...]:
    """Return the blocks of each group that a load of `num_tokens` tokens fills.

    Raises:
        RequestError: vLLM has allocated no block for a state.
    """
    spans = []
    entries = live_entries(geometry, num_tokens, list(map(len, tables)))
    for group, table, needed in zip(geometry.groups, tables, entries, strict=True):
        # Each group has its own hit; vLLM reports only that of full attention.
        is_state = group.kind == "ssm"
        first = needed.start if is_state else hit_blocks(table, needed.start)
        filled = table[first : needed.stop]
        if is_state and any(block.is_null for block in filled):
            raise RequestError("the block of its state is the null block")
        spans.append(Span(0 if is_state else first, [block.block_id for block in filled]))
    return tuple(spans)


def hit_blocks(table: Sequence[KVCacheBlock], start: int = 0) -> int:
    """Return how many leading entries of a request's block table must not be written, `start` or more.

    These are hits of the prefix cache, which other requests may share, and the null blocks before them. The blocks that
    vLLM allocates for a load have no hash yet.
    """
    for index in range(start, len(table)):
        if not table[index].is_null and table[index].block_hash is None:
            return index
    return len(table)
