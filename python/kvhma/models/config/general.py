# SPDX-License-Identifier: Apache-2.0
"""The rule for decoders without a separate rule, and the fields of a file that might change their cache.

vLLM's Transformers backend, and most of vLLM's classes, treat all decoders with the usual fields alike: heads in each
layer. A layer has a window if ``layer_types`` lists one and the class reads that field. Without such a list all layers
have the window. Any other field that could change a cache is refused by its name. So no list of architectures is
needed, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvhma.errors import ConfigError
from kvhma.models.config.fields import ALIASES, Fields
from kvhma.models.config.recorded import defaults_of, derives_layers, is_known, lacks
from kvhma.text import quote

_READ = frozenset(
    {
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "head_dim",
        *ALIASES,
        *(alias for aliases in ALIASES.values() for alias in aliases),
    }
)
"""Fields that the general rule reads."""

_OF_A_LIST = frozenset(
    {"max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"}
)
"""Fields that say where windows are. They have no effect without a window, nor next to ``layer_types``."""

_COULD_CHANGE = re.compile(
    r"window|sliding|swa|chunk|layer|block|group|pattern|kv|lora_rank|latent|ssm|mamba|linear|conv|state|index|compress"
    r"|global|local|cross|cla$|head|hybrid|interval|period|every|skip|reuse|sparse|attn|attention|recurr|rwkv|delta"
    r"|cache|encoder|multi_query|decoder_architecture|loop|share|mem_|memory|stack"
)
"""Parts of names of fields that can change a cache."""

_HARMLESS = re.compile(
    "|".join(
        (
            # other modules, experts and positions
            r"(vision|visual|image|video|audio|speech|tokenizer|lm_head|embedding|embd)_\w+",
            r"(moe|mlp|expert|shared_expert|router|num_nextn|mtp|num_mtp|rope|rotary|layer_rope|initializer)_\w+",
            r"((n|num|num_local|n_routed|num_shared|n_shared)_experts|shared_intermediate_size|num_dense_layers)\w*",
            r"n_group|topk_group|num_(expert|limited)_groups?|(decoder_)?sparse_step|interleave_moe_layer_step",
            r"no_rope_layers?\w*|nope_layer_interval|(spatial|temporal)_conv_size",
            # precision, scaling and kernels
            r"(output|norm|query_pre|scale|quantization|summary|apply)_\w+",
            r"\w*(dropout|layerdrop|layernorm|layer_norm\w*|_norm|token_index|bias|topk_prob|router\w*)",
            r"_?(flash_)?(attn|attention)_(implementation\w*|impl|dropout|pdrop|multiplier|logit_softcapping|scale)",
            r"(attn|attention)_(softmax_in_fp32|probs_dropout_prob|value_scale|temperature_tuning|output_gate)",
            r"(attn|attention)_(in_multiplier|out_multiplier|mask\w*)|key_multiplier|layer_scale\w*|full_attn_mod",
            r"use_(cache|flash_attn\w*|cache_quantization|cache_kernel|parallel_residual|qk_norm|qk_layernorm)",
            r"clip_qkv|qkv_proj\w*|fused_qkv|head_norm|parallel_attn|num_ln_in_parallel_attn|reorder_and_upcast_attn",
            r"chunk_size_feed_forward|add_cross_attention|sep_token_index",
        )
    )
)
"""Fields with such a name that do not change the cache: precision, scaling, positions, experts, other modules."""


def check_fields(text: Mapping[str, Any], kind: str) -> None:
    """Refuse a file if the general rule might be wrong about its cache.

    Args:
        text: the configuration of the language model.
        kind: its ``model_type``.

    Raises:
        ConfigError: the text names the field.
    """
    listed, window = text.get("layer_types"), text.get("sliding_window", defaults_of(kind).get("sliding_window"))
    without_effect = _OF_A_LIST if listed or not window else frozenset()
    for name, value in text.items():
        if name not in without_effect and _could_change_cache(name, value):
            raise ConfigError(
                f"{name} {quote(value)}: model_type {quote(kind)} has no rule, and this field could change its cache; "
                "give a geometry instead"
            )
    _check_heads(Fields(text, defaults_of(kind)), kind)
    if listed:
        if not derives_layers(kind) and listed != ["full_attention"] * len(listed):
            raise ConfigError(f"layer_types {quote(listed)}: model_type {quote(kind)} is not known to read this field")
        return
    if window and (derives_layers(kind) or text.get("use_sliding_window") is False):
        raise ConfigError(
            f"layer_types is missing, sliding_window is {quote(window)}: which layers of model_type {quote(kind)} have "
            "a window is not known"
        )


def _could_change_cache(name: str, value: Any) -> bool:
    """Return whether a field that the general rule does not read could change a cache."""
    if name in _READ or not value or (name.endswith("_ratio") and value == 1):
        return False
    return _COULD_CHANGE.search(name) is not None and _HARMLESS.fullmatch(name) is None


def _check_heads(fields: Fields, kind: str) -> None:
    """Refuse fields of heads that a model's class may not read."""
    queries, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    width, heads = fields.get("head_dim"), fields.get("num_key_value_heads")
    if isinstance(width, int) and width and width * queries != hidden and lacks(kind, "head_dim"):
        raise ConfigError(
            f"head_dim {quote(width)}: {queries} heads of hidden_size {hidden} have another size, and model_type "
            f"{quote(kind)} is not known to read this field"
        )
    if heads and heads != queries and is_known(kind) and lacks(kind, "num_key_value_heads"):
        raise ConfigError(
            f"num_key_value_heads {quote(heads)}: model_type {quote(kind)} has as many as heads of queries, {queries}"
        )
