# SPDX-License-Identifier: Apache-2.0
"""vLLM's nightly tests of prefill and decode over NIXL: every pair of engines that they run is planned, and cut.

The models, tensor-parallel sizes and orders are those of ``tests/v1/kv_connector/nixl_integration`` in vLLM's
repository (config_sweep_accuracy_test.sh, run_accuracy_test.sh: blocks of 128 tokens at both sides). Specs come from
vLLM's own model classes, and backends from the order in which vLLM prefers them on an H100 and on a B200.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

import kvhma
from kvhma.geometry import Geometry
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.config.engine_config import rank_info_of
from support.attention_backends import backends_of
from support.cli_configs import CONFIGS
from support.families import COMMON, FAMILIES
from support.vllm_grouping import get_kv_cache_config_from_groups
from support.vllm_models import Allocated, allocate

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from vLLM's imports
    pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="models are read as vLLM 0.32 reads them"),
]
SOURCE = backends_of(Path(vllm.__file__).parent)
DEVICES = {"H100": DeviceCapability(9, 0), "B200": DeviceCapability(10, 0)}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # Its language model has heads and no latent, which its published file marks with a null. Newer configuration
    # classes refuse that null, so a model of the same shape replaces it.
    "deepseek-ai/deepseek-vl2-tiny": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1280,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
    },
    "ibm-granite/granite-4.0-h-tiny": CONFIGS["granite-4.0-h-tiny"],
    "Qwen/Qwen3.5-0.8B": CONFIGS["Qwen3.5-0.8B"],
    "ai21labs/AI21-Jamba2-3B": {
        **CONFIGS["Jamba-v0.1"],
        "hidden_size": 2560,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "mamba_d_state": 64,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "google/gemma-3-4b-it": CONFIGS["gemma-3-4b"],
    "google/gemma-4-E2B-it": {
        **FAMILIES["gemma-4, shared layers"],
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
    },
}

MODELS["Qwen/Qwen3.5-0.8B, MTP"] = {
    **MODELS["Qwen/Qwen3.5-0.8B"],
    "text_config": {**MODELS["Qwen/Qwen3.5-0.8B"]["text_config"], "mtp_num_hidden_layers": 1},
}
ARGUMENTS = {"Qwen/Qwen3.5-0.8B, MTP": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}}

PAIRS = [
    *[("Qwen/Qwen3-0.6B", p, d, order) for p, d in ((1, 1), (2, 2), (1, 2), (2, 1)) for order in ("LBHNC", "BLHNC")],
    *[("deepseek-ai/deepseek-vl2-tiny", p, d, "LBHNC") for p, d in ((1, 1), (1, 2), (2, 1), (2, 2))],
    ("ibm-granite/granite-4.0-h-tiny", 1, 1, "LBHNC"),
    ("ibm-granite/granite-4.0-h-tiny", 2, 2, "LBHNC"),
    ("Qwen/Qwen3.5-0.8B", 1, 1, "LBHNC"),
    ("Qwen/Qwen3.5-0.8B", 1, 2, "LBHNC"),
    ("Qwen/Qwen3.5-0.8B, MTP", 1, 1, "LBHNC"),
    ("ai21labs/AI21-Jamba2-3B", 1, 1, "LBHNC"),
    *[("google/gemma-3-4b-it", p, d, "LBHNC") for p, d in ((1, 1), (1, 2), (2, 1))],
    ("google/gemma-4-E2B-it", 1, 1, "LBHNC"),
]


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    """vLLM's platform for NVIDIA, which imports its compiled files and does not use them to return its order."""
    # Temporary, and without removing other modules that are imported meanwhile: they would be loaded twice.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm._C", "vllm._C_stable_libtorch"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        import vllm.platforms.cuda as platform

        yield platform


