# SPDX-License-Identifier: Apache-2.0
"""Makes a model of the fields of a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from kvhma.errors import ConfigError, GeometryError
from kvhma.models.config.architectures import ARCHITECTURES, GENERAL, Architecture
from kvhma.models.config.fields import Fields
from kvhma.models.config.general import check_fields
from kvhma.models.config.layers import WITHOUT_WINDOWS, WORDS, late_windows
from kvhma.models.config.recorded import defaults_of, known_types, text_type
from kvhma.models.table import STATE_KINDS, Model, State
from kvhma.text import quote

_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where a multimodal model has the configuration of its language model, the only part with a KV cache."""

_TEXT_TYPES = {"deepseek_vl_v2": "deepseek_v2", "kimi_k25": "kimi_k2"}
"""Types of language models inside types that transformers does not know."""

_TYPES_OF_CLASSES = {"LongcatFlashForCausalLM": "longcat_flash", "LongcatFlashNgramForCausalLM": "longcat_flash"}
"""Types of public files that name only their class."""

_DECODERS = re.compile(r"\w*(CausalLM|LMHeadModel|ConditionalGeneration|ChatModel|LanguageModel|MiniCPM[VO])\w*")
"""Names of classes that generate text. Other classes, such as encoders, may have the same fields."""

_ENCODERS = ("siglip_text_model", "siglip2_text_model")
"""Language models inside other models that only encode."""

_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    # A checkpoint in float32 runs in bfloat16 unless the engine is configured otherwise.
    "float32": "bfloat16",
}
_FP8 = "float8_e4m3fn"


