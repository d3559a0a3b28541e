# SPDX-License-Identifier: Apache-2.0
"""Views of layers in a buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from kvhma.errors import LayoutError
from kvhma.geometry import Axis, Geometry, Layer, Part

View: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""A tensor for an attention or opaque layer; for state a tuple of convolution and SSM state, as far as it has them.

Parts that only a kernel understands together, such as data and scales, have a tensor each.
"""

_LETTERS = {"heads": "H", "tokens": "N", "content": "C"}


class Strided(NamedTuple):
    """A regular cut of a buffer's bytes.

    Attributes:
        dtype: of the items, as a part names it.
        item_bytes: bytes of an item.
        offset: bytes to the first item.
        dims: for each dimension, by its name, the size, and the bytes from one index to the next.
    """

    dtype: str
    item_bytes: int
    offset: int
    dims: Mapping[str, tuple[int, int]]


def strided(buffer: torch.Tensor, cut: Strided, name: str) -> torch.Tensor:
    """Return a view of a buffer's bytes, without copying.

    Args:
        buffer: int8, contiguous.
        cut: which bytes.
        name: the layer, for errors.

    Raises:
        LayoutError: torch has no such dtype, or an item is not at a multiple of its bytes.
    """
    dtype = getattr(torch, cut.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != cut.item_bytes:
        if cut.item_bytes != 1:
            raise LayoutError(f"layer {name!r}: dtype {cut.dtype!r} of {cut.item_bytes} bytes: torch has none")
        dtype = torch.int8
    sizes, strides = zip(*cut.dims.values(), strict=True)
    if misplaced := [nbytes for nbytes in (cut.offset, *strides) if nbytes % cut.item_bytes]:
        raise LayoutError(f"layer {name!r}: {misplaced[0]} bytes are no multiple of an item's {cut.item_bytes}")
    items = buffer.view(-1)[: buffer.numel() // cut.item_bytes * cut.item_bytes].view(dtype)
    return items.as_strided(sizes, [nbytes // cut.item_bytes for nbytes in strides], cut.offset // cut.item_bytes)


def make_view(
    buffer: torch.Tensor, geometry: Geometry, layer: Layer, dims: str | None, head_shape: Sequence[int] | None
) -> View:
    """Return a layer's view of its buffer.

    Returns:
        Attention: the dimensions `dims`; B counts kernel blocks. State: convolution ``(blocks, channels, rows)``, or
            rows first if they are, and SSM state ``(blocks, heads, *head_shape)``. Opaque: ``(blocks, bytes)``.

    Raises:
        LayoutError: `dims` or `head_shape` does not fit the layer, or its kernel blocks are not evenly spaced.
    """
    if geometry.groups[layer.group].kind == "ssm":
        return tuple(strided(buffer, cut, layer.name) for cut in _state_cuts(geometry, layer, head_shape))
    cut = token_cut(geometry, layer)
    if cut is None:
        parts = layer.page.parts
        found = tuple(strided(buffer, _cut(geometry, layer, part, part.axes), layer.name) for part in parts)
        return found[0] if len(found) == 1 else found
    ordered = {letter: cut.dims[letter] for letter in _order(cut, layer.name, dims)}
    return strided(buffer, cut._replace(dims=ordered), layer.name)


def even_stride(geometry: Geometry, layer: Layer) -> int | None:
    """Return the bytes from one kernel block to the next over all blocks; None if they are not evenly spaced."""
    ratio = geometry.groups[layer.group].ratio
    stride = layer.block_stride // ratio
    return stride if ratio == 1 or geometry.kernel_stride(layer) * ratio == layer.block_stride else None


def token_cut(geometry: Geometry, layer: Layer) -> Strided | None:
    """Return keys and values, or a latent, with the dimensions B, S, H, N, C as far as the layer has them.

    Returns:
        None if the layer has other parts or axes.
    """
    first, *rest = layer.page.parts
    if {axis.name for axis in first.axes} - set(_LETTERS) or geometry.groups[layer.group].kind == "ssm":
        return None
    cut = _cut(geometry, layer, first, first.axes)
    dims = {_LETTERS.get(name, name): dim for name, dim in cut.dims.items()}
    if rest:
        if len(rest) > 1 or (rest[0].axes, rest[0].dtype) != (first.axes, first.dtype):
            return None
        dims["S"] = (2, rest[0].offset - first.offset)
    return cut._replace(dims=dims)


def _order(cut: Strided, name: str, dims: str | None) -> str:
    """Return the order of the dimensions of a view."""
    if dims is None:
        is_apart = "S" in cut.dims and cut.dims["S"][1] > cut.dims["B"][1]
        dims = "SBNHC" if is_apart else "BSNHC" if "S" in cut.dims else "BHNC"
    order = dims if "H" in cut.dims else dims.replace("H", "")
    if sorted(order) != sorted(cut.dims):
        raise LayoutError(f"dims {dims!r}: layer {name!r} has the dimensions {''.join(cut.dims)}")
    return order


def _cut(geometry: Geometry, layer: Layer, part: Part, axes: Sequence[Axis]) -> Strided:
    """Return a part over all kernel blocks, which are dimension B.

    ::

        | k0 of block 0 | k1 of block 0 | k0 of block 1 | ...      evenly spaced: one dimension
        |<-- stride --->|
    """
    ratio = geometry.groups[layer.group].ratio
    stride = even_stride(geometry, layer)
    if stride is None:
        raise LayoutError(
            f"layer {layer.name!r}: {ratio} kernel blocks every {geometry.kernel_stride(layer)} bytes, and a block "
            f"every {layer.block_stride}: a view needs kernel blocks that are evenly spaced"
        )
    dims = {axis.name: (axis.length or 0, axis.stride) for axis in axes}
    return Strided(
        part.dtype, part.item_bytes, layer.offset + part.offset, {"B": (layer.num_blocks * ratio, stride), **dims}
    )


def _state_cuts(geometry: Geometry, layer: Layer, head_shape: Sequence[int] | None) -> list[Strided]:
    """Return the convolution over all its parts, and the SSM state.

    A block of state::

        offset
        | x        | B   | C   | head 0 | head 1 | ...  | padding | next block
        |<---- channels ------>|<------- heads ------->|
    """
    cuts = []
    conv = [part for part in layer.page.parts if part.name != "ssm"]
    if conv:
        cut = _cut(geometry, layer, conv[0], sorted(conv[0].axes, key=lambda axis: -axis.stride))
        width = sum((axis.length or 0) for part in conv for axis in part.axes if axis.name == "channels")
        cuts.append(cut._replace(dims={**cut.dims, "channels": (width, cut.dims["channels"][1])}))
    for part in layer.page.parts[len(conv) :]:
        cut = _cut(geometry, layer, part, part.axes)
        if head_shape is not None:
            cut = cut._replace(dims=_with_head_shape(cut, layer.name, head_shape))
        cuts.append(cut)
    return cuts


def _with_head_shape(cut: Strided, name: str, head_shape: Sequence[int]) -> dict[str, tuple[int, int]]:
    items, stride = cut.dims["content"]
    if math.prod(head_shape) != items:
        raise LayoutError(f"head_shape {tuple(head_shape)}: a head of layer {name!r} has {items} items")
    dims = {letter: dim for letter, dim in cut.dims.items() if letter != "content"}
    for index, size in enumerate(head_shape):
        dims[f"content {index}"] = (size, math.prod(head_shape[index + 1 :]) * stride)
    return dims
