# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's configuration, and refuses features that the connector does not support."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
import vllm
import vllm.envs
from transformers.dynamic_module_utils import get_relative_import_files
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.model_loader.utils import get_draft_load_config, get_model_cls
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import try_get_local_file
from vllm.utils import deep_gemm
from vllm.utils.network_utils import get_ip
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, iter_layer_specs

from kvhma.errors import SettingsError, UnsupportedPairError
from kvhma.vllm.caches.formats import Writer, backend_name, kind_of, transferred_groups
from kvhma.vllm.caches.layer_parts import RankInfo
from kvhma.vllm.caches.module_values import built_layers, held_modules
from kvhma.vllm.config.engine_facts import EngineFacts
from kvhma.vllm.config.identity import TOKENS, ModelIdentity
from kvhma.vllm.config.rooms import WITHOUT_SETTING, check_installed, find_rooms
from kvhma.vllm.config.settings import COPY, Settings
from kvhma.vllm.config.weight_digests import SECONDS
from kvhma.vllm.config.weight_files import digest_weights
from kvhma.vllm.wire.params import Address

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 does not distinguish sources
    CACHE_HIT_SOURCE: Any = None
else:
    CACHE_HIT_SOURCE = CacheHitSource.P2P

_INDEXERS = frozenset(
    {"DEEPSEEK_V32_INDEXER", "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER", "DEEPSEEK_V4_INDEXER"}
)

_PLATFORMS = ("cuda", "rocm", "xpu", "cpu")

HOST = "cpu"
"""VLLM's name for host memory, as the buffer's device and as a platform."""

_GROUPS_OF_STATE = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""Names of the groups of B and C in model configurations."""

_NOT_COMPARED = frozenset(
    {"max_position_embeddings", "max_model_len", "initializer_range", "use_cache", "auto_map", "tokenizer_class"}
)
"""Fields of a model's configuration that change no value in a cache. Tables of other lengths are compared."""

_COMMON = transformers.PretrainedConfig().to_dict().keys() - {"architectures"}
"""Fields that transformers adds to the configuration of every model. Of them only the architecture is the model's."""

_NOT_OF_DRAFTS = _NOT_COMPARED | TOKENS | _COMMON | {"model", "num_lookahead_tokens", "dspark_draft_topk"}
"""VLLM repeats the fields of EAGLE's ``model`` beside it. The others decide how many tokens it drafts, and which."""

_VARIABLES: dict[str, Any] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": None,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": None,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": None,
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": None,
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": None,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
}
"""Variables that quantize what the model does not, or choose experts at random, with their values without effect.

Others choose kernels, which compute the same up to rounding.
"""

_MAX_TEXT = 1000


def check_config(config: VllmConfig) -> None:
    """Refuse unsupported features before anything is allocated.

    Raises:
        UnsupportedPairError: the text names the setting and both values.
    """
    parallel, model = config.parallel_config, config.model_config
    # vLLM may then shorten what a connector has promised to load, and D has no experts of P's tokens.
    routed = "enable_return_routed_experts"
    required: list[tuple[str, Any, Any]] = [(routed, config.aux_output_config.enabled, False)]
    # Before 0.33 vLLM does not notify connectors when it remaps the caches. Other engines would read other memory.
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        required.append(("enable_sleep_mode", getattr(model, "enable_sleep_mode", False), False))
    # In 0.31 vLLM finds blocks that all running requests share by their reference count, which leases increase.
    if hasattr(FullAttentionManager, "get_num_common_prefix_blocks"):
        required.append(("disable_cascade_attn", getattr(model, "disable_cascade_attn", True), True))
    ranks = parallel.prefill_context_parallel_size
    if ranks > 1 and (speculative := getattr(config, "speculative_config", None)) is not None:
        # A draft may compute on one of these ranks or on all. It is not verified yet which ranks have its tokens.
        raise UnsupportedPairError(
            f"prefill_context_parallel_size is {ranks} and speculative_config is {speculative.method!r}, the kvhma "
            "connector supports one of them at a time"
        )
    for name, found, supported in required:
        if found != supported:
            only = f"the kvhma connector supports only {supported} with vLLM {vllm.__version__}"
            raise UnsupportedPairError(f"{name} is {found}, {only}")


def check_items(config: VllmConfig, settings: Settings) -> None:
    """Refuse local prefill of prompts whose multimodal items only P has seen.

    Raises:
        SettingsError: failed loads would fall back to local prefill; the text names the settings.
    """
    transfer = _transfer_config(config)
    if settings.trusts_items and transfer.is_kv_consumer and transfer.kv_load_failure_policy != "fail":
        raise SettingsError(
            f"kv_connector_extra_config: mm_items is {settings.mm_items!r} and kv_load_failure_policy is "
            f"{transfer.kv_load_failure_policy!r}, expected 'fail': a decode engine cannot compute items that it "
            "did not get"
        )


