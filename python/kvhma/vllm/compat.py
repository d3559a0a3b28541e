# SPDX-License-Identifier: Apache-2.0
"""What is read from vLLM's configuration, and which of its features the connector refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.content import Place, kind_of
from kvhma.vllm.params import Address
from kvhma.vllm.scheduler import EngineFacts
from kvhma.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 does not tell sources apart
    CACHE_HIT_SOURCE: Any = None
else:
    CACHE_HIT_SOURCE = CacheHitSource.P2P

_GROUPS_OF_STATE = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""What configurations of models call the groups of B and C."""


def check_config(config: VllmConfig) -> None:
    """Refuse what cannot be served, before anything is allocated.

    Raises:
        UnsupportedPairError: the text names the setting and both values.
    """
    parallel = config.parallel_config
    wanted: list[tuple[str, Any, Any]] = [
        # Not for want of a plan: no engine with stages has shown yet that groups mean the same in each of them.
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1), 1),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1), 1),
        ("enable_return_routed_experts", getattr(config.model_config, "enable_return_routed_experts", False), False),
    ]
    for name, found, needed in wanted:
        if found != needed:
            raise UnsupportedPairError(f"{name} is {found}, the kvhma connector supports only {needed}")


def place_of(config: VllmConfig) -> Place:
    """Return where this worker is."""
    parallel = config.parallel_config
    text = config.model_config.hf_text_config
    groups = next((getattr(text, name) for name in _GROUPS_OF_STATE if getattr(text, name, None)), None)
    return Place(
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        state_groups=groups,
    )


def host_staged(config: VllmConfig, settings: Settings) -> bool:
    """Return whether blocks go through host memory."""
    if settings.host_staged is not None:
        return settings.host_staged
    return bool(config.kv_transfer_config.kv_buffer_device == "cpu" and current_platform.device_type != "cpu")


def engine_facts(config: VllmConfig, caches: KVCacheConfig, settings: Settings) -> EngineFacts:
    """Return what the scheduler's half has to know."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    host = settings.side_channel_host or vllm.envs.VLLM_NIXL_SIDE_CHANNEL_HOST
    port = (settings.side_channel_port or vllm.envs.VLLM_NIXL_SIDE_CHANNEL_PORT) + parallel.data_parallel_index
    specs = [spec for group in caches.transfer_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    # D computes the last token of a prompt in any case. Its state is that of the token before, and its window or chunk
    # may begin where P, one token further, has let go of the blocks: P must not go there.
    keeps_all = all(kind_of("of any name", spec) in ("full", "mla") for spec in specs)
    # A draft module of several steps reads tokens that only D knows.
    lookahead = getattr(config, "num_prefill_lookahead_tokens", 0) - 1
    return EngineFacts(
        engine_id=transfer.engine_id,
        address=Address(host, port),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        has_state=caches.has_mamba_layers,
        backoff=max(int(not keeps_all), lookahead),
        recompute=transfer.kv_load_failure_policy == "recompute",
        host_staged=host_staged(config, settings),
        transfer_groups=tuple(caches.transfer_group_ids),
        drafted_state=caches.has_mamba_layers and _drafted_state(config),
    )


def _drafted_state(config: VllmConfig) -> bool:
    caches = config.cache_config
    rings = [getattr(caches, name, False) for name in ("use_replayssm", "use_kda_recoverssm")]
    return bool(config.num_speculative_tokens) or any(rings)
