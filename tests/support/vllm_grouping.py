# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions that put layers into groups and groups into memory, from the module where its version has them."""

from __future__ import annotations

from typing import Any

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning

get_kv_cache_config_from_groups = planning.get_kv_cache_config_from_groups
get_kv_cache_groups = planning.get_kv_cache_groups
project_groups = planning._project_kv_cache_groups_to_worker


def get_kv_cache_configs(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    """Return the caches of all workers, each with its own layers and so much memory."""
    groups = getattr(planning, "get_global_kv_cache_groups", None)  # an argument since vLLM 0.33
    more = () if groups is None else (groups(config, specs),)
    return list(planning.get_kv_cache_configs(config, specs, memory, *more))
