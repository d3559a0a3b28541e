# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls on a connector, version by version, and which hooks are ours. Written from vLLM's sources.

`HOOKS` is compared with the installed vLLM: a hook that is new, gone or has another signature fails a test.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

from kvhma.versions import series as two_numbers


class Hook(NamedTuple):
    """A member of ``KVConnectorBase_V1`` or ``SupportsHMA``.

    Attributes:
        name: of the method.
        form: parameters without types, after ``classmethod`` if it is one; for a property, ``property`` instead.
        ours: whether KvhmaConnector defines it; otherwise KvhmaConnector inherits it on purpose.
        why: what our method does, or why the base's is right.
        since: first series of vLLM that has it.
    """

    name: str
    form: str
    ours: bool
    why: str
    since: str = "0.31"


HOOKS = (
    Hook("__init__", "(vllm_config, role, kv_cache_config)", True, "settings and the engine's features are checked"),
    Hook("role", "property", False, "the base keeps it"),
    # The class, before there are caches.
    Hook("get_required_kvcache_layout", "classmethod(vllm_config)", True, "heads outside of tokens"),
    Hook("requires_piecewise_for_cudagraph", "classmethod(extra_config)", False, "nothing happens layer by layer"),
    Hook("supports_sleep_mode", "classmethod(kv_transfer_config)", True, "with UCX alone, as upstream", "0.33"),
    Hook("build_kv_connector_stats", "classmethod(data=None)", True, "our stats"),
    Hook(
        "build_prom_metrics",
        "classmethod(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        True,
        "our metrics",
    ),
    # The scheduler's side.
    Hook("supports_divergent_local_hybrid_hits", "property", True, "a load fills what shorter hits lack"),
    Hook("requires_kv_delivery", "property", False, "a producer's hand-over has to come, as the base says"),
    Hook("bind_kv_cache_manager", "(kv_cache_manager)", True, "its prefix cache decides what may be cached"),
    Hook("bind_gpu_block_pool", "(gpu_block_pool)", False, "the base's bind_kv_cache_manager calls it; the pool is "
         "taken from the manager"),
    Hook("set_xfer_handshake_metadata_pp_aware", "(metadata)", True, "identities of all workers, also after a wake-up"),
    Hook("set_xfer_handshake_metadata", "(metadata)", False, "only the base's pp-aware one calls it, which is ours"),
    Hook("get_finished_count", "()", False, "None: every worker reports every request"),
    Hook("on_new_request", "(request)", True, "parameters are checked once, P's prompt is shortened"),
    Hook("get_num_new_matched_tokens", "(request, num_computed_tokens)", True, "how much will be loaded"),
    Hook("get_loaded_kv_cache_group_ids", "(request)", True, "blocks that vLLM must not zero under a read", "0.32"),
    Hook("get_external_cache_hit_sources", "(request, num_external_tokens)", False, "the base says what "
         "_cache_hit_source says, which is ours", "0.32"),
    Hook("update_state_after_alloc", "(request, blocks, num_external_tokens)", True, "the blocks of a load"),
    Hook("build_connector_meta", "(scheduler_output)", True, "what the workers do in a step"),
    Hook("update_connector_output", "(connector_output)", True, "what the workers report"),
    Hook("request_finished", "(request, block_ids)", True, "for engines with one group"),
    Hook("request_finished_all_groups", "(request, block_ids)", True, "whether blocks are held, and the parameters"),
    Hook("register_finished_partial_tail", "(request, block_ids, partial_tail_offloads)", False, "none is offloaded"),
    Hook("has_pending_block_frees", "()", True, "whether answers were evicted for a request that lacks blocks"),
    Hook("has_pending_push_work", "()", True, "blocks that are kept let vLLM's loop rest, unless a step is due"),
    Hook("take_events", "()", False, "vLLM itself tells of the blocks that it caches after a load"),
    Hook("reset_cache", "()", True, "all that is held is freed, and a new incarnation begins"),
    # The worker's side.
    Hook("get_mem_pool_context", "()", False, "None: vLLM's memory is registered where it is"),
    Hook("register_kv_caches", "(kv_caches)", True, "caches are described and registered, threads start"),
    Hook("unregister_kv_caches", "()", True, "reads end, and nothing can reach the memory any more", "0.33"),
    Hook("restore_kv_caches", "()", True, "registered anew, under a new name with a new worker identity", "0.33"),
    Hook("set_host_xfer_buffer_ops", "(copy_operation)", False, "host staging copies by itself, parts of pages"),
    Hook("get_handshake_metadata", "()", True, "the worker identity"),
    Hook("bind_connector_metadata", "(connector_metadata)", True, "a device is marked before the step is launched"),
    Hook("clear_connector_metadata", "()", False, "as above"),
    Hook("has_connector_metadata", "()", False, "as above"),
    Hook("_get_connector_metadata", "()", False, "as above"),
    Hook("handle_preemptions", "(kv_connector_metadata)", False, "nothing is saved of a request that still runs"),
    Hook("start_load_kv", "(forward_context, **kwargs)", True, "loads are queued"),
    Hook("wait_for_layer_load", "(layer_name)", True, "nothing: a load ends before its request is scheduled"),
    Hook("save_kv_layer", "(layer_name, kv_layer, attn_metadata, **kwargs)", True, "nothing: others read in place"),
    Hook("wait_for_save", "()", True, "the copy of host staging"),
    Hook("finish_forward", "()", False, "a load never writes to blocks that a step reads"),
    Hook("reset_capture_state", "()", False, "capturing graphs changes nothing here"),
    Hook("get_transfer_results", "(finished_req_ids)", True, "each request once, the failed ones among them"),
    Hook("get_finished", "(finished_req_ids)", False, "only the base's get_transfer_results calls it"),
    Hook("get_block_ids_with_load_errors", "()", False, "failures are reported by request: ids of blocks mean nothing "
         "without their group"),
    Hook("build_connector_worker_meta", "()", True, "why loads failed"),
    Hook("get_kv_connector_kv_cache_events", "()", False, "as take_events"),
    Hook("get_kv_connector_stats", "()", True, "what was counted"),
    Hook("shutdown", "()", True, "reads end, threads stop"),
)  # fmt: skip

