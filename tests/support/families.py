# SPDX-License-Identifier: Apache-2.0
"""Configurations of families whose heads, kinds or layers differ, cut down to what a cache depends on.

Heads, their sizes and the state's sizes are those of real models where these are known; everything else is small.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
PICTURES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 16, "out_hidden_size": 1024}
GEMMA_4 = {
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 12,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _own(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**COMMON, "architectures": [architecture], "model_type": model_type, **fields}


def _gemma4(**fields: Any) -> dict[str, Any]:
    return _own("Gemma4ForCausalLM", "gemma4_text", **GEMMA_4, **fields)


def _nested(architecture: str, model_type: str, text: str, vision: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "text_config": {**COMMON, "model_type": text, **fields},
        "vision_config": {**PICTURES, **vision},
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma-4": _gemma4(),
    "gemma-4, 4 global heads": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=4),
    "gemma-4, 2 global heads": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=2),
    "gemma-4, 1 global head": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma-4, global heads that do not count": _gemma4(num_global_key_value_heads=4),
    "gemma-4, shared layers": _gemma4(num_kv_shared_layers=6),
    "gemma-3n": _own(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        num_hidden_layers=15,
        num_kv_shared_layers=5,
        sliding_window=512,
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
    ),
    "DeepSeek-V3.2": _own(
        "DeepseekV32ForCausalLM", "deepseek_v32", **LATENT, index_topk=2048, index_head_dim=128, index_n_heads=64
    ),
    "Kimi-Linear": _own(
        "KimiLinearForCausalLM",
        "kimi_linear",
        **{**LATENT, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 9},
        num_hidden_layers=9,
        num_key_value_heads=16,
        linear_attn_config={
            "full_attn_layers": [4, 8, 9],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        num_experts_per_token=2,
        num_shared_experts=1,
        mla_use_nope=True,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        num_expert_group=1,
        hidden_act="silu",
    ),
    "Zamba2": _own(
        "Zamba2ForCausalLM",
        "zamba2",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_mamba_heads=32,
        mamba_ngroups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        num_mem_blocks=1,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        adapter_rank=16,
        use_mem_rope=True,
    ),
    "MiMo-V2-Flash": _own(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        num_hidden_layers=12,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=192,
        v_head_dim=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        sliding_window=128,
        sliding_window_size=128,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        moe_layer_freq=[0] * 12,
        add_swa_attention_sink_bias=True,
        layernorm_epsilon=1e-5,
        attention_bias=False,
        partial_rotary_factor=0.334,
        rope_theta=10000.0,
        swa_rope_theta=10000.0,
        attention_value_scale=0.7,
        hidden_act="silu",
    ),
    "Qwen3-VL-MoE": _nested(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        {"deepstack_visual_indexes": [0]},
        **EXPERTS,
        head_dim=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20]},
    ),
    "Qwen2.5-VL": {
        **_own("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        "vision_config": {**PICTURES, "fullatt_block_indexes": [0]},
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 8, 8]},
    },
    "GLM-4.5V": _nested(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        "glm4v_moe_text",
        {},
        n_routed_experts=8,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=False,
        head_dim=128,
        rope_parameters={**ROPE, "mrope_section": [16, 8, 8], "partial_rotary_factor": 0.5},
    ),
    "phi": _own("PhiForCausalLM", "phi", num_key_value_heads=None, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
    "GPT-NeoX": {
        name: value for name, value in _own("GPTNeoXForCausalLM", "gpt_neox").items() if name != "num_key_value_heads"
    },
    "StarCoder2": _own("Starcoder2ForCausalLM", "starcoder2", sliding_window=64),
    "StarCoder2, no window": _own("Starcoder2ForCausalLM", "starcoder2", sliding_window=None),
    "Hunyuan": _own("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=128),
    "Hunyuan-MoE": _own("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", head_dim=128, num_experts=8, moe_topk=2),
    "GLM-4.7-Flash": _own("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **LATENT, hidden_act="silu"),
}
"""By name; the reader must agree with vLLM's model class on each."""
