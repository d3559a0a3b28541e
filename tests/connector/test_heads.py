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

# With its parts, since torch warns while they are imported, and a warning is an error here.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
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


def model_wide(kv_heads: int, held: int, rank: int, size: int) -> tuple[int, int, int] | None:
    """Extent, start and length that one number for all layers gave until November 2026; None was one whole part."""
    shards = size if held > 1 or held * size == kv_heads else kv_heads
    return None if shards > size or size % shards else (held * shards, rank * shards // size * held, held)


def test_what_one_number_for_all_layers_made_of_it() -> None:
    # gemma-4 with one global head, sliding layers with 8: parts of other ranks, which only equal engines can read.
    assert [model_wide(8, len(heads(1, 0, size)), 0, size) for size in (1, 2)] == [None, None]
    for mine, theirs in ((1, 2), (2, 1)):
        kvhma.plan(worker("gemma-4 12B", 0, mine), [worker("gemma-4 12B", rank, theirs) for rank in range(theirs)])
    # MiMo-V2 has 4 heads in its full layers and 8 in the sliding ones: with 8 ranks these were 4 heads, each twice.
    said = [model_wide(4, 1, rank, 8) for rank in range(8)]
    assert said == [(4, rank // 2, 1) for rank in range(8)]
    assert [heads(8, rank, 8) for rank in range(8)] == [(rank,) for rank in range(8)]


def test_which_heads_of_a_layer_are_known() -> None:
    """A rank that is alone or has several heads knows them all; with one head it knows that others may hold the
    same."""

    def axis(rank: int, size: int, layer: int) -> Axis:
        return worker("MiMo-V2", rank, size).layers[layer].page.parts[0].axes[0]

    assert [(axis(3, 4, 1).extent, axis(3, 4, 1).start, axis(3, 4, 1).may_repeat)] == [(8, 6, False)]
    assert [(axis(3, 4, 0).extent, axis(3, 4, 0).start, axis(3, 4, 0).may_repeat)] == [(4, 3, True)]
    assert axis(0, 1, 0).may_repeat is False


def test_layers_of_other_models_are_refused_where_that_can_be_seen() -> None:
    with pytest.raises(UnsupportedPairError, match=r'"0".*extent.*16 with 8'):
        kvhma.plan(worker("gemma-4 31B", 0, 1), worker("gemma-4 26B", 0, 1))


def test_latents_are_held_by_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=6, dtype=torch.bfloat16, max_tp_shards=1)
    order = KVCacheLayout.LBHNC
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    strides = compute_layout_strides(spec, BLOCKS, 1, order)
    tensor = KVCacheTensor(raw.numel(), ["0"], layer_stride=strides[0], block_stride=strides[1])
    caches = {"0": create_kv_cache_views(raw, spec, BLOCKS, order, tensor)[0]}
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(["0"], spec)])
    writer = Writer("TRITON_MLA", "cuda", "9.0")
    (part,) = geometry_of(config, caches, RankInfo(1, 2), writer=lambda _: writer).layers[0].page.parts
    assert not any(axis.may_repeat for axis in part.axes)


def test_numbers_that_vllm_gives_by_layer() -> None:
    """The numbers above are those of vLLM's own configuration, layer by layer."""
    configuration = pytest.importorskip(
        "transformers.models.gemma4.configuration_gemma4", reason="needs vLLM; make connector runs it"
    )
    convertor = pytest.importorskip(
        "vllm.transformers_utils.model_arch_config_convertor", reason="needs vLLM; make connector runs it"
    )

    def by_layer(**more: Any) -> list[int]:
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        config = configuration.Gemma4TextConfig(
            num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8, layer_types=kinds, **more
        )
        arch = convertor.Gemma4ModelArchConfigConvertor(config, config).convert()
        return [arch[index].total_num_kv_heads for index in range(6)]

    assert by_layer(attention_k_eq_v=True, num_global_key_value_heads=1) == [8, 8, 8, 8, 8, 1]
    assert by_layer(attention_k_eq_v=True, num_global_key_value_heads=2) == [8, 8, 8, 8, 8, 2]
    assert by_layer() == [8] * 6
