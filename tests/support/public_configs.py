# SPDX-License-Identifier: Apache-2.0
"""Configurations of architectures without a separate rule, with the values of a public checkpoint.

Fields that do not affect a cache are here only where vLLM's class requires them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROPE = {"rope_theta": 10000.0, "max_position_embeddings": 4096}


def own(
    architecture: str, model_type: str, layers: int | None, hidden: int, heads: int, kv_heads: int | None, **more: Any
) -> dict[str, Any]:
    form = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 256,
        "vocab_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **ROPE,
        **more,
    }
    return {name: value for name, value in form.items() if value is not None}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

PUBLIC: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By model. The experts of MiniMax-M3 have an activation that no kernel for CPUs has; they cache nothing."""
