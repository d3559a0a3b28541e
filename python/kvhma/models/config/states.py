# SPDX-License-Identifier: Apache-2.0
"""The recurrent state of an architecture, from the fields of its configuration."""

from __future__ import annotations

from dataclasses import replace

from kvhma.errors import ConfigError
from kvhma.models.config.fields import Fields
from kvhma.models.table import State, StateKind
from kvhma.text import quote


def mamba2(fields: Fields, dtype: str) -> State:
    """Read a Mamba2 state as Bamba, Granite 4 and Falcon-H1 write it."""
    heads = fields.size("mamba_n_heads")
    width = fields.optional_size("mamba_d_ssm") or fields.size("mamba_expand") * fields.size("hidden_size")
    head = fields.size("mamba_d_head", derived=width // heads)
    if heads * head != width:
        raise ConfigError(f"mamba_d_head {head} of {heads} heads: together they must have {width} channels")
    return _mamba2(fields, heads, head, fields.size("mamba_d_state"), fields.size("mamba_n_groups"), dtype)


def pure_mamba2(fields: Fields, dtype: str) -> State:
    """Read the state of Mamba2 itself."""
    heads, head = fields.size("num_heads"), fields.size("head_dim")
    return _mamba2(fields, heads, head, fields.size("state_size"), fields.size("n_groups"), dtype)


def nemotron_h(fields: Fields, dtype: str) -> State:
    """Read a Mamba2 state as NemotronH writes it; the recurrent part is float32 unless the file has another dtype."""
    heads, head = fields.size("mamba_num_heads"), fields.size("mamba_head_dim")
    groups = fields.size("n_groups", "mamba_n_groups")
    ssm = _dtype_of(fields, "mamba_ssm_cache_dtype", dtype, "float32")
    return replace(_mamba2(fields, heads, head, fields.size("ssm_state_size"), groups, dtype), ssm_dtype=ssm)


def _mamba2(fields: Fields, heads: int, head: int, columns: int, groups: int, dtype: str) -> State:
    if heads % groups:
        raise ConfigError(f"n_groups {groups}: must divide the {heads} heads of the state")
    return _state("mamba2", _taps(fields, "mamba_d_conv", "conv_kernel"), (heads, head, columns), groups, dtype)


def mamba1(fields: Fields, dtype: str) -> State:
    """Read a Mamba1 state as Jamba and Mamba write it: each channel is a head of one row."""
    expand = fields.size("mamba_expand", "expand")
    inner = expand * fields.size("hidden_size")
    if fields.get("mamba_expand") is None:  # Mamba's own field has the name of an MLP field of other models
        inner = fields.size("intermediate_size", derived=inner)
    taps, columns = _taps(fields, "mamba_d_conv", "conv_kernel"), fields.size("mamba_d_state", "state_size")
    return _state("mamba1", taps, (inner, 1, columns), 0, dtype)


def gated_delta_net(fields: Fields, dtype: str) -> State:
    """Read the state of a gated delta net: key heads are its groups."""
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key, value = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    state = _state("gdn", _taps(fields, "linear_conv_kernel_dim"), (values, value, key), keys, dtype)
    return replace(state, ssm_dtype=_dtype_of(fields, "mamba_ssm_dtype", dtype))


def kimi_delta(fields: Fields, dtype: str) -> State:
    """Read the state of Kimi delta attention; its recurrent part is float32."""
    lists = fields.get("linear_attn_config")
    linear = Fields(lists if isinstance(lists, dict) else {}, {"short_conv_kernel_size": 4})
    heads, width = linear.size("num_heads"), linear.size("head_dim")
    state = _state("kda", _taps(linear, "short_conv_kernel_size"), (heads, width, width), heads, dtype)
    return replace(state, ssm_dtype="float32")


def zamba2(fields: Fields, dtype: str) -> State:
    """Read a Mamba2 state as Zamba2 writes it."""
    heads, width = fields.size("n_mamba_heads"), fields.size("mamba_expand") * fields.size("hidden_size")
    if width % heads:
        raise ConfigError(f"n_mamba_heads {heads}: must divide the {width} channels of the state")
    return _mamba2(fields, heads, width // heads, fields.size("mamba_d_state"), fields.size("mamba_ngroups"), dtype)


def short_conv(fields: Fields, dtype: str) -> State:
    """Read the state of a short convolution: its last inputs, without a recurrent part."""
    channels = fields.size("conv_dim", derived=fields.size("hidden_size"))
    return _state("short_conv", _taps(fields, "conv_L_cache"), (channels, 1, 0), 0, dtype)


def linear_attention(fields: Fields, dtype: str) -> State:
    """Read the state of linear attention: a matrix of each query head."""
    heads = fields.size("num_attention_heads")
    width = fields.size("head_dim", derived=fields.size("hidden_size") // heads)
    return State("linear", 0, 1, heads, width, width, 0, dtype, dtype)


def _state(kind: StateKind, taps: int, heads: tuple[int, int, int], groups: int, dtype: str) -> State:
    """Return a state; `heads` has their number, rows and columns, as in :class:`State`."""
    count, rows, columns = heads
    return State(
        kind=kind,
        conv_dim=count * rows + 2 * groups * columns,
        d_conv=taps,
        n_heads=count,
        head_dim=rows,
        d_state=columns,
        n_groups=groups,
        conv_dtype=dtype,
        ssm_dtype=dtype,
    )


def _taps(fields: Fields, *names: str) -> int:
    taps = fields.size(*names)
    if taps < 2:
        raise ConfigError(f"{fields.called(*names)} {taps}: a convolution of less than 2 taps has no state")
    return taps


def _dtype_of(fields: Fields, name: str, dtype: str, usual: str | None = None) -> str:
    value = fields.get(name) or usual
    if value in (None, "auto"):
        return dtype
    if value not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"{name} {quote(value)}: known are float32, bfloat16, float16")
    return str(value)
