# SPDX-License-Identifier: Apache-2.0
"""Blocks that go through host memory: a bounded pool of slots is registered in place of the caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Layer, Page, Region, Span
from kvhma.geometry import Memory as MemoryKind
from kvhma.vllm.accelerator import Accelerator, device_of
from kvhma.vllm.memory import Storages, zero_host
from kvhma.vllm.slots import SlotRanges, Slots

_ALIGN = 64


class StagingPool:
    """Pinned host memory for some blocks at a time; what others know of this engine's caches is the pool.

    A slot has room for a block of any group, the pages of its layers one after the other::

        caches   layer a  | 0 | 1 | 2 | 3 | ...        a block has a page in each layer of its group
                 layer b  | 0 | 1 | 2 | 3 | ...
        pool     slot 0 (none) | slot 1: a's page, b's page | slot 2: ...

    P's scheduler gives a finished prompt slots and tells other engines these; D's worker takes slots for a load, reads
    into them and copies them to the blocks.

    Attributes:
        geometry: of the pool.
    """

    kind: MemoryKind = "DRAM"
    scratch: Region | None = None

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor], slots: SlotRanges) -> None:
        """Allocate the pool.

        Args:
            geometry: of the caches.
            caches: by layer.
            slots: how many.

        Raises:
            GeometryError: a page is not in one piece, or pages of two layers are interleaved.
        """
        self.device = device_of(caches.values())
        self._slots = Slots(slots.loads)
        room, layers = _pool_layers(geometry, slots.count)
        self._bytes = torch.empty(slots.count * room, dtype=torch.uint8, pin_memory=not self.device.is_host)
        region = Region(self._bytes.data_ptr(), self._bytes.nbytes)
        self.geometry = replace(geometry, regions=(region,), layers=layers)
        storages = Storages(caches)
        of_caches = (_pages(storages, geometry, layer) for layer in geometry.layers)
        of_pool = (_pages(Storages({"pool": self._bytes}), self.geometry, layer) for layer in layers)
        self._pages: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in geometry.groups]
        for layer, on_device, on_host in zip(layers, of_caches, of_pool, strict=True):
            self._pages[layer.group].append((on_device, on_host))

    def take(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        """See :class:`kvhma.vllm.memory.Memory`."""
        return self._slots.take(spans)

    def release(self, places: Sequence[Span]) -> None:
        """See :class:`kvhma.vllm.memory.Memory`."""
        self._slots.release(places)

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """See :class:`kvhma.vllm.memory.Memory`. Nothing but reads is written to slots, so it comes after nothing."""
        zero_host(rows)
        return None

    def copy_in(self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None) -> None:
        """Copy slots to the device, on the connector's stream."""
        if isinstance(self.device, Accelerator):
            self.device.launch(lambda: self._to_device(places, spans), after).synchronize()
        else:
            self._to_device(places, spans)

    def copy_out(self, spans: Sequence[Span], places: Sequence[Span]) -> None:
        """Copy blocks to slots, on the stream of the calling thread, which waits for it."""
        for pages, blocks, slots in self._moves(spans, places):
            for on_device, on_host in pages:
                on_host[slots] = on_device[blocks.to(on_device.device)].to("cpu")

    def _to_device(self, places: Sequence[Span], spans: Sequence[Span]) -> None:
        for pages, blocks, slots in self._moves(spans, places):
            for on_device, on_host in pages:
                on_device[blocks.to(on_device.device)] = on_host[slots].to(on_device.device)

    def _moves(
        self, spans: Sequence[Span], places: Sequence[Span]
    ) -> Iterable[tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]]:
        """Yield the pages of each group's layers, its blocks, and their slots."""
        for pages, span, place in zip(self._pages, spans, places, strict=True):
            blocks, slots = (torch.as_tensor(np.asarray(of.ids, dtype=np.int64)) for of in (span, place))
            if len(blocks):
                yield pages, blocks, slots


def _pool_layers(geometry: Geometry, slots: int) -> tuple[int, tuple[Layer, ...]]:
    """Return the bytes of a slot, and where in the pool each layer's pages are."""
    _check_pages(geometry)
    offsets = []
    ends = [0] * len(geometry.groups)
    for layer in geometry.layers:
        offsets.append(ends[layer.group])
        page = _room(layer.page)
        ends[layer.group] += geometry.groups[layer.group].ratio * page
    room = max(ends, default=0)
    layers = []
    for layer, offset in zip(geometry.layers, offsets, strict=True):
        page = _room(layer.page)
        layers.append(replace(layer, region=0, offset=offset, num_blocks=slots, block_stride=room, kernel_stride=page))
    return room, tuple(layers)


def _check_pages(geometry: Geometry) -> None:
    """Refuse pages that cannot be copied whole: what lies between their bytes is another page's.

    ::

        in one piece    | a: page of block 0 | b: page of block 0 | a: page of block 1 | ...
        interleaved     | a: token 0 | b: token 0 | a: token 1 | b: token 1 | ...
    """
    for group in range(len(geometry.groups)):
        pieces = []
        for layer in (one for one in geometry.layers if one.group == group):
            stride = _kernel_stride(geometry, layer)
            start = geometry.regions[layer.region].base + layer.offset
            # Of the first two blocks: with those after them it is the same.
            pieces += [
                (start + block * layer.block_stride + kernel * stride, _reach(layer.page), layer.name)
                for block in range(min(2, layer.num_blocks))
                for kernel in range(geometry.groups[group].ratio)
            ]
        for (start, nbytes, name), (after, _, other) in pairwise(sorted(pieces)):
            if start + nbytes > after:
                raise GeometryError(
                    f"host_staged: pages of {name} and {other} are interleaved: {nbytes} bytes, of which the other's "
                    f"begin at {after - start}"
                )


def _reach(page: Page) -> int:
    """Return the bytes from a page's start to its last byte, what lies between its items included."""
    return max(
        part.offset + sum((axis.shard.held - 1) * axis.stride for axis in part.axes) + part.item_bytes
        for part in page.parts
    )


def _room(page: Page) -> int:
    """Return the bytes that a page gets in a slot."""
    return -(-_reach(page) // _ALIGN) * _ALIGN


def _kernel_stride(geometry: Geometry, layer: Layer) -> int:
    ratio = geometry.groups[layer.group].ratio
    return layer.block_stride // ratio if layer.kernel_stride is None else layer.kernel_stride


def _pages(storages: Storages, geometry: Geometry, layer: Layer) -> torch.Tensor:
    """Return a layer's pages as bytes: shape (blocks, kernel blocks of a block, bytes of a page)."""
    address = geometry.regions[layer.region].base + layer.offset
    within = storages.from_address(address)
    ratio = geometry.groups[layer.group].ratio
    return within.as_strided(
        (layer.num_blocks, ratio, _reach(layer.page)),
        (layer.block_stride, _kernel_stride(geometry, layer), 1),
        within.storage_offset(),
    )
