# SPDX-License-Identifier: Apache-2.0
"""Kernels of Mamba in plain torch, with the slots and rows of vLLM's GPU kernels, where the CPU kernels fail.

* Mamba1: prefill and decode.
* Mamba2 with a prefix cache: the state at the end of a chunk, and the place where a prefill stores it.
* Mamba2 with drafts: decode. A sequence has one slot for its state and one more for each draft. A step begins where the
  last accepted token ended. It stores the state after each of its tokens until vLLM knows how many it accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def _sequences(indices: Any, starts: Any, accepted: Any) -> Iterator[tuple[list[int], int, int, int]]:
    """For each sequence: slots, first and last token, and how many tokens of the previous step were accepted."""
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
    """Convolve `x` (tokens, channels) with the preceding rows in `conv_state` (slots, channels, rows)."""
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


def selective_scan(
    u: Any,
    states: Any,
    delta: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    delta_bias: Any,
    *,
    delta_softplus: bool,
    cache_indices: Any,
    has_initial_state: Any,
    query_start_loc: Any,
    **_: Any,
) -> Any:
    """Advance `states` (slots, channels, columns) by `u` (channels, tokens) and return what each token makes of them.

    `delta` and the gate `z` are (channels, tokens), `a` (channels, columns), `b` and `c` (columns, tokens).
    """
    import torch
    from torch.nn import functional

    step = delta.float() + (0 if delta_bias is None else delta_bias[:, None])
    step = functional.softplus(step) if delta_softplus else step
    out = torch.zeros_like(u)
    starts, begun = query_start_loc.tolist(), has_initial_state.tolist()
    for index, slot in enumerate(cache_indices.tolist()):
        if not slot:  # block 0 is padding
            continue
        now = states[slot].float() if begun[index] else torch.zeros_like(states[slot], dtype=torch.float32)
        for token in range(starts[index], starts[index + 1]):
            width = step[:, token, None]
            now = now * (width * a).exp() + width * u[:, token, None].float() * b[:, token].float()
            out[:, token] = now @ c[:, token].float() + d * u[:, token]
        states[slot] = now
    return out * functional.silu(z)


def mamba_1_step(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    dt_bias: Any,
    *,
    z: Any,
    state_batch_indices: Any,
    out: Any,
    **_: Any,
) -> None:
    """Advance `state` (slots, channels, columns) by `x` (tokens, channels), into `out`, which `z` is the gate of."""
    from torch.nn import functional

    # Mamba2 with one head.
    one = (each[:, None] for each in (state, x, dt))
    selective_state_update(
        *one,
        a[None],
        b[:, None],
        c[:, None],
        d[None],
        dt_bias[None],
        state_batch_indices=state_batch_indices,
        out=out[:, None],
    )
    out *= functional.silu(z)


def chunk_scan(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    *,
    out: Any,
    cu_seqlens: Any,
    cu_chunk_seqlens: Any,
    last_chunk_indices: Any,
    seq_idx: Any,
    initial_states: Any = None,
    return_intermediate_states: bool = False,
    **more: Any,
) -> Any:
    """Make vLLM's CPU kernel, which returns a sequence's last state only, return the state after each chunk too."""
    import torch
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    def scan(tokens: slice, cuts: Any, chunk_cuts: Any, last: Any, of: Any, states: Any) -> Any:
        cut = {"cu_seqlens": cuts, "cu_chunk_seqlens": chunk_cuts, "last_chunk_indices": last, "seq_idx": of}
        given = (x[tokens], dt[tokens], a, b[tokens], c[tokens])
        return mamba_chunk_scan_combined_varlen(*given, out=out[tokens], initial_states=states, **cut, **more)

    if not return_intermediate_states:
        return scan(slice(None), cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, initial_states)
    cuts, sequences = cu_chunk_seqlens.tolist(), seq_idx.tolist()
    zero = torch.zeros(1, dtype=cu_seqlens.dtype)
    found: list[Any] = []
    for chunk, sequence in enumerate(sequences):
        if chunk and sequences[chunk - 1] == sequence:
            states = found[-1]
        else:
            states = None if initial_states is None else initial_states[sequence : sequence + 1]
        begin, end = cuts[chunk : chunk + 2]
        whole = torch.tensor([0, end - begin], dtype=cu_seqlens.dtype)
        found.append(scan(slice(begin, end), whole, whole, zero, zero, states))
    return torch.cat(found)


def store_prefill_checkpoint(
    checkpoint: Any,
    chunk_idx: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    query_start_loc: Any,
    *,
    state_len: int,
) -> None:
    """Write the state at one point of each prefill to a separate slot.

    `x` is (channels, tokens), `conv_state` (slots, channels, rows), `ssm_state` (slots, heads, width, columns).
    """
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset > 0:  # else this row has no checkpoint
            slot, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
            conv_state[slot, :, :state_len] = x[:, end - state_len : end]
            ssm_state[slot] = chunk_states[int(chunk_idx[row])]
