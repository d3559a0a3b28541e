# SPDX-License-Identifier: Apache-2.0
"""Tensors on devices that this machine does not have."""

from __future__ import annotations

from typing import Any

import torch


class Elsewhere(torch.Tensor):
    """A tensor that says where it is and how it is shaped, and has no bytes."""

    @staticmethod
    def __new__(cls, device: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, device=device, dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> None:
        raise AssertionError(f"{func} of a tensor without bytes")
