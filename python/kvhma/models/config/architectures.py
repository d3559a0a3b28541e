# SPDX-License-Identifier: Apache-2.0
"""The supported architectures, by ``model_type``.

A file may leave out fields that have a default in the architecture's own configuration class. The defaults for layers,
heads and windows are recorded (`kvhma.models.config.recorded`); those for states and patterns are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvhma.models.config import heads, layers, states
from kvhma.models.config.fields import Fields
from kvhma.models.table import Attention, State


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the configuration of one ``model_type`` describes the cache.

    Attributes:
        layers: returns the kind of every layer if the file has no list of them.
        state: reads the recurrent state, if the architecture has a state.
        mla: whether attention caches a latent.
        listed: whether a list of layers in the file counts; otherwise only `layers` does.
        defaults: values of fields that a file may leave out.
        heads: returns the layers whose heads differ from the model's, if the architecture has such layers.
        width: returns the items of a head, if the architecture has its own rule.
        kv_heads: returns the heads of K and V, if the architecture has its own rule.
        reads: fields about the cache that most architectures do not have and that these functions read.
        refused: fields that change the cache of this architecture only, and how.
        window_more: additional tokens of a window beyond `sliding_window`.
    """

    layers: Callable[[Fields], list[str]]
    state: Callable[[Fields, str], State] | None = None
    mla: bool = False
    listed: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    heads: Callable[[Fields], tuple[Attention, ...]] | None = None
    width: Callable[[Fields], int] | None = None
    kv_heads: Callable[[Fields], int] | None = None
    reads: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    window_more: int = 0


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
_EVERY_NTH_FULL = layers.every_nth_full("sliding", "sliding_window_pattern", "_sliding_window_pattern")

GENERAL = Architecture(layers.windowed)
"""For decoders that are not named here; `kvhma.models.config.general` decides which."""

_OWN_SIZE = {"head_dim": "a separate head size"}
_UNLISTED = {"layer_types": "windows in some layers"}
"""For classes that give each layer the same window, even if the file has a list."""


_UNIFORM = Architecture(layers.uniform)
_MLA = Architecture(
    layers.uniform,
    mla=True,
    listed=False,
    reads=frozenset(("kv_lora_rank", "v_head_dim")),
)
_INDEXED = replace(
    _MLA,
    layers=layers.indexed,
    defaults={"index_topk": 2048, "index_head_dim": 128},
    reads=_MLA.reads | {"index_topk"},
)
# The file must have this field: without it the model's own class fails.
_HUNYUAN = Architecture(layers.uniform, width=lambda fields: fields.size("head_dim"))
_QWEN_MOE = Architecture(
    layers.late_windows, defaults=_QWEN, refused={**_UNLISTED, "use_sliding_window": "windows in some layers"}
)
_QWEN_VL = Architecture(
    layers.late_windows,
    defaults={**_QWEN, "num_key_value_heads": 8, "max_window_layers": 80},
    refused=_OWN_SIZE,
)
_WINDOWED = Architecture(layers.windowed)
_FOURTH_FULL = Architecture(_EVERY_NTH_FULL, defaults={"sliding_window_pattern": 4})
_QWEN_GDN = Architecture(
    layers.every_nth_full("state", "full_attention_interval"),
    states.gated_delta_net,
    defaults=_GDN,
)
_LFM2 = Architecture(layers.lfm2, states.short_conv, defaults={"conv_L_cache": 3})
_MINIMAX_M3 = Architecture(
    layers.minimax_m3,
    listed=False,
    heads=heads.minimax_m3,
    defaults={
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "hidden_size": 6144,
        "head_dim": 128,
    },
)
_MULTI_HEAD = Architecture(layers.uniform, refused={"num_key_value_heads": "heads that share K and V"})
_MAMBA1 = Architecture(
    layers.all_state, states.mamba1, listed=False, defaults={"conv_kernel": 4, "state_size": 16, "expand": 2}
)

