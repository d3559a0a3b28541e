# SPDX-License-Identifier: Apache-2.0
"""Tiny models of further families: those of `make families`, one for each way in which a family caches differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

FAMILIES: dict[str, Settings] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By name. Every expert is used: if a router picked another expert for a difference in the last bit, the model is no
oracle. What is special:

llama4: three layers of chunks, then one that sees everything; `interleave_moe_layer_step` leaves no layer of experts.
mimo_v2, step3p5: layers of a window have more heads than the others; `mimo_v2_wide_keys` is as the real models.
step3p5: real ones have a router with a sigmoid, which vLLM's router for CPUs lacks.
gemma3n: the last five layers read what the previous two cached.
falcon_h1: each layer has attention and a state.
zamba2: two layers share the weights of their attention, and cache separately.
qwen2_5_vl: the rotary embedding of keys and values has three positions for each token: time, height and width.
"""

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
