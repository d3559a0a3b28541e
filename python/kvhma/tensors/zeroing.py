# SPDX-License-Identifier: Apache-2.0
"""Zeroes ranges of bytes in an engine's tensors, on any device, before a read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.tensors.storages import Storages


def clear(rows: NDArray[np.uint64], tensors: Iterable[torch.Tensor]) -> None:
    """Zero ranges of tensors' storages. Finished when it returns, on a device too.

    Earlier work on the device's current stream, which may write to these ranges, has finished then as well.

    Args:
        rows: shape (n, 3), address, length in bytes, device: ``Transfer.zero``.
        tensors: tensors whose storages have all of the ranges.

    Raises:
        GeometryError: a range is in no storage. Nothing was zeroed.
    """
    if not len(rows):
        return
    pieces = Storages({str(index): tensor for index, tensor in enumerate(tensors)}).pieces(rows)
    torch._foreach_zero_(pieces)
    for device in {piece.device for piece in pieces}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