def options_of(config: VllmConfig, settings: Settings) -> tuple[str, ...]:
    """Return the options that an engine has, in the order in which they are called.

    Raises:
        SettingsError: a setting asks for an option whose folder is absent.
    """
    has_turns = settings.bidirectional_kv_xfer and not no_answers(config)
    asked = {
        "tickets": "",
        "next_turns": "bidirectional_kv_xfer is True" if has_turns else "",
        "pictures": f"mm_items is {settings.mm_items!r}" if settings.trusts_items else "",
        "staging": f"kv_buffer_device is {HOST!r}" if host_staged(config) else "",
        "digests": f"content_digests is {settings.content_digests}" if settings.content_digests else "",
        "copies": f"backends names {COPY!r}" if COPY in settings.backends and not host_staged(config) else "",
        "trace": f"trace_out is {settings.trace_out!r}" if settings.trace_out else "",
        "spans": "otlp_traces_endpoint is set" if config.observability_config.otlp_traces_endpoint else "",
    }
    for option, asked_by in asked.items():
        if asked_by:
            check_installed(option, asked_by)
    return tuple(option for option, asked_by in asked.items() if asked_by or option in WITHOUT_SETTING)


def rank_info_of(config: VllmConfig) -> RankInfo:
    """Return the rank of this worker, and facts of the model's states that no spec has.

    In vLLM's numbering of workers tensor-parallel ranks are innermost. In context-parallel groups prefill
    context-parallel ranks are innermost::

        rank       0       1       2       3       4       5       6       7       tp 2, pcp 2, pp 2
        pp/pcp/tp  0/0/0   0/0/1   0/1/0   0/1/1   1/0/0   ...
        dcp 2      a0      b0      a1      b1      c0      ...                     groups a, b, c ...
        dcp 4      a0      a2      a1      a3      b0      ...
    """
    parallel = config.parallel_config
    text = config.model_config.hf_text_config
    groups = next((getattr(text, name) for name in _GROUPS_OF_STATE if getattr(text, name, None)), None)
    pcp_size, cp_size = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    outer_rank, tp_rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    return RankInfo(
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        state_groups=groups,
        cp_rank=(tp_rank * pcp_size + outer_rank % pcp_size) % cp_size,
        cp_size=cp_size,
        cp_interleave=parallel.cp_kv_cache_interleave_size,
        cp_tp_size=max(1, cp_size // pcp_size),
    )


def writer_of(config: VllmConfig) -> Callable[[str], Writer]:
    """Return a function that returns the writer of a layer's cache."""
    context = config.compilation_config.static_forward_context
    platform = next((name for name in _PLATFORMS if getattr(current_platform, f"is_{name}")()), "")
    capability = current_platform.get_device_capability()

    def find(name: str) -> Writer:
        layer = context.get(name)
        get_backend = getattr(layer, "get_attn_backend", None)
        kind = None if get_backend is None else get_backend()
        backend = "" if kind is None else backend_name(kind)
        return Writer(
            backend=backend,
            platform=platform,
            capability="" if capability is None else capability.as_version_str(),
            cache_dtype=_indexer_dtype(config) if backend in _INDEXERS else _cache_dtype(layer),
            version=vllm.__version__,
            cpu_kernel=getattr(layer, "isa", None),
            classes=() if kind is None else (type(layer), kind),
        )

    return find


def _cache_name(name: str) -> str:
    """Return one name of a cache type. vLLM has two for 8-bit floats, and a model's file may have either."""
    return "fp8_e4m3" if name == "fp8" else name


def _cache_dtype(layer: Any) -> str:
    """Return the cache type of a layer, with the platform's kind of 8-bit floats."""
    found = getattr(layer, "kv_cache_dtype", None) or getattr(getattr(layer, "cache_config", None), "cache_dtype", None)
    name = _cache_name(found if isinstance(found, str) else "")
    return f"{name}/{_name_of(current_platform.fp8_dtype())}" if "fp8" in name else name


def _indexer_dtype(config: VllmConfig) -> str:
    """Return the cache type of an indexer, a separate setting, and how the hardware stores its scales."""
    kept = config.attention_config.resolve_indexer_kv_dtype("fp8")
    scales = "mx" if _indexer_has_mx_scales() else "float32"
    return f"indexer-{kept}/{scales}/{_name_of(current_platform.fp8_dtype())}"


def _indexer_has_mx_scales() -> bool:
    decides = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)  # vLLM 0.32 always stores floats
    return decides is not None and bool(decides())


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def nixl_package() -> str:
    """Return the name of NIXL's package on this platform, as vLLM's own connector does."""
    return "nixl_rocm" if current_platform.is_rocm() else "nixl"


