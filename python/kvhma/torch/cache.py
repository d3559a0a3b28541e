# SPDX-License-Identifier: Apache-2.0
"""One contiguous buffer for the blocks of many layers, and a view of it for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvhma.errors import LayoutError
from kvhma.geometry import Geometry
from kvhma.models.stride_orders import Order
from kvhma.tensors import LayerTensors, RankOptions, geometry_from_tensors
from kvhma.torch.arrange import CachePlan, Groups, arrange
from kvhma.torch.memory import make_buffers
from kvhma.torch.placement import BufferKind
from kvhma.torch.references import References, TensorReference, data_reference
from kvhma.torch.views import View, cross_layer_view, make_view, parts_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class Buffer:
    """One allocation.

    Attributes:
        kind: ``ordered``: heads before layers, so a slice of heads is contiguous over layers. ``default``: a page for
            each layer in each block. ``isolated``: one slot, because blocks are not outermost or because only the owner
            understands a block's content.
        tensor: the whole allocation, int8, contiguous.
        dims: names of its dimensions.
        page_bytes: bytes of one layer in a logical block, including padding.
        layers: for each slot the layers that share it, at most one of each group.
        cross_layer: the same memory as one tensor over all layers, with their dtype and dimensions in memory order, for
            example ``(blocks, layers, 2, tokens, heads, head_dim)``. None if the layers differ in form, or if a group
            has fewer layers and heads come before layers.
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
        views: for each layer its view. Attention and opaque layers have a tensor; state has a tuple of convolution and
            SSM state, as far as the state has them.
        geometry: the cache in the form for a plan. Each buffer is a region; regions are in the order of the layers.
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
    **rank: Unpack[RankOptions],
) -> Cache:
    """Allocate the cache of one rank, zeroed.

    Args:
        specs: for each KV cache group its layers' specs by name. The j-th layers of all groups share memory.
        num_blocks: logical blocks, including the null block.
        layout: stride order of layers, blocks, heads, tokens and content, outermost first. With B outermost, all layers
            of equal pages have one buffer; with L outermost, each slot has a separate buffer.
        device: torch device; on ``meta`` nothing is allocated and addresses are made up.
        shared: for each tensor of an engine the layers that share it, instead of the j-th layers of all groups.
        **rank: ``tp_rank``, ``tp_size`` and ``null_block``, as for :class:`kvhma.Geometry`.

    Returns:
        The cache: views by layer, buffers, and the geometry.

    Raises:
        LayoutError: the specs are inconsistent, or this layout is impossible; the text names layers and both values.
            Nothing is allocated.
        GeometryError: a number is out of the range of a geometry. Nothing is allocated.
        AllocationError: there is not enough memory for all buffers. Nothing stays allocated.
    """
    plan = arrange([dict(group) for group in specs], num_blocks, layout, shared)
    target = _device(device)
    # First without memory, so that a geometry's refusal comes before any allocation.
    _allocate(plan, torch.device("meta"), rank)
    return _allocate(plan, target, rank)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise LayoutError(f"device {device!r}: {str(error).splitlines()[0]}") from None


def _allocate(plan: CachePlan, device: torch.device, rank: RankOptions) -> Cache:
    tensors = make_buffers(plan.buffers, device)
    views: dict[str, View] = {}
    layers: dict[str, LayerTensors] = {}
    for index, group in enumerate(plan.groups):
        for name, spec in group.items():
            placement = plan.placements[name]
            views[name] = make_view(tensors[placement.buffer], spec, placement, plan.num_blocks)
            layers[name] = LayerTensors(index, parts_of(spec, views[name]))
    geometry = geometry_from_tensors([next(iter(group.values())).group() for group in plan.groups], layers, **rank)
    buffers = tuple(
        Buffer(
            kind=buffer.kind,
            tensor=tensor,
            dims=tuple(buffer.dims),
            page_bytes=buffer.page_class.page_bytes,
            layers=buffer.slots,
            cross_layer=cross_layer_view(tensor, buffer, plan.specs, plan.placements),
        )
        for buffer, tensor in zip(plan.buffers, tensors, strict=True)
    )
    return Cache(buffers, views, geometry, _references(plan, geometry))


def _references(plan: CachePlan, geometry: Geometry) -> References:
    tensors = []
    for buffer in plan.buffers:
        # Regions are in the order in which layers use them, which may differ from that of the buffers.
        region = geometry.regions[geometry.layer_by_name[buffer.slots[0][0]].region]
        tensors.append(
            TensorReference(
                base=region.base,
                nbytes=region.bytes,
                memory=region.memory,
                device=region.device,
                kind=buffer.kind,
                page_bytes=buffer.page_class.page_bytes,
                layers=buffer.slots,
            )
        )
    data = (
        tuple(data_reference(name, spec, plan.placements[name], plan.num_blocks) for name, spec in group.items())
        for group in plan.groups
    )
    return References(tuple(tensors), tuple(data))
