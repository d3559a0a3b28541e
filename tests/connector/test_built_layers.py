# SPDX-License-Identifier: Apache-2.0
"""What decides a cache besides its weights: read from models that vLLM has built, with real tables."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import msgspec
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.transformers import utils

from kvhma.errors import HandshakeError, UnsupportedPairError
from kvhma.nixl.handshake import MAX_EXTRA_BYTES
from kvhma.vllm.caches.module_values import built_layers
from kvhma.vllm.config.identity import check_same_model, decode_extra, encode_extra
from kvhma.vllm.wire.built_layers import POSITIONS, BuiltLayer, BuiltLayers
from support.built import Runner, built, form
from support.engines.families import FAMILIES as ENGINES
from support.engines.tiny import MODELS
from support.families import FAMILIES
from support.identity import IDENTITY

pytestmark = pytest.mark.filterwarnings("ignore")  # from vLLM's imports


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **parameters}}


LLAMA = form("LlamaForCausalLM", "llama")
LONG = form("Phi3ForCausalLM", "phi3", max_position_embeddings=2048, original_max_position_embeddings=256) | rope(
    rope_type="longrope",
    original_max_position_embeddings=256,
    short_factor=[1 + index / 50 for index in range(16)],
    long_factor=[1.0 + 2 * index for index in range(16)],
)
LLAMA_4 = form(
    "Llama4ForCausalLM",
    "llama4_text",
    num_local_experts=2,
    num_experts_per_tok=1,
    intermediate_size_mlp=256,
    attention_chunk_size=64,
    no_rope_layer_interval=2,
    attn_scale=0.1,
    floor_scale=64,
    max_position_embeddings=1 << 17,
)
TUNED = {"attn_temperature_tuning": True}
LENGTHS = {
    "longrope, the original length and more": (LONG, 256, 257, "use_long_rope is False here, True at"),
    "longrope, more and the original length": (LONG, 1024, 256, "use_long_rope is True here, False at"),
    "longrope, up to the original length": (LONG, 128, 256, None),
    "longrope, more than the original length": (LONG, 257, 2048, None),
    "Llama 4, up to 32,768 and more": (LLAMA_4, 32768, 32769, "attn_temperature_tuning is False here, True at"),
    "Llama 4, up to 32,768": (LLAMA_4, 1024, 32768, None),
    "Llama 4, more than 32,768": (LLAMA_4, 32769, 65536, None),
}


@pytest.mark.parametrize(("of", "local", "remote", "text"), LENGTHS.values(), ids=LENGTHS)
def test_lengths_may_differ_where_values_do_not(of, local, remote, text):
    here, there = (built(of, max_model_len=length) for length in (local, remote))
    if text is None:
        check_same_model(here, there)
        return
    with pytest.raises(UnsupportedPairError, match=rf"^model.layers.\d.*: self_attn.*{text} the prefill engine"):
        check_same_model(here, there)


def test_a_generation_configuration_that_switches_a_scale():
    plain, tuned = (built(LLAMA_4, override_generation_config=given) for given in ({}, TUNED))
    with pytest.raises(UnsupportedPairError, match="attn_temperature_tuning is False here, True at"):
        check_same_model(plain, tuned)
    check_same_model(tuned, built(LLAMA_4, max_model_len=40000))


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
DEEPSEEK = {"architectures": ["DeepseekV2ForCausalLM"]} | MODELS["deepseek_v2"]
GEMMA_3 = form("Gemma3ForCausalLM", "gemma3_text", sliding_window=64, num_hidden_layers=6)
TABLES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "half a percent of theta": (LLAMA, rope(), rope(rope_theta=10050.0)),
    "linear": (LLAMA, rope(rope_type="linear", factor=2.0), rope(rope_type="linear", factor=2.01)),
    "NTK": (LLAMA, rope(rope_type="ntk", factor=2.0), rope(rope_type="ntk", factor=2.1)),
    "Llama 3": (
        LLAMA,
        rope(rope_type="llama3", factor=8.0, **LLAMA_3),
        rope(rope_type="llama3", factor=16.0, **LLAMA_3),
    ),
    "YaRN": (LLAMA, rope(factor=4.0, **YARN), rope(factor=5.0, **YARN)),
    "the magnitude of YaRN": (
        LLAMA,
        rope(factor=4.0, attention_factor=1.0, **YARN),
        rope(factor=4.0, attention_factor=1.004, **YARN),
    ),
    "MLA": (DEEPSEEK, rope(factor=4.0, beta_fast=32, **YARN), rope(factor=4.0, beta_fast=8, **YARN)),
    "only layers with a window": (
        GEMMA_3,
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
}


@pytest.mark.parametrize(("of", "local", "remote"), TABLES.values(), ids=TABLES)
def test_tables_of_positions(of, local, remote):
    here, there = (built(of | given).layers for given in (local, remote))
    text = here.difference(there)
    assert text is not None
    assert "rotary_emb.cos_sin_cache at position " in text
    assert here.difference(built(of | local).layers) is None


def test_a_table_of_all_positions_or_of_the_first_ones():
    """The same values up to the shorter length."""
    short, long = (built(LLAMA | {"max_position_embeddings": length}) for length in (1024, 8192))
    assert short.layers.difference(long.layers) is None
    assert long.layers.difference(short.layers) is None
    tables = [identity.layers.kinds[0].tables["self_attn.rotary_emb.cos_sin_cache"] for identity in (short, long)]
    assert [len(rows) for rows in tables] == [sum(at < length for at in POSITIONS) for length in (1024, 8192)]


def test_a_table_that_one_platform_rounds():
    """vLLM stores a table in the model's dtype, or in float32 where a kernel reads that."""
    sides = ((1e4, torch.float32), (1e4, torch.bfloat16), (10050.0, torch.bfloat16))
    with set_current_vllm_config(VllmConfig()):
        tables = [get_rope(64, 4096, rope_parameters={"rope_theta": of}, dtype=dtype) for of, dtype in sides]
    found = [read_one(table) for table in tables]
    assert found[0].kinds != found[1].kinds
    assert found[0].difference(found[1]) is None
    assert found[0].difference(found[2]) is not None


