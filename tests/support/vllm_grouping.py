# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions that put layers into groups and groups into memory, wherever its version keeps them."""

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

try:
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker as project_groups
except ImportError:
    from vllm.v1.core.kv_cache_planning import _project_kv_cache_groups_to_worker as project_groups

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups", "project_groups"]
