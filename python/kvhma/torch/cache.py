# SPDX-License-Identifier: Apache-2.0
"""One contiguous buffer for the blocks of many layers, and a view of it for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvhma.geometry import Geometry
from kvhma.hybrid import LayoutError, Order
from kvhma.torch.arrange import BufferKind, Groups, Lot, arrange
from kvhma.torch.memory import make_buffers
from kvhma.torch.plots import Plot, Spec
from kvhma.torch.references import References, TensorReference, data_reference
from kvhma.torch.tensors import LayerTensors, geometry_from_tensors
from kvhma.torch.views import View, make_view, over_layers, parts_of


@dataclass(frozen=True, eq=False)
class Buffer:
    """One allocation.

    Attributes:
        kind: ``ordered``: heads before layers, so that a slice of heads is contiguous over layers; ``default``: a
            page for each layer in each block; ``isolated``: one slot, because blocks are not outermost of all or
            because nobody knows what a block holds.
        tensor: all of it, int8, contiguous.
        dims: names of its dimensions.
        page_bytes: bytes of one layer in a logical block, padding included.
        layers: for each slot the layers that share it, one of each group at most.
        cross_layer: the same memory as one tensor over all layers, of their dtype, its dimensions in the order of
            memory, for example ``(blocks, layers, 2, tokens, heads, head_dim)``. None where the layers are not of one
            form, or where one group has fewer of them and heads come before layers.
    """

    kind: BufferKind
    tensor: torch.Tensor
    dims: tuple[str, ...]
    page_bytes: int
    layers: tuple[tuple[str, ...], ...]
    cross_layer: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Cache:
    """An allocated cache. The memory lives as long as one of its tensors.

    Attributes:
        buffers: the allocations.
        views: for each layer its view: attention and opaque layers have a tensor, state has a tuple of convolution
            and state proper, those it has.
        geometry: the cache as a plan needs it. Each buffer is a region; regions are in the order of the layers.
        references: buffers and layers' bytes in a few numbers.
    """

    buffers: tuple[Buffer, ...]
    views: Mapping[str, View]
    geometry: Geometry
    references: References


def allocate(
    specs: Groups,
    num_blocks: int,
    *,
    layout: Order = "BLHNC",
    device: torch.device | str = "cpu",
    shared: Sequence[Sequence[str]] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    null_block: int | None = 0,
) -> Cache:
    """Allocate the cache of one rank, zeroed.

    Args:
        specs: for each KV cache group its layers' specs by name. The j-th layers of all groups share memory.
        num_blocks: logical blocks, the null block included.
        layout: stride order of layers, blocks, heads, tokens and content, outermost first. With B outermost all layers
            of equal pages have one buffer; with L outermost each slot has its own.
        device: where to; on ``meta`` nothing is allocated and addresses are made up.
        shared: for each tensor of an engine the layers that share it, instead of the j-th of all groups.
        tp_rank: place among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        null_block: logical block id that stands for "no block", or None.

    Raises:
        LayoutError: the specs contradict themselves or each other, or cannot be laid out so; the text names layers and
            both values. Nothing is allocated.
        GeometryError: a number is out of the range of a geometry. Nothing is allocated.
        AllocationError: there is not enough memory for all buffers. Nothing stays allocated.
    """
    groups = [dict(group) for group in specs]
    lots, plots = arrange(groups, num_blocks, layout, shared)
    where = _device(device)
    sizes = (tp_rank, tp_size, null_block)
    # Once without memory, so that what a geometry refuses is refused before anything is allocated.
    _put_together(groups, num_blocks, layout, lots, plots, torch.device("meta"), *sizes)
    return _put_together(groups, num_blocks, layout, lots, plots, where, *sizes)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise LayoutError(f"device {device!r}: {str(error).splitlines()[0]}") from None


def _put_together(
    groups: Groups,
    num_blocks: int,
    layout: str,
    lots: Sequence[Lot],
    plots: Mapping[str, Plot],
    device: torch.device,
    tp_rank: int,
    tp_size: int,
    null_block: int | None,
) -> Cache:
    tensors = make_buffers(lots, device)
    specs: dict[str, Spec] = {name: spec for group in groups for name, spec in group.items()}
    views = {
        name: make_view(tensors[plots[name].buffer], spec, plots[name], num_blocks) for name, spec in specs.items()
    }
    geometry = geometry_from_tensors(
        [next(iter(group.values())).group() for group in groups],
        {
            name: LayerTensors(index, parts_of(spec, views[name]))
            for index, group in enumerate(groups)
            for name, spec in group.items()
        },
        tp_rank=tp_rank,
        tp_size=tp_size,
        null_block=null_block,
    )
    buffers = tuple(
        Buffer(
            lot.kind,
            tensor,
            lot.dims,
            lot.key.page_bytes,
            lot.slots,
            over_layers(tensor, lot.slots, specs, plots, num_blocks, layout),
        )
        for lot, tensor in zip(lots, tensors, strict=True)
    )
    return Cache(buffers, views, geometry, _references(groups, buffers, plots, geometry, num_blocks))


def _references(
    groups: Groups, buffers: Sequence[Buffer], plots: Mapping[str, Plot], geometry: Geometry, num_blocks: int
) -> References:
    # Regions are in the order in which layers use them, which need not be that of the buffers.
    regions = [geometry.regions[geometry.layer_by_name[buffer.layers[0][0]].region] for buffer in buffers]
    tensors = (
        TensorReference(
            region.base, region.bytes, region.memory, region.device, buffer.kind, buffer.page_bytes, buffer.layers
        )
        for buffer, region in zip(buffers, regions, strict=True)
    )
    data = (
        tuple(data_reference(name, spec, plots[name], num_blocks) for name, spec in group.items()) for group in groups
    )
    return References(tuple(tensors), tuple(data))
