# SPDX-License-Identifier: Apache-2.0
"""The caches of vLLM's own model classes, which are created here without weights, a device or other ranks.

A machine that plans may lack things that a serving machine has. These replace them:

* Parameters are on torch's meta device, and the platform is vLLM's CPU platform, so that no GPU is touched.
* The tensor-parallel group reports the requested size and rank.
* Attention gets the backends of a GPU, sparse attention included.
* If torchvision is not installed, an empty module replaces it: only the language model has a cache.
* A plain class with the fields of the file replaces a configuration class that is remote code.
* The CPU reports AMX, because vLLM has no prefix cache for MLA without it. It reports no bfloat16 in AVX-512, because
  vLLM then stores states in float32, unlike on a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from kvhma.errors import GeometryError, LayoutError
from kvhma.models import Attention, Model, State, StateKind
from kvhma.models.block_size import token_bytes
from kvhma.models.config.fields import Fields
from kvhma.models.config.layers import nemotron_h_puzzle
from kvhma.models.grouping import group_layers
from kvhma.models.grouping import layer_specs as planned_specs
from kvhma.models.pages import state_bytes
from kvhma.models.table import AttentionKind

_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
_GPU = {
    False: "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    True: "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend",
}
"""Attention and MLA on any GPU, whose kernels have another cache layout than a CPU's kernels."""
_PICTURES = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
_WITH_VALUES = {"ApertusForCausalLM", "BloomForCausalLM", "Gemma3nForCausalLM"}
"""Models whose constructors read values of tensors."""
_ELSEWHERE = {
    # The class for NVIDIA needs its compilers. The class for AMD has the same cache.
    "KimiLinearForCausalLM": ("vllm.models.kimi_k3.amd.linear", "KimiLinearForCausalLM"),
}
_DRAFTS = {"Qwen3_5ForConditionalGeneration": "Qwen3_5MTP"}
"""Models with an own draft model, which vLLM uses for speculative decoding."""
_ATTENTION: dict[str, AttentionKind] = {
    "FullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
}
_STATES: dict[str, StateKind] = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "gdn",
    "KDA_ATTN": "kda",
    "LINEAR": "linear",
    "SHORT_CONV": "short_conv",
}


@mock.patch("torch.cpu._is_amx_tile_supported", mock.Mock(return_value=True))
@mock.patch("torch.cpu._is_avx512_bf16_supported", mock.Mock(return_value=False))
def layer_specs(
    form: Mapping[str, Any], tp_size: int = 1, tp_rank: int = 0, *, gpu: bool = True, **arguments: Any
) -> tuple[Any, dict[str, Any]]:
    """Create vLLM's model of a configuration for one rank.

    Args:
        form: the model's ``config.json``.
        tp_size: ranks of the engine.
        tp_rank: the rank.
        gpu: whether to use the attention of a GPU.
        arguments: more of vLLM's ``EngineArgs``.

    Returns:
        vLLM's configuration, with the block size of its platform, and its spec of each layer, in its order.

    Raises:
        Exception: vLLM's error about a model that it does not create.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    architecture = form["architectures"][0]
    _prepare()
    _register_class(architecture)
    if "speculative_config" in arguments and architecture in _DRAFTS:
        _register_class(_DRAFTS[architecture])
    _register_configs(form)
    config = _config(form, arguments)
    config.parallel_config.tensor_parallel_size = tp_size
    group = parallel_state._TP
    with (
        mock.patch.object(group, "world_size", tp_size),
        mock.patch.object(group, "rank_in_group", tp_rank),
        # Vision towers move to a device, which tensors on the meta device cannot.
        mock.patch("torch.nn.Module.to", lambda module, *_, **__: module),
        _backends(gpu),
        set_current_vllm_config(config),
    ):
        with torch.device("cpu" if architecture in _WITH_VALUES else "meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        return config, get_kv_cache_spec(config)


def _config(form: Mapping[str, Any], more: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    # Some models read the directory again in their constructor. The same model always gets the same directory.
    text = json.dumps({name: value for name, value in form.items() if name != "auto_map"})
    folder = Path(_folder(), hashlib.sha256(text.encode()).hexdigest()[:16])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    arguments: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 1024}
    # No cache depends on the length, and a model may have fewer positions.
    with mock.patch.dict(os.environ, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1"):
        return EngineArgs(model=str(folder), skip_tokenizer_init=True, **(arguments | more)).create_engine_config()


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _prepare() -> None:
    """Create parallel groups with one rank, which vLLM's layers need."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    meeting = Path(_folder(), "ranks")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("cpu"))
    from vllm.triton_utils import triton

    if not hasattr(triton, "set_allocator"):  # vLLM's own replacement, without a GPU
        triton.set_allocator = lambda *_: None