_NEMOTRON_H = Architecture(
    layers.nemotron_h,
    states.nemotron_h,
    defaults={"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    reads=frozenset(("attention_head_dim",)),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _UNIFORM,
    "mistral": _WINDOWED,
    "ministral": _WINDOWED,
    "mixtral": Architecture(layers.windowed, refused=_UNLISTED),
    "qwen2": Architecture(layers.late_windows, defaults=_QWEN),
    "qwen2_moe": _QWEN_MOE,
    "qwen3": Architecture(layers.late_windows, defaults=_QWEN),
    "qwen3_moe": _QWEN_MOE,
    "phi3": _WINDOWED,
    "phi3_v": _WINDOWED,
    "phi4mm": _WINDOWED,
    "minicpm": Architecture(layers.windowed, refused={**_OWN_SIZE, **_UNLISTED}),
    "gemma": _UNIFORM,
    "gemma2": Architecture(_EVERY_NTH_FULL, defaults={"sliding_window_pattern": 2}),
    "gemma3_text": Architecture(_EVERY_NTH_FULL, defaults={"sliding_window_pattern": 6}),
    "gemma3n_text": Architecture(
        _EVERY_NTH_FULL,
        defaults={"sliding_window_pattern": 5, "num_kv_shared_layers": 15},
        reads=frozenset(("num_kv_shared_layers",)),
    ),
    "gemma4_text": Architecture(
        _EVERY_NTH_FULL,
        defaults={
            "sliding_window_pattern": 6,
            "global_head_dim": 512,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
        },
        heads=heads.gemma4,
        reads=frozenset(
            (
                "num_kv_shared_layers",
                "global_head_dim",
                "num_global_key_value_heads",
                "attention_k_eq_v",
                "per_layer_config",
            )
        ),
    ),
    "gpt_oss": Architecture(_EVERY_NTH_FULL, defaults={"sliding_window_pattern": 2}),
    "llama4_text": Architecture(layers.llama4, defaults={"no_rope_layer_interval": 4}),
    "cohere": _UNIFORM,
    # A query sees as many tokens before its own.
    "cohere2": replace(_FOURTH_FULL, window_more=1),
    "cohere2_moe": replace(_FOURTH_FULL, window_more=1),
    "exaone4": _FOURTH_FULL,
    "olmo": _UNIFORM,
    "olmo2": _UNIFORM,
    "olmo3": _FOURTH_FULL,
    "olmoe": _UNIFORM,
    "granite": _UNIFORM,
    "granitemoe": _UNIFORM,
    "glm": _UNIFORM,
    "glm4": _UNIFORM,
    "glm4_moe": _UNIFORM,
    "glm4v_moe_text": _UNIFORM,
    "glm4_moe_lite": replace(_MLA, refused={"head_dim": "a rotary part of another size"}),
    "dots1": Architecture(layers.late_windows, defaults={**_QWEN, "max_window_layers": 62}),
    "qwen2_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_omni_text": Architecture(layers.late_windows, defaults=_QWEN),
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_vl_moe_text": _UNIFORM,
    "qwen3_omni_moe_text": _UNIFORM,
    "falcon": Architecture(
        layers.uniform,
        defaults={"multi_query": True, "new_decoder_architecture": False},
        kv_heads=heads.falcon,
        reads=frozenset(("multi_query", "new_decoder_architecture")),
    ),
    "gpt_bigcode": Architecture(
        layers.uniform,
        defaults={"multi_query": True, "new_decoder_architecture": False},
        kv_heads=heads.falcon,
        reads=frozenset(("multi_query",)),
    ),
    "phi": _UNIFORM,
    "gpt_neox": _MULTI_HEAD,
    "starcoder2": _WINDOWED,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "mimo_v2_flash": Architecture(
        layers.mimo,
        listed=False,
        heads=heads.mimo,
        reads=frozenset(("v_head_dim", "swa_num_key_value_heads", "swa_head_dim", "hybrid_layer_pattern")),
    ),
    "step3p5": Architecture(
        layers.step3p5,
        listed=False,
        heads=heads.step3p5,
        kv_heads=lambda fields: fields.size("num_attention_groups"),
    ),
    "minimax_m2": _UNIFORM,
    "minimax_m3_text": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "nemotron": _UNIFORM,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": replace(_MLA, defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "axk1": _MLA,
    "mistral4": _MLA,
    "longcat_flash": replace(_MLA, layers=layers.twice),
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "nemotron-nas": Architecture(
        layers.nemotron_nas, listed=False, heads=heads.nemotron_nas, reads=frozenset(("block_configs",))
    ),
    "olmo_hybrid": Architecture(
        layers.every_nth_full("state", "full_attention_interval"),
        states.gated_delta_net,
        defaults={"linear_conv_kernel_dim": 4, "full_attention_interval": 4},
        refused=_OWN_SIZE,
    ),
    "kimi_linear": Architecture(
        layers.kimi_linear,
        states.kimi_delta,
        mla=True,
        listed=False,
        reads=_MLA.reads | {"linear_attn_config"},
    ),
    "bailing_hybrid": Architecture(
        layers.every_nth_full("state", "layer_group_size"),
        states.linear_attention,
        mla=True,
        listed=False,
        defaults={"layer_group_size": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        reads=_MLA.reads,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_puzzle": replace(
        _NEMOTRON_H,
        layers=layers.nemotron_h_puzzle,
        listed=False,
        reads=_NEMOTRON_H.reads | {"block_configs"},
    ),
    "qwen3_next": _QWEN_GDN,
    "qwen3_5_text": _QWEN_GDN,
    "qwen3_5_moe_text": _QWEN_GDN,
    "jamba": Architecture(
        layers.jamba,
        states.mamba1,
        defaults={
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "bamba": Architecture(layers.bamba, states.mamba2, listed=False, defaults=_MAMBA2),
    "granitemoehybrid": Architecture(layers.all_state, states.mamba2, defaults=_MAMBA2, refused=_OWN_SIZE),
    "falcon_h1": Architecture(layers.both, states.mamba2, listed=False, defaults={**_MAMBA2, "mamba_d_ssm": 1024}),
    "zamba2": Architecture(
        layers.zamba2,
        states.zamba2,
        listed=False,
        defaults={
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
        },
        width=heads.zamba2,
        reads=frozenset(("attention_head_dim",)),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "mamba2": Architecture(
        layers.all_state,
        states.pure_mamba2,
        listed=False,
        defaults={"num_heads": 128, "n_groups": 8, "state_size": 128, "conv_kernel": 4},
    ),
}
