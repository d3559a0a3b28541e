# SPDX-License-Identifier: Apache-2.0
"""Ranges of bytes in an engine's tensors, on whatever device, zeroed before a read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.tensors.storages import Storages


def clear(rows: NDArray[np.uint64], tensors: Iterable[torch.Tensor]) -> None:
    """Zero ranges of tensors' storages. Done when it returns, on a device too.

    What the device was told to write there before, by its current stream, has been done then as well.

    Args:
        rows: shape (n, 3), address, length in bytes, device: ``Transfer.zero``.
        tensors: that have all of the ranges in their storages.

    Raises:
        GeometryError: a range that is in none. Nothing was zeroed.
    """
    if not len(rows):
        return
    pieces = Storages({str(index): tensor for index, tensor in enumerate(tensors)}).pieces(rows)
    torch._foreach_zero_(pieces)
    for device in {piece.device for piece in pieces}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
