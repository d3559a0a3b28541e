# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own model classes cache, on a rank of any engine: made without weights, devices or other ranks.

Six things stand in for what a machine may not have. Parameters are on torch's meta device. The tensor-parallel group
says another size and rank than it has. A module of pictures that is not installed is an empty one, since only the
language model has a cache. Sparse attention, which vLLM's CPU platform refuses, gets the backend it has on NVIDIA. The
CPU has AMX: vLLM has no prefix cache for MLA without it, nor blocks that every family can have. And it has no bfloat16
in AVX-512, where vLLM keeps states in float32 whatever the model says, as no GPU does.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
_GPU = {
    False: "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    True: "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend",
}
"""Attention and MLA on any GPU: what reads and writes there lays out the cache otherwise than a CPU's kernels do."""
_PICTURES = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
_WITH_VALUES = {"Gemma3nForCausalLM"}
"""Models that look at values while they are made."""

_BY_HAND = {
    "Qwen2_5_VLForConditionalGeneration": "vllm.model_executor.models.qwen2_5_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm.model_executor.models.qwen3_vl_moe",
    "Glm4vMoeForConditionalGeneration": "vllm.model_executor.models.glm4_1v",
    "Gemma3ForConditionalGeneration": "vllm.model_executor.models.gemma3_mm",
    "Llama4ForConditionalGeneration": "vllm.model_executor.models.mllama4",
    "Qwen3_5ForConditionalGeneration": "vllm.model_executor.models.qwen3_5",
    # The class for NVIDIA needs compilers of theirs; that for AMD has the same cache, written apart.
    "KimiLinearForCausalLM": "vllm.models.kimi_k3.amd.linear",
}


@dataclass(frozen=True)
class Allocated:
    """What an engine would allocate.

    Attributes:
        config: vLLM's configuration, with the block size the platform chose.
        specs: vLLM's spec of every layer, as its model class says, in its order.
        groups: vLLM's groups of them.
    """

    config: Any
    specs: dict[str, Any]
    groups: list[Any]


@mock.patch("torch.cpu._is_amx_tile_supported", mock.Mock(return_value=True))
@mock.patch("torch.cpu._is_avx512_bf16_supported", mock.Mock(return_value=False))
def allocate(
    form: dict[str, Any], tp_size: int, order: str = "LBNHC", tp_rank: int = 0, *, gpu: bool = False, **arguments: Any
) -> Allocated:
    """Make vLLM's model of a configuration for one rank, and let its allocator group the layers.

    Args:
        form: the model's ``config.json``.
        tp_size: ranks of the engine.
        order: of the cache.
        tp_rank: which of them.
        gpu: whether attention is that of a GPU.
        arguments: more of vLLM's ``EngineArgs``.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from support.vllm_grouping import get_kv_cache_groups

    _prepare()
    _register(form["architectures"][0])
    config = _config(form, arguments)
    config.parallel_config.tensor_parallel_size = tp_size
    group = parallel_state._TP
    with (
        mock.patch.object(group, "world_size", tp_size),
        mock.patch.object(group, "rank_in_group", tp_rank),
        _backends(gpu),
        set_current_vllm_config(config),
    ):
        with torch.device("cpu" if form["architectures"][0] in _WITH_VALUES else "meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        config.cache_config.kv_cache_layout = order
        specs = get_kv_cache_spec(config)
        return Allocated(config, specs, get_kv_cache_groups(config, dict(specs)))


def _config(form: dict[str, Any], more: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    # Some models read the directory again when they are made. Engines of one model have one name for it.
    text = json.dumps(form)
    folder = Path(_folder(), hashlib.sha256(text.encode()).hexdigest()[:16])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    arguments: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 2048}
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **(arguments | more)).create_engine_config()


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _prepare() -> None:
    """Make groups of one rank, without which no layer can be made."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    meeting = Path(_folder(), "ranks")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("cpu"))


class _Empty(types.ModuleType):
    """A module that has whatever is asked for."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@cache
def _register(architecture: str) -> None:
    """Register a class by hand where vLLM cannot import it in the subprocess in which it looks at it."""
    if architecture not in _BY_HAND:
        return
    from vllm import ModelRegistry

    empty = [f"torchvision{end}" for end in _PICTURES if f"torchvision{end}" not in sys.modules]
    try:
        importlib.import_module("torchvision")
        empty = []
    except ModuleNotFoundError:
        sys.modules.update({name: _Empty(name) for name in empty})
    try:
        module = importlib.import_module(_BY_HAND[architecture])
    finally:
        for name in empty:
            sys.modules.pop(name)
    ModelRegistry.register_model(architecture, getattr(module, architecture))


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

    with mock.patch.object(kind, "get_attn_backend_cls", staticmethod(chosen)):
        yield
