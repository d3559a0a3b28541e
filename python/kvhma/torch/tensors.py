# SPDX-License-Identifier: Apache-2.0
"""Geometry of views that somebody else made: where their items are, read from storages, offsets and strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region
from kvhma.torch.regions import Place, Regions
from kvhma.torch.shard import Shard

BLOCKS, KERNEL_BLOCKS = "blocks", "kernel_blocks"
"""Names of the dimensions that number blocks; every other name is an axis of the part."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A view of one part of a layer, in all blocks.

    K and V that lie apart are two parts, as are the parts of a convolution state: slice the tensor.

    Attributes:
        name: of the part: ``kv``, ``k``, ``v``, ``x``, ``B``, ``C``, ``q`` or ``ssm``.
        tensor: the view. Of it only storage, offset, shape, strides and dtype are read.
        axes: a name for each dimension. ``blocks`` has kernel blocks, those of a logical block side by side; or logical
            blocks, if there is also a dimension ``kernel_blocks``. Dimensions of one name that follow each other are
            one axis, the first the outermost.
        shards: the range of an axis that this rank holds; axes that are not in it are held whole.
        dtype: name of the items' encoding; None for that of the tensor's dtype.
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
        parts: its parts, all of one storage.
    """

    group: int
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the pages of a layer are numbered; a stride is None where there is only one block."""

    num_blocks: int
    block_stride: int | None
    kernel_stride: int | None


def geometry_from_tensors(
    groups: Sequence[Group],
    layers: Mapping[str, LayerTensors],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    null_block: int | None = 0,
    regions: Sequence[Region] | None = None,
) -> Geometry:
    """Describe a cache by its views. Nothing is allocated, read or written.

    Args:
        groups: KV cache groups, in the order of the engine's block tables.
        layers: views of every layer by name, in any order.
        tp_rank: place among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        null_block: logical block id that stands for "no block", or None.
        regions: memory that is registered for transfer, if that is not the views' storages as a whole.

    Returns:
        The geometry. Each storage is one region, in the order in which layers use them; storages that overlap are one.
        On the ``meta`` device addresses are made up.

    Raises:
        GeometryError: a view cannot be described, or two of a layer do not fit each other; the text names the layer and
            both values.
        AddressOverflowError: an address does not fit 64 bits.
    """
    groups = tuple(groups)
    for name, layer in layers.items():
        _check_layer(name, layer, len(groups))
    tensors = [(f"layer {name!r} part {p.name!r}", p.tensor) for name, layer in layers.items() for p in layer.parts]
    found = Regions(tensors, regions)
    return Geometry(
        regions=found.regions,
        groups=groups,
        layers=tuple(_layer(name, layer, groups[layer.group], found) for name, layer in layers.items()),
        tp_rank=tp_rank,
        tp_size=tp_size,
        null_block=null_block,
    )


def _check_layer(name: str, layer: LayerTensors, num_groups: int) -> None:
    if not 0 <= layer.group < num_groups:
        raise GeometryError(f"layer {name!r}: group {layer.group}, there are {num_groups}")
    if not layer.parts:
        raise GeometryError(f"layer {name!r}: parts (), a layer has at least one")
    for part in layer.parts:
        at, tensor = f"layer {name!r} part {part.name!r}", part.tensor
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


def _layer(name: str, layer: LayerTensors, group: Group, found: Regions) -> Layer:
    places = [found.place(part.tensor) for part in layer.parts]
    for part, place in zip(layer.parts, places, strict=True):
        if place.region != places[0].region:
            raise GeometryError(
                f"layer {name!r}: part {layer.parts[0].name!r} is in region {places[0].region}, part {part.name!r} in "
                f"region {place.region}; a layer lies in one: register memory that has both, or make it two layers"
            )
    offset = min(place.offset for place in places)
    parts, blocks = [], []
    for part, place in zip(layer.parts, places, strict=True):
        made, numbered = _part(f"layer {name!r} part {part.name!r}", part, place, offset, group)
        parts.append(made)
        blocks.append(numbered)
    for part, other in zip(layer.parts, blocks, strict=True):
        if other != blocks[0]:
            raise GeometryError(
                f"layer {name!r}: blocks of part {layer.parts[0].name!r} are {_words(blocks[0])}, "
                f"of part {part.name!r} {_words(other)}"
            )
    page = Page(tuple(parts))
    kernel = blocks[0].kernel_stride
    # With a single block any stride will do.
    block_stride = blocks[0].block_stride or (kernel or page.nbytes) * group.ratio
    return Layer(
        name=name,
        group=layer.group,
        region=places[0].region,
        offset=offset,
        num_blocks=blocks[0].num_blocks,
        block_stride=block_stride,
        page=page,
        # Only where it is not what a geometry assumes anyway.
        kernel_stride=None if kernel is None or kernel * group.ratio == block_stride else kernel,
    )


def _words(blocks: _Blocks) -> str:
    return f"{blocks.num_blocks}, {blocks.block_stride} bytes apart, kernel blocks {blocks.kernel_stride}"


def _part(at: str, part: TensorPart, place: Place, start: int, group: Group) -> tuple[Part, _Blocks]:
    item = part.tensor.element_size()
    dims = _dims(at, part, item)
    blocks = _blocks(at, dims.pop(BLOCKS), dims.pop(KERNEL_BLOCKS, None), group.ratio)
    axes = []
    for name, (size, stride) in dims.items():
        shard = part.shards.get(name, Shard(size))
        if problem := shard.problem(f"shard of {name!r}"):
            raise GeometryError(f"{at}: {problem}")
        if shard.held != size:
            raise GeometryError(f"{at}: shard of {name!r} holds {shard.held}, the view has {size}")
        axes.append(Axis(name, shard.extent, item if stride is None else stride, shard.start, size))
    dtype = str(part.tensor.dtype).removeprefix("torch.") if part.dtype is None else part.dtype
    return Part(part.name, dtype, item, place.offset - start, tuple(axes)), blocks


def _dims(at: str, part: TensorPart, item: int) -> dict[str, tuple[int, int | None]]:
    """Return size and stride in bytes by axis; the stride is None where there is only one index."""
    found: dict[str, tuple[int, int | None]] = {}
    before = None
    for name, size, step in zip(part.axes, part.tensor.shape, part.tensor.stride(), strict=True):
        stride = step * item if size > 1 else None
        if stride == 0:
            raise GeometryError(f"{at}: {size} indices of {name!r} with stride 0: they share their bytes")
        if name in found:
            if name != before:
                raise GeometryError(f"{at}: axes {part.axes} name {name!r} in places that do not follow each other")
            outer_size, outer = found[name]
            if outer is not None and stride is not None and outer != size * stride:
                raise GeometryError(f"{at}: {name!r} is unevenly spaced: {outer} bytes over {size} of {stride}")
            if outer is not None and stride is None:
                stride = outer
            size *= outer_size
        found[name] = (size, stride)
        before = name
    return found


def _blocks(at: str, blocks: tuple[int, int | None], kernels: tuple[int, int | None] | None, ratio: int) -> _Blocks:
    count, stride = blocks
    if kernels is not None:
        if kernels[0] != ratio:
            raise GeometryError(f"{at}: {kernels[0]} {KERNEL_BLOCKS!r}, the group's ratio is {ratio}")
        return _Blocks(count, stride, kernels[1])
    if count % ratio:
        raise GeometryError(f"{at}: {count} kernel blocks, not a multiple of the group's ratio {ratio}")
    whole = stride * ratio if stride is not None and count > ratio else None
    return _Blocks(count // ratio, whole, stride if ratio > 1 else None)
