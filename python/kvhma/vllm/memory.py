# SPDX-License-Identifier: Apache-2.0
"""The memory that is registered for transfer, and the caches themselves as such memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Region, Span
from kvhma.geometry import Memory as MemoryKind
from kvhma.tensors.permuting import launch_permute
from kvhma.tensors.storages import Storages
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

    def permute(self, permutes: NDArray[np.uint64]) -> torch.Event | None:
        """Begin to put ranges of what was read into order: :attr:`kvhma.permute.PermutedRead.permutes`.

        Returns:
            What the device has to have done before they are in order; None if they are.

        Raises:
            GeometryError: a range that is not in the memory.
        """

    def take(self, spans: Sequence[Span]) -> Sequence[Span] | None:
        """Return places to read a load's blocks into, for each group; None while there is no room.

        Raises:
            RequestError: there will never be.
        """

    def release(self, places: Sequence[Span]) -> None:
        """Take places back: nothing is read into them any more."""

    def copy_in(
        self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None
    ) -> torch.Event | None:
        """Begin to bring what was read to where the engine uses it.

        Args:
            places: that were taken for the blocks.
            spans: the blocks.
            after: what the device has to have done before, since it may write there; None if nothing.

        Returns:
            What the device has to have done before it is there, and the places are free; None if it is.
        """

    def copy_out(self, spans: Sequence[Span], places: Sequence[Span]) -> None:
        """Bring blocks that the engine has computed to places where others read them. Done when it returns."""


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

    def permute(self, permutes: NDArray[np.uint64]) -> torch.Event | None:
        """See :class:`Memory`. Nothing else is launched that writes there: blocks are zeroed before they are read."""
        return self.device.launch(lambda: launch_permute(permutes, self._storages), None)

    def take(self, spans: Sequence[Span]) -> Sequence[Span] | None:
        """Blocks are read into themselves."""
        return spans

    def release(self, places: Sequence[Span]) -> None:
        """They are the engine's."""

    def copy_in(
        self, places: Sequence[Span], spans: Sequence[Span], after: torch.Event | None = None
    ) -> torch.Event | None:
        """Blocks are where they belong."""
        return None

    def copy_out(self, spans: Sequence[Span], places: Sequence[Span]) -> None:
        """Blocks are where they belong."""


def zero_host(rows: NDArray[np.uint64]) -> None:
    """Zero ranges of host memory."""
    for address, length, _ in rows.tolist():
        ctypes.memset(address, 0, length)


def _zero_all(pieces: list[torch.Tensor]) -> None:
    """Zero tensors, all in one launch or a few of a hundred each, where ``zero_()`` would be a launch for each."""
    torch._foreach_zero_(pieces)