class _Empty(types.ModuleType):
    """A module that has an attribute of every name."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]  # of the class, so every instance is a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@cache
def _register_class(architecture: str) -> None:
    """Import a model class here: vLLM would import it in a subprocess, which takes seconds."""
    from vllm import ModelRegistry

    lazy = ModelRegistry.models.get(architecture)
    module, name = _ELSEWHERE.get(architecture, (getattr(lazy, "module_name", None), getattr(lazy, "class_name", None)))
    if module is None or name is None:
        return  # unknown, or registered by hand: vLLM raises the error
    empty = []
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        empty = [f"torchvision{end}" for end in _PICTURES if f"torchvision{end}" not in sys.modules]
        sys.modules.update({name: _Empty(name) for name in empty})
    try:
        ModelRegistry.register_model(architecture, getattr(importlib.import_module(module), name))
    finally:
        for module_name in empty:
            sys.modules.pop(module_name)


def _register_configs(form: Mapping[str, Any]) -> None:
    """Register a plain class for each type that transformers and vLLM do not know, so no remote code runs."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for part in (form, *(value for value in form.values() if isinstance(value, dict))):
        kind = part.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY:
            AutoConfig.register(kind, type("PlainConfig", (_Plain, PretrainedConfig), {"model_type": kind}))


class _Plain:
    """Does what remote code usually does: objects with a type become configurations, others get attributes."""

    def __post_init__(self, **fields: Any) -> None:
        from transformers import AutoConfig

        made = {
            name: AutoConfig.for_model(**value)
            if isinstance(value, dict) and "model_type" in value
            else _with_attributes(value)
            for name, value in fields.items()
        }
        super().__post_init__(**made)  # type: ignore[misc]  # of transformers' class, which is another base class


class _Object(dict[str, Any]):
    """An object of a file, whose fields are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _with_attributes(self[name])
        except KeyError:
            raise AttributeError(name) from None


def _with_attributes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_attributes(item) for item in value]
    return _Object({name: _with_attributes(item) for name, item in value.items()}) if isinstance(value, dict) else value


@contextlib.contextmanager
def _backends(gpu: bool) -> Iterator[None]:
    from vllm.platforms import current_platform

    kind = type(current_platform)
    own = kind.get_attn_backend_cls

    def chosen(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_sparse:
            return _SPARSE
        if gpu:
            return _GPU[bool(attn_selector_config.use_mla)]
        return str(own(selected_backend, attn_selector_config, num_heads=num_heads))

    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, backend_to_kernel_cls

    experts: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    check: Any = FusedMoEConfig.__post_init__
    choose: Any = experts.select_unquantized_moe_backend

    # Both refuse experts that the CPU's kernels lack. No experts run here.
    def unchecked(config: Any) -> None:
        with contextlib.suppress(NotImplementedError):
            check(config)

    def any_kernel(moe_config: Any) -> Any:
        with contextlib.suppress(NotImplementedError):
            return choose(moe_config)
        return UnquantizedMoeBackend.CPU, backend_to_kernel_cls(UnquantizedMoeBackend.CPU)[0]

    with (
        mock.patch.object(kind, "get_attn_backend_cls", staticmethod(chosen)),
        mock.patch.object(FusedMoEConfig, "__post_init__", unchecked),
        mock.patch.object(experts, "select_unquantized_moe_backend", any_kernel),
    ):
        yield


# --- From specs to a model ---------------------------------------------------------------------------------


def version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(vllm.__version__)


def ask(name: str, form: Mapping[str, Any], tp_sizes: Iterable[int]) -> tuple[Model, dict[int, str], int]:
    """Ask vLLM's class of a configuration for its caches. This process gets vLLM's CPU platform.

    Args:
        name: of the model.
        form: its ``config.json``.
        tp_sizes: possible tensor-parallel sizes of an engine.

    Returns:
        The caches over all ranks, in the dtype of the model; for some of `tp_sizes` the reason why they cannot be
        planned; and the number of layers.

    Raises:
        GeometryError: vLLM caches something that `Model` cannot describe; the text names the layer and the spec.
        Exception: vLLM's error about a model that it does not create.
    """
    _use_cpu()
    if form.get("model_type") == "nemotron_h_puzzle":
        nemotron_h_puzzle(Fields(form, {}))  # what its remote code would make of the blocks
    # Quantized weights need kernels. They change only the dtype of a cache.
    form = {field: value for field, value in form.items() if field != "quantization_config"}
    config, specs = layer_specs(form)
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    model = model_of_specs(name, specs, num_layers)
    refused = {}
    for tp_size in tp_sizes:
        try:
            rank = (config, specs) if tp_size == 1 else layer_specs(form, tp_size)
            _check_rank(model, *rank, tp_size)
        except LayoutError as error:
            refused[tp_size] = str(error)
        except Exception as error:
            refused[tp_size] = f"tp_size {tp_size}: vLLM does not create it: {' '.join(str(error).split())[:300]}"
    return model, refused, num_layers


def _use_cpu() -> None:
    """Choose the platform before any code asks for it, so that vLLM does not look for a GPU."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    vars(platforms)["_current_platform"] = CpuPlatform()