ATTRIBUTES = {"_cache_hit_source": "0.32"}
"""Class attributes of the base that are not hooks, with the first series that has them; we set them."""

CALLERS = {
    "config/vllm.py": ("connector_cls",),
    "distributed/kv_transfer/kv_connector/utils.py": ("connector", "connector_cls"),
    "distributed/kv_transfer/kv_connector/v1/metrics.py": ("connector_cls", "self.connector_cls"),
    "model_executor/layers/attention/kv_transfer_utils.py": ("connector",),
    "v1/core/sched/scheduler.py": ("self.connector", "connector"),
    "v1/engine/core.py": ("kv_connector",),
    "v1/worker/gpu/kv_connector.py": ("self.kv_connector",),
    "v1/worker/gpu_model_runner.py": ("get_kv_transfer_group()", "kv_transfer_group"),
    "v1/worker/gpu_worker.py": ("get_kv_transfer_group()", "connector"),
    "v1/worker/kv_connector_model_runner_mixin.py": ("kv_connector",),
}
"""Files of vLLM that hold a connector, and under which names."""

OTHERS_ONLY = {"get_aligned_num_cpu_blocks"}
"""What these files call on a connector of vLLM under one of these names, after they have checked its type."""

_HOLDS = re.compile(r"\bget_kv_transfer_group\(\)|\bKVConnectorFactory\.\w+\(")
_FOLDERS = ("config", "distributed", "engine", "model_executor", "v1")
_OWN = re.compile(r"kv_connector/(factory\.py|v1/(?!metrics))|kv_transfer_state|v1/offloading")


def hooks(series: str) -> dict[str, Hook]:
    """The hooks that a series of vLLM has."""
    return {hook.name: hook for hook in HOOKS if two_numbers(hook.since) <= two_numbers(series)}


def members(*classes: type) -> dict[str, str]:
    """Name and form of the members that these classes define themselves."""
    return {
        name: found
        for cls in classes
        for name, member in vars(cls).items()
        if (name == "__init__" or not name.startswith("__")) and (found := form(member)) is not None
    }


def attributes(*classes: type) -> set[str]:
    """Names that these classes define themselves and that are no members."""
    return {
        name
        for cls in classes
        for name, member in vars(cls).items()
        if not name.startswith("__") and not name.startswith("_abc_") and form(member) is None
    }


def form(member: Any) -> str | None:
    """How a member is called, see `Hook`; None if it is not a member."""
    if isinstance(member, property):
        return "property"
    kind = "classmethod" if isinstance(member, classmethod) else ""
    function = member.__func__ if kind else member
    if not inspect.isfunction(function):
        return None
    signature = inspect.signature(function)
    _, *parameters = (one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values())
    return kind + str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def takes_all_of(ours: Any, hook: Hook) -> bool:
    """Whether a method of ours can be called as vLLM calls the base's: the same parameters, or any."""
    found = form(ours)
    return found in (hook.form, re.sub(r"\(.*", "(*args)", hook.form))


def calls(vllm: Path) -> dict[str, set[str]]:
    """What `CALLERS` use of a connector, and where."""
    found: dict[str, set[str]] = {}
    for name, holders in CALLERS.items():
        for node in ast.walk(ast.parse((vllm / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in holders:
                found.setdefault(node.attr, set()).add(name)
    return {name: where for name, where in found.items() if name not in OTHERS_ONLY and name != "__name__"}


def holders(vllm: Path) -> set[str]:
    """Files outside of vLLM's own connectors in which a connector is made or asked for."""
    files = (path for folder in _FOLDERS for path in (vllm / folder).rglob("*.py"))
    named = ((str(path.relative_to(vllm)), path) for path in files)
    return {name for name, path in named if not _OWN.search(name) and _HOLDS.search(path.read_text(encoding="utf-8"))}