def test_tables_beside_the_layers():
    """vLLM's backend for models of transformers keeps one rotary module for all layers."""
    long = LLAMA | rope(
        rope_type="longrope", original_max_position_embeddings=64, short_factor=[1.0] * 16, long_factor=[4.0] * 16
    )
    here, there = (
        built(long | {"max_position_embeddings": length}, model_impl="transformers", max_model_len=64).layers
        for length in (128, 4096)
    )
    assert "LlamaModel.rotary_emb.attention_scaling is 1.0801" in (here.difference(there) or "")


def test_frequencies_that_transformers_computes_anew_beyond_a_length():
    dynamic = LLAMA | rope(rope_type="dynamic", factor=2.0)
    here, there, shorter = (
        built(dynamic | {"max_position_embeddings": length}, model_impl="transformers", max_model_len=most).layers
        for length, most in ((128, 128), (256, 128), (128, 64))
    )
    if hasattr(utils, "disable_noop_dynamic_rope"):  # 0.33 computes none anew within max_model_len
        assert here.difference(there) is None
    else:
        assert "LlamaModel.rotary_emb.original_max_seq_len is 128.0 here, 256.0" in (here.difference(there) or "")
    assert here.difference(shorter) is None


class Layer(torch.nn.Module):
    """A decoder layer with a cached layer, as a model has it."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        for name, module in modules.items():
            self.add_module(name, module)


def read_one(table: torch.nn.Module, **values: Any) -> BuiltLayers:
    layer = Layer(rotary_emb=table)
    vars(layer).update(values)
    return read_model(torch.nn.ModuleList([layer]), layer.attn)


def read_model(model: torch.nn.Module, *cached: torch.nn.Module) -> BuiltLayers:
    context = {f"layer {index}": module for index, module in enumerate(cached)}
    config = SimpleNamespace(model=model)
    return _register(config, context)


def _register(self: Any, context: dict[str, Any]) -> BuiltLayers:
    return built_layers(context, context, {"use_qk_norm"})


def test_which_numbers_and_switches_count():
    table = torch.nn.Module()
    base = {"scaling": 0.5, "use_qk_norm": True, "use_fast_kernel": True, "num_heads": 4, "limit": math.inf}
    plain = read_one(table, **base)
    assert plain.kinds[0].scalars == {".scaling": 0.5, ".use_qk_norm": True, ".limit": "inf"}
    for changed, seen in (
        ({"scaling": 0.25}, ".scaling is 0.5 here, 0.25 at the prefill engine"),
        ({"use_qk_norm": False}, ".use_qk_norm is True here, False at the prefill engine"),
        ({"limit": 7.0}, ".limit is 'inf' here, 7.0 at the prefill engine"),
        ({"use_fast_kernel": False, "num_heads": 2}, None),
    ):
        found = plain.difference(read_one(table, **(base | changed)))
        assert found == (None if seen is None else f"layer 0: {seen}")


def with_table(rows: torch.Tensor) -> torch.nn.Module:
    table = torch.nn.Module()
    table.register_buffer("rows", rows, persistent=False)
    return table


def test_a_mask_arrives_at_a_peer():
    """A table may hold infinity, which JSON has not."""
    mask = read_one(with_table(torch.full((8, 8), -math.inf).triu(1)))
    identity = msgspec.structs.replace(IDENTITY, layers=mask)
    assert decode_extra(encode_extra(identity, vllm="0.32.0")).model == identity
    assert mask.difference(read_one(with_table(torch.zeros(8, 8)))) is not None


def test_a_large_model_whose_layers_all_have_scales_of_their_own_has_room():
    """As a file with a scale of each layer's 8-bit cache has: each layer is another kind, with its tables."""
    table = with_table(torch.rand(1 << 17, 8))
    layers = [Layer(rotary_emb=table) for _ in range(126)]
    for index, layer in enumerate(layers):
        layer.attn._k_scale_float = layer.attn._v_scale_float = math.pi / (index + 1)
    found = read_model(torch.nn.ModuleList(layers), *(layer.attn for layer in layers))
    assert len(found.kinds) == 126
    assert len(encode_extra(msgspec.structs.replace(IDENTITY, layers=found), vllm="0.32.0")) <= MAX_EXTRA_BYTES


