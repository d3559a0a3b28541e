# SPDX-License-Identifier: Apache-2.0
"""The memory that is registered for transfer: the caches themselves, or a copy in host memory where they cannot be."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Span
from kvhma.geometry import Memory as MemoryKind


class Memory(Protocol):
    """What loads are read into and other engines read from."""

    kind: MemoryKind

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """Zero ranges: shape (n, 3), address, length in bytes, device. Done when it returns.

        Raises:
            GeometryError: a range that is not in the caches.
        """

    def copy_in(self, spans: Sequence[Span]) -> None:
        """Bring blocks that were read, for each group, to where the engine uses them. Done when it returns."""

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Bring blocks that the engine has computed to where others read them. Done when it returns."""


class DeviceMemory:
    """The engine's own caches."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor]) -> None:
        """Look at the storages behind the caches."""
        self.kind: MemoryKind = geometry.regions[0].memory
        self._storages = [
            torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
            for cache in {_storage_key(cache): cache for cache in caches.values()}.values()
        ]

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """See :class:`Memory`."""
        if self.kind == "DRAM":
            zero_host(rows)
        else:
            zero_device(rows, self._storages)

    def copy_in(self, spans: Sequence[Span]) -> None:
        """Blocks are where they belong."""

    def copy_out(self, spans: Sequence[Span]) -> None:
        """Blocks are where they belong."""


class HostStaging:
    """A copy of the caches in host memory, byte for byte, through which blocks go in and out."""

    kind: MemoryKind = "DRAM"

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Allocate a copy of each storage; the views of the copy are `caches`."""
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

    def zero(self, rows: NDArray[np.uint64]) -> None:
        """See :class:`Memory`."""
        zero_host(rows)

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
                # block i:  | kernel block i * ratio | ... | i * ratio + ratio - 1 |
                on_host = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1)
                on_device = on_host.to(cache.device)
                devices.add(cache.device)
                if to_host:
                    view[on_host] = cache[on_device].to("cpu")
                else:
                    cache[on_device] = view[on_host].to(cache.device)
        for device in devices:
            _synchronize(device)


def zero_host(rows: NDArray[np.uint64]) -> None:
    """Zero ranges of host memory."""
    for address, length, _ in rows.tolist():
        ctypes.memset(address, 0, length)


def zero_device(rows: NDArray[np.uint64], storages: Sequence[torch.Tensor]) -> None:
    """Zero ranges of a device's memory through the storages that they are in, which may overlap.

    ::

        range            |=======|==============|
        storage    |-------------|
        another        |-----|          it ends before: the one that reaches furthest is taken
        the next                 |--------------------|

    Raises:
        GeometryError: a range that is not in the storages.
    """
    bounds = [(one.data_ptr(), one.data_ptr() + one.numel(), one) for one in storages]
    for address, length, _ in rows.tolist():
        at, end = address, address + length
        while at < end:
            around = [one for one in bounds if one[0] <= at < one[1]]
            if not around:
                raise GeometryError(f"bytes {at:#x}..{end:#x} to be zeroed are in no storage of the caches")
            base, last, storage = max(around, key=lambda one: one[1])
            stop = min(end, last)
            storage[at - base : stop - base].zero_()
            at = stop
    if len(rows):
        _synchronize(storages[0].device)


def _storage_key(cache: torch.Tensor) -> tuple[int, int]:
    """Address and bytes: of two storages that begin at the same address one may be longer."""
    storage = cache.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
