# SPDX-License-Identifier: Apache-2.0
"""The memory that is registered for transfer: an interface, and the engine's caches as an implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Region, Span
from kvhma.geometry import Memory as MemoryKind
from kvhma.nixl.blocking import clear_host
from kvhma.tensors.permuting import launch_permute
from kvhma.tensors.storages import Storages
from kvhma.vllm.device.accelerator import Accelerator, device_of
from kvhma.vllm.device.cache_device import CacheDevice

_SCRATCH_BYTES = 1 << 16


class Memory(Protocol):
    """The memory that loads read into and other engines read from.

    Attributes:
        geometry: that is registered.
        kind: of the registered memory.
        device: of the engine's caches.
        scratch: a range on the device for the first read of a connection, to be registered too; None if host memory is
            registered.
    """

    geometry: Geometry
    kind: MemoryKind
    device: CacheDevice
    scratch: Region | None

    def from_address(self, address: int) -> torch.Tensor:
        """Return the registered bytes from an address to the end of their storage; empty without any."""

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """Begin to zero ranges: shape (n, 3), address, length in bytes, device.

        Args:
            rows: the ranges.
            after: device work that may write there, and has to end before; None without any.

        Returns:
            Device work that has to end before anything else writes there or near; None without any.

        Raises:
            GeometryError: a range is not in the caches. Nothing was zeroed.
        """

    def take_places(self, spans: Sequence[Span]) -> Sequence[Span] | None:
        """Return places to read a load's blocks into, for each group; None while there is no room.

        Raises:
            RequestError: there are more blocks than places.
        """

    def release_places(self, places: Sequence[Span]) -> None:
        """Free places that no read writes to any more."""

    def copy_in(
        self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None
    ) -> torch.Event | None:
        """Begin to copy what was read to the engine's blocks.

        Args:
            places: that were taken for the blocks.
            spans: the blocks.
            after: device work that may write there, and has to end before; None without any.

        Returns:
            Device work after which the blocks are filled and the places may be freed; None if they are.
        """


class DeviceMemory:
    """The engine's own caches."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor]) -> None:
        """Find the storages of the caches."""
        self.geometry = geometry
        self.kind: MemoryKind = geometry.regions[0].memory
        self.device = device_of(caches.values())
        self._storages = Storages(caches)
        self.from_address = self._storages.from_address
        self.scratch: Region | None = None
        if isinstance(self.device, Accelerator):
            scratch = self._scratch_bytes = next(iter(caches.values())).new_zeros(_SCRATCH_BYTES, dtype=torch.uint8)
            self.scratch = Region(scratch.data_ptr(), _SCRATCH_BYTES, self.kind, geometry.regions[0].device)
            # This loads the kernel that loads use. Loading a kernel may wait for all other work on the device.
            self.device.launch(lambda: _zero_all([scratch]), self.device.mark())

    def zero(self, rows: NDArray[np.uint64], after: torch.Event | None = None) -> torch.Event | None:
        """See :class:`Memory`."""
        if not isinstance(self.device, Accelerator):
            clear_host(rows)
            return None
        if not len(rows):
            return after  # earlier steps must not overwrite what is read either
        pieces = self._storages.pieces(rows)
        return self.device.launch(lambda: _zero_all(pieces), after)

    def permute(self, permutes: NDArray[np.uint64]) -> torch.Event | None:
        """Begin to reorder ranges after a read: :attr:`kvhma.permute.PermutedRead.permutes`.

        No other launched work writes there: blocks are zeroed before the read.

        Returns:
            Device work after which they are in order; None if they are.

        Raises:
            GeometryError: a range is not in the memory.
        """
        return self.device.launch(lambda: launch_permute(permutes, self._storages), None)

    def take_places(self, spans: Sequence[Span]) -> Sequence[Span] | None:
        """Return the blocks: loads read into them directly."""
        return spans

    def release_places(self, places: Sequence[Span]) -> None:
        """Do nothing: the blocks are the engine's."""

    def copy_in(
        self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None
    ) -> torch.Event | None:
        """Do nothing: the blocks are filled already."""
        return None


def _zero_all(pieces: list[torch.Tensor]) -> None:
    """Zero tensors in one launch, or in launches of a hundred tensors. ``zero_()`` would be a launch for each."""
    torch._foreach_zero_(pieces)
