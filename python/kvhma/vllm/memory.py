# SPDX-License-Identifier: Apache-2.0
"""The memory that is registered for transfer: the caches themselves, or a copy in host memory where they cannot be."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Region, Span
from kvhma.geometry import Memory as MemoryKind
from kvhma.vllm.accelerator import Accelerator, device_of
from kvhma.vllm.cache_device import CacheDevice

_SCRATCH_BYTES = 4096


class Memory(Protocol):
    """What loads are read into and other engines read from.

    Attributes:
        kind: of the memory that is registered.
        device: that the engine's caches are on.
        scratch: a range on that device that connections are warmed up with, to be registered too; None if what is
            registered is host memory.
    """

    kind: MemoryKind
    device: CacheDevice
    scratch: Region | None

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """Begin to zero ranges: shape (n, 3), address, length in bytes, device.

        Args:
            rows: the ranges.
            after: what the device has to have done before, since it may write there; None if nothing.

        Returns:
            What the device has to have done before anything else is written there or near; None if nothing has.

        Raises:
            GeometryError: a range that is not in the caches. Nothing was zeroed.
        """

    def copy_in(self, spans: Sequence[Span], after: torch.Event | None = None) -> None:
        """Bring blocks that were read, for each group, to where the engine uses them. Done when it returns.

        Args:
            spans: the blocks.
            after: what the device has to have done before, since it may write there; None if nothing.
        """

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Bring blocks that the engine has computed to where others read them. Done when it returns."""


class DeviceMemory:
    """The engine's own caches."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor]) -> None:
        """Look at the storages behind the caches."""
        self.kind: MemoryKind = geometry.regions[0].memory
        self.device = device_of(caches.values())
        self._storages = Storages(caches)
        self.scratch: Region | None = None
        if isinstance(self.device, Accelerator):
            scratch = self._scratch_bytes = next(iter(caches.values())).new_zeros(_SCRATCH_BYTES, dtype=torch.uint8)
            self.scratch = Region(scratch.data_ptr(), _SCRATCH_BYTES, self.kind, geometry.regions[0].device)
            # As the loads will, so that the first one finds the kernel loaded: that may wait for all others to end.
            self.device.launch(lambda: _zero_all([scratch]), self.device.mark())

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """See :class:`Memory`."""
        if not isinstance(self.device, Accelerator):
            zero_host(rows)
            return None
        if not len(rows):
            return after  # what is read may not be written over either
        pieces = self._storages.pieces(rows)
        return self.device.launch(lambda: _zero_all(pieces), after)

    def copy_in(self, spans: Sequence[Span], after: torch.Event | None = None) -> None:
        """Blocks are where they belong."""

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Blocks are where they belong."""


class HostStaging:
    """A copy of the caches in host memory, byte for byte, through which blocks go in and out."""

    kind: MemoryKind = "DRAM"
    scratch: Region | None = None

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Allocate a copy of each storage; the views of the copy are `caches`."""
        self.device = device_of(caches.values())
        copies: dict[tuple[int, int], torch.Tensor] = {}
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.caches: dict[str, torch.Tensor] = {}
        for name, cache in caches.items():
            key = _storage_key(cache)
            if key not in copies:
                _, nbytes = key
                copies[key] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cache.is_cuda)
            view = torch.empty(0, dtype=cache.dtype).set_(
                copies[key].untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
            )
            self.caches[name] = view
            self._pairs[name] = (cache, view)
        self._layers: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []

    def describe(self, geometry: Geometry) -> None:
        """Take the geometry of the copy, which says what the layers of each group are."""
        self._layers = [[] for _ in geometry.groups]
        for layer in geometry.layers:
            cache, view = self._pairs[layer.name]
            self._layers[layer.group].append((cache, view, geometry.groups[layer.group].ratio))

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """See :class:`Memory`. Nothing but reads is written to the copy, so it comes after nothing."""
        zero_host(rows)
        return None

    def copy_in(self, spans: Sequence[Span], after: torch.Event | None = None) -> None:
        """Copy blocks to the device, on the connector's stream."""
        if isinstance(self.device, Accelerator):
            self.device.launch(lambda: self._copy(spans, to_host=False), after).synchronize()
        else:
            self._copy(spans, to_host=False)

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Copy blocks to the host, on the stream of the calling thread, which waits for it."""
        self._copy(spans, to_host=True)

    def _copy(self, spans: Sequence[Span], *, to_host: bool) -> None:
        for layers, span in zip(self._layers, spans, strict=True):
            ids = torch.as_tensor(np.asarray(span.ids, dtype=np.int64))
            if not len(ids):
                continue
            for cache, view, ratio in layers:
                # block i:  | kernel block i * ratio | ... | i * ratio + ratio - 1 |
                on_host = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1)
                on_device = on_host.to(cache.device)
                if to_host:
                    view[on_host] = cache[on_device].to("cpu")
                else:
                    cache[on_device] = view[on_host].to(cache.device)


class Storages:
    """The storages behind caches, as bytes. Some may overlap, or lie in others."""

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Keep each storage that no other one covers, in the order of their addresses."""
        found = {_storage_key(cache): cache for cache in caches.values()}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bytes: list[torch.Tensor] = []
        for start, nbytes in sorted(found, key=lambda key: (key[0], -key[1])):
            if self._ends and start + nbytes <= self._ends[-1]:
                continue
            cache = found[start, nbytes]
            self._starts.append(start)
            self._ends.append(start + nbytes)
            self._bytes.append(cache.new_empty(0, dtype=torch.uint8).set_(cache.untyped_storage()))

    def pieces(self, rows: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Return ranges, rows of address, length and device, as tensors of bytes: one or more for each range.

        ::

            range            |=======|==============|
            storage    |-------------|
            another        |-----|          lies in the first one, so it is not kept
            the next             |--------------------|    begins later, so it reaches further

        Raises:
            GeometryError: a range that is not in the storages.
        """
        found = []
        for address, length, _ in rows.tolist():
            at, end = address, address + length
            while at < end:
                index = bisect_right(self._starts, at) - 1  # of those that begin by then, the one that ends last
                if index < 0 or self._ends[index] <= at:
                    raise GeometryError(f"bytes {at:#x}..{end:#x} to be zeroed are in no storage of the caches")
                stop = min(end, self._ends[index])
                start = self._starts[index]
                found.append(self._bytes[index][at - start : stop - start])
                at = stop
        return found


def zero_host(rows: NDArray[np.uint64]) -> None:
    """Zero ranges of host memory."""
    for address, length, _ in rows.tolist():
        ctypes.memset(address, 0, length)


def _zero_all(pieces: list[torch.Tensor]) -> None:
    """Zero tensors, all in one launch or a few of a hundred each, where ``zero_()`` would be a launch for each."""
    torch._foreach_zero_(pieces)


def _storage_key(cache: torch.Tensor) -> tuple[int, int]:
    """Address and bytes: of two storages that begin at the same address one may be longer."""
    storage = cache.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
