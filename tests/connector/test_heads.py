# SPDX-License-Identifier: Apache-2.0
"""KV heads that differ by layer, at every pair of tensor-parallel sizes.

vLLM decides which heads a rank has: its own projection is loaded with a weight that is the number of its head. Plans
are made from the workers' handshakes, and judged with those heads.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Page
from kvhma.oracle import Oracle
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo

SIZES = (1, 2, 4, 8)
BLOCKS, QUERIES, WIDTH = 6, 16, 2
WRITER = Writer("FLASH_ATTN", "cuda", "9.0")


@cache
def heads(total: int, rank: int, size: int) -> tuple[int, ...]:
    """Global KV heads that vLLM puts on a rank."""
    group = SimpleNamespace(rank_in_group=rank, world_size=size)
    with patch.object(parallel_state, "_TP", group), set_current_vllm_config(VllmConfig()):
        layer = QKVParallelLinear(1, WIDTH, QUERIES, total, bias=False, params_dtype=torch.float32)
        numbers = torch.arange(total, dtype=torch.float32).repeat_interleave(WIDTH)[:, None]
        layer.weight_loader_v2(layer.weight, numbers, "k")
    first = layer.num_heads * WIDTH
    return tuple(int(row) for row in layer.weight.data[first : first + layer.num_kv_heads * WIDTH : WIDTH, 0])


def full(held: int) -> AttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=held, head_size=WIDTH, dtype=torch.bfloat16)


def sliding(held: int) -> AttentionSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=held, head_size=WIDTH, dtype=torch.bfloat16, sliding_window=6)


MODELS: dict[str, dict[str, tuple[Any, int]]] = {
    "gemma-4 31B": {"0": (sliding, 16), "5": (full, 4)},
    "gemma-4 26B": {"0": (sliding, 8), "5": (full, 2)},
    "gemma-4 with k_eq_v and one global head": {"0": (sliding, 8), "5": (full, 1)},
    "gemma-4 12B": {"0": (sliding, 8), "5": (full, 1), "6": (sliding, 8)},
    "MiMo-V2": {"0": (full, 4), "1": (sliding, 8)},
    "a draft model with fewer heads": {"0": (full, 8), "draft.0": (full, 2)},
    "a draft model with more heads": {"0": (full, 2), "draft.0": (full, 8), "draft.1": (full, 1)},
}


def worker(model: str, rank: int, size: int, layout: str = "LBHNC") -> Geometry:
    """What the connector announces for a worker: each layer is a group, with caches as vLLM lays them out."""
    order, tensors, groups, caches = KVCacheLayout[layout], [], [], {}
    specs = {name: kind(len(heads(total, rank, size))) for name, (kind, total) in MODELS[model].items()}
    raw = torch.zeros(sum(BLOCKS * spec.page_size_bytes for spec in specs.values()), dtype=torch.int8)
    offset = 0
    for name, spec in specs.items():
        strides = compute_layout_strides(spec, BLOCKS, 1, order)
        tensor = KVCacheTensor(raw.numel(), [name], layer_stride=strides[0], block_stride=strides[1], offset=offset)
        caches[name] = create_kv_cache_views(raw, spec, BLOCKS, order, tensor)[0]
        tensors.append(tensor)
        groups.append(KVCacheGroupSpec([name], spec))
        offset += BLOCKS * spec.page_size_bytes
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)
    return geometry_of(config, caches, RankInfo(rank, size), writer=lambda _: WRITER)


def true(model: str, geometry: Geometry) -> Geometry:
    """The same worker with the heads that vLLM put there."""
    layers = []
    for layer in geometry.layers:
        total = MODELS[model][layer.name][1]
        has = heads(total, geometry.tp_rank, geometry.tp_size)
        (part,) = layer.page.parts
        axes = (Axis("heads", total, part.axes[0].stride, has[0], len(has)), *part.axes[1:])
        layers.append(replace(layer, page=Page((replace(part, axes=axes),))))
    return replace(geometry, layers=tuple(layers))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(SIZES, SIZES)))
def test_every_pair_of_sizes(model: str, mine: int, theirs: int) -> None:
    sources = [worker(model, rank, theirs, "LBNHC") for rank in range(theirs)]
    truths = [true(model, source) for source in sources]
    tables = [[1 + (at + group) % (BLOCKS - 1) for at in range(3)] for group in range(len(MODELS[model]))]
    for rank in range(mine):
        local = worker(model, rank, mine)
        plan = kvhma.plan(local, sources)
        oracle = Oracle(true(model, local), truths)
        for tokens in (1, 4, 7, 12):
            spans = kvhma.live_spans(local, tokens, [table[: -(-tokens // 4)] for table in tables])
            oracle.check(tokens, spans, spans, plan.transfer(tokens, spans, spans))


def test_layers_of_other_models_are_refused_where_that_can_be_seen() -> None:
    with pytest.raises(UnsupportedPairError, match=r'"0".*extent.*16 with 8'):
        kvhma.plan(worker("gemma-4 31B", 0, 1), worker("gemma-4 26B", 0, 1))