_REFUSED = {
    "index_topk": "a sparse-attention index next to the latent",
    "index_topk_freq": "an index in some layers only",
    "index_topk_pattern": "an index in some layers only",
    "indexer_types": "an index in some layers only",
    "compress_ratios": "compressed latents of several sizes",
    "num_kv_shared_layers": "layers that share a cache",
    "global_head_dim": "heads of different size in full and sliding layers",
    "num_global_key_value_heads": "heads of different number in full and sliding layers",
    "swa_num_key_value_heads": "heads of different number in full and sliding layers",
    "swa_head_dim": "heads of different size in full and sliding layers",
    "hybrid_layer_pattern": "windows in some layers",
    "per_layer_config": "layers that differ one by one",
    "block_configs": "layers that differ one by one",
    "linear_attn_config": "linear attention in some layers",
    "attention_k_eq_v": "heads of different number in full and sliding layers",
    "kv_lora_rank": "a latent in place of heads",
    "v_head_dim": "V of another length than K",
    "use_cla": "layers that share a cache",
    "attention_head_dim": "heads of two sizes",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Fields with which a cache has more than its model type says, and what it has."""

_USUAL: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "layer_types": lambda text: ["full_attention"] * len(text["layer_types"]),
    "indexer_types": lambda text: ["full"] * len(text["indexer_types"]),
    # For pictures alone, whose tokens see each other; the cache is the same.
    "use_bidirectional_attention": lambda _: "vision",
    "index_topk_freq": lambda _: 1,
    "v_head_dim": lambda text: text.get("head_dim"),
    "attention_head_dim": lambda text: text.get("head_dim"),
    "head_dim": lambda text: _usual_width(text),
    "num_key_value_heads": lambda text: text.get("num_attention_heads"),
}
"""Values with which such a field has no effect."""

_GONE = {
    "arctic": "0.28",
    "minimax": "0.23",
    "minimax_m1": "0.23",
    "minimax_text_01": "0.23",
    "mllama": "0.10.2",
    "mpt": "0.28",
    "persimmon": "0.25",
    "phi3small": "0.9.2",
    "phi4flash": "0.10.2",
    "plamo2": "0.26",
}
"""Architectures that vLLM no longer runs, and the last version that did: no layout to compare with."""


def _usual_width(text: Mapping[str, Any]) -> Any:
    """Return the head size that a model derives if the file has none; None if unknown."""
    if rotary := text.get("qk_rope_head_dim"):
        return rotary
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def model_from_config(form: Mapping[str, Any], *, kv_dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
    """Turn a configuration into a model, named by its ``model_type``.

    Args:
        form: the parsed ``config.json``.
        kv_dtype: dtype of the KV cache; None for the checkpoint's.
        ssm_dtype: dtype of the recurrent state; None for the dtype of the architecture and the configuration.

    Returns:
        The model as `kvhma.models.vllm_layout.layout` takes it.

    Raises:
        ConfigError: an unknown architecture, or a field that is missing or wrong.
    """
    text = _language_model(form)
    architecture = _architecture(form, text)
    _refuse(text, architecture)
    fields = Fields(text, {**defaults_of(str(text["model_type"])), **architecture.defaults})
    dtype = _dtype(form, text)
    try:
        kinds = _kinds(fields, architecture)
        # Files of models without a state may have its fields, with any values.
        state = (
            architecture.state(fields, dtype) if architecture.state and any("state" in kind for kind in kinds) else None
        )
        if state and ssm_dtype:
            state = replace(state, ssm_dtype=ssm_dtype)
        layers = _layers(fields, architecture, kinds, state)
        return _model(fields, text, architecture, layers, state, kv_dtype or kv_dtype_of(form, dtype))
    except GeometryError as error:
        raise ConfigError(str(error)) from error


def _refuse(text: Mapping[str, Any], architecture: Architecture) -> None:
    """Refuse fields about the cache that this architecture's reader does not know."""
    for name, what in {**_REFUSED, **architecture.refused}.items():
        value = text.get(name)
        if value and name not in architecture.reads and not (name in _USUAL and value == _USUAL[name](text)):
            raise ConfigError(f"{name} {quote(value)}: {what} cannot be described yet; give a geometry instead")

    window = text.get("sliding_window")
    if window and architecture.layers in WITHOUT_WINDOWS and not architecture.mla:
        raise ConfigError(f"sliding_window {quote(window)}: this architecture is known without windows only")


def _language_model(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model, with its type."""
    names = form.get("architectures")
    if "model_type" not in form and isinstance(names, list) and names and names[0] in _TYPES_OF_CLASSES:
        form = {**form, "model_type": _TYPES_OF_CLASSES[names[0]]}
    text = form
    while nested := next((text[name] for name in _NESTED if isinstance(text.get(name), dict)), None):
        text = {**nested, "model_type": nested.get("model_type") or _type_inside(text)}
    if text is form and (inside := _type_inside(form)) and form.get("model_type") not in ARCHITECTURES:
        if "num_hidden_layers" not in form:
            raise ConfigError(f"text_config is missing: model_type {quote(form['model_type'])} has its layers there")
        text = {**form, "model_type": inside}
    return text


def _type_inside(form: Mapping[str, Any]) -> str | None:
    kind = form.get("model_type")
    return (_TEXT_TYPES.get(kind) or text_type(kind)) if isinstance(kind, str) else None


def _architecture(form: Mapping[str, Any], text: Mapping[str, Any]) -> Architecture:
    kind = text.get("model_type")
    if kind is None:
        raise ConfigError("model_type is missing: is this the config.json of a Hugging Face model?")
    if not isinstance(kind, str):
        raise ConfigError(f"model_type {quote(kind)}: must be a string")
    if kind in _GONE:
        raise ConfigError(f"model_type {quote(kind)}: vLLM ran this architecture up to version {_GONE[kind]} only")
    if form.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ConfigError(
            f"is_encoder_decoder True: model_type {quote(kind)} caches cross attention, whose blocks hold "
            "tokens of the encoder"
        )
    if kind in _ENCODERS:
        raise ConfigError(f"model_type {quote(kind)}: an encoder, which has no KV cache")
    found = ARCHITECTURES.get(kind)
    if found is not None:
        # DeepSeek's first models have heads; the later models have a latent.
        has_heads = found.mla and text.get("qk_nope_head_dim") == 0 == text.get("qk_rope_head_dim")
        return GENERAL if has_heads else found
    names = form.get("architectures")
    # A model inside another model generates text.
    if form.get("model_type") == kind and not _is_decoder(names):
        raise ConfigError(f"architectures {quote(names)}: model_type {quote(kind)} is not known{_nearest(kind)}")
    try:
        _check_general(text, kind)
    except ConfigError as error:
        raise ConfigError(f"{error}{_nearest(kind)}") from None
    return GENERAL


def _is_decoder(names: Any) -> bool:
    name = names[0] if isinstance(names, list) and names else None
    return isinstance(name, str) and _DECODERS.fullmatch(name) is not None


def _check_general(text: Mapping[str, Any], kind: str) -> None:
    for name in ("num_hidden_layers", "num_attention_heads"):
        if Fields(text, defaults_of(kind)).get(name) is None:
            raise ConfigError(f"{name} is missing, and model_type {quote(kind)} has no rule")
    _refuse(text, GENERAL)
    check_fields(text, kind)


def _nearest(kind: str) -> str:
    """Return a suggestion for a type that may be misspelt."""
    known = {*ARCHITECTURES, *known_types()}
    near = [] if kind in known else get_close_matches(kind[:100], sorted(known), 3, 0.75)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _kinds(fields: Fields, architecture: Architecture) -> list[str]:
    """Return what every layer caches: as the file lists it, else by the architecture's rule."""
    listed = fields.words("layer_types", "layers_block_type") if architecture.listed else None
    return architecture.layers(fields) if listed is None else _listed_kinds(fields, architecture, *listed)


def _layers(fields: Fields, architecture: Architecture, kinds: list[str], state: State | None) -> tuple[str, ...]:
    """Return the layers' names of kinds: of the architecture's attention and state, and without shared caches."""
    attention = "mla" if architecture.mla else "full"
    if any("state" in kind for kind in kinds) and state is None:
        raise ConfigError("layer_types: this architecture has no recurrent state")
    recurrent = state.kind if state else ""
    kept = len(kinds) - _shared(fields, len(kinds))
    return tuple(
        kind.replace("full", attention).replace("state", recurrent) if index < kept else "none"
        for index, kind in enumerate(kinds)
    )


def _listed_kinds(fields: Fields, architecture: Architecture, name: str, words: list[str]) -> list[str]:
    """Return the kinds that the field `name` lists as `words`."""
    unknown = next((index for index, word in enumerate(words) if word not in WORDS), None)
    if unknown is not None:
        raise ConfigError(f"{name}[{unknown}] {quote(words[unknown])}: known are {', '.join(WORDS)}")
    kinds = [WORDS[word] for word in words]
    if architecture.layers is late_windows and "sliding" in kinds and not fields.get("use_sliding_window"):
        raise ConfigError(f"{name} {quote(words)}: use_sliding_window is false, so that no layer has a window")
    count = fields.get("num_hidden_layers")
    # NemotronH's count is the length of its list, not the field in the file.
    if name == "layer_types" and count not in (None, len(words)):
        raise ConfigError(f"layer_types has {len(words)} entries, num_hidden_layers is {quote(count)}")
    return kinds


def _shared(fields: Fields, count: int) -> int:
    """Return how many of the last layers use the cache of an earlier layer."""
    shared = fields.optional_size("num_kv_shared_layers") or 0
    if shared >= count:
        raise ConfigError(f"num_kv_shared_layers {shared}: must be less than the {count} layers")
    return shared


def _model(
    fields: Fields,
    text: Mapping[str, Any],
    architecture: Architecture,
    layers: tuple[str, ...],
    state: State | None,
    kv_dtype: str,
) -> Model:
    kinds = {kind for layer in layers for kind in layer.split("+")}
    heads, width, queries = 1, 1, None
    if architecture.mla:
        width = fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")
        queries = fields.optional_size("num_attention_heads")
    elif kinds - STATE_KINDS - {"none"}:
        queries = fields.size("num_attention_heads")
        heads = (
            architecture.kv_heads(fields)
            if architecture.kv_heads
            else fields.size("num_key_value_heads", derived=queries)
        )
        width = architecture.width(fields) if architecture.width else _width(fields, queries)
    apart = "v_head_dim" in architecture.reads and not architecture.mla
    v_width = fields.optional_size("v_head_dim") if apart else None
    return Model(
        name=str(text["model_type"]),
        layers=layers,
        kv_heads=heads,
        head_dim=width,
        dtype=kv_dtype,
        window=_window(fields, architecture) if "sliding" in kinds else None,
        chunk=fields.optional_size("attention_chunk_size") if "chunked" in kinds else None,
        state=state if kinds & STATE_KINDS else None,
        v_head_dim=v_width if v_width != width else None,
        attention=architecture.heads(fields) if architecture.heads else (),
        query_heads=queries,
    )


def _window(fields: Fields, architecture: Architecture) -> int | None:
    window = fields.optional_size("sliding_window")
    return None if window is None else window + architecture.window_more


def _width(fields: Fields, queries: int) -> int:
    """Return the items of a head: as given, else derived from the hidden size."""
    hidden = fields.optional_size("hidden_size") or 0
    return fields.size("head_dim", "attention_head_dim", derived=hidden // queries or None)


def _dtype(form: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the dtype that the model runs in: the checkpoint's, from its outermost configuration."""
    said = ((name, source.get(name)) for source in (form, text) for name in ("dtype", "torch_dtype"))
    name, value = next((item for item in said if item[1] is not None), ("dtype", "bfloat16"))
    short = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(short, str) or short not in _DTYPES:
        raise ConfigError(f"{name} {quote(value)}: known are {', '.join(_DTYPES)}")
    return _DTYPES[short]


def kv_dtype_of(form: Mapping[str, Any], dtype: str) -> str:
    """Return the dtype of K and V: 8 bits if the quantized checkpoint asks for it, else the model's.

    Args:
        form: the parsed ``config.json``.
        dtype: the model's.

    Raises:
        ConfigError: the checkpoint asks for another cache.
    """
    quantization = form.get("quantization_config")
    if not isinstance(quantization, dict):
        return dtype
    algorithm, scheme = quantization.get("kv_cache_quant_algo"), quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        algorithm = "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else quote(scheme)
    if algorithm is None or (isinstance(scheme, dict) and not scheme):
        return dtype
    if algorithm != "FP8":
        raise ConfigError(f"quantization_config: KV cache in {quote(algorithm)}; known is FP8")
    return _FP8