@cache
def rank_of(model: str, tp: int, rank: int, order: str) -> Allocated:
    form = MODELS[model]
    text = {"vocab_size": 512, **form.get("text_config", {})}
    form = {**form, "vocab_size": 512} | ({"text_config": text} if "text_config" in form else {})
    found = allocate(form, tp, order, rank, gpu=True, block_size=128, **ARGUMENTS.get(model, {}))
    found.config.parallel_config.rank = rank
    return found


def geometry(found: Allocated, order: str, writer: Writer) -> Geometry:
    """Let vLLM place and view the caches, with kernel blocks of 64 tokens as FlashInfer has, and describe them.

    Where the blocks of all layers are next to each other, vLLM does not split them.
    """
    caches = get_kv_cache_config_from_groups(found.config, found.groups, 1 << 29)
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    sizes = [
        spec.block_size if order[0] == "B" or isinstance(spec, MambaSpec) else math.gcd(spec.block_size, 64)
        for spec in specs
    ]
    views = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[order], sizes)
    return geometry_of(caches, views, rank_info_of(found.config), writer=lambda _: writer)


def writers(cuda: Any, device: str, config: Any) -> list[str]:
    """Return the writer of each backend in vLLM's order for a model on a device, the default first."""
    order = cuda._get_backend_priorities(
        use_mla=config.model_config.use_mla,
        device_capability=DEVICES[device],
        use_mm_prefix=config.model_config.is_mm_prefix_lm,
    )
    return [writer_of(backend) for backend in order]


def writer_of(backend: AttentionBackendEnum) -> str:
    module, _, name = backend.value.rpartition(".")
    composite = SOURCE.composites.get((module, name))
    return SOURCE.classes[(module, name) if composite is None else composite[1]][0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "p", "d", "order"), PAIRS)
def test_what_upstream_runs_is_planned(cuda, model, p, d, order, device):
    prefill = [rank_of(model, p, rank, order) for rank in range(p)]
    decode = [rank_of(model, d, rank, order) for rank in range(d)]
    capability = DEVICES[device].as_version_str()
    default = writers(cuda, device, prefill[0].config)[0]
    writer = Writer(default, "cuda", capability, "auto", vllm.__version__)
    remotes = [geometry(found, order, writer) for found in prefill]
    for found in decode:
        local = geometry(found, order, writer)
        assert "whole" not in {part.name for layer in local.layers for part in layer.page.parts}
        assert kvhma.plan(local, remotes).sources


def test_what_vllm_prefers_for_pictures_is_a_composite(cuda):
    """As published, gemma-3 looks at the tokens of a picture in both directions: it has a separate backend on an
    H100."""
    found = rank_of("google/gemma-3-4b-it", 1, 0, "LBHNC")
    assert found.config.model_config.is_mm_prefix_lm
    for device, name in (("H100", "TRITON_FLASH_ATTN"), ("B200", "TRITON_FLASHINFER")):
        order = cuda._get_backend_priorities(use_mla=False, device_capability=DEVICES[device], use_mm_prefix=True)
        assert order[0].name == name
        assert writers(cuda, device, found.config)[0] == "TRITON_ATTN"
    unread = geometry(found, "LBHNC", Writer("SOMEBODY_S_OWN", "cuda", "9.0", "auto", vllm.__version__))
    assert {part.name for layer in unread.layers for part in layer.page.parts} == {"whole"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pictures", [False, True])
def test_every_backend_of_vllm_s_order_pairs_with_every_other(cuda, device, pictures):
    """One engine on an H100, another on a B200, or with another backend: the same bytes from every writer."""
    found = rank_of("google/gemma-3-4b-it" if pictures else "Qwen/Qwen3-0.6B", 1, 0, "LBHNC")
    cut = [name for name in writers(cuda, device, found.config) if name != "TURBOQUANT"]
    assert len(cut) >= 4
    geometries = [geometry(found, "LBHNC", Writer(name, "cuda", "9.0", "auto", vllm.__version__)) for name in cut]
    for local in geometries:
        for remote in geometries:
            assert kvhma.plan(local, [remote]).sources == [0]
