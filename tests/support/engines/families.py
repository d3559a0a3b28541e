# SPDX-License-Identifier: Apache-2.0
"""Tiny models of further families: those of `make families`, one for each way in which a family caches differently."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

COMMON: Settings = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA_2: Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
WINDOWS = ["sliding_attention"] * 2 + ["full_attention"]
# Every expert is used: if a router picked another expert for a difference in the last bit, the model is no oracle.
ALL_EXPERTS: Settings = {"num_experts": 2, "num_experts_per_tok": 2}

# Layers of a window have twice the heads of the others.
MIMO_V2: Settings = COMMON | {
    "model_type": "mimo_v2_flash",
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 6,
    "head_dim": 32,
    "v_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "sliding_window": 64,
    "sliding_window_size": 64,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1],
    "moe_layer_freq": [0] * 6,
    "add_swa_attention_sink_bias": True,
    "layernorm_epsilon": 1e-5,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "attention_value_scale": 0.7,
    "hidden_act": "silu",
}

FAMILIES: dict[str, Settings] = {
    "jamba": COMMON
    | ALL_EXPERTS
    | {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 16,
        "use_mamba_kernels": False,
    },
    # Three layers of chunks, then one that sees everything.
    "llama4": COMMON
    | {
        "model_type": "llama4_text",
        "max_position_embeddings": 1 << 16,
        "head_dim": 32,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 8,  # no layer of experts
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 64,
    },
    "mimo_v2": MIMO_V2,
    # As in the real models.
    "mimo_v2_wide_keys": MIMO_V2 | {"head_dim": 48, "swa_head_dim": 48},
    # The last five layers read what the previous two cached.
    "gemma3n": COMMON
    | {
        "model_type": "gemma3n_text",
        "head_dim": 32,
        "num_hidden_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 5,
        "sliding_window": 64,
        "intermediate_size": [256] * 10,
        "activation_sparsity_pattern": [0.0] * 10,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "tie_word_embeddings": True,
    },
    # Each layer has attention and a state.
    "falcon_h1": COMMON
    | MAMBA_2
    | {"model_type": "falcon_h1", "head_dim": 32, "num_hidden_layers": 3, "mamba_d_ssm": 256, "mamba_rms_norm": True},
    # Two layers share the weights of their attention, and cache separately.
    "zamba2": COMMON
    | {
        "model_type": "zamba2",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 16,
        "chunk_size": 64,
    },
    "granitemoehybrid": COMMON
    | MAMBA_2
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "attention_multiplier": 32**-0.5,
        "position_embedding_type": "nope",
    },
    "step3p5": COMMON
    | {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_hidden_layers": 6,
        "num_attention_groups": 2,
        "head_dim": 32,
        "layer_types": WINDOWS * 2,
        "sliding_window": 64,
        # Windows have more heads for queries, and more of keys and values.
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 8,
            "num_attention_groups": 4,
            "head_dim": 32,
        },
        "use_head_wise_attn_gate": True,
        "rope_theta": 10000.0,
        "moe_layers_enum": "1,4",
        "moe_num_experts": 2,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_router_activation": "softmax",  # real ones have a sigmoid, which vLLM's router for CPUs lacks
        "max_seq_len": 4096,
        "eos_token_id": [510, 511],
        "bos_token_id": 0,
    },
    "exaone4": COMMON
    | {
        "model_type": "exaone4",
        "head_dim": 32,
        "num_hidden_layers": 6,
        "layer_types": WINDOWS * 2,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
    },
    # The rotary embedding of keys and values has three positions for each token: time, height and width.
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": COMMON
        | {
            "model_type": "qwen2_5_vl_text",
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 510,
        "video_token_id": 511,
        "vision_start_token_id": 508,
        "vision_end_token_id": 509,
    },
}

Shapes = dict[str, tuple[int, ...]]


def _attention(stem: str, hidden: int, heads: int, kv_heads: int, key: int, value: int) -> Shapes:
    return {
        f"{stem}.q_proj.weight": (heads * key, hidden),
        f"{stem}.k_proj.weight": (kv_heads * key, hidden),
        f"{stem}.v_proj.weight": (kv_heads * value, hidden),
        f"{stem}.o_proj.weight": (hidden, heads * value),
    }


def _mlp(stem: str, hidden: int, width: int) -> Shapes:
    return {
        f"{stem}.gate_proj.weight": (width, hidden),
        f"{stem}.up_proj.weight": (width, hidden),
        f"{stem}.down_proj.weight": (hidden, width),
    }


def _around(settings: Settings) -> Shapes:
    hidden, tokens = settings["hidden_size"], settings["vocab_size"]
    norms = {
        f"model.layers.{layer}.{name}.weight": (hidden,)
        for layer in range(settings["num_hidden_layers"])
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    ends: Shapes = {
        "model.embed_tokens.weight": (tokens, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (tokens, hidden),
    }
    return norms | ends


def _mimo_v2(settings: Settings) -> Shapes:
    found, hidden = _around(settings), settings["hidden_size"]
    for layer, window in enumerate(settings["hybrid_layer_pattern"]):
        stem, swa = f"model.layers.{layer}", "swa_" if window else ""
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        heads, *rest = (settings[swa + name] for name in names)
        found |= _attention(f"{stem}.self_attn", hidden, heads, *rest)
        found |= _mlp(f"{stem}.mlp", hidden, settings["intermediate_size"])
        if window:
            found[f"{stem}.self_attn.attention_sink_bias"] = (heads,)
    return found


def _step3p5(settings: Settings) -> Shapes:
    found, hidden = _around(settings), settings["hidden_size"]
    other, experts = settings["attention_other_setting"], settings["moe_num_experts"]
    for layer, kind in enumerate(settings["layer_types"]):
        of = other if kind == other["attention_type"] else settings
        stem, heads = f"model.layers.{layer}", of["num_attention_heads"]
        found |= _attention(f"{stem}.self_attn", hidden, heads, of["num_attention_groups"], 32, 32)
        found[f"{stem}.self_attn.g_proj.weight"] = (heads, hidden)
        found |= {f"{stem}.self_attn.{name}.weight": (32,) for name in ("q_norm", "k_norm")}
        if str(layer) not in settings["moe_layers_enum"].split(","):
            found |= _mlp(f"{stem}.mlp", hidden, settings["intermediate_size"])
            continue
        found |= _mlp(f"{stem}.share_expert", hidden, settings["share_expert_dim"])
        each = _mlp(f"{stem}.moe", hidden, settings["moe_intermediate_size"])
        found |= {name: (experts, *shape) for name, shape in each.items()}
        found |= {f"{stem}.moe.gate.weight": (experts, hidden), f"{stem}.moe.router_bias": (experts,)}
    return found


SHAPES = {"mimo_v2_flash": _mimo_v2, "step3p5": _step3p5}
"""Tensors of the checkpoints that vLLM reads, of models that transformers does not have, or has under other names."""
