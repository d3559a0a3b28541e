# SPDX-License-Identifier: Apache-2.0
"""Indices for tensors on a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def indices_beside(tensor: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
    """Return indices on a tensor's device, without waiting for the device's pending work.

    A copy from pageable memory begins only after all earlier work on the stream. Pinned memory returns to torch's own
    pool, which reuses it after the copy.
    """
    found = torch.from_numpy(indices)
    if tensor.device.type == "cpu":
        return found
    pinned = torch.empty(len(indices), dtype=torch.int64, pin_memory=True)
    pinned.copy_(found)
    return tensor.new_empty(len(indices), dtype=torch.int64).copy_(pinned, non_blocking=True)
