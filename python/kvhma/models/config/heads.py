# SPDX-License-Identifier: Apache-2.0
"""Heads that differ by layer, and sizes of heads that do not follow from the hidden size."""

from __future__ import annotations

from kvhma.errors import ConfigError
from kvhma.models.config.fields import Fields
from kvhma.models.table import Attention
from kvhma.text import quote


def gemma4(fields: Fields) -> tuple[Attention, ...]:
    """Full attention has longer heads; where K is V too, another number of them."""
    shared = fields.get("attention_k_eq_v")
    if not isinstance(shared, bool):
        raise ConfigError(f"attention_k_eq_v {quote(shared)}: must be true or false")
    heads = fields.size("num_key_value_heads")
    if shared:
        heads = fields.optional_size("num_global_key_value_heads") or heads
    return (Attention("full", heads, fields.size("global_head_dim")),)


def mimo(fields: Fields) -> tuple[Attention, ...]:
    """Windows have other heads than full attention."""
    queries, others = fields.size("num_attention_heads"), fields.size("swa_num_attention_heads")
    if queries != others:
        raise ConfigError(f"swa_num_attention_heads {others}, num_attention_heads {queries}: must be equal")
    heads, width = fields.size("swa_num_key_value_heads"), fields.size("swa_head_dim")
    return (Attention("sliding", heads, width, fields.size("swa_v_head_dim", derived=width)),)


def zamba2(fields: Fields) -> int:
    """Attention runs over the hidden state beside the embedding: heads are twice as long as they would be."""
    queries = fields.size("num_attention_heads")
    width = 2 * fields.size("hidden_size")
    if width % queries:
        raise ConfigError(f"num_attention_heads {queries}: must divide {width}, twice the hidden_size")
    return width // queries