def model_of_specs(name: str, specs: Mapping[str, Any], num_layers: int = 0) -> Model:
    """Return a model with the layers of vLLM's specs of a single rank, in their order.

    Layers that cache nothing are ``"none"``, up to `num_layers`.

    Raises:
        GeometryError: a spec that `Model` cannot describe.
    """
    words: list[list[str]] = []
    attention: dict[Attention, str] = {}
    states: set[State] = set()
    last = -1
    for layer, spec in specs.items():
        cache = _cache(layer, spec)
        if isinstance(cache, State):
            states.add(cache)
            word: str = cache.kind
        else:
            word = attention.setdefault(
                cache, f"{cache.kind}{len(attention)}" if cache.kind != "indexer" else "indexer"
            )
        number = _number(layer)
        if number == last and word not in words[-1]:
            words[-1].append(word)
            continue
        if number > last:
            words += [["none"]] * (number - last - 1)
        words.append([word])
        last = number
    if len(states) > 1:
        raise GeometryError(f"layers: states of {len(states)} sorts, {states}; one can be described")
    words += [["none"]] * (num_layers - len(words))
    return _model(
        name,
        ["+".join(sorted(layer_words, key=lambda word: word != "indexer")) for layer_words in words],
        attention,
        states,
    )


def _model(name: str, layers: list[str], attention: dict[Attention, str], states: set[State]) -> Model:
    """Return the model. Its heads are those of most layers."""
    sorts = [sort for sort in attention if sort.kind != "indexer"]
    if not sorts:
        return Model(name, tuple(layers), 1, 1, state=next(iter(states), None))
    used = {word: sum(word in layer.split("+") for layer in layers) for word in attention.values()}
    # A block with a state has the size of full attention, if the model has full attention.
    usual = max(sorts, key=lambda sort: (sort.kind in ("full", "mla"), used[attention[sort]]))
    kinds = Counter(sort.kind for sort in sorts)
    plain = {sort: sort.kind for sort in sorts if kinds[sort.kind] == 1}
    named = tuple(
        Attention(
            sort.kind,
            sort.kv_heads,
            sort.head_dim,
            sort.v_head_dim,
            None if sort.dtype == usual.dtype and sort.kind != "indexer" else sort.dtype,
            sort.window,
            sort.chunk,
            plain.get(sort, word),
        )
        for sort, word in attention.items()
        if not sort.has_scales
    )
    renamed = {attention[sort]: kind for sort, kind in plain.items()}
    return Model(
        name,
        tuple("+".join(renamed.get(word, word) for word in layer.split("+")) for layer in layers),
        usual.kv_heads,
        usual.head_dim,
        usual.dtype or "bfloat16",
        state=next(iter(states), None),
        v_head_dim=usual.v_head_dim,
        attention=named,
    )


def _number(layer: str) -> int:
    found = re.search(r"(?<![a-z0-9])\d+", layer)
    if found is None:
        raise GeometryError(f"layer {layer!r}: its name has no number")
    return int(found[0])


