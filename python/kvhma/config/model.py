# SPDX-License-Identifier: Apache-2.0
"""From the fields of a configuration to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvhma.config.architectures import ARCHITECTURES, Architecture
from kvhma.config.fields import ConfigError, Fields, quoted
from kvhma.config.layers import WORDS
from kvhma.errors import GeometryError
from kvhma.models import STATE_KINDS, Model, State

_NESTED = ("text_config", "llm_config")
"""Where a multimodal model keeps the configuration of its language model. Only that one has a KV cache."""

_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    # A checkpoint in float32 runs in bfloat16 unless the engine is told otherwise.
    "float32": "bfloat16",
}
_FP8 = "float8_e4m3fn"


_REFUSED = {
    "index_topk": "a sparse-attention index beside the latent",
    "compress_ratios": "compressed latents of several sizes",
    "num_kv_shared_layers": "layers that share a cache",
    "global_head_dim": "heads of different size in full and sliding layers",
}
"""Fields of architectures whose cache is more than their type says, and what it is."""


def known_model_types() -> tuple[str, ...]:
    """Return the ``model_type`` values that can be read."""
    return tuple(ARCHITECTURES)


def model_from_config(form: Mapping[str, Any], *, kv_dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
    """Turn a configuration into a model, named by its ``model_type``.

    Args:
        form: the parsed ``config.json``.
        kv_dtype: dtype of the KV cache; None for what the checkpoint asks for.
        ssm_dtype: dtype of the recurrent state; None for what the architecture and the configuration say.

    Raises:
        ConfigError: an unknown architecture, or a field that is missing or wrong.
    """
    text = next((form[name] for name in _NESTED if isinstance(form.get(name), dict)), form)
    architecture = _architecture(form, text)
    for name, what in _REFUSED.items():
        if text.get(name):
            raise ConfigError(f"{name} {quoted(text[name])}: {what} cannot be described yet; give a geometry instead")
    fields = Fields(text, architecture.defaults)
    dtype = _dtype(form, text)
    try:
        state = architecture.state(fields, dtype) if architecture.state else None
        if state and ssm_dtype:
            state = replace(state, ssm_dtype=ssm_dtype)
        layers = _layers(fields, architecture, state)
        return _model(fields, text, architecture, layers, state, kv_dtype or _kv_dtype(form, dtype))
    except GeometryError as error:
        raise ConfigError(str(error)) from error


def _architecture(form: Mapping[str, Any], text: Mapping[str, Any]) -> Architecture:
    kind = text.get("model_type")
    if isinstance(kind, str) and kind in ARCHITECTURES:
        return ARCHITECTURES[kind]
    if kind is None:
        raise ConfigError("model_type is missing: is this the config.json of a Hugging Face model?")
    names = form.get("architectures")
    name = f" (architecture {quoted(names[0])})" if isinstance(names, list) and names else ""
    raise ConfigError(
        f"unknown architecture: model_type {quoted(kind)}{name}; known are {', '.join(ARCHITECTURES)}; "
        "of others give a geometry as JSON"
    )


def _layers(fields: Fields, architecture: Architecture, state: State | None) -> tuple[str, ...]:
    """Return the kind of every layer: as listed in the file, else by the architecture's rule."""
    listed = fields.words("layer_types", "layers_block_type") if architecture.listed else None
    if listed is None:
        kinds = architecture.layers(fields)
    else:
        name, words = listed
        for index, word in enumerate(words):
            if word not in WORDS:
                raise ConfigError(f"{name}[{index}] {quoted(word)}: known are {', '.join(WORDS)}")
        kinds = [WORDS[word] for word in words]
        count = fields.get("num_hidden_layers")
        # NemotronH's count is what its list has, whatever the file says.
        if count is not None and count != len(words) and name == "layer_types":
            raise ConfigError(f"layer_types has {len(words)} entries, num_hidden_layers is {quoted(count)}")
    attention = "mla" if architecture.mla else "full"
    if any("state" in kind for kind in kinds) and state is None:
        raise ConfigError("layer_types: this architecture has no recurrent state")
    own = state.kind if state else ""
    return tuple(kind.replace("full", attention).replace("state", own) for kind in kinds)


def _model(
    fields: Fields,
    text: Mapping[str, Any],
    architecture: Architecture,
    layers: tuple[str, ...],
    state: State | None,
    kv_dtype: str,
) -> Model:
    kinds = {kind for layer in layers for kind in layer.split("+")}
    heads, width = 1, 1
    if architecture.mla:
        width = fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")
    elif kinds - STATE_KINDS - {"none"}:
        queries = fields.size("num_attention_heads")
        heads = fields.size("num_key_value_heads", derived=queries)
        hidden = fields.optional_size("hidden_size") or 0
        width = fields.size("head_dim", "attention_head_dim", derived=hidden // queries or None)
    return Model(
        name=str(text["model_type"]),
        layers=layers,
        kv_heads=heads,
        head_dim=width,
        dtype=kv_dtype,
        window=fields.optional_size("sliding_window") if "sliding" in kinds else None,
        chunk=fields.optional_size("attention_chunk_size") if "chunked" in kinds else None,
        state=state if kinds & STATE_KINDS else None,
    )


def _dtype(form: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the dtype the model runs in: that of the checkpoint."""
    for source in (text, form):
        for name in ("dtype", "torch_dtype"):
            if (value := source.get(name)) is None:
                continue
            short = value.removeprefix("torch.") if isinstance(value, str) else value
            if not isinstance(short, str) or short not in _DTYPES:
                raise ConfigError(f"{name} {quoted(value)}: known are {', '.join(_DTYPES)}")
            return _DTYPES[short]
    return "bfloat16"


def _kv_dtype(form: Mapping[str, Any], dtype: str) -> str:
    """Return the dtype of K and V: 8 bits where the quantized checkpoint says so, else the model's."""
    quantization = form.get("quantization_config")
    if not isinstance(quantization, dict):
        return dtype
    algorithm, scheme = quantization.get("kv_cache_quant_algo"), quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        algorithm = "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else quoted(scheme)
    if algorithm is None or (isinstance(scheme, dict) and not scheme):
        return dtype
    if algorithm != "FP8":
        raise ConfigError(f"quantization_config: KV cache in {quoted(algorithm)}; known is FP8")
    return _FP8
