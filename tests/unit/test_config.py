# SPDX-License-Identifier: Apache-2.0
"""Models from the config.json of real ones: layers, groups, blocks and bytes as published."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvhma.errors import ConfigError, GeometryError, LayoutError
from kvhma.geometry import Shard
from kvhma.models import Attention, Model, State, models
from kvhma.models.config import model_from_config, read_config
from kvhma.models.config.architectures import ARCHITECTURES
from kvhma.models.pages import state_bytes
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_configs import CONFIGS, NEMOTRON_3_NANO
from support.families import FAMILIES
from support.public_configs import PUBLIC


def save(folder: Path, form: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(form if isinstance(form, str) else json.dumps(form))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_as_in_the_table(name: str, tmp_path: Path) -> None:
    """The table and the configurations were written down apart from one another."""
    assert replace(read_config(save(tmp_path, CONFIGS[name])), name=name) == models()[name]


def test_named_after_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = save(folder, NEMOTRON_3_NANO)
    assert read_config(folder) == read_config(path)
    assert read_config(path).name == "my-model"
    assert read_config(save(folder, NEMOTRON_3_NANO, "other.json")).name == "other"


def test_quantization_beside_the_file(tmp_path: Path) -> None:
    save(tmp_path, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "hf_quant_config.json")
    assert read_config(save(tmp_path, NEMOTRON_3_NANO)).dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"kv_cache_quant_algo": None}, "bfloat16"),
        ({"kv_cache_scheme": None, "quant_method": "compressed-tensors"}, "bfloat16"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}, "float8_e4m3fn"),
    ],
)
def test_quantized_caches(quantization: dict[str, Any], dtype: str) -> None:
    assert model_from_config({**NEMOTRON_3_NANO, "quantization_config": quantization}).dtype == dtype


def test_dtypes_that_are_asked_for() -> None:
    one = model_from_config(NEMOTRON_3_NANO, kv_dtype="float8_e4m3fn", ssm_dtype="bfloat16")
    assert one.state is not None
    assert (one.dtype, one.state.conv_dtype, one.state.ssm_dtype) == ("float8_e4m3fn", "bfloat16", "bfloat16")


def test_null_is_the_default_of_the_architecture() -> None:
    one = model_from_config({**NEMOTRON_3_NANO, "mamba_ssm_cache_dtype": None})
    assert one.state is not None
    assert one.state.ssm_dtype == "float32"


def test_half_precision_checkpoint() -> None:
    one = model_from_config({**CONFIGS["Qwen3-Next-80B-A3B"], "torch_dtype": "float16"})
    assert one.state is not None
    assert (one.dtype, one.state.conv_dtype, one.state.ssm_dtype) == ("float16",) * 3
    assert model_from_config({**CONFIGS["Jamba-v0.1"], "torch_dtype": "float32"}).dtype == "bfloat16"


PLAIN = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8}


def kinds(**form: Any) -> str:
    """First letters of what the layers cache."""
    return "".join(kind[0] for kind in model_from_config({**PLAIN, **form}).layers)


def test_rules_of_layers() -> None:
    assert kinds(model_type="llama") == "f" * 8
    assert kinds(model_type="mistral", sliding_window=None) == "f" * 8
    assert kinds(model_type="mistral", sliding_window=4096) == "s" * 8
    assert kinds(model_type="mistral") == "s" * 8  # its default is a window of 4096
    assert kinds(model_type="qwen2", use_sliding_window=False, sliding_window=4096) == "f" * 8
    assert kinds(model_type="qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=5) == "fffffsss"
    assert kinds(model_type="gemma2") == "sfsfsfsf"
    assert kinds(model_type="gemma3_text", sliding_window_pattern=4) == "sssfsssf"
    assert kinds(model_type="exaone4", sliding_window_pattern="LLLG") == "sssfsssf"
    assert kinds(model_type="exaone4", sliding_window=None) == "f" * 8
    assert kinds(model_type="llama4_text", no_rope_layers=[1, 0, 1, 1, 1, 1, 1, 0]) == "cfcccccf"
    assert kinds(model_type="llama4_text", attention_chunk_size=None) == "f" * 8
    assert kinds(model_type="jamba", attn_layer_period=4, attn_layer_offset=2) == "mmfmmmfm"
    assert kinds(model_type="bamba", attn_layer_indices=[3], mamba_n_heads=16, mamba_d_head=64) == "mmmfmmmm"
    assert kinds(model_type="lfm2", full_attn_idxs=[2, 5]) == "ssfssfss"
    assert kinds(model_type="deepseek_v2", layer_types=["full_attention"] * 8) == "m" * 8
    assert kinds(model_type="qwen3_next", full_attention_interval=2) == "gfgfgfgf"
    assert kinds(model_type="nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention"]) == "mnf"


def test_heads_and_sizes() -> None:
    assert (model_from_config({**PLAIN, "model_type": "llama"}).kv_heads) == 8
    one = model_from_config({**PLAIN, "model_type": "llama", "num_key_value_heads": 2, "head_dim": None})
    assert (one.kv_heads, one.head_dim) == (2, 64)
    assert model_from_config({**PLAIN, "model_type": "qwen3"}).head_dim == 128
    assert model_from_config({"model_type": "mistral4"}).head_dim == 256 + 64  # where most latents have 512 items


def test_short_convolution() -> None:
    """LFM2: two rows of every channel, and no recurrent part."""
    one = model_from_config({**PLAIN, "model_type": "lfm2", "full_attn_idxs": [2, 5], "num_key_value_heads": 2})
    assert one.state == State("short_conv", 512, 3, 512, 1, 0, 0, "bfloat16", "bfloat16")
    assert (state_bytes(one.state), state_bytes(one.state, tp_size=2)) == (512 * 2 * 2, 256 * 2 * 2)
    geometry = layout(one, LayoutOptions(num_blocks=4, tp_rank=1, tp_size=2))
    (page,) = {layer.page for layer in geometry.layers if geometry.groups[layer.group].kind == "ssm"}
    (part,) = page.parts
    assert (part.name, part.nbytes) == ("x", 1024)
    assert [(axis.name, axis.start, axis.length) for axis in part.axes] == [("channels", 256, 256), ("rows", 0, 2)]


def test_linear_attention() -> None:
    """Ring 2.5: a matrix of each head in seven layers of eight, and nothing convolved."""
    one = model_from_config(PUBLIC["Ring-2.5-1T"])
    assert one.layers == (("linear",) * 7 + ("mla",)) * 2
    assert one.state == State("linear", 0, 1, 64, 128, 128, 0, "bfloat16", "bfloat16")
    assert (one.state.conv_parts, state_bytes(one.state, tp_size=4)) == ((), 16 * 128 * 128 * 2)
    geometry = layout(one, LayoutOptions(num_blocks=4, tp_rank=1, tp_size=2))
    (page,) = {layer.page for layer in geometry.layers if geometry.groups[layer.group].kind == "ssm"}
    (part,) = page.parts
    assert (part.name, part.offset, part.axes[0].shard) == ("ssm", 0, Shard(64, 32, 32))
    assert all(layer == "mla" for layer in model_from_config({"model_type": "bailing_hybrid", **PLAIN}).layers)


@pytest.mark.parametrize("sizes", [{"conv_dim": 4}, {"d_conv": 2}, {"n_groups": 1}, {"draft_rows": 1}, {"n_heads": 0}])
def test_linear_attention_keeps_no_rows(sizes: dict[str, int]) -> None:
    with pytest.raises(GeometryError, match=next(iter(sizes))):
        State(**{**asdict(State("linear", 0, 1, 4, 8, 8, 0, "bfloat16", "bfloat16")), **sizes})


def test_step_has_other_heads_in_windows() -> None:
    form = PUBLIC["Step-3.5-Flash"]
    other = form["attention_other_setting"] | {"num_attention_groups": 4, "head_dim": 64}
    one = model_from_config({**form, "attention_other_setting": other})
    assert one.layers == ("full", *["sliding"] * 3, "full", "sliding")
    assert (one.kv_heads, one.head_dim, one.window) == (8, 128, 512)
    assert one.attention == (Attention("sliding", 4, 64),)
    for wrong in ([1], {"attention_type": "mamba"}, {"attention_type": "sliding_attention"}):
        with pytest.raises(ConfigError, match=r"attention_other_setting|num_attention_groups is missing"):
            model_from_config({**form, "attention_other_setting": wrong})
    with pytest.raises(ConfigError, match="layer_types"):
        model_from_config({**form, "layer_types": ["full_attention"] * 5})
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        model_from_config({name: value for name, value in form.items() if name != "sliding_window"})


def test_puzzle_blocks_differ_in_experts_only() -> None:
    form = PUBLIC["Nemotron-3-Puzzle"]
    plain = {**form, "model_type": "nemotron_h"}
    del plain["block_configs"]
    one, other = model_from_config(form), model_from_config(plain)
    assert (one.layers, one.state, one.kv_heads) == (other.layers, other.state, other.kv_heads)
    blocks = form["block_configs"]
    for wrong in (None, blocks[:-1], [*blocks[:3], {"block_type": "attention", "num_key_value_heads": 4}, *blocks[4:]]):
        with pytest.raises(ConfigError, match="block_configs"):
            model_from_config({**form, "block_configs": wrong})


def test_fields_of_a_state_that_no_layer_has() -> None:
    """Granite 4 micro: attention only, in the class of hybrids."""
    one = model_from_config({**PUBLIC["granite-4.0-micro"], "mamba_d_head": 64})
    assert (set(one.layers), one.state) == ({"full"}, None)
    with pytest.raises(ConfigError, match="mamba_d_head 64 of 128 heads"):
        model_from_config({**PUBLIC["granite-4.0-micro"], "mamba_d_head": 64, "layer_types": ["mamba"] * 4})


def test_an_index_beside_heads() -> None:
    """MiniMax-M3: a key of each token in bfloat16, whole on every rank, beside the heads of some layers."""
    one = model_from_config(PUBLIC["MiniMax-M3"])
    assert one.layers == ("full",) * 3 + ("indexer+full",) * 3
    index = next(cache for _, cache in one.specs if cache.kind == "indexer")
    assert index == Attention("indexer", 1, 128, dtype="bfloat16")
    geometry = layout(one, LayoutOptions(num_blocks=4, tp_rank=1, tp_size=2))
    (part,) = geometry.layer_by_name["model.layers.4.self_attn.indexer.k_cache"].page.parts
    assert [(axis.name, axis.start, axis.length, axis.extent) for axis in part.axes] == [
        ("tokens", 0, 16, 16),
        ("content", 0, 128, 128),
    ]
    assert model_from_config({"model_type": "minimax_m3_text"}).layers == ("full",) * 60
    for wrong in ({}, [1], {"sparse_attention_freq": [1]}, {"sparse_attention_freq": [2] * 6}):
        with pytest.raises(ConfigError, match="sparse_attention_freq must be"):
            model_from_config({**PUBLIC["MiniMax-M3"], "sparse_attention_config": wrong})


def test_models_without_attention() -> None:
    mamba2 = model_from_config({"model_type": "mamba2", "num_hidden_layers": 3})
    assert mamba2.layers == ("mamba2",) * 3
    assert mamba2.state is not None
    assert mamba2.state.conv_dim == 128 * 64 + 2 * 8 * 128
    mamba = model_from_config({"model_type": "mamba", "num_hidden_layers": 3, "hidden_size": 768})
    assert mamba.state == State("mamba1", 1536, 4, 1536, 1, 16, 0, "bfloat16", "bfloat16")


def setting(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda form: form.update(fields)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda form: form.pop(name)


BAD = {
    "unknown": (
        setting(model_type="foo", architectures=["FooForCausalLM"]),
        "config.json: hybrid_override_pattern 'MEMEM*EMEM",
    ),
    "no-type": (without("model_type"), "model_type is missing"),
    "number-as-type": (setting(model_type=3), "model_type 3: must be a string"),
    "letter": (setting(hybrid_override_pattern="M*X"), "hybrid_override_pattern 'M*X': must be"),
    "no-pattern": (setting(hybrid_override_pattern=None), "hybrid_override_pattern None"),
    "word": (setting(layers_block_type=["mamba", "ring"]), "layers_block_type[1] 'ring': known are full_attention"),
    "text-heads": (setting(num_key_value_heads="2"), "num_key_value_heads '2': must be an integer"),
    "no-heads": (setting(num_key_value_heads=-2), "num_key_value_heads -2: must be 1 to"),
    "half": (setting(head_dim=64.5), "head_dim 64.5: must be an integer"),
    "true": (setting(head_dim=True), "head_dim True: must be an integer"),
    "huge": (setting(head_dim=10**30), "must be 1 to 2147483648"),
    "groups": (setting(n_groups=7), "n_groups 7: must divide the 64 heads"),
    "one-tap": (setting(conv_kernel=1), "conv_kernel 1: a convolution of less than 2 taps"),
    "dtype": (setting(torch_dtype="int4"), "torch_dtype 'int4': known are bfloat16"),
    "state-dtype": (setting(mamba_ssm_cache_dtype="int8"), "mamba_ssm_cache_dtype 'int8': known are float32"),
    "kv-dtype": (setting(quantization_config={"kv_cache_quant_algo": "NVFP4"}), "KV cache in 'NVFP4'; known is FP8"),
    "sparse": (setting(index_topk=2048), "index_topk 2048: a sparse-attention index"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str, tmp_path: Path) -> None:
    change, text = BAD[name]
    form = deepcopy(NEMOTRON_3_NANO)
    change(form)
    path = save(tmp_path, form)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


FOO = {"model_type": "foo", "architectures": ["FooForCausalLM"], **PLAIN}
WINDOWS = ["sliding_attention", "full_attention"] * 4
GPTJ = PUBLIC["gpt-j-6b"]
M3 = "MiniMaxM3SparseForConditionalGeneration"
SPARSE = {**PLAIN, "sparse_attention_config": {"use_sparse_attention": True}}


def test_a_decoder_needs_no_rule_of_its_own() -> None:
    """What vLLM's Transformers backend makes of it: heads everywhere, and windows where the file has them."""
    one = model_from_config({**FOO, "num_key_value_heads": 2, "attention_dropout": 0.1, "n_shared_experts": 1})
    assert (one.layers, one.kv_heads, one.head_dim, one.query_heads) == (("full",) * 8, 2, 64, 8)
    assert kinds(**FOO, sliding_window=64) == "s" * 8
    listed = ["sliding_attention", "full_attention"] * 4
    # Of a type whose class lists layers.
    cwm = {**FOO, "model_type": "cwm", "head_dim": 64}
    assert kinds(**cwm, sliding_window=64, layer_types=listed, sliding_window_pattern=2) == "sf" * 4
    old = {"n_layer": 8, "n_head": 8, "n_embd": 512}
    assert model_from_config({"model_type": "foo", "architectures": ["FooLMHeadModel"], **old}).head_dim == 64


