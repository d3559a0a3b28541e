# SPDX-License-Identifier: Apache-2.0
"""Caches of layers with one spec, laid out and viewed by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def allocated(
    spec: Any, blocks: int, names: Sequence[str] = ("a",), layout: str = "LBNHC", kernel: int | None = None
) -> tuple[Any, dict[str, Any], KVCacheConfig]:
    """Return all bytes, int8; the view of each layer; and the configuration."""
    order = KVCacheLayout[layout]
    raw = torch.zeros(len(names) * blocks * spec.page_size_bytes, dtype=torch.int8)
    strides = compute_layout_strides(spec, blocks, len(names), order)
    tensor = KVCacheTensor(raw.numel(), list(names), layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(raw, spec, blocks, order, tensor, kernel)
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(list(names), spec)])
    return raw, dict(zip(names, views, strict=True)), config
