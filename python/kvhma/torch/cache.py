# SPDX-License-Identifier: Apache-2.0
"""Memory for a geometry, and a view of it for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvhma.errors import AllocationError, LayoutError
from kvhma.geometry import Geometry, Region
from kvhma.tensors.regions import locate
from kvhma.torch.buffers import BufferKind, describe
from kvhma.torch.views import View, make_view, strided


@dataclass(frozen=True, eq=False)
class Buffer:
    """One allocation: the memory of a region.

    Attributes:
        kind: ``ordered``: heads before layers, so a slice of heads is contiguous over layers. ``default``: a page for
            each layer in each block. ``isolated``: one slot, or blocks are not outermost.
        tensor: the whole allocation, int8, contiguous.
        dims: names of its dimensions, outermost first: of ``kv``, ``heads``, ``blocks``, ``layers``, then ``bytes``.
            Only ``bytes`` if its layers are not evenly spaced.
        layers: for each slot the layers that share it, at most one of each group.
        cross_layer: the same memory as one tensor over all layers, with their dtype and dimensions in memory order, for
            example ``(blocks, layers, 2, tokens, heads, head_dim)``. None if the layers differ in form, or are not
            evenly spaced.
    """

    kind: BufferKind
    tensor: torch.Tensor
    dims: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    cross_layer: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Cache:
    """An allocated cache. The memory lives as long as one of its tensors.

    Attributes:
        buffers: the allocations, in the order of the geometry's regions.
        views: for each layer its view. State has a tuple of convolution and SSM state, as far as the state has them.
        geometry: the same caches at the addresses of the buffers, in the form for a plan.
    """

    buffers: tuple[Buffer, ...]
    views: Mapping[str, View]
    geometry: Geometry


def allocate(
    geometry: Geometry,
    *,
    device: torch.device | str = "cpu",
    dims: str | None = None,
    head_shape: Sequence[int] | None = None,
) -> Cache:
    """Allocate the cache of one rank, zeroed.

    Args:
        geometry: the layout of the cache. Addresses, kind of memory and device of its regions do not count.
        device: torch device; on ``meta`` nothing is allocated and addresses are made up.
        dims: the order of the dimensions of attention views: B kernel blocks, S two for K and V (unless they are one
            content), H heads, N tokens, C content. A latent's view has no H. None for ``BHNC``, ``BSNHC``, or
            ``SBNHC`` if V of all blocks follows K of all blocks.
        head_shape: shape of one head of a recurrent state, for example ``(head_dim, d_state)``; None for one dimension.

    Returns:
        The cache: buffers, views by layer, and the geometry at the buffers' addresses.

    Raises:
        LayoutError: a view is impossible; the text names the layer and both values. Nothing is allocated.
        AllocationError: there is not enough memory for all buffers. Nothing stays allocated.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise LayoutError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    # First without memory, so that a view's refusal comes before any allocation.
    _cache(geometry, torch.device("meta"), dims, head_shape)
    return _cache(geometry, target, dims, head_shape)


def _cache(geometry: Geometry, device: torch.device, dims: str | None, head_shape: Sequence[int] | None) -> Cache:
    memory = _zeros(geometry.regions, device)
    regions, _ = locate({f"region {index}": tensor for index, tensor in enumerate(memory)})
    views = {
        layer.name: make_view(memory[layer.region], geometry, layer, dims, head_shape) for layer in geometry.layers
    }
    buffers = []
    for index, tensor in enumerate(memory):
        found = describe(geometry, index)
        cross = None if found.cross is None else strided(tensor, found.cross, found.layers[0][0])
        shape = tuple(found.shape.values())
        buffers.append(Buffer(found.kind, tensor.view(shape), tuple(found.shape), found.layers, cross))
    return Cache(tuple(buffers), views, replace(geometry, regions=regions))


def _zeros(regions: Sequence[Region], device: torch.device) -> list[torch.Tensor]:
    """Return a zeroed int8 tensor for each region, ``(region.bytes,)``.

    Raises:
        AllocationError: the device has not enough memory.
    """
    tensors: list[torch.Tensor] = []
    try:
        for region in regions:
            tensors.append(torch.zeros(region.bytes, dtype=torch.int8, device=device))
    except (RuntimeError, MemoryError) as error:  # torch's error for a full GPU is a RuntimeError
        done = sum(tensor.nbytes for tensor in tensors)
        tensors.clear()
        total = sum(region.bytes for region in regions)
        reason = str(error).splitlines()[0]
        raise AllocationError(
            f"{len(regions)} buffers need {total} bytes, {device} had no room after the first {done}: {reason}"
        ) from None
    return tensors
