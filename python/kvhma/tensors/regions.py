# SPDX-License-Identifier: Apache-2.0
"""From a tensor's storage to a region of memory: the only place with this rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Memory, Region

_MEMORIES: dict[str, Memory] = {"cpu": "DRAM", "meta": "DRAM", "cuda": "VRAM", "xpu": "VRAM"}
_META_BASE, _META_ALIGN = 1 << 20, 4096
"""Storages on the meta device get consecutive addresses from here on."""


class Location(NamedTuple):
    """Position of a tensor's first item: index of the region, and bytes from its base."""

    region: int
    offset: int


def locate(
    tensors: Mapping[str, torch.Tensor], registered: Sequence[Region] | None = None
) -> tuple[tuple[Region, ...], dict[str, Location]]:
    """Return the regions of some tensors, and the position of each tensor in them.

    Args:
        tensors: each tensor by its name in errors.
        registered: regions to find the tensors in; None for their storages, each once, in order of use, with
            overlapping storages joined.

    Raises:
        GeometryError: a device with an unknown kind of memory, or a tensor that is not inside one registered range.
    """
    storages = _storages(tensors)
    regions = _join(storages.values()) if registered is None else tuple(registered)
    return regions, {name: _find(name, tensor, storages[name], regions) for name, tensor in tensors.items()}


def _storages(tensors: Mapping[str, torch.Tensor]) -> dict[str, Region]:
    made_up: dict[int, int] = {}
    next_base = _META_BASE
    found = {}
    for name, tensor in tensors.items():
        device = tensor.device
        if device.type not in _MEMORIES:
            raise GeometryError(f"{name}: device {device}; known are {', '.join(_MEMORIES)}")
        storage = tensor.untyped_storage()
        base, nbytes = int(storage.data_ptr()), int(storage.nbytes())
        if device.type == "meta":
            base = made_up.setdefault(storage._cdata, next_base)
            if base == next_base:
                next_base += -(-nbytes // _META_ALIGN) * _META_ALIGN
        found[name] = Region(base, nbytes, _MEMORIES[device.type], device.index or 0)
    return found


def _join(storages: Iterable[Region]) -> tuple[Region, ...]:
    """Return each storage once, with overlapping storages as one region, in the order of each first use.

    ::

        storages   [ second use  )            [ third use )
                           [ first use  )
        joined     [ region 0           )     [ region 1  )      storages that only touch stay two
    """
    joined: list[tuple[int, Region]] = []  # with the first use of each region
    in_order = enumerate(dict.fromkeys(storages))
    for use, storage in sorted(in_order, key=lambda item: (item[1].memory, item[1].device, item[1].base)):
        if joined and _overlaps(joined[-1][1], storage):
            first_use, last = joined[-1]
            nbytes = max(last.bytes, storage.base + storage.bytes - last.base)
            joined[-1] = (min(first_use, use), Region(last.base, nbytes, last.memory, last.device))
        else:
            joined.append((use, storage))
    return tuple(region for _, region in sorted(joined, key=lambda item: item[0]))


def _overlaps(region: Region, storage: Region) -> bool:
    """Whether a storage that begins no earlier than a region overlaps it."""
    same = (region.memory, region.device) == (storage.memory, storage.device)
    return same and storage.base < region.base + region.bytes


def _find(name: str, tensor: torch.Tensor, storage: Region, regions: Sequence[Region]) -> Location:
    """Find the region that contains a whole tensor.

        storage.base      start = base + storage_offset * item     end
        |                 |<----- first item to last item -------->|
        |=================|========================================|====|
    region.base .............................................. region.base + region.bytes
    """
    item = tensor.element_size()
    start = storage.base + int(tensor.storage_offset()) * item
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    end = start + item + sum((size - 1) * stride for size, stride in strides) * item
    for index, region in enumerate(regions):
        same = (region.memory, region.device) == (storage.memory, storage.device)
        if same and region.base <= start and end <= region.base + region.bytes:
            return Location(index, start - region.base)
    raise GeometryError(f"{name}: bytes {start:#x}..{end:#x} of {tensor.device} are in no region of {regions}")
