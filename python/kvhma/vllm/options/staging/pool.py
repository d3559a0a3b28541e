# SPDX-License-Identifier: Apache-2.0
"""Staging in host memory: a bounded pool of slots is registered instead of the caches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Layer, Page, Region, Span
from kvhma.geometry import Memory as MemoryKind
from kvhma.nixl.blocking import clear_host
from kvhma.tensors.indices import indices_beside
from kvhma.tensors.storages import Storages
from kvhma.vllm.device.accelerator import device_of
from kvhma.vllm.options.staging.slots import SlotRanges, Slots

_ALIGN = 64
_ASIDE_BYTES = 64 << 20
"""Most bytes that are gathered on the device at a time."""
_ITEMS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class StagingPool:
    """Pinned host memory for some blocks at a time. Other engines only know this pool, not the caches.

    A slot has room for a block of any group, with the pages of its layers next to each other::

        caches   layer a  | 0 | 1 | 2 | 3 | ...        a block has a page in each layer of its group
                 layer b  | 0 | 1 | 2 | 3 | ...
        pool     slot 0 (unused) | slot 1: a's page, b's page | slot 2: ...

    P's scheduler gives a finished prompt slots, and other engines read these. D's worker takes slots for a load, reads
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
            slots: numbers of the slots.
        """
        self.device = device_of(caches.values())
        self._slots = Slots(slots.loads)
        self._room, layers = _pool_layers(geometry, slots.count)
        self._bytes = torch.empty(slots.count * self._room, dtype=torch.uint8, pin_memory=not self.device.is_host)
        region = Region(self._bytes.data_ptr(), self._bytes.nbytes)
        self.geometry = replace(geometry, regions=(region,), layers=layers)
        storages = Storages(caches)
        pool = self._pool = Storages({"pool": self._bytes})
        self.from_address = pool.from_address
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in geometry.groups]
        for of_cache, of_pool in zip(geometry.layers, layers, strict=True):
            on_host = _parts(pool, self.geometry, of_pool)
            self._parts[of_pool.group] += [
                _as_items(part, on_host[name]) for name, part in _parts(storages, geometry, of_cache).items()
            ]

    def take_places(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        """See :class:`kvhma.vllm.device.memory.Memory`."""
        return self._slots.take_slots(spans)

    def release_places(self, places: Sequence[Span]) -> None:
        """See :class:`kvhma.vllm.device.memory.Memory`."""
        self._slots.release_slots(places)

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """See :class:`kvhma.vllm.device.memory.Memory`. Only reads write to slots, so it need not wait for `after`."""
        clear_host(rows)
        return None

    def copy_in(
        self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None
    ) -> torch.Event | None:
        """Copy slots to the device, on the connector's stream."""
        return self.device.launch(lambda: self._to_device(places, spans), after)

    def copy_out(self, spans: Sequence[Span], places: Sequence[Span]) -> None:
        """Copy computed blocks to slots, on the stream of the calling thread, and wait."""
        for parts, blocks, slots in self._moves(spans, places):
            # Zeros, because other engines can also read the gaps between pages.
            copies = parts[0][0].new_zeros((len(slots), self._room), dtype=torch.uint8)
            indices = indices_beside(copies, blocks)
            for on_device, in_slots in parts:
                _within(copies, in_slots).copy_(on_device.index_select(0, indices))
            for rows, of_copies in self._runs(slots):
                rows.copy_(copies[of_copies], non_blocking=True)
        if (done := self.device.mark()) is not None:
            done.synchronize()

    def _to_device(self, places: Sequence[Span], spans: Sequence[Span]) -> None:
        for parts, blocks, slots in self._moves(spans, places):
            copies = parts[0][0].new_empty((len(slots), self._room), dtype=torch.uint8)
            for rows, of_copies in self._runs(slots):
                copies[of_copies].copy_(rows, non_blocking=True)
            indices = indices_beside(copies, blocks)
            for on_device, in_slots in parts:
                on_device.index_copy_(0, indices, _within(copies, in_slots))

    def _moves(
        self, spans: Sequence[Span], places: Sequence[Span]
    ) -> Iterable[tuple[list[tuple[torch.Tensor, torch.Tensor]], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the parts of each group's layers, some of its blocks and their slots, few enough to gather."""
        batch = max(1, _ASIDE_BYTES // self._room)
        for parts, span, place in zip(self._parts, spans, places, strict=True):
            blocks, slots = (np.asarray(ids, dtype=np.int64) for ids in (span.ids, place.ids))
            for start in range(0, len(blocks) if parts else 0, batch):
                yield parts, blocks[start : start + batch], slots[start : start + batch]

    def _runs(self, slots: NDArray[np.int64]) -> Iterable[tuple[torch.Tensor, slice]]:
        """Yield runs of neighbouring slots, of shape (n, bytes of a slot), and their indices in `slots`.

        A copy engine copies whole slots from pinned memory by itself. For parts of slots a thread would first gather
        them in memory that is not pinned.
        """
        rows = self._bytes.view(-1, self._room)
        ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        for start, end in itertools.pairwise([0, *ends]):
            first = int(slots[start])
            yield rows[first : first + end - start], slice(start, end)


def _pool_layers(geometry: Geometry, slots: int) -> tuple[int, tuple[Layer, ...]]:
    """Return the bytes of a slot, and where in the pool each layer's pages are."""
    ends = [0] * len(geometry.groups)
    pages, offsets = [], []
    for layer in geometry.layers:
        pages.append(_dense(layer.page))
        offsets.append(ends[layer.group])
        ends[layer.group] += geometry.groups[layer.group].ratio * _room(layer.page)
    room = max(ends, default=0)
    layers = tuple(
        Layer(layer.name, layer.group, 0, offset, slots, room, page, kernel_stride=_room(page))
        for layer, page, offset in zip(geometry.layers, pages, offsets, strict=True)
    )
    return room, layers


def _dense(page: Page) -> Page:
    """Return a page without gaps, with its axes in the same order of strides.

    The gaps between the items of a page may belong to another layer or block, so they are not copied::

        in a cache   a: token 0 | b: token 0 | a: token 1 | b: token 1 | ...
        in a slot    a: token 0 | a: token 1 | ...
    """
    parts, offset = [], 0
    for part in sorted(page.parts, key=lambda part: part.offset):
        stride = part.item_bytes
        strides = {}
        for index, axis in sorted(enumerate(part.axes), key=lambda item: item[1].stride):
            strides[index] = stride
            stride *= axis.shard.held
        axes = tuple(replace(axis, stride=strides[index]) for index, axis in enumerate(part.axes))
        parts.append(replace(part, offset=offset, axes=axes))
        offset += stride
    return Page(tuple(parts))


def _room(page: Page) -> int:
    """Return the bytes of a page in a slot."""
    return -(-page.nbytes // _ALIGN) * _ALIGN


def _parts(storages: Storages, geometry: Geometry, layer: Layer) -> dict[str, torch.Tensor]:
    """Return the parts of a layer's pages as bytes: blocks, kernel blocks of a block, axes, bytes of an item."""
    found = {}
    for part in layer.page.parts:
        within = storages.from_address(geometry.regions[layer.region].base + layer.offset + part.offset)
        ratio = geometry.groups[layer.group].ratio
        shape = (layer.num_blocks, ratio, *(axis.shard.held for axis in part.axes), part.item_bytes)
        strides = (layer.block_stride, geometry.kernel_stride(layer), *(axis.stride for axis in part.axes), 1)
        found[part.name] = within.as_strided(shape, strides, within.storage_offset())
    return found


def _within(copies: torch.Tensor, in_slots: torch.Tensor) -> torch.Tensor:
    """Return the part of copied slots that has the position of `in_slots` in the pool."""
    shape = (len(copies), *in_slots.shape[1:])
    return copies.view(in_slots.dtype).as_strided(shape, in_slots.stride(), in_slots.storage_offset())


def _as_items(in_cache: torch.Tensor, in_pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both views with whole items instead of bytes, which copy faster, if they are aligned."""
    dtype = _ITEMS.get(in_cache.shape[-1], torch.uint8)
    try:
        return in_cache.view(dtype), in_pool.view(dtype)
    except RuntimeError:
        return in_cache, in_pool
