# SPDX-License-Identifier: Apache-2.0
"""Which registered range a tensor lies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Memory, Region

_MEMORIES: dict[str, Memory] = {"cpu": "DRAM", "meta": "DRAM", "cuda": "VRAM", "xpu": "VRAM"}
_META_BASE, _META_ALIGN = 1 << 20, 4096
"""Storages without memory are numbered as if they lay one behind the other from here on."""


class Place(NamedTuple):
    """Where a tensor's first item is."""

    region: int
    offset: int


class Regions:
    """The regions that some tensors lie in.

    Attributes:
        regions: the tensors' storages, each once, in order of use and joined where they overlap; or what was
            registered.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], registered: Sequence[Region] | None) -> None:
        """Find them.

        Args:
            tensors: each with words for where it is from.
            registered: ranges that are registered as they are, or None for the storages.

        Raises:
            GeometryError: a device whose memory has no kind, or a tensor that is not inside of one registered range.
        """
        self._meta: dict[int, int] = {}
        self._next_meta = _META_BASE
        storages = [self._storage(at, tensor) for at, tensor in tensors]
        self.regions = _join(storages) if registered is None else tuple(registered)
        self._places = {
            id(tensor): self._find(at, tensor, storage) for (at, tensor), storage in zip(tensors, storages, strict=True)
        }

    def place(self, tensor: torch.Tensor) -> Place:
        """Return where one of the tensors is."""
        return self._places[id(tensor)]

    def _storage(self, at: str, tensor: torch.Tensor) -> Region:
        device = tensor.device
        if device.type not in _MEMORIES:
            raise GeometryError(f"{at}: device {device}; known are {', '.join(_MEMORIES)}")
        storage = tensor.untyped_storage()
        base, nbytes = int(storage.data_ptr()), int(storage.nbytes())
        if device.type == "meta":
            base = self._meta.setdefault(storage._cdata, self._next_meta)
            if base == self._next_meta:
                self._next_meta += -(-nbytes // _META_ALIGN) * _META_ALIGN
        return Region(base, nbytes, _MEMORIES[device.type], device.index or 0)

    def _find(self, at: str, tensor: torch.Tensor, storage: Region) -> Place:
        item = tensor.element_size()
        start = storage.base + int(tensor.storage_offset()) * item
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        end = start + item + sum((size - 1) * stride for size, stride in strides) * item
        for index, region in enumerate(self.regions):
            same = (region.memory, region.device) == (storage.memory, storage.device)
            if same and region.base <= start and end <= region.base + region.bytes:
                return Place(index, start - region.base)
        raise GeometryError(f"{at}: bytes {start:#x}..{end:#x} of {tensor.device} are in none of {self.regions}")


def _join(storages: Sequence[Region]) -> tuple[Region, ...]:
    """Return each range once, those that overlap as one, in the order of the first storage of each."""
    joined: list[Region] = []
    for one in sorted(set(storages), key=lambda region: (region.memory, region.device, region.base)):
        last = joined[-1] if joined else None
        if last and (last.memory, last.device) == (one.memory, one.device) and one.base < last.base + last.bytes:
            nbytes = max(last.bytes, one.base + one.bytes - last.base)
            joined[-1] = Region(last.base, nbytes, last.memory, last.device)
        else:
            joined.append(one)
    order: dict[Region, None] = {}
    for storage in storages:
        holds = (r for r in joined if (r.memory, r.device) == (storage.memory, storage.device))
        order.setdefault(next(r for r in holds if r.base <= storage.base < r.base + r.bytes))
    return tuple(order)
