# SPDX-License-Identifier: Apache-2.0
"""The memory that is registered: the caches themselves, or a copy in host memory where they cannot be."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Span
from kvhma.geometry import Memory as MemoryKind


class Memory(Protocol):
    """What loads are read into and other engines read from."""

    kind: MemoryKind

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """Zero ranges: shape (n, 3), address, length in bytes, device. Done when it returns."""

    def copy_in(self, spans: Sequence[Span]) -> None:
        """Bring blocks that were read, for each group, to where the engine uses them. Done when it returns."""

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Bring blocks that the engine has computed to where others read them. Done when it returns."""


class DeviceMemory:
    """The engine's own caches."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor]) -> None:
        """Look at the storage behind the caches."""
        self.kind: MemoryKind = geometry.regions[0].memory
        self._bytes: dict[int, torch.Tensor] = {}
        for cache in caches.values():
            storage = cache.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
            self._bytes.setdefault(storage.data_ptr(), flat)

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """See :class:`Memory`."""
        zero_rows(rows, self.kind, self._bytes)

    def copy_in(self, spans: Sequence[Span]) -> None:
        """Blocks are where they belong."""

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Blocks are where they belong."""


class HostStaging:
    """A copy of the caches in host memory, byte for byte, through which blocks go in and out."""

    kind: MemoryKind = "DRAM"

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Allocate a copy of each storage; the views of the copy are `caches`."""
        copies: dict[int, torch.Tensor] = {}
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.caches: dict[str, torch.Tensor] = {}
        for name, cache in caches.items():
            storage = cache.untyped_storage()
            if storage.data_ptr() not in copies:
                pin = cache.is_cuda
                copies[storage.data_ptr()] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
            host = copies[storage.data_ptr()]
            view = torch.empty(0, dtype=cache.dtype).set_(
                host.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
            )
            self.caches[name] = view
            self._pairs[name] = (cache, view)
        self._bytes = {copy.data_ptr(): copy for copy in copies.values()}
        self._layers: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []

    def describe(self, geometry: Geometry) -> None:
        """Take the geometry of the copy, which says what the layers of each group are."""
        self._layers = [[] for _ in geometry.groups]
        for layer in geometry.layers:
            cache, view = self._pairs[layer.name]
            self._layers[layer.group].append((cache, view, geometry.groups[layer.group].ratio))

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """See :class:`Memory`."""
        zero_rows(rows, "DRAM", self._bytes)

    def copy_in(self, spans: Sequence[Span]) -> None:
        """Copy blocks to the device."""
        self._copy(spans, to_host=False)

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Copy blocks to the host."""
        self._copy(spans, to_host=True)

    def _copy(self, spans: Sequence[Span], *, to_host: bool) -> None:
        devices = set()
        for layers, span in zip(self._layers, spans, strict=True):
            ids = torch.as_tensor(np.asarray(span.ids, dtype=np.int64))
            if not len(ids):
                continue
            for cache, view, ratio in layers:
                kernel = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1)
                there = kernel.to(cache.device)
                devices.add(cache.device)
                if to_host:
                    view[kernel] = cache[there].to("cpu")
                else:
                    cache[there] = view[kernel].to(cache.device)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def zero_rows(rows: NDArray[np.uint64], kind: MemoryKind, storages: Mapping[int, torch.Tensor]) -> None:
    """Zero ranges of memory, on the host or through a storage of the device."""
    if kind == "DRAM":
        for address, length, _ in rows.tolist():
            ctypes.memset(address, 0, length)
        return
    bases = sorted(storages)
    device = next(iter(storages.values())).device
    for address, length, _ in rows.tolist():
        base = max(base for base in bases if base <= address)
        storages[base][address - base : address - base + length].zero_()
    if len(rows):
        torch.accelerator.synchronize(device)
