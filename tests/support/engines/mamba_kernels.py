# SPDX-License-Identifier: Apache-2.0
"""Decode steps of Mamba2 in plain torch, with the slots and rows that vLLM's kernels for GPUs use.

A sequence has a slot for its state and one behind it for each draft. A step begins where the last token that was
accepted ended, and keeps what follows each of its tokens until it is known how many of them are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def _sequences(indices: Any, starts: Any, accepted: Any) -> Iterator[tuple[list[int], int, int, int]]:
    """Slots, first and last token, and how many tokens of the step before were accepted, of each sequence."""
    table = indices.reshape(len(indices), -1).tolist()
    begins = list(range(len(table) + 1)) if starts is None else starts.tolist()
    counts = [1] * len(table) if accepted is None else accepted.tolist()
    for index, slots in enumerate(table):
        if slots[0] and begins[index] < begins[index + 1]:  # block 0 is padding
            yield slots, begins[index], begins[index + 1], counts[index]


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    conv_state_indices: Any,
    num_accepted_tokens: Any = None,
    query_start_loc: Any = None,
    **_: Any,
) -> Any:
    """Convolve `x` (tokens, channels) behind the rows of `conv_state` (slots, channels, rows)."""
    import torch
    from torch.nn import functional

    taps = weight.shape[1]
    out = torch.zeros_like(x)
    for slots, begin, end, accepted in _sequences(conv_state_indices, query_start_loc, num_accepted_tokens):
        state = conv_state[slots[0]]
        before = state[:, accepted - 1 : accepted + taps - 2]
        inputs = torch.cat([before, x[begin:end].T.to(state.dtype)], dim=1)
        rows = taps - 1 if num_accepted_tokens is None else taps - 2 + end - begin
        state[:, :rows] = inputs[:, -rows:]
        found = functional.conv1d(inputs[None], weight[:, None].to(state.dtype), bias, groups=len(weight))[0].T
        out[begin:end] = functional.silu(found) if activation in ("silu", "swish") else found
    return out


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    dt_bias: Any,
    *,
    state_batch_indices: Any,
    out: Any,
    num_accepted_tokens: Any = None,
    cu_seqlens: Any = None,
    **_: Any,
) -> None:
    """Advance `state` (slots, heads, width, columns) by `x` (tokens, heads, width), into `out`."""
    from torch.nn import functional

    heads = x.shape[1]
    b, c = (each.float().repeat_interleave(heads // each.shape[1], dim=1) for each in (b, c))
    step = functional.softplus(dt.float() + dt_bias)
    for slots, begin, end, accepted in _sequences(state_batch_indices, cu_seqlens, num_accepted_tokens):
        now = state[slots[accepted - 1]].float()
        for token in range(begin, end):
            width = step[token][..., None]
            now = now * (width * a).exp() + width * x[token].float()[..., None] * b[token][:, None]
            out[token] = (now * c[token][:, None]).sum(-1) + d * x[token]
            state[slots[token - begin]] = now
