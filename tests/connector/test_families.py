# SPDX-License-Identifier: Apache-2.0
"""`kvhma.models.config` and `kvhma.models.vllm_layout` against vLLM's own model classes, layer by layer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import MambaSpec, SparseCacheRole, UniformTypeKVCacheSpecs

from kvhma.errors import ConfigError
from kvhma.geometry import Geometry, Layer
from kvhma.models.config import model_from_config
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_configs import CONFIGS
from support.families import FAMILIES
from support.groups import cache_groups
from support.vllm_models import Allocated, allocate

KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "ssm",
}
DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.uint8: "uint8",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from vLLM's imports
    pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="models are read as vLLM 0.32 reads them"),
]


def long(tp: int) -> Any:
    return pytest.param(tp, marks=pytest.mark.long)


def place(name: str, spec: Any, layers: int) -> tuple[int, str]:
    """A layer's number and what it caches: each model class has its own prefixes of names."""
    number = re.search(r"(?<![a-z0-9])\d+", name)
    assert number, name
    what = "state" if isinstance(spec, MambaSpec) else "attention"
    # Falcon-H1 numbers its states after its layers.
    behind = layers if re.fullmatch(r"model\.\d+\.mixer", name) else 0
    return int(number[0]) - behind, "index" if getattr(spec, "cache_role", None) == SparseCacheRole.INDEXER else what


def of(layer: Layer, geometry: Geometry) -> tuple[int, str]:
    what = "state" if geometry.groups[layer.group].kind == "ssm" else "attention"
    return int(layer.name.split(".")[2]), "index" if "indexer" in layer.name else what


def same(form: dict[str, Any], tp: int, order: Order = "LBNHC") -> None:
    for rank in range(tp) if tp <= 2 else (0, tp - 1):
        same_rank(allocate(form, tp, order, rank), form, tp, rank, order)


def same_rank(found: Allocated, form: dict[str, Any], tp: int, rank: int, order: Order) -> None:
    one = model_from_config(form)
    block = found.config.cache_config.block_size
    geometry = layout(
        one, LayoutOptions(num_blocks=2, tp_size=tp, tp_rank=rank, block_size=asked(found, block), order=order)
    )
    groups = [group.kv_cache_spec for group in found.groups]
    own = [
        {
            name: (spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec)
            for name in y.layer_names
        }
        for y, spec in zip(found.groups, groups, strict=True)
    ]
    told = cache_groups(one, tp_size=tp, block_size=asked(found, block), order=order)
    numbers = {layer.name: of(layer, geometry) for layer in geometry.layers}
    assert [[numbers[name] for name in group.layers] for group in told] == [
        [place(name, spec, len(one.layers)) for name, spec in members.items()] for members in own
    ]
    assert [list(group.pages) for group in told] == [
        [spec.page_size_bytes for spec in members.values()] for members in own
    ]
    layers = {of(layer, geometry): layer for layer in geometry.layers}
    for members in own:
        for name, spec in members.items():
            layer = layers[place(name, spec, len(one.layers))]
            group = geometry.groups[layer.group]
            assert group.kind == KINDS[type(spec).__name__]
            assert group.window == getattr(spec, "sliding_window", None)
            assert group.chunk == getattr(spec, "attention_chunk_size", None)
            same_page(layer, spec, group.block_size)


def asked(found: Allocated, block: int) -> int:
    """The user's block size: vLLM's CPU platform uses 128 tokens unless a state needs more."""
    return min(block, 128)


def same_page(layer: Layer, spec: Any, block: int) -> None:
    parts = {part.name: part for part in layer.page.parts}
    if isinstance(spec, MambaSpec):
        assert layer.page.nbytes == spec.state_content_size_bytes
        assert {DTYPES[dtype] for dtype in spec.dtypes} == {part.dtype for part in parts.values()}
        if "ssm" in parts and len(spec.shapes[-1]) == 3:
            heads, content = parts["ssm"].axes
            assert (heads.length, content.extent) == (spec.shapes[-1][0], spec.shapes[-1][1] * spec.shapes[-1][2])
        return
    assert block == spec.block_size
    assert layer.page.nbytes == spec.unpadded_page_size_bytes
    if spec.cache_role == SparseCacheRole.INDEXER if hasattr(spec, "cache_role") else False:
        assert (spec.head_size, spec.dtype) == (132, torch.uint8)
        return
    axes = {axis.name: axis for axis in parts["kv"].axes}
    assert parts["kv"].dtype == DTYPES[spec.dtype]
    assert axes["content"].extent == spec.head_size + spec.head_size_v
    assert (axes["heads"].length if "heads" in axes else 1) == spec.num_kv_heads


@pytest.mark.parametrize("tp", [long(1), 2, long(4), long(8)])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tp: int) -> None:
    same(FAMILIES[name], tp)


@pytest.mark.parametrize("name", ["gemma-4, 2 global heads", "MiMo-V2-Flash", "DeepSeek-V3.2", "Kimi-Linear"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_families_with_the_block_outermost(name: str, tp: int) -> None:
    same(FAMILIES[name], tp, "BLNHC")


@pytest.mark.parametrize("tp", [1, long(2)])
@pytest.mark.parametrize("name", [name for name in CONFIGS if "FP8" not in name])
def test_models_of_the_table(name: str, tp: int) -> None:
    form = CONFIGS[name]
    form = {key: value for key, value in form.items() if key != "quantization_config"}  # of weights
    text = {"vocab_size": 512, **form.get("text_config", {})}
    # vLLM's CPU build has no such experts; a layer of experts has no cache, and an MLP has no cache either.
    form = {key: value.replace("E", "-") if key == "hybrid_override_pattern" else value for key, value in form.items()}
    same({**form, "vocab_size": 512} | ({"text_config": text} if "text_config" in form else {}), tp)


LEFT_OUT = (
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "sliding_window",
    "num_kv_shared_layers",
    "global_head_dim",
    "num_global_key_value_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "n_mamba_heads",
    "mamba_d_state",
)
ADDED = {
    "head_dim": 96,
    "num_key_value_heads": 2,
    "sliding_window": 96,
    "v_head_dim": 32,
    "num_kv_shared_layers": 1,
    "global_head_dim": 64,
    "attention_head_dim": 32,
    "num_global_key_value_heads": 2,
    "use_bidirectional_attention": "all",
    "index_topk_freq": 2,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def changed(form: dict[str, Any], change: str) -> dict[str, Any] | None:
    """The configuration with a field left out, or with another value; None if that is the same configuration."""
    text = dict(form.get("text_config", form))
    field, sign = change[1:], change[0]
    if (sign == "-") == (field not in text):
        return None
    if sign == "-":
        del text[field]
    else:
        text[field] = ADDED[field]
    return {**form, "text_config": text} if "text_config" in form else text


@pytest.mark.parametrize("change", [*(f"-{name}" for name in LEFT_OUT), *(f"+{name}" for name in ADDED)])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_field_leads_to_a_wrong_guess(name: str, change: str) -> None:
    """With any field left out or added, the reader agrees with vLLM's class or refuses."""
    form = changed(FAMILIES[name], change)
    if form is None:
        return
    try:
        model_from_config(form)
    except ConfigError:
        return
    try:
        found = allocate(form, 1)
    except Exception:
        return
    same_rank(found, form, 1, 0, "LBNHC")
