# SPDX-License-Identifier: Apache-2.0
"""Allocates memory for all buffers, or for no buffer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvhma.errors import AllocationError
from kvhma.torch.placement import BufferPlan

_MEMINFO = Path("/proc/meminfo")
_MAX_BYTES = 2**63 - 1


def make_buffers(plans: Sequence[BufferPlan], device: torch.device) -> list[torch.Tensor]:
    """Return a zeroed int8 tensor for each buffer.

    Raises:
        AllocationError: the device has not enough memory, or a buffer does not fit an address space.
    """
    total = sum(plan.nbytes for plan in plans)
    free = _MAX_BYTES if device.type == "meta" else _available(device)
    if total > min(free, _MAX_BYTES):
        raise AllocationError(f"{_name(plans)} need {total} bytes, {device} has {free} left")
    buffers = []
    try:
        for plan in plans:
            buffers.append(torch.zeros(tuple(plan.dims.values()), dtype=torch.int8, device=device))
    except (RuntimeError, MemoryError) as error:  # torch's error for a full GPU is a RuntimeError
        done = sum(buffer.nbytes for buffer in buffers)
        buffers.clear()
        reason = str(error).splitlines()[0]
        raise AllocationError(
            f"{_name(plans)} need {total} bytes, {device} had no room after the first {done}: {reason}"
        ) from None
    return buffers


def _name(plans: Sequence[BufferPlan]) -> str:
    """Return a name of the buffers for errors."""
    names = [name for plan in plans for slot in plan.slots for name in slot]
    layers = f"layer {names[0]!r}" if len(names) == 1 else f"{len(names)} layers {names[0]!r} to {names[-1]!r}"
    return f"{len(plans)} buffers of {layers}"


def _available(device: torch.device) -> int:
    """Return the bytes available without swapping; no bound if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    return _MAX_BYTES