def _cache(layer: str, spec: Any) -> Attention | State:
    found = type(spec).__name__
    if found == "MambaSpec":
        return _state(layer, spec)
    if found not in _ATTENTION:
        raise GeometryError(
            f"layer {layer!r}: vLLM caches a {found} there; known are {', '.join(_ATTENTION)}, MambaSpec"
        )
    kind = _ATTENTION[found]
    dtype = str(spec.dtype).removeprefix("torch.")
    if getattr(getattr(spec, "cache_role", None), "value", None) == "indexer":
        # 8-bit keys are counted in bytes, including the scale of each key.
        return Attention("indexer", 1, *((spec.head_size - 4,) if dtype == "uint8" else (spec.head_size, None, dtype)))
    odd = {
        "state_content_bytes": spec.state_content_bytes,
        "num_head_slots": spec.num_head_slots,
        "compress_ratio": getattr(spec, "compress_ratio", 1) if getattr(spec, "compress_ratio", 1) != 1 else None,
        "tokens_per_state": spec.tokens_per_state if spec.tokens_per_state != 1 else None,
        "model_version": getattr(spec, "model_version", None),
    }
    for field, value in odd.items():
        if value is not None:
            raise GeometryError(
                f"layer {layer!r}: vLLM's {found} has {field} {value!r}; such a page cannot be described"
            )
    if kind == "mla":
        return Attention("mla", 1, spec.head_size, dtype=dtype)
    return Attention(
        kind,
        spec.num_kv_heads,
        spec.head_size,
        spec.head_size_v if spec.head_size_v != spec.head_size else None,
        dtype,
        window=spec.sliding_window if kind == "sliding" else None,
        chunk=spec.attention_chunk_size if kind == "chunked" else None,
    )


def _state(layer: str, spec: Any) -> State:
    """Return the state over all ranks, from the spec of a single rank."""
    kind = _STATES.get(spec.mamba_type.name)
    if kind == "gdn" and len(spec.shapes) == 4:
        kind = "kda"
    described = f"layer {layer!r}: a state of {spec.mamba_type.name} with {spec.shapes}"
    if kind is None:
        raise GeometryError(f"{described}; known are {', '.join(_STATES)}")
    *conv, last = spec.shapes if kind != "short_conv" else (*spec.shapes, (0, 0, 0))
    rows = min((min(shape) for shape in conv), default=0)
    channels = sum(max(shape) for shape in conv)
    heads, head_dim, d_state = {2: (last[0], 1, last[-1]), 3: last}[len(last)]
    if kind == "short_conv":
        heads, head_dim = channels, 1
    rest = channels - heads * head_dim if conv else 0
    groups, odd = divmod(rest, 2 * d_state) if d_state else (0, rest)
    if odd:
        raise GeometryError(f"{described}: {rest} channels beside those of the heads")
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    return State(kind, channels, rows + 1, heads, head_dim, d_state, groups, dtypes[0], dtypes[-1])


def _check_rank(model: Model, config: Any, specs: Mapping[str, Any], tp_size: int) -> None:
    """Refuse a model if a rank of vLLM has other bytes or other groups than planned."""
    names = dict(zip((name for name, _ in model.specs), specs, strict=True))
    for name, cache_ in model.specs:
        spec = specs[names[name]]
        if isinstance(cache_, State):
            planned, held = state_bytes(cache_, tp_size=tp_size), spec.state_content_size_bytes
        else:
            planned = token_bytes(cache_, tp_size=tp_size) * spec.block_size
            held = spec.unpadded_page_size_bytes
        if planned != held:
            raise LayoutError(
                f"tp_size {tp_size}: vLLM's {names[name]} has {held} bytes in a block of {spec.block_size} tokens, and "
                f"{planned} would be planned"
            )
    # vLLM's CPU platform asks for blocks of 128 tokens unless a state needs longer ones.
    block_size = min(config.cache_config.block_size, 128)
    planned_groups = [
        {names[name]: spec.page for name, spec in group.items()}
        for group in group_layers(planned_specs(model, tp_size=tp_size, block_size=block_size), block_major=False)
    ]
    held_groups = [_pages(group) for group in cache_groups(config, specs)]
    if planned_groups != held_groups:
        sizes = [[len(group) for group in groups] for groups in (held_groups, planned_groups)]
        raise LayoutError(
            f"tp_size {tp_size}: vLLM makes groups of {sizes[0]} layers, and groups of {sizes[1]} or with "
            "other pages would be planned"
        )


def cache_groups(config: Any, specs: Mapping[str, Any], order: str = "LBNHC") -> list[Any]:
    """Return vLLM's groups of a rank's layers.

    Args:
        config: vLLM's configuration.
        specs: from :func:`layer_specs`.
        order: stride order of the cache.
    """
    from vllm.config import set_current_vllm_config

    try:
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:  # before vLLM 0.33
        planning = importlib.import_module("vllm.v1.core.kv_cache_utils")

    config.cache_config.kv_cache_layout = order
    with set_current_vllm_config(config):
        return list(planning.get_kv_cache_groups(config, dict(specs)))


def _pages(group: Any) -> dict[str, int]:
    """Return the page bytes of each layer of vLLM's group."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: (several[name] if several else group.kv_cache_spec).page_size_bytes for name in group.layer_names}