def host_staged(config: VllmConfig) -> bool:
    """Return whether blocks go through host memory: vLLM's caches are on a device, its buffer is not."""
    return bool(_transfer_config(config).kv_buffer_device == HOST and current_platform.device_type != HOST)


def _transfer_config(config: VllmConfig) -> KVTransferConfig:
    if config.kv_transfer_config is None:
        raise SettingsError("kv_transfer_config is missing, expected the connector's")
    return config.kv_transfer_config


def engine_id_of(config: VllmConfig) -> str:
    """Return the name of the engine. vLLM makes a name if it is not set.

    Raises:
        SettingsError: the engine has no name.
    """
    engine_id: str | None = _transfer_config(config).engine_id
    if engine_id is None:
        raise SettingsError("kv_transfer_config: engine_id is missing, expected the name of the engine")
    return engine_id


def side_channel_of(config: VllmConfig, settings: Settings) -> Address:
    """Return the address that the listener of an engine binds to."""
    host = settings.side_channel_host or vllm.envs.VLLM_NIXL_SIDE_CHANNEL_HOST
    port = settings.side_channel_port or vllm.envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    return Address(host, port + config.parallel_config.data_parallel_index)


def advertised_of(config: VllmConfig, settings: Settings) -> Address:
    """Return the address of an engine's listener for other engines.

    Raises:
        SettingsError: it binds to every address of this machine, and the one that other engines reach is not known.
    """
    bind = side_channel_of(config, settings)
    port = bind.port
    if settings.advertised_port is not None:
        port = settings.advertised_port + config.parallel_config.data_parallel_index
    if settings.advertised_host is not None:
        return Address(settings.advertised_host, port)
    if not bind.is_wildcard:
        return Address(bind.host, port)
    own = Address(get_ip(), port)  # VLLM_HOST_IP, or the address from which this machine reaches other hosts
    if own.is_wildcard:
        raise SettingsError(
            f"side_channel_host is {bind.host!r}, every address of this machine, and none of them was found: set "
            "advertised_host to where other engines reach it"
        )
    return own


def engine_facts(config: VllmConfig, caches: KVCacheConfig, settings: Settings) -> EngineFacts:
    """Return the facts of an engine for the connector's scheduler."""
    parallel = config.parallel_config
    groups, options = transferred_groups(caches), options_of(config, settings)
    # The scheduler has the layers of the first stage. Of a group without layers there it has the spec.
    kinds = {
        kind_of(next(iter(group.layer_names), "of a later stage"), spec)
        for group in (caches.kv_cache_groups[index] for index in groups)
        for spec in iter_layer_specs(group.kv_cache_spec)
    }
    # D always computes the last token of a prompt. It needs the state of the token before. Its window or chunk may
    # begin in a block that P frees with the last token. So P stops before the last token.
    keeps_all = kinds <= {"full", "mla"}
    cp_size = parallel.decode_context_parallel_size
    if cp_size > 1 and "ssm" in kinds and config.cache_config.enable_prefix_caching:
        # Prefix hits may end inside blocks there. It is not verified yet that loads fill up such blocks.
        raise UnsupportedPairError(
            f"decode_context_parallel_size is {cp_size} and enable_prefix_caching is True, with recurrent states the "
            "kvhma connector supports one of them at a time"
        )
    if cp_size > 1 and not config.use_v2_model_runner:
        _check_sharded(cp_size, [caches.kv_cache_groups[index].kv_cache_spec for index in groups])
    # A draft module with several steps reads tokens that only D knows.
    lookahead = getattr(config, "num_prefill_lookahead_tokens", 0) - 1
    return EngineFacts(
        engine_id=engine_id_of(config),
        address=advertised_of(config, settings),
        bind=side_channel_of(config, settings),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_size=cp_size,
        has_state="ssm" in kinds,
        has_windows=not kinds.isdisjoint({"sliding", "chunked"}),
        backoff=max(int(not keeps_all), lookahead),
        recompute=_transfer_config(config).kv_load_failure_policy == "recompute",
        host_staged=host_staged(config),
        transfer_groups=groups,
        drafted_state=caches.has_mamba_layers and _drafted_state(config),
        drafts=config.speculative_config is not None,
        max_model_len=config.model_config.max_model_len,
        options=options,
        extras={
            name: room.facts(config, caches, settings) for name in options for room in find_rooms("scheduler", [name])
        },
        positions_depend_on_items=config.model_config.uses_mrope,
        may_wait=may_wait(config),
        step_timeout=vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
        applies_adapters=applies_adapters(config),
    )


