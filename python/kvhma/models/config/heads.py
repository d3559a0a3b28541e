# SPDX-License-Identifier: Apache-2.0
"""Heads that differ by layer, and head sizes that do not follow from the hidden size."""

from __future__ import annotations

from kvhma.errors import ConfigError
from kvhma.models.config.fields import Fields
from kvhma.models.config.layers import nemotron_nas as nemotron_nas_layers
from kvhma.models.table import Attention, AttentionKind
from kvhma.text import quote


def gemma4(fields: Fields) -> tuple[Attention, ...]:
    """Full attention has longer heads, and another number of them if V equals K.

    transformers 5 writes this as differences of each layer with full attention.
    """
    if fields.get("per_layer_config") is not None:
        return (_of_each_full_layer(fields),)
    shared = fields.get("attention_k_eq_v")
    if not isinstance(shared, bool):
        raise ConfigError(f"attention_k_eq_v {quote(shared)}: must be true or false")
    heads = fields.size("num_key_value_heads")
    if shared:
        heads = fields.optional_size("num_global_key_value_heads") or heads
    return (Attention("full", heads, fields.size("global_head_dim")),)


def _of_each_full_layer(fields: Fields) -> Attention:
    differing, listed = fields.get("per_layer_config"), fields.words("layer_types")
    if not isinstance(differing, dict) or listed is None:
        raise ConfigError(f"per_layer_config {quote(differing)}: must be an object, with layer_types next to it")
    full = {index for index, word in enumerate(listed[1]) if word == "full_attention"}
    numbers = {int(name) for name in differing if isinstance(name, str) and name.isdecimal() and len(name) < 6}
    forms = [form for form in differing.values() if form == next(iter(differing.values()))]
    form = forms[0] if forms else {}
    known = {"head_dim", "num_key_value_heads"}
    if numbers != full or len(forms) != len(full) or not isinstance(form, dict) or set(form) - known:
        raise ConfigError(
            f"per_layer_config {quote(differing)}: must give head_dim and num_key_value_heads of each layer with full "
            "attention, the same ones"
        )
    # Fields that do not differ are left out.
    own = Fields(form, {name: fields.size(name) for name in known})
    return Attention("full", own.size("num_key_value_heads"), own.size("head_dim"))


def minimax_m3(fields: Fields) -> tuple[Attention, ...]:
    """An index has one key for each token, in bfloat16 for every model dtype."""
    sparse = fields.get("sparse_attention_config")
    if sparse is None:
        return ()
    own = Fields(sparse if isinstance(sparse, dict) else {}, {})
    return (Attention("indexer", 1, own.size("sparse_index_dim"), dtype="bfloat16"),)


def falcon(fields: Fields) -> int:
    """One head, as many as queries, or a field of the newer architecture."""
    flags = [fields.get(name) for name in ("new_decoder_architecture", "multi_query")]
    for flag, name in zip(flags, ("new_decoder_architecture", "multi_query"), strict=True):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} {quote(flag)}: must be true or false")
    queries = fields.size("num_attention_heads")
    heads = fields.size("num_kv_heads", derived=queries) if flags[0] else 1 if flags[1] else queries
    unread = "num_key_value_heads"
    if fields.called(unread) == unread and fields.get(unread) not in (None, heads):
        raise ConfigError(
            f"{unread} {quote(fields.get(unread))}: must be {heads}, the value of the fields that the class reads"
        )
    return heads


def nemotron_nas(fields: Fields) -> tuple[Attention, ...]:
    """Each layer has its own number of heads, which `kvhma.models.config.layers.nemotron_nas` puts into its name."""
    queries = fields.size("num_attention_heads")
    width = fields.size("head_dim", derived=fields.size("hidden_size") // queries)
    counts = sorted({word for word in nemotron_nas_layers(fields) if word != "none"})
    return tuple(Attention("full", int(word.removeprefix("heads")), width, name=word) for word in counts)


def mimo(fields: Fields) -> tuple[Attention, ...]:
    """Windows have other heads than full attention."""
    queries, others = fields.size("num_attention_heads"), fields.size("swa_num_attention_heads")
    if queries != others:
        raise ConfigError(f"swa_num_attention_heads {others}, num_attention_heads {queries}: must be equal")
    heads, width = fields.size("swa_num_key_value_heads"), fields.size("swa_head_dim")
    return (Attention("sliding", heads, width, fields.size("swa_v_head_dim", derived=width)),)


def step3p5(fields: Fields) -> tuple[Attention, ...]:
    """Layers of one type, usually those with windows, have other heads."""
    differing = fields.get("attention_other_setting")
    if not differing:
        return ()
    own = Fields(differing if isinstance(differing, dict) else {}, {"head_dim": fields.get("head_dim")})
    kinds: dict[str, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding"}
    kind = kinds.get(str(own.get("attention_type")))
    if kind is None:
        raise ConfigError(f"attention_other_setting {quote(differing)}: attention_type must be {' or '.join(kinds)}")
    return (Attention(kind, own.size("num_attention_groups"), own.size("head_dim")),)


def zamba2(fields: Fields) -> int:
    """Attention runs over the hidden state and the embedding together, so heads are twice as long."""
    queries = fields.size("num_attention_heads")
    width = 2 * fields.size("hidden_size")
    if width % queries:
        raise ConfigError(f"num_attention_heads {queries}: must divide {width}, twice the hidden_size")
    return width // queries
