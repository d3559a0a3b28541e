# SPDX-License-Identifier: Apache-2.0
"""The geometry of an engine's views, from their storages, offsets and strides.

A layer begins where its first part begins, and the offsets of its parts count from there::

    region.base
    |<- layer.offset ->|<- offset of v ->|
    |                  | k of block 0    | v of block 0 | padding | k of block 1 ...
                       |<-------------- block_stride ------------>|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Shard
from kvhma.tensors.regions import Location, locate

if TYPE_CHECKING:
    from typing_extensions import Unpack

BLOCKS, KERNEL_BLOCKS = "blocks", "kernel_blocks"
"""Names of the dimensions that number blocks; every other name is an axis of the part."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A view of one part of a layer, in all blocks.

    K and V in one tensor are two parts, as are the parts of a convolution state: slice the tensor.

    Attributes:
        name: name of the part: ``kv``, ``k``, ``v``, ``x``, ``B``, ``C``, ``q`` or ``ssm``.
        tensor: the view. Only its storage, offset, shape, strides and dtype are read.
        axes: a name for each dimension. ``blocks`` counts kernel blocks, with those of a logical block after each
            other; or logical blocks, if there is also a dimension ``kernel_blocks``. Adjacent dimensions with one name
            are one axis, outermost first.
        shards: the range of an axis that this rank holds; axes without an entry are held whole.
        dtype: name of the items' encoding; None for the tensor's dtype.
    """

    name: str
    tensor: torch.Tensor
    axes: tuple[str, ...]
    shards: Mapping[str, Shard] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The views of one layer.

    Attributes:
        group: index of its group.
        parts: its parts, all in one storage.
    """

    group: int
    parts: tuple[TensorPart, ...]


class RankOptions(TypedDict, total=False):
    """Fields of a geometry besides the bytes; omitted fields have the default of `Geometry`."""

    tp_rank: int
    tp_size: int
    null_block: int | None


class _Dim(NamedTuple):
    """A dimension: its size, and bytes from one index to the next; None with a single index."""

    size: int
    stride: int | None


class _Blocks(NamedTuple):
    """The blocks of a layer and their strides in bytes; no stride with a single block."""

    num_blocks: int
    block_stride: int | None
    kernel_stride: int | None

    def __str__(self) -> str:
        return f"{self.num_blocks}, {self.block_stride} bytes apart, kernel blocks {self.kernel_stride}"


def geometry_from_tensors(
    groups: Sequence[Group],
    layers: Mapping[str, LayerTensors],
    *,
    regions: Sequence[Region] | None = None,
    **rank: Unpack[RankOptions],
) -> Geometry:
    """Describe a cache by its views. Nothing is allocated, read or written.

    Args:
        groups: KV cache groups, in the order of the engine's block tables.
        layers: views of every layer by name, in any order.
        regions: registered memory, if it differs from the views' whole storages.
        **rank: ``tp_rank``, ``tp_size`` and ``null_block``, as for :class:`kvhma.Geometry`.

    Returns:
        The geometry. Each storage is one region, in the order in which layers use them; overlapping storages are one
        region. On the ``meta`` device addresses are made up.

    Raises:
        GeometryError: a view cannot be described, or two views of a layer do not fit each other; the text names the
            layer and both values.
        AddressOverflowError: an address does not fit 64 bits.
    """
    groups = tuple(groups)
    for name, layer in layers.items():
        _check_layer(name, layer, len(groups))
    tensors = {_label(name, part): part.tensor for name, layer in layers.items() for part in layer.parts}
    found, locations = locate(tensors, regions)
    described = (_layer(name, layer, groups[layer.group], locations) for name, layer in layers.items())
    return Geometry(found, groups, tuple(described), **rank)


def _label(name: str, part: TensorPart) -> str:
    return f"layer {name!r} part {part.name!r}"


def _check_layer(name: str, layer: LayerTensors, num_groups: int) -> None:
    if not 0 <= layer.group < num_groups:
        raise GeometryError(f"layer {name!r}: group {layer.group}, there are {num_groups}")
    if not layer.parts:
        raise GeometryError(f"layer {name!r}: parts (), a layer has at least one")
    for part in layer.parts:
        _check_part(_label(name, part), part)


def _check_part(at: str, part: TensorPart) -> None:
    tensor = part.tensor
    if not isinstance(tensor, torch.Tensor):
        raise GeometryError(f"{at}: tensor is {type(tensor).__name__}, expected torch.Tensor")
    if tensor.layout != torch.strided:
        raise GeometryError(f"{at}: tensor has layout {tensor.layout}, expected {torch.strided}")
    if tensor.dim() != len(part.axes):
        raise GeometryError(f"{at}: {len(part.axes)} axes {part.axes} for shape {tuple(tensor.shape)}")
    if tensor.numel() == 0:
        raise GeometryError(f"{at}: shape {tuple(tensor.shape)} has no items")
    if BLOCKS not in part.axes:
        raise GeometryError(f"{at}: axes {part.axes} have no {BLOCKS!r}")
    if unknown := set(part.shards) - set(part.axes):
        raise GeometryError(f"{at}: shards of {', '.join(sorted(unknown))}, axes are {part.axes}")