CHANGING = {
    "sliding_window_size": 128,
    "attention_window_size": 128,
    "attn_layer_period": 8,
    "layer_group_size": 5,
    "num_attention_groups": 2,
    "compress_ratios": [4, 128],
    "cross_attention_layers": [3],
    "hybrid_layer_ids": [6],
    "kv_lora_rank": 512,
    "layers_block_type": ["mamba"] * 8,
    "linear_num_key_heads": 16,
    "local_layer_ids": [1],
    "num_attention_heads_per_layer": [8] * 8,
    "num_kv_shared_layers": 2,
    "per_layer_config": {"1": {"head_dim": 32}},
    "sparse_attention_config": {"topk": 16},
    "ssm_state_size": 16,
    "swa_head_dim": 128,
    "use_cla": True,
    "v_head_dim": 32,
}


@pytest.mark.parametrize("field", CHANGING)
def test_a_field_that_could_change_a_cache_is_named(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_from_config({**FOO, field: CHANGING[field]})
    assert str(caught.value).startswith(f"{field} ")
    assert len(str(caught.value)) < 300


PUBLISHED = {
    "llava-1.5-7b": ("full" * 32, 32, 128),
    "pixtral-12b": ("full" * 40, 8, 128),
    "starcoder-15b": ("full" * 40, 1, 128),
    "falcon-7b": ("full" * 32, 1, 64),
    "falcon-40b": ("full" * 60, 8, 64),
    "gpt-j-6b": ("full" * 28, 16, 256),
    "LongCat-Flash": ("mla" * 56, 1, 576),
    "Qwen2-VL-7B": ("full" * 28, 4, 128),
    "Qwen3-VL-8B": ("full" * 36, 8, 128),
    "Qwen2.5-Omni-7B": ("full" * 28, 4, 128),
    "Kimi-K2.5": ("mla" * 61, 1, 576),
    "deepseek-vl2-tiny": ("full" * 12, 10, 128),
    "Seed-OSS-36B": ("full" * 64, 8, 128),
    "InternVL3-8B": ("full" * 28, 4, 128),
    "Phi-4-multimodal": ("sliding" * 32, 8, 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """Where a file leaves fields out, the defaults are those of the class of its language model."""
    one = model_from_config(PUBLIC[name])
    assert ("".join(one.layers), one.kv_heads, one.head_dim) == PUBLISHED[name]


def test_heads_of_each_layer() -> None:
    """Nemotron-NAS: heads by layer, and layers without attention."""
    one = model_from_config(PUBLIC["Nemotron-49B"])
    assert one.layers == ("heads8", "none", "heads4", "heads8")
    assert [cache.kv_heads for _, cache in one.specs if isinstance(cache, Attention)] == [8, 4, 8]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (None, "block_configs[3] None: must have an object attention"),
        ({"attention": {"n_heads_in_group": 8, "window_length": 64}}, "attention.window_length 64: is not known"),
        ({"attention": {"n_heads_in_group": 7}}, "attention.n_heads_in_group 7: must divide 64 heads"),
        ({"attention": {}}, "n_heads_in_group is missing"),
    ],
)
def test_a_layer_whose_heads_are_not_known_is_refused(block: object, text: str) -> None:
    form = PUBLIC["Nemotron-49B"]
    with pytest.raises(ConfigError) as caught:
        model_from_config({**form, "block_configs": [*form["block_configs"][:3], block]})
    assert text in str(caught.value)


def test_dtype_of_the_outermost_configuration() -> None:
    """As vLLM reads it: a dtype beside the language model's own counts more."""
    text = {"model_type": "llama", **PLAIN, "dtype": "float16"}
    assert model_from_config({"model_type": "llava", "text_config": text}).dtype == "float16"
    assert model_from_config({"model_type": "llava", "dtype": "bfloat16", "text_config": text}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"model_type": "llama", **PLAIN, "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: at most 4096"),
        ({"model_type": "llama", **PLAIN, "layer_types": ["full_attention"]}, "has 1 entries, num_hidden_layers is 8"),
        ({"model_type": "llama", **PLAIN, "layer_types": ["mamba"] * 8}, "no recurrent state"),
        ({"model_type": "llama", **PLAIN, "layer_types": "full"}, "layer_types 'full': must be a list"),
        (
            {"model_type": "llama", **PLAIN, "layer_types": ["full_attention", "ring"] * 4},
            "layer_types[1] 'ring': known",
        ),
        ({"model_type": "llama", **PLAIN, "layer_types": ["sliding_attention"] * 8}, "window is missing"),
        ({**FOO, "num_hidden_layers": None}, "num_hidden_layers is missing, and model_type 'foo' has no rule"),
        ({**FOO, "num_attention_heads": None}, "num_attention_heads is missing, and model_type 'foo' has no rule"),
        ({**FOO, "hidden_size": None}, "hidden_size is missing"),
        ({**FOO, "head_dim": 96}, "head_dim 96: 8 heads of hidden_size 512 have another size"),
        ({**FOO, "sliding_window": 64, "layer_types": WINDOWS}, "layer_types ['sliding_attention', 'full_attention'"),
        ({**PUBLIC["MiniCPM4-8B"], "layer_types": WINDOWS * 4}, "windows in some layers cannot be described yet"),
        ({**PLAIN, "model_type": "qwen2", "sliding_window": 96, "layer_types": WINDOWS}, "use_sliding_window is false"),
        ({**PLAIN, "model_type": "mixtral", "sliding_window": 96, "layer_types": WINDOWS}, "windows in some layers"),
        ({**PLAIN, "model_type": "qwen3_moe", "sliding_window": 96, "layer_types": WINDOWS}, "windows in some layers"),
        ({**PLAIN, "model_type": "qwen2_moe", "use_sliding_window": True}, "use_sliding_window True: windows in some"),
        ({**GPTJ, "head_dim": 96}, "head_dim 96: 16 heads of hidden_size 4096 have another size"),
        (
            {**GPTJ, "num_key_value_heads": 2},
            "num_key_value_heads 2: model_type 'gptj' has as many as",
        ),
        ({**PUBLIC["MiniCPM4-8B"], "head_dim": 96}, "head_dim 96: a separate head size"),
        ({**PUBLIC["Olmo-Hybrid-7B"], "head_dim": 96}, "head_dim 96: a separate head size"),
        ({**PUBLIC["falcon-40b"], "num_key_value_heads": 2}, "num_key_value_heads 2: must be 8"),
        ({**PUBLIC["starcoder-15b"], "num_key_value_heads": 2}, "num_key_value_heads 2: must be 1"),
        ({**FOO, "model_type": "lama", "ssm_state_size": 16}, "(did you mean llama or mllama or llama4?)"),
        ({**FOO, "architectures": ["FooModel"]}, "architectures ['FooModel']: model_type 'foo' is not known"),
        ({**FOO, "is_encoder_decoder": True}, "is_encoder_decoder True: model_type 'foo' caches cross attention"),
        ({**FOO, "sliding_window": 64, "use_sliding_window": False}, "layer_types is missing, sliding_window is 64"),
        ({**FOO, "model_type": "seed_oss", "compress_ratio": 4}, "compress_ratio 4: model_type 'seed_oss' has no rule"),
        ({**FOO, "model_type": "exaone_moe"}, "layer_types is missing, sliding_window is 4096"),
        (
            {"model_type": "siglip", "text_config": {**PLAIN, "model_type": "siglip_text_model"}},
            "model_type 'siglip_text_model': an encoder, which has no KV cache",
        ),
        ({"model_type": "llava", "vision_config": {}}, "text_config is missing: model_type 'llava'"),
        ({"model_type": "minimax_text_01"}, "vLLM ran this architecture up to version 0.23 only"),
        (
            {"model_type": "minimax_m3_vl", "architectures": [M3], "text_config": SPARSE},
            "sparse_attention_config {'use_sparse_attention'",
        ),
        ({"model_type": "llama4_text", **PLAIN, "no_rope_layers": [1]}, "no_rope_layers [1]: must be a list of 8"),
        ({"model_type": "jamba", **PLAIN, "attn_layer_offset": 9}, "attn_layer_offset 9: must be less than"),
        ({"model_type": "bamba", **PLAIN, "attn_layer_indices": ["1"]}, "attn_layer_indices ['1']: must be a list"),
        ({"model_type": "falcon_h1", **PLAIN, "mamba_d_head": 3}, "mamba_d_head 3 of 128 heads"),
    ],
)
def test_other_refusals(form: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_from_config(form)
    assert text in str(caught.value)


# --- against the classes of the models themselves --------------------------------------------------------------------

WORDS = {"full_attention": "f", "sliding_attention": "s", "chunked_attention": "c", "hybrid": "b"}


ELSEWHERE = {form.get("text_config", form)["model_type"] for form in (*FAMILIES.values(), *PUBLIC.values())}
"""Compared with vLLM's own classes in test_families.py and test_architectures.py, with other fields too."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [kind for kind in ARCHITECTURES if kind not in ELSEWHERE])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """An almost empty file gives what the architecture's own class has: layers, heads and their size, the window."""
    transformers = pytest.importorskip("transformers", reason="needs transformers; make connector runs it")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"no {model_type} in this version")
    own = transformers.CONFIG_MAPPING[model_type]()
    given = {name: value for name in PLAIN if isinstance(value := getattr(own, name, None), int)}
    if model_type == "nemotron_h":
        given["hybrid_override_pattern"] = own.hybrid_override_pattern
    if model_type == "falcon_h1":  # its defaults contradict each other
        given["mamba_d_head"] = own.mamba_d_head
    if model_type == "lfm2_moe":
        own.layer_types = None
    one = model_from_config({"model_type": model_type, "dtype": "bfloat16", **given})
    listed = getattr(own, "layer_types", None)
    if listed is None:
        listed = ["sliding_attention" if getattr(own, "sliding_window", None) else "full_attention"] * len(one.layers)
    expected = [WORDS.get(word, "-") for word in listed]
    found = [
        {"mla": "f", "full": "f"}.get(kind, kind[0] if kind in ("sliding", "chunked") else "-") for kind in one.layers
    ]
    assert ["b" if "+" in kind else letter for kind, letter in zip(one.layers, found, strict=True)] == expected
    if any(set(kind.split("+")) & {"full", "sliding", "chunked"} for kind in one.layers):
        assert one.kv_heads == (own.num_key_value_heads or own.num_attention_heads)
        width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        assert one.head_dim == width
    if one.window is not None:
        assert one.window == own.sliding_window