def applies_adapters(config: VllmConfig) -> str:
    """Return the settings that decide to which modules vLLM applies an adapter, and in which dtype, as JSON."""
    lora = config.lora_config
    if lora is None:
        return ""
    targets = getattr(lora, "target_modules", None)
    return _json([targets and sorted(targets), lora.lora_dtype, lora.enable_tower_connector_lora])


def _check_sharded(cp_size: int, specs: Sequence[KVCacheSpec]) -> None:
    """Refuse attention that every rank stores whole, as a draft without context parallelism does.

    Model Runner V2 maps tokens to slots by each group's spec. Its predecessor distributes tokens in every group
    (vllm/v1/worker/gpu/block_table.py and vllm/v1/worker/block_table.py).
    """
    for spec in specs:
        layers = iter_layer_specs(spec)
        if any(isinstance(layer, AttentionSpec) and not layer.dcp_sharded for layer in layers):
            raise UnsupportedPairError(
                f"decode_context_parallel_size is {cp_size} and dcp_sharded of a {type(spec).__name__} is False, which "
                "Model Runner V1 does not support: set VLLM_USE_V2_MODEL_RUNNER=1"
            )


def may_wait(config: VllmConfig) -> bool:
    """Return whether a step may wait for loads without delaying other engines or stages."""
    parallel = config.parallel_config
    return bool(parallel.data_parallel_size * parallel.pipeline_parallel_size == 1)


def no_answers(config: VllmConfig) -> str:
    """Return why answers are not held for the next turns of their conversations, nor read; empty if they are."""
    if host_staged(config):
        return "blocks go through host memory"
    # With several stages, or ranks that have different tokens, the end of an answer is not verified yet.
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    found = ((name, getattr(config.parallel_config, name)) for name in sizes)
    return next((f"{name} is {size}" for name, size in found if size > 1), "")


def _drafted_state(config: VllmConfig) -> bool:
    """Whether decoding moves a state to another slot or row, see `EngineFacts`."""
    caches = config.cache_config
    rings = [getattr(caches, name, False) for name in ("use_replayssm", "use_kda_recoverssm")]
    return bool(config.num_speculative_tokens) or any(rings)


def identity_of(config: VllmConfig, settings: Settings, layers: Iterable[str] = ()) -> ModelIdentity:
    """Return the identity of an engine's model, and read its weights for it: call this once they are loaded.

    Args:
        config: vLLM's.
        settings: of the connector.
        layers: names of the transferred layers, whose modules are read.

    Raises:
        UnsupportedPairError: the modules cannot be read with this version of vLLM.
    """
    model, draft = config.model_config, _draft_model(config)
    built = built_layers(layers, config.compilation_config.static_forward_context, model.hf_text_config.to_dict())
    deadline = time.monotonic() + SECONDS
    dtype = _name_of(model.dtype)
    cache_dtype = resolve_kv_cache_dtype_string(config.cache_config.cache_dtype, model)
    left_out = _NOT_COMPARED | _COMMON | (TOKENS - _held_tokens())
    return ModelIdentity(
        # For a model from an object store, vLLM replaces its name by a local folder.
        model=_bounded(getattr(model, "model_weights", "") or model.model),
        revision=_revision(model),
        model_id=settings.model_id,
        dtype=dtype,
        quantization=None if model.quantization is None else str(model.quantization),
        cache_dtype=dtype if cache_dtype == "auto" else _cache_name(str(cache_dtype)),
        overrides=_json(_overrides(config) | ({} if settings.trusts_items else _item_settings(model))),
        draft=None if draft is None else _drafts(draft, config.speculative_config),
        config=dict(_fields(model.hf_config.to_dict(), left_out))
        | ({} if settings.trusts_items else dict(_item_files(model))),
        versions=f"vLLM {vllm.__version__}, transformers {transformers.__version__}",
        layers=built,
        weights=_digest(model, config.load_config, deadline),
        draft_weights=None if draft is None else _digest(draft, get_draft_load_config(config), deadline),
        draft_config={} if draft is None else dict(_fields(draft.hf_config.to_dict(), _NOT_OF_DRAFTS)),
    )


def _digest(model: ModelConfig, load: LoadConfig, deadline: float) -> str | None:
    return digest_weights(model, load, _revision(model), deadline)


def _revision(model: ModelConfig) -> str | None:
    found = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return None if found is None else _bounded(str(found))