def test_what_vllm_derives_from_a_ranks_weights_does_not_count():
    """vLLM's Mamba2 has a view of its rank's convolution as a buffer that no file has."""
    first, second = (torch.nn.Module() for _ in range(2))
    for module, rows in ((first, 8), (second, 4)):
        module.weight = torch.nn.Parameter(torch.ones(rows, 4))
        module.register_buffer("conv_weights", module.weight.view(-1, 4) * rows, persistent=False)
    assert read_one(first).difference(read_one(second)) is None


def test_a_draft_model_that_an_object_of_vllm_holds(monkeypatch):
    drafter = type("Drafter", (), {"__module__": "vllm.v1.spec_decode"})()
    layers = [Layer(), Layer()]
    target, drafter.model = (torch.nn.ModuleList([layer]) for layer in layers)
    runner = Runner(target)
    runner.drafter = drafter
    context = {name: layer.attn for name, layer in zip(("0", "1"), layers, strict=True)}
    assert _register(runner, context).layers == {"0": 0, "1": 0}


def test_a_model_that_no_caller_holds():
    with pytest.raises(UnsupportedPairError, match="no caller of register_kv_caches holds Module, a cached layer"):
        read_model(torch.nn.ModuleList([Layer()]), torch.nn.Module(), torch.nn.Module())


def test_layers_of_one_side_only_are_not_compared():
    """Of other pipeline stages, and of a draft model that only D has."""
    one, other = (BuiltLayer({"scale": value}, {}) for value in (1.0, 2.0))
    local = BuiltLayers([one, other], {"a": 0, "b": 1})
    assert local.difference(BuiltLayers([one], {"a": 0})) is None
    assert local.difference(BuiltLayers([one, one], {"a": 0, "b": 1})) == (
        "b: scale is 2.0 here, 1.0 at the prefill engine"
    )


HUGE = BuiltLayer({"x" * 257: 1.0}, {})
HOSTILE = {
    "a kind that was not sent": (BuiltLayers([], {"a": 5}), None),
    "a long name": (BuiltLayers([HUGE], {}), "length <= 256"),
    "many layers": (BuiltLayers([], {str(number): 0 for number in range(4097)}), "length <= 4096"),
    "a row of many": (BuiltLayers([BuiltLayer({}, {"t": [[0.0] * 9]})], {}), "length <= 8"),
    "many fields": (BuiltLayers([BuiltLayer({str(n): n for n in range(1025)}, {})], {}), "length <= 1024"),
}


@pytest.mark.parametrize(("sent", "text"), HOSTILE.values(), ids=HOSTILE)
def test_what_a_peer_sends_is_bounded(sent, text):
    data = encode_extra(msgspec.structs.replace(IDENTITY, layers=sent), vllm="0.32.0")
    if text is None:
        local = msgspec.structs.replace(IDENTITY, layers=BuiltLayers([BuiltLayer({}, {})], {"a": 0}))
        check_same_model(local, decode_extra(data).model)
        return
    with pytest.raises(HandshakeError, match=text):
        decode_extra(data)


SAMPLE = {"llama", "gemma3", "nemotron_h", "qwen3_next", "deepseek_v2", "gpt_oss", "llama4"}
SIDES: dict[str, dict[str, Any]] = {
    "ranks": {"tp_size": 2},
    "length": {"max_model_len": 2048},
    "compiled": {"enforce_eager": False},
}


def _named() -> dict[str, dict[str, Any]]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    tiny = {
        name: {"architectures": [CLASSES.get(settings["model_type"], "")]} | settings
        for name, settings in (MODELS | ENGINES).items()
    }
    return tiny | FAMILIES


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in _named()]
)
@pytest.mark.parametrize("side", SIDES)
def test_equal_models_are_equal_on_unequal_engines(name, side):
    of = _named()[name]
    try:
        here, there = built(of), built(of, **SIDES[side])
    except Exception as error:
        if name in SAMPLE:
            raise
        pytest.skip(f"vLLM does not build it here: {error}")
    assert here.layers.layers.keys() == there.layers.layers.keys() != set()
    check_same_model(here, there)