@pytest.mark.filterwarnings("ignore")
def test_recorded_defaults_are_those_of_transformers() -> None:
    """The file is what tools/config_defaults.py makes of the transformers that vLLM pins."""
    transformers = pytest.importorskip("transformers", reason="needs transformers; make connector runs it")
    tool = Path(__file__).parents[2] / "tools" / "config_defaults.py"
    recorded = json.loads((tool.parents[1] / "python/kvhma/data/config_defaults.json").read_text("utf-8"))
    if recorded["transformers"] != ".".join(transformers.__version__.split(".")[:2]):
        pytest.skip(f"recorded from transformers {recorded['transformers']}")
    found = subprocess.run([sys.executable, tool, "--check"], capture_output=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-1000:]


CLASSES = {
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
}
STATES = {
    **{form["model_type"]: form for form in (f.get("text_config", f) for f in CONFIGS.values())},
    "lfm2": {"model_type": "lfm2", **PLAIN, "conv_dim": 512, "conv_L_cache": 3, "full_attn_idxs": [2]},
    "lfm2_moe": {"model_type": "lfm2_moe", **PLAIN, "layer_types": ["conv"] * 7 + ["full_attention"]},
    "mamba": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 2, "intermediate_size": 1536},
    "mamba2": {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 2},
}


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("model_type", CLASSES)
def test_states_are_those_of_vllm(model_type: str, tp_size: int) -> None:
    """vLLM's own model classes say how large a rank's state is."""
    pytest.importorskip("vllm", reason="needs vLLM; make connector runs it")
    from importlib import import_module
    from types import SimpleNamespace

    transformers = pytest.importorskip("transformers", reason="needs transformers; make connector runs it")
    form = STATES[model_type]
    own = transformers.CONFIG_MAPPING[model_type](**{k: v for k, v in form.items() if k != "model_type"})
    module, name = CLASSES[model_type]
    try:
        kind = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    except ModuleNotFoundError as error:  # what models of pictures need
        pytest.skip(str(error))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        cache_config=SimpleNamespace(use_replayssm=False),
        model_config=SimpleNamespace(hf_config=own, hf_text_config=own),
        num_speculative_tokens=0,
        speculative_config=None,
    )
    shapes = kind.get_mamba_state_shape_from_config(config)
    one = model_from_config(form)
    if model_type == "falcon_h1" and tp_size == 4:
        # The function has an answer; the layer itself says that two groups do not run on four ranks.
        with pytest.raises(LayoutError, match=r"tp_size 4: state\.n_groups 2"):
            _state_pages(one, tp_size)
        return
    pages = _state_pages(one, tp_size)
    for page in pages:
        *conv, last = page.parts
        conv = conv if len(shapes) == 2 else [*conv, last]
        items = [sum(part.nbytes // part.item_bytes for part in conv)]
        items += [last.nbytes // last.item_bytes] if len(shapes) == 2 else []
        assert items == [_product(shape) for shape in shapes]


def _state_pages(one: Model, tp_size: int) -> list[Any]:
    found = []
    for rank in range(tp_size):
        geometry = layout(one, LayoutOptions(num_blocks=2, tp_rank=rank, tp_size=tp_size))
        found.append(next(y.page for y in geometry.layers if geometry.groups[y.group].kind == "ssm"))
    return found


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result