def _overrides(config: VllmConfig) -> dict[str, Any]:
    model = config.model_config
    found = {
        "quantization_config": getattr(model, "quantization_config", None),
        "disable_sliding_window": model.disable_sliding_window,
        "model_class_overrides": model.model_class_overrides,
        "model_class": _plugins_class(model),
        "remote_code": _remote_code(),
        "swa_bounded_replay": "off" if not config.cache_config.swa_bounded_replay else None,
    }
    variables = {name: getattr(vllm.envs, name, default) for name, default in _VARIABLES.items()}
    changed = {name: value for name, value in variables.items() if (value or None) != _VARIABLES[name]}
    return {name: value for name, value in found.items() if value} | changed


def _plugins_class(model: ModelConfig) -> str:
    """Return the loaded class of a model and the version of its package; empty if it is vLLM's own class."""
    kind = get_model_cls(model)
    package = kind.__module__.partition(".")[0]
    if package == "vllm":
        return ""
    versions = [f"{name} {metadata.version(name)}" for name in metadata.packages_distributions().get(package, [])]
    return " ".join([f"{kind.__module__}.{kind.__qualname__}", *versions])


def _remote_code() -> list[str]:
    """Return each class that transformers took from a model's folder or repository, and a digest of its code.

    That is its file, and the files beside it that this one imports.
    """
    kinds = set(map(type, _modules()))
    files = {kind: inspect.getfile(kind) for kind in kinds if kind.__module__.startswith("transformers_modules.")}
    digests = {}
    for path in set(files.values()):
        code = {Path(each) for each in (path, *get_relative_import_files(path))}
        parts = [part.read_bytes() for part in sorted(code) if part.is_file()]
        digests[path] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return sorted(f"{kind.__qualname__} {digests[path]}" for kind, path in files.items())


def _held_tokens() -> set[str]:
    """Return which of `TOKENS` a loaded module holds."""
    return {name for module in _modules() for name in TOKENS & vars(module).keys()}


def _modules() -> Iterator[torch.nn.Module]:
    return (module for model in held_modules() for module in model.modules())


def _item_settings(model: ModelConfig) -> dict[str, Any]:
    """Return what decides the embeddings of multimodal items: vLLM's names of items cover only what a request sets."""
    items = model.multimodal_config
    found = {"mm_encoder_attn_dtype": getattr(items, "mm_encoder_attn_dtype", None)}
    processor = getattr(items, "mm_processor_kwargs", None) or {}
    found["mm_processor_kwargs"] = {name: value for name, value in processor.items() if name != "device"}
    if scales := getattr(items, "mm_encoder_fp8_scale_path", None):
        found["mm_encoder_fp8_scale_path"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()[:16]
    if items is not None and items.video_pruning_rate:
        found["video_pruning_method"] = items.video_pruning_method
    return {name: value for name, value in found.items() if value}


def _item_files(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the files that say how items are scaled and cut, which vLLM's names of items do not cover either."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        path = try_get_local_file(model.model, name, _revision(model) or "main")
        if isinstance(path, Path):
            yield name, _bounded("".join(path.read_text(encoding="utf-8", errors="replace").split()))


def _fields(settings: Mapping[str, Any], left_out: Collection[str], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a model's configuration as it was read, with `hf_overrides`, and of the objects in it."""
    for name, value in settings.items():
        if name in left_out:
            continue
        # An object with other names is a map, such as that of a model's modules: one field, however many it has.
        if isinstance(value, dict) and name.endswith("_config") and all(str(key).isidentifier() for key in value):
            yield from _fields(value, left_out, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}"[:256], _json(value)


def _draft_model(config: VllmConfig) -> ModelConfig | None:
    """Return the configuration of a draft model with separate weights."""
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    # Methods without a draft model name the model itself here, because its own layers draft.
    return None if draft is None or draft.model == config.model_config.model else draft


def _drafts(draft: ModelConfig, speculative: Any) -> str:
    """Return which model drafts, and how: other methods compute other keys from the same weights."""
    how = f"{draft.quantization} {speculative.method}{' in parallel' if speculative.parallel_drafting else ''}"
    how = f"{how} {_plugins_class(draft)}".rstrip()
    return _bounded(f"{draft.model} {_revision(draft) or ''} {_name_of(draft.dtype)} {how}")


def _json(value: Any) -> str:
    return _bounded(json.dumps(value, sort_keys=True, default=str))


def _bounded(text: str) -> str:
    """Return a text unchanged, or the beginning of a long text and a digest of all of it."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:100]}... {hashlib.sha256(text.encode()).hexdigest()}"
