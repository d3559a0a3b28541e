# SPDX-License-Identifier: Apache-2.0
"""Views of layers in a buffer, and the same views as parts of a geometry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from kvhma.tensors.geometry import BLOCKS, TensorPart
from kvhma.torch.placement import BufferPlan, LayerPlacement
from kvhma.torch.specs import AttentionSpec, Spec, StateSpec, TokenSpec

View: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""A tensor for an attention or opaque layer; for state a tuple of convolution and SSM state, as far as it has them."""

_AXES = {"B": BLOCKS, "H": "heads", "N": "tokens", "C": "content"}


def make_view(buffer: torch.Tensor, spec: Spec, placement: LayerPlacement, num_blocks: int) -> View:
    """Return a layer's view of its buffer, without copying.

    A block of state::

        offset           offset + conv_bytes
        | convolution    | head 0 | head 1 | ...  | padding | next block
        |<----------------------- B ----------------------->|

    Returns:
        Attention: the dimensions of the spec's view, with its dtype; B counts kernel blocks. State: convolution
            ``(blocks, channels, rows)``, or rows first in order SD, and state ``(blocks, heads, ...)``. Opaque: int8
            ``(blocks, bytes)``.
    """
    offset, strides = placement.offset, placement.strides
    if isinstance(spec, TokenSpec):
        sizes = {**spec.sizes, "B": num_blocks * spec.ratio}
        strides = {**strides, "B": strides["K"]}
        return _strided(buffer, spec.dtype, [(sizes[axis], strides[axis]) for axis in spec.dims], offset)
    blocks = (num_blocks, strides["B"])
    if not isinstance(spec, StateSpec):
        return _strided(buffer, torch.int8, [blocks, (spec.nbytes, 1)], offset)
    views = []
    if spec.conv:
        dims = _dense(spec.conv_shape, spec.conv_dtype)
        views.append(_strided(buffer, spec.conv_dtype, [blocks, *dims], offset))
    if spec.ssm_heads is not None:
        dims = _dense((spec.ssm_heads.held, *spec.ssm_shape), spec.ssm_dtype)
        views.append(_strided(buffer, spec.ssm_dtype, [blocks, *dims], offset + spec.conv_bytes))
    return tuple(views)


def parts_of(spec: Spec, view: View) -> tuple[TensorPart, ...]:
    """Return the parts of a layer's view with named dimensions."""
    if isinstance(view, tuple):
        assert isinstance(spec, StateSpec)  # noqa: S101 - make_view has made it
        return _state_parts(spec, view)
    if isinstance(spec, TokenSpec):
        return _token_parts(spec, view)
    assert not isinstance(spec, StateSpec)  # noqa: S101 - its view is a tuple
    return (TensorPart("opaque", view, (BLOCKS, "bytes"), dtype=spec.encoding),)


def cross_layer_view(
    buffer: torch.Tensor, plan: BufferPlan, specs: Mapping[str, Spec], placements: Mapping[str, LayerPlacement]
) -> torch.Tensor | None:
    """Return a buffer as one tensor over its layers, with dimensions in memory order.

    ::

        first layer's offset
        |       one slot's layer to the next: stride of L
        |<----->|
        | slot 0 | slot 1 | slot 2 | ...

    Returns:
        None if layers differ in form, or are not evenly spaced.
    """
    names = [slot[0] for slot in plan.slots]
    first, start = specs[names[0]], placements[names[0]]
    if not isinstance(first, TokenSpec):
        return None
    step = placements[names[1]].offset - start.offset if len(names) > 1 else first.padded_bytes
    for index, slot in enumerate(plan.slots):
        for name in slot:
            spec, placement = specs[name], placements[name]
            if not isinstance(spec, TokenSpec) or (spec.sizes, spec.dtype) != (first.sizes, first.dtype):
                return None
            if (placement.strides, placement.offset) != (start.strides, start.offset + index * step):
                return None
    sizes = {**first.sizes, "B": plan.num_blocks * first.ratio, "L": len(names)}
    strides = {**start.strides, "B": start.strides["K"], "L": step}
    axes = list(first.dims) if len(names) == 1 and plan.order[0] == "L" else ["L", *first.dims]
    # Of dimensions with equal stride, one has a single index; they are in stride order. S is not in it (-1) and comes
    # first.
    axes.sort(key=lambda axis: (-strides[axis], plan.order.find(axis)))
    return _strided(buffer, first.dtype, [(sizes[axis], strides[axis]) for axis in axes], start.offset)


def _strided(buffer: torch.Tensor, dtype: torch.dtype, dims: Sequence[tuple[int, int]], offset: int) -> torch.Tensor:
    """Return a view of a buffer's bytes.

    Args:
        buffer: int8, contiguous.
        dtype: dtype of the view.
        dims: size of each dimension, and bytes from one index to the next, a multiple of an item.
        offset: bytes to the first item, a multiple of an item.
    """
    item = dtype.itemsize
    flat = buffer.view(-1)
    items = flat[: flat.numel() // item * item].view(dtype)
    sizes, strides = zip(*dims, strict=True)
    return items.as_strided(sizes, [stride // item for stride in strides], offset // item)


def _dense(shape: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions of a dense array: (2, 3) of 4 bytes gives [(2, 12), (3, 4)]."""
    return [(size, math.prod(shape[at + 1 :]) * dtype.itemsize) for at, size in enumerate(shape)]


def _token_parts(spec: TokenSpec, view: torch.Tensor) -> tuple[TensorPart, ...]:
    axes = tuple(_AXES[letter] for letter in spec.dims if letter != "S")
    shards = {"heads": spec.heads} if isinstance(spec, AttentionSpec) else {}
    if "H" in spec.dims and not shards:
        # A latent has no heads axis, even if the kernel wants a dimension of one head.
        view, axes = view.select(spec.dims.index("H"), 0), tuple(axis for axis in axes if axis != "heads")
    if spec.kv == "packed":
        return (TensorPart("kv", view, axes, shards),)
    k_or_v = spec.dims.index("S")
    return tuple(TensorPart(name, view.select(k_or_v, index), axes, shards) for index, name in enumerate("kv"))


def _state_parts(spec: StateSpec, view: tuple[torch.Tensor, ...]) -> tuple[TensorPart, ...]:
    parts, start = [], 0
    if spec.conv:
        # channels of a block:  | x          | B     | C     |
        #                       0            start of B, then of C
        axes = (BLOCKS, "channels", "rows") if spec.conv_order == "DS" else (BLOCKS, "rows", "channels")
        for part in spec.conv:
            channels = view[0].narrow(axes.index("channels"), start, part.channels.held)
            parts.append(TensorPart(part.name, channels, axes, {"channels": part.channels}))
            start += part.channels.held
    if spec.ssm_heads is not None:
        # Dimensions of one name are one axis; a head with a single item has none.
        names = (BLOCKS, "heads", *("content" for _ in spec.ssm_shape))
        parts.append(TensorPart("ssm", view[-1], names, {"heads": spec.ssm_heads}))
    return tuple(parts)
