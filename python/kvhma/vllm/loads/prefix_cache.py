# SPDX-License-Identifier: Apache-2.0
"""D's prefix cache: where its hits may end, and whether groups may have different ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import iter_layer_specs

from kvhma.vllm.caches.formats import KINDS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


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
