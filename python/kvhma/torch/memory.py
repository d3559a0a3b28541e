# SPDX-License-Identifier: Apache-2.0
"""Memory for all buffers, or for none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvhma.errors import KvhmaError
from kvhma.torch.arrange import Lot

_MEMINFO = Path("/proc/meminfo")
_MAX_BYTES = 2**63 - 1


class AllocationError(KvhmaError, MemoryError):
    """There is not enough memory for all buffers; none was kept."""


def make_buffers(lots: Sequence[Lot], device: torch.device) -> list[torch.Tensor]:
    """Return a zeroed int8 tensor for each buffer.

    Raises:
        AllocationError: the device has not enough memory, or a buffer does not fit an address space.
    """
    total = sum(lot.nbytes for lot in lots)
    free = _MAX_BYTES if device.type == "meta" else _available(device)
    if total > min(free, _MAX_BYTES):
        raise AllocationError(f"{_words(lots)} need {total} bytes, {device} has {free} left")
    buffers = []
    try:
        for lot in lots:
            buffers.append(torch.zeros(lot.shape, dtype=torch.int8, device=device))
    except (RuntimeError, MemoryError) as error:  # torch's own class for a full GPU is a RuntimeError
        done = sum(buffer.nbytes for buffer in buffers)
        buffers.clear()
        reason = str(error).splitlines()[0]
        raise AllocationError(
            f"{_words(lots)} need {total} bytes, {device} had no room behind the first {done}: {reason}"
        ) from None
    return buffers


def _words(lots: Sequence[Lot]) -> str:
    names = [name for lot in lots for slot in lot.slots for name in slot]
    layers = f"layer {names[0]!r}" if len(names) == 1 else f"{len(names)} layers {names[0]!r} to {names[-1]!r}"
    return f"{len(lots)} buffers of {layers}"


def _available(device: torch.device) -> int:
    """Return bytes that can be had without swapping; where nobody says, no bound."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and _MEMINFO.exists():
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        if "MemAvailable" in rows:
            return int(rows["MemAvailable"].split()[0]) * 1024
    return _MAX_BYTES
