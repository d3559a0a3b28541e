# SPDX-License-Identifier: Apache-2.0
"""Rules by which architectures order their layers: ``full``, ``sliding``, ``chunked``, ``none`` or ``state``.

``state`` stands for the recurrent state of the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvhma.errors import ConfigError
from kvhma.models.config.fields import Fields
from kvhma.models.table import INDEX_KEY
from kvhma.text import quote

WORDS: Mapping[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "mlp": "none",
    "moe": "none",
}
"""Meaning of the words of a layer list; ``state`` is the recurrent state of the architecture."""

_NEMOTRON_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none"}


def everywhere(kind: str) -> Callable[[Fields], list[str]]:
    """Return a reader of models whose layers are all of one kind."""
    return lambda fields: [kind] * fields.layers()


uniform = everywhere("full")
all_state = everywhere("state")
both = everywhere("full+state")
"""Attention and state in each layer."""


def windowed(fields: Fields) -> list[str]:
    """Windows everywhere, if there is a window."""
    return ["sliding" if fields.optional_size("sliding_window") else "full"] * fields.layers()


def late_windows(fields: Fields) -> list[str]:
    """Windows after the first layers, if they are switched on."""
    count = fields.layers()
    if not fields.get("use_sliding_window") or not fields.optional_size("sliding_window"):
        return ["full"] * count
    first = fields.get("max_window_layers")
    if not isinstance(first, int) or first < 0:
        raise ConfigError(f"max_window_layers {quote(first)}: must be an integer of at least 0")
    return ["full" if index < first else "sliding" for index in range(count)]


def every_nth_full(kind: str, *names: str) -> Callable[[Fields], list[str]]:
    """Return a reader of models whose layers are `kind` except every n-th; n is the first given field of `names`."""

    def layers(fields: Fields) -> list[str]:
        if kind == "sliding" and not fields.optional_size("sliding_window"):
            return ["full"] * fields.layers()
        pattern = fields.get(*names)
        # Some files write the pattern out, as LLLG.
        step = len(pattern) if isinstance(pattern, str) else fields.size(*names)
        return ["full" if step and (index + 1) % step == 0 else kind for index in range(fields.layers())]

    return layers


def llama4(fields: Fields) -> list[str]:
    """Chunks in the layers with rotary embedding."""
    count = fields.layers()
    rope = fields.get("no_rope_layers")
    if rope and (not isinstance(rope, list) or len(rope) != count):
        raise ConfigError(f"no_rope_layers {quote(rope)}: must be a list of {count} numbers, one for each layer")
    if not fields.optional_size("attention_chunk_size"):
        return ["full"] * count
    step = fields.size("no_rope_layer_interval")
    flags = rope or [(index + 1) % step != 0 for index in range(count)]
    return ["chunked" if flag else "full" for flag in flags]


def indexed(fields: Fields) -> list[str]:
    """An index and its latent everywhere."""
    width = fields.size("index_head_dim")
    if width != INDEX_KEY:
        raise ConfigError(f"index_head_dim {width}: known is {INDEX_KEY}")
    return ["indexer+full"] * fields.layers()


def minimax_m3(fields: Fields) -> list[str]:
    """Heads everywhere, and an index in the layers where the list has a one."""
    count, sparse = fields.layers(), fields.get("sparse_attention_config")
    if sparse is None:
        return ["full"] * count
    flags = sparse.get("sparse_attention_freq") if isinstance(sparse, dict) else None
    if not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags):
        raise ConfigError(
            f"sparse_attention_config {quote(sparse)}: sparse_attention_freq must be a 0 or a 1 for each of the layers"
        )
    return ["indexer+full" if flag else "full" for flag in flags]


def kimi_linear(fields: Fields) -> list[str]:
    """Full attention and state in the layers that are listed, counted from one."""
    count, lists = fields.layers(), fields.get("linear_attn_config")
    full, state = (lists.get(name) if isinstance(lists, dict) else None for name in ("full_attn_layers", "kda_layers"))
    if not isinstance(full, list) or not isinstance(state, list):
        raise ConfigError(f"linear_attn_config {quote(lists)}: must say full_attn_layers and kda_layers")
    if any(type(index) is not int for index in full + state) or sorted(full + state) != [*range(1, count + 1)]:
        raise ConfigError(
            f"full_attn_layers {quote(full)}, kda_layers {quote(state)}: must be the layers 1 to {count}, each once"
        )
    return ["full" if index + 1 in full else "state" for index in range(count)]


def twice(fields: Fields) -> list[str]:
    """Two caches in each layer, which vLLM names one after the other."""
    return ["full"] * (2 * fields.size("num_layers", "num_hidden_layers"))


def nemotron_nas(fields: Fields) -> list[str]:
    """A separate number of heads in each layer, or no attention."""
    blocks, queries = fields.get("block_configs"), fields.size("num_attention_heads")
    count = fields.layers()
    if not isinstance(blocks, list) or len(blocks) != count:
        raise ConfigError(f"block_configs {quote(blocks)}: must be a list of {count} objects, one for each layer")
    return [_nas_layer(f"block_configs[{index}]", block, queries) for index, block in enumerate(blocks)]


def _nas_layer(place: str, block: Any, queries: int) -> str:
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict):
        raise ConfigError(f"{place} {quote(block)}: must have an object attention")
    for name in ("replace_with_linear", "window_length", "num_sink_tokens"):
        if attention.get(name):
            raise ConfigError(f"{place}.attention.{name} {quote(attention[name])}: is not known")
    if attention.get("no_op"):
        return "none"
    group = Fields(attention, {}).size("n_heads_in_group")
    if queries % group:
        raise ConfigError(f"{place}.attention.n_heads_in_group {group}: must divide {queries} heads")
    return f"heads{queries // group}"


def zamba2(fields: Fields) -> list[str]:
    """State in every layer, and attention in the hybrid layers, where vLLM counts attention first.

    transformers 5 calls linear_attention what older files call mamba.
    """
    listed = fields.words("layers_block_type", "layer_types")
    if listed is None or set(listed[1]) - {"mamba", "linear_attention", "hybrid"} or len(listed[1]) != fields.layers():
        found = None if listed is None else listed[1]
        raise ConfigError(
            f"layers_block_type {quote(found)}: must be mamba, linear_attention or hybrid for each of the layers"
        )
    return ["full"] * listed[1].count("hybrid") + ["state"] * len(listed[1])


def mimo(fields: Fields) -> list[str]:
    """Windows where the pattern has a one."""
    pattern = fields.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) != fields.layers() or any(flag not in (0, 1) for flag in pattern):
        raise ConfigError(f"hybrid_layer_pattern {quote(pattern)}: must be a 0 or a 1 for each of the layers")
    return ["sliding" if flag else "full" for flag in pattern]


def nemotron_h(fields: Fields) -> list[str]:
    """One letter for each layer."""
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
        raise ConfigError(
            f"hybrid_override_pattern {quote(pattern)}: must be a text of {', '.join(_NEMOTRON_LETTERS)}, "
            "one letter for each layer"
        )
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def nemotron_h_puzzle(fields: Fields) -> list[str]:
    """One letter for each layer; blocks may differ in their experts only.

    Remote code gives each layer the fields of its block, so no field of a block with a cache is read here or by vLLM's
    class without that code.
    """
    kinds, blocks = nemotron_h(fields), fields.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != len(kinds):
        raise ConfigError(f"block_configs {quote(blocks)}: must be a list of {len(kinds)} objects, one for each layer")
    for index, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        if kind != "none" and (not isinstance(block, dict) or set(block) - {"block_type"}):
            raise ConfigError(
                f"block_configs[{index}] {quote(block)}: other fields of a layer with a cache are not known"
            )
    return kinds


def step3p5(fields: Fields) -> list[str]:
    """Windows in the listed layers, of which files have some for drafts at the end; without a list in every second."""
    count, listed = fields.layers(), fields.words("layer_types")
    words = listed[1][:count] if listed else ["sliding_attention", "full_attention"] * count
    if set(words) - {"full_attention", "sliding_attention"} or len(words) < count:
        raise ConfigError(f"layer_types {quote(words)}: must be full_attention or sliding_attention for each layer")
    fields.size("sliding_window")
    return [WORDS[word] for word in words[:count]]


def jamba(fields: Fields) -> list[str]:
    """Full attention once in a period."""
    period = fields.size("attn_layer_period")
    offset = fields.get("attn_layer_offset")
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ConfigError(f"attn_layer_offset {quote(offset)}: must be less than attn_layer_period {period}")
    return ["full" if index % period == offset else "state" for index in range(fields.layers())]


def bamba(fields: Fields) -> list[str]:
    """Full attention in the listed layers."""
    full = fields.indices("attn_layer_indices") or set()
    return ["full" if index in full else "state" for index in range(fields.layers())]


def lfm2(fields: Fields) -> list[str]:
    """Full attention in the listed layers; in all layers without a list."""
    full = fields.indices("full_attn_idxs")
    return ["full" if full is None or index in full else "state" for index in range(fields.layers())]


WITHOUT_WINDOWS = frozenset(
    (
        uniform,
        twice,
        minimax_m3,
        nemotron_nas,
        nemotron_h,
        nemotron_h_puzzle,
        jamba,
        bamba,
        lfm2,
        all_state,
        both,
        zamba2,
    )
)
"""Rules without windows. An engine still gives every layer a window if the file has one."""
