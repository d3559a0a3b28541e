# SPDX-License-Identifier: Apache-2.0
"""The architectures that can be read, by ``model_type``.

Defaults are those of the architectures' own configuration classes, for fields that a file may leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhma.config import layers, states
from kvhma.config.fields import Fields
from kvhma.models import State


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one ``model_type`` says what it caches.

    Attributes:
        layers: gives the kind of every layer where the file has no list of them.
        state: reads the recurrent state, of architectures that have one.
        mla: whether attention caches a latent.
        listed: whether a list of layers in the file counts; else `layers` alone knows.
        defaults: values of fields that a file may leave out.
    """

    layers: Callable[[Fields], list[str]]
    state: Callable[[Fields, str], State] | None = None
    mla: bool = False
    listed: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


_MAMBA2 = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_HALF = ("sliding_window_pattern", "_sliding_window_pattern")

_UNIFORM = Architecture(layers.uniform)
_MLA = Architecture(layers.uniform, mla=True, listed=False, defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
_MAMBA1 = Architecture(
    layers.all_state, states.mamba1, listed=False, defaults={"conv_kernel": 4, "state_size": 16, "expand": 2}
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _UNIFORM,
    "mistral": Architecture(layers.windowed, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Architecture(layers.windowed, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Architecture(layers.windowed, defaults={"num_key_value_heads": 8}),
    "qwen2": Architecture(layers.late_windows, defaults=_QWEN),
    "qwen2_moe": Architecture(layers.late_windows, defaults=_QWEN),
    "qwen3": Architecture(layers.late_windows, defaults={**_QWEN, "head_dim": 128}),
    "qwen3_moe": Architecture(layers.late_windows, defaults={**_QWEN, "num_key_value_heads": 4}),
    "phi3": Architecture(layers.windowed),
    "gemma": Architecture(layers.uniform, defaults={"head_dim": 256}),
    "gemma2": Architecture(
        layers.every_nth_full("sliding", *_HALF),
        defaults={
            "sliding_window_pattern": 2,
            "sliding_window": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
    "gemma3_text": Architecture(
        layers.every_nth_full("sliding", *_HALF),
        defaults={
            "sliding_window_pattern": 6,
            "sliding_window": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
    "gpt_oss": Architecture(
        layers.every_nth_full("sliding", *_HALF),
        defaults={
            "sliding_window_pattern": 2,
            "sliding_window": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "llama4_text": Architecture(
        layers.llama4,
        defaults={
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 48,
        },
    ),
    "cohere": _UNIFORM,
    "cohere2": Architecture(
        layers.every_nth_full("sliding", *_HALF), defaults={"sliding_window_pattern": 4, "sliding_window": 4096}
    ),
    "exaone4": Architecture(
        layers.every_nth_full("sliding", *_HALF), defaults={"sliding_window_pattern": 4, "sliding_window": 4096}
    ),
    "olmo": _UNIFORM,
    "olmo2": _UNIFORM,
    "olmo3": Architecture(
        layers.every_nth_full("sliding", *_HALF), defaults={"sliding_window_pattern": 4, "sliding_window": 4096}
    ),
    "olmoe": _UNIFORM,
    "granite": _UNIFORM,
    "granitemoe": _UNIFORM,
    "glm": Architecture(layers.uniform, defaults={"num_key_value_heads": 2, "head_dim": 128}),
    "glm4": Architecture(layers.uniform, defaults={"num_key_value_heads": 2, "head_dim": 128}),
    "glm4_moe": Architecture(layers.uniform, defaults={"num_key_value_heads": 8}),
    "minimax_m2": Architecture(layers.uniform, defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "nemotron": _UNIFORM,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "nemotron_h": Architecture(
        layers.nemotron_h,
        states.nemotron_h,
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
        },
    ),
    "qwen3_next": Architecture(
        layers.every_nth_full("state", "full_attention_interval"),
        states.gated_delta_net,
        defaults={**_GDN, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    ),
    "qwen3_5_text": Architecture(
        layers.every_nth_full("state", "full_attention_interval"),
        states.gated_delta_net,
        defaults={**_GDN, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "qwen3_5_moe_text": Architecture(
        layers.every_nth_full("state", "full_attention_interval"),
        states.gated_delta_net,
        defaults={**_GDN, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    ),
    "jamba": Architecture(
        layers.jamba,
        states.mamba1,
        defaults={
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "num_key_value_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "bamba": Architecture(layers.bamba, states.mamba2, listed=False, defaults={**_MAMBA2, "num_key_value_heads": 8}),
    "granitemoehybrid": Architecture(layers.all_state, states.mamba2, defaults=_MAMBA2),
    "falcon_h1": Architecture(
        layers.both, states.mamba2, listed=False, defaults={**_MAMBA2, "num_key_value_heads": 8, "mamba_d_ssm": 1024}
    ),
    "lfm2": Architecture(layers.lfm2, states.short_conv, defaults={"num_key_value_heads": 8, "conv_L_cache": 3}),
    "lfm2_moe": Architecture(layers.lfm2, states.short_conv, defaults={"num_key_value_heads": 8, "conv_L_cache": 3}),
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "mamba2": Architecture(
        layers.all_state,
        states.pure_mamba2,
        listed=False,
        defaults={"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4},
    ),
}
