# SPDX-License-Identifier: Apache-2.0
"""The device's half of :func:`kvhma.tensors.copying.launch_copy`; importing it needs Triton, which vLLM brings."""

from typing import Any

import torch
import triton
import triton.language as tl

_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
_BLOCK_BYTES = 4096


def _copy(
    to: Any,
    source: Any,
    lengths: Any,
    unit: tl.constexpr,
    kind: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copy one chunk, a block of items at a time; `unit` divides addresses and length, so that accesses are wide."""
    chunk = tl.program_id(0)
    written = tl.multiple_of(tl.load(to + chunk), unit).to(tl.pointer_type(kind))
    read = tl.multiple_of(tl.load(source + chunk), unit).to(tl.pointer_type(kind))
    items = tl.multiple_of(tl.load(lengths + chunk) // size, unit // size)
    for begin in range(0, items, block):
        at = begin + tl.arange(0, block)
        tl.store(written + at, tl.load(read + at, mask=at < items), mask=at < items)


_kernel = triton.jit(_copy)


def copy_chunks(to: torch.Tensor, source: torch.Tensor, lengths: torch.Tensor, unit: int) -> None:
    """Launch a program for each chunk.

    Args:
        to: addresses to write to: int64 of shape (n,), on the device that copies.
        source: addresses to read from, of the same shape.
        lengths: bytes of each, of the same shape.
        unit: 1, 2, 4, 8 or 16, which divides all of these.
    """
    size = min(unit, 8)
    _kernel[(len(to),)](to, source, lengths, unit, _TYPES[unit], size, _BLOCK_BYTES // size)
