# SPDX-License-Identifier: Apache-2.0
"""Views of layers in a buffer, and the same views as parts of a geometry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from kvhma.torch.attention import AttentionSpec, MLASpec
from kvhma.torch.plots import Plot, Spec, TokenSpec
from kvhma.torch.state import StateSpec
from kvhma.torch.tensors import BLOCKS, TensorPart

View: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Of an attention or opaque layer a tensor; of state a tuple: convolution, state proper, those it has."""

_AXES = {"B": BLOCKS, "H": "heads", "N": "tokens", "C": "content"}


def make_view(buffer: torch.Tensor, spec: Spec, plot: Plot, num_blocks: int) -> View:
    """Return a layer's view of its buffer. No byte is copied.

    Returns:
        Attention: the dimensions of the spec's view, of its dtype, B counting kernel blocks. State: convolution
        ``(blocks, channels, rows)``, or rows first in order SD, and state ``(blocks, heads, ...)``. Opaque: int8
        ``(blocks, bytes)``.
    """
    if isinstance(spec, AttentionSpec | MLASpec):
        sizes = spec.sizes | {"B": num_blocks * spec.ratio}
        strides = {**plot.strides, "B": plot.strides["K"]}
        shape = tuple(sizes[letter] for letter in spec.dims)
        return _strided(buffer, spec.dtype, shape, tuple(strides[letter] for letter in spec.dims), plot.offset)
    stride = plot.strides["B"]
    if isinstance(spec, StateSpec):
        views, offset = [], plot.offset
        if spec.conv:
            views.append(_rows(buffer, spec.conv_dtype, num_blocks, stride, spec.conv_shape, offset))
        if spec.ssm_heads is not None:
            shape = (spec.ssm_heads.held, *spec.ssm_shape)
            views.append(_rows(buffer, spec.ssm_dtype, num_blocks, stride, shape, offset + spec.conv_bytes))
        return tuple(views)
    return _rows(buffer, torch.int8, num_blocks, stride, (spec.nbytes,), plot.offset)


def parts_of(spec: Spec, view: View) -> tuple[TensorPart, ...]:
    """Name the dimensions of a layer's view."""
    if isinstance(view, tuple):
        assert isinstance(spec, StateSpec)  # noqa: S101 - make_view has made it
        return _state_parts(spec, view)
    if isinstance(spec, AttentionSpec | MLASpec):
        return _token_parts(spec, view)
    assert not isinstance(spec, StateSpec)  # noqa: S101 - its view is a tuple
    return (TensorPart("opaque", view, (BLOCKS, "bytes"), dtype=spec.encoding),)


def over_layers(
    buffer: torch.Tensor,
    slots: Sequence[tuple[str, ...]],
    specs: Mapping[str, Spec],
    plots: Mapping[str, Plot],
    num_blocks: int,
    layout: str,
) -> torch.Tensor | None:
    """Return a buffer as one tensor over its layers, dimensions in the order of memory; None if they differ in form."""
    first, plot = specs[slots[0][0]], plots[slots[0][0]]
    if not isinstance(first, AttentionSpec | MLASpec):
        return None
    step = plots[slots[1][0]].offset - plot.offset if len(slots) > 1 else first.padded_bytes
    for at, slot in enumerate(slots):
        for name in slot:
            spec, other = specs[name], plots[name]
            if not isinstance(spec, AttentionSpec | MLASpec) or (spec.sizes, spec.dtype) != (first.sizes, first.dtype):
                return None
            if (other.strides, other.offset) != (plot.strides, plot.offset + at * step):
                return None
    sizes = {**first.sizes, "B": num_blocks * first.ratio, "L": len(slots)}
    strides = {**plot.strides, "B": plot.strides["K"], "L": step}
    letters = ["L", *first.dims]
    if len(slots) == 1 and layout[0] == "L":
        letters.remove("L")
    # Of dimensions with one index the layout knows the place; K and V are outside of what they tie with.
    letters.sort(key=lambda letter: (-strides[letter], layout.find(letter)))
    shape = tuple(sizes[letter] for letter in letters)
    return _strided(buffer, first.dtype, shape, tuple(strides[letter] for letter in letters), plot.offset)


def _strided(
    buffer: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a view of a buffer's bytes; strides and offset in bytes, all multiples of an item."""
    item = dtype.itemsize
    flat = buffer.view(-1)
    items = flat[: flat.numel() // item * item].view(dtype)
    return items.as_strided(shape, tuple(stride // item for stride in strides), offset // item)


def _rows(
    buffer: torch.Tensor, dtype: torch.dtype, num_blocks: int, stride: int, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a view whose blocks are dense."""
    strides = [math.prod(shape[at + 1 :]) * dtype.itemsize for at in range(len(shape))]
    return _strided(buffer, dtype, (num_blocks, *shape), (stride, *strides), offset)


def _token_parts(spec: TokenSpec, view: torch.Tensor) -> tuple[TensorPart, ...]:
    axes = tuple(_AXES[letter] for letter in spec.dims if letter != "S")
    shards = {"heads": spec.heads} if isinstance(spec, AttentionSpec) else {}
    if "H" in spec.dims and not shards:
        # The one head of a latent is no axis: other engines' latents have none.
        view, axes = view.select(spec.dims.index("H"), 0), tuple(axis for axis in axes if axis != "heads")
    if spec.kv == "packed":
        return (TensorPart("kv", view, axes, shards),)
    at = spec.dims.index("S")
    return tuple(TensorPart(name, view.select(at, index), axes, shards) for index, name in enumerate("kv"))


def _state_parts(spec: StateSpec, view: tuple[torch.Tensor, ...]) -> tuple[TensorPart, ...]:
    parts, start = [], 0
    if spec.conv:
        at = 1 if spec.conv_order == "DS" else 2
        axes = (BLOCKS, "channels", "rows") if at == 1 else (BLOCKS, "rows", "channels")
        for part in spec.conv:
            piece = view[0].narrow(at, start, part.channels.held)
            parts.append(TensorPart(part.name, piece, axes, {"channels": part.channels}))
            start += part.channels.held
    if spec.ssm_heads is not None:
        # Dimensions of one name are one axis; a head of a single item has none.
        names = (BLOCKS, "heads", *("content" for _ in spec.ssm_shape))
        parts.append(TensorPart("ssm", view[-1], names, {"heads": spec.ssm_heads}))
    return tuple(parts)
