# SPDX-License-Identifier: Apache-2.0
"""Configurations as real models have them, cut down to the fields that say what is cached."""

from __future__ import annotations

from typing import Any

NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "mamba_ssm_cache_dtype": "float32",
    "sliding_window": None,
}


def _gemma3(layers: int, **more: Any) -> dict[str, Any]:
    text = {"model_type": "gemma3_text", "num_hidden_layers": layers, "sliding_window": 1024, **more}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }


def _gpt_oss(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }


def _granite(hidden: int, heads: int, kv_heads: int, mamba_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 40,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


def _falcon_h1(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, groups: int) -> dict[str, Any]:
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "mamba_d_ssm": inner,
        "mamba_n_heads": inner // 128,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": groups,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    # The 4B file leaves heads and their size to the architecture's defaults.
    "gemma-3-4b": _gemma3(34, hidden_size=2560),
    "gemma-3-12b": _gemma3(48, hidden_size=3840, num_attention_heads=16, num_key_value_heads=8, head_dim=256),
    "gemma-3-27b": _gemma3(62, hidden_size=5376, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "Llama-4-Scout-17B-16E": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 48,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "no_rope_layers": [],
        },
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B": NEMOTRON_3_NANO,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv": {
        **NEMOTRON_3_NANO,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
    # It does not name the state's dtype, the architecture's default is float32.
    "Nemotron-H-8B": {
        **{name: value for name, value in NEMOTRON_3_NANO.items() if name != "mamba_ssm_cache_dtype"},
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_key_value_heads": 8,
        "mamba_num_heads": 128,
    },
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "num_hidden_layers": 24,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "mamba_ssm_dtype": "float32",
        },
    },
    "granite-4.0-h-tiny": _granite(1536, 12, 4, 48),
    "granite-4.0-h-small": _granite(4096, 32, 8, 128),
    "Falcon-H1-7B": _falcon_h1(44, 3072, 12, 2, 3072, 1),
    "Falcon-H1-34B": _falcon_h1(72, 5120, 20, 4, 4096, 2),
    "Jamba-v0.1": {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 32,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}
"""By the name the built-in table has for the model."""