def _layer(name: str, layer: LayerTensors, group: Group, locations: Mapping[str, Location]) -> Layer:
    region, offset = _start(name, layer, locations)
    found = []
    for view in layer.parts:
        at = _label(name, view)
        found.append(_part(at, view, group.ratio, locations[at].offset - offset))
    blocks, first = found[0]
    for own, part in found:
        if own != blocks:
            raise GeometryError(
                f"layer {name!r}: blocks of part {first.name!r} are {blocks}, of part {part.name!r} {own}"
            )
    page = Page(tuple(part for _, part in found))
    # With a single block any stride is valid.
    block_stride = blocks.block_stride or (blocks.kernel_stride or page.nbytes) * group.ratio
    # The default stride of a geometry is not stored.
    assumed = blocks.kernel_stride is None or blocks.kernel_stride * group.ratio == block_stride
    kernel_stride = None if assumed else blocks.kernel_stride
    return Layer(name, layer.group, region, offset, blocks.num_blocks, block_stride, page, kernel_stride)


def _start(name: str, layer: LayerTensors, locations: Mapping[str, Location]) -> Location:
    """Return the address of the first byte of all parts."""
    found = [locations[_label(name, part)] for part in layer.parts]
    region, first = found[0].region, layer.parts[0].name
    for part, location in zip(layer.parts, found, strict=True):
        if location.region != region:
            raise GeometryError(
                f"layer {name!r}: part {first!r} is in region {region}, part {part.name!r} in region "
                f"{location.region}; a layer is in one region: register memory that covers both, or make it two layers"
            )
    return Location(region, min(location.offset for location in found))


def _part(at: str, part: TensorPart, ratio: int, offset: int) -> tuple[_Blocks, Part]:
    """Return the blocks of a view, and the part in each of them."""
    dims = _dims(at, part)
    blocks = _blocks(at, dims.pop(BLOCKS), dims.pop(KERNEL_BLOCKS, None), ratio)
    item = part.tensor.element_size()
    axes = []
    for name, (size, stride) in dims.items():
        shard = part.shards.get(name, Shard(size))
        if problem := shard.problem(f"shard of {name!r}"):
            raise GeometryError(f"{at}: {problem}")
        if shard.held != size:
            raise GeometryError(f"{at}: shard of {name!r} holds {shard.held}, the view has {size}")
        axes.append(Axis(name, shard.extent, item if stride is None else stride, shard.start, size))
    dtype = str(part.tensor.dtype).removeprefix("torch.") if part.dtype is None else part.dtype
    return blocks, Part(part.name, dtype, item, offset, tuple(axes))


def _dims(at: str, part: TensorPart) -> dict[str, _Dim]:
    """Return the dimensions by name, with dimensions of one name joined."""
    item = part.tensor.element_size()
    found: dict[str, _Dim] = {}
    last = None
    for name, size, step in zip(part.axes, part.tensor.shape, part.tensor.stride(), strict=True):
        dim = _Dim(size, step * item if size > 1 else None)
        if dim.stride == 0:
            raise GeometryError(f"{at}: {size} indices of {name!r} with stride 0: they share their bytes")
        if name in found and name != last:
            raise GeometryError(f"{at}: axes {part.axes} name {name!r} in places that do not follow each other")
        found[name] = _join_dims(at, name, found[name], dim) if name in found else dim
        last = name
    return found


def _join_dims(at: str, name: str, outer: _Dim, inner: _Dim) -> _Dim:
    """Return one dimension in place of two of one name, which must be evenly spaced.

    ::

        outer index 0              outer index 1
        | 0 | 1 | ... | size - 1 | 0 | 1 | ...        outer.stride == inner.size * inner.stride
    """
    if inner.stride is None:
        return _Dim(outer.size * inner.size, outer.stride)
    if outer.stride not in (None, inner.size * inner.stride):
        raise GeometryError(
            f"{at}: {name!r} is unevenly spaced: {outer.stride} bytes over {inner.size} of {inner.stride}"
        )
    return _Dim(outer.size * inner.size, inner.stride)


def _blocks(at: str, blocks: _Dim, kernels: _Dim | None, ratio: int) -> _Blocks:
    """Return the blocks of a part.

    ::

        one dimension, ratio 2       | kernel block 0 | kernel block 1 | kernel block 2 | ...
                                     |<-blocks.stride>|
                                     |<- 2 * blocks.stride: block ---->|

        two dimensions, ratio 2      | b0 k0 | b1 k0 | b2 k0 ... | b0 k1 | b1 k1 ...
                                     |<----->| blocks.stride
                                     |<---- kernels.stride ----->|
    """
    if kernels is not None:
        if kernels.size != ratio:
            raise GeometryError(f"{at}: {kernels.size} {KERNEL_BLOCKS!r}, the group's ratio is {ratio}")
        return _Blocks(blocks.size, blocks.stride, kernels.stride)
    if blocks.size % ratio:
        raise GeometryError(f"{at}: {blocks.size} kernel blocks, not a multiple of the group's ratio {ratio}")
    whole = blocks.stride * ratio if blocks.stride is not None and blocks.size > ratio else None
    return _Blocks(blocks.size // ratio, whole, blocks.stride if ratio > 1 else None)
