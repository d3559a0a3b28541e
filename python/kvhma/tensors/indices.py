# SPDX-License-Identifier: Apache-2.0
"""Indices for tensors on a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def indices_beside(tensor: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
    """Return indices where a tensor is, without a wait for what its device still has to do.

    A copy from memory that is not pinned begins when all is done that was launched on the stream before. Pinned memory
    goes back to torch's own pool, which gives it away once the copy is done.
    """
    found = torch.from_numpy(indices)
    if tensor.device.type == "cpu":
        return found
    pinned = torch.empty(len(indices), dtype=torch.int64, pin_memory=True)
    pinned.copy_(found)
    return tensor.new_empty(len(indices), dtype=torch.int64).copy_(pinned, non_blocking=True)
