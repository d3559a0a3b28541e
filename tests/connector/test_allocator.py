# SPDX-License-Identifier: Apache-2.0
"""`models.vllm_layout` and vLLM's allocator: the same layers through both, with all heads, orders and ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvhma.errors import LayoutError
from kvhma.models import Attention, Model, State
from kvhma.models.block_size import hybrid_block_size
from kvhma.models.pages import state_bytes
from kvhma.models.vllm_layout import LayoutOptions, layout, stage_layers
from support.groups import cache_groups
from support.vllm_grouping import get_kv_cache_config_from_groups, get_kv_cache_groups, project_groups

BLOCKS = 5
PAGE_ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


def settings(order: str, blocks: int = BLOCKS) -> Any:
    """The fields of a configuration that the allocator reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[order],
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
    )


def specs_of(one: Model, tp: int, block: int) -> dict[str, Any]:
    """The specs that vLLM's layers of such a model have on one rank."""
    logical = hybrid_block_size(one, tp_size=tp, block_size=block)
    own = [spec for _, spec in one.specs if isinstance(spec, Attention)]
    page = logical * own_bytes(one, tp) if own else None
    specs = {}
    for name, spec in one.specs:
        if isinstance(spec, State):
            held = state_bytes(spec, tp_size=tp)
            specs[name] = MambaSpec(block_size=logical, shapes=((held,),), dtypes=(torch.uint8,), page_size_padded=page)
            continue
        heads = {"num_kv_heads": max(1, spec.kv_heads // tp), "head_size": spec.head_dim, "block_size": logical}
        heads |= {"dtype": getattr(torch, spec.dtype or "uint8")}
        both = heads | {"head_size_v": spec.v_head_dim or spec.head_dim}
        if spec.kind == "full":
            specs[name] = FullAttentionSpec(**both)
        elif spec.kind == "sliding":
            specs[name] = SlidingWindowSpec(**both, sliding_window=spec.window)
        elif spec.kind == "chunked":
            specs[name] = ChunkedLocalAttentionSpec(**both, attention_chunk_size=spec.chunk)
        elif spec.kind == "mla":
            specs[name] = MLAAttentionSpec(**heads)
        else:
            specs[name] = MLAAttentionSpec(
                **(heads | {"head_size": 132}), cache_role=SparseCacheRole.INDEXER, max_tp_shards=1
            )
    return specs


def own_bytes(one: Model, tp: int) -> int:
    """A token of the model's own heads: vLLM pads a state's page to a multiple of it."""
    token = one.token_spec()
    return max(1, token.kv_heads // tp) * token.token_bytes


def allocated(
    specs: dict[str, Any], order: str, stage: range | None = None
) -> tuple[list[Any], dict[str, tuple[Any, Any]], int]:
    """vLLM's groups; view and spec of each layer; bytes of all: of a pipeline stage if its layers are given."""
    config = settings(order)
    groups = get_kv_cache_groups(config, dict(specs))
    if stage is not None:
        groups = project_groups(
            groups, {name: spec for name, spec in specs.items() if int(name.split(".")[2]) in stage}
        )
    found = get_kv_cache_config_from_groups(config, groups, 1 << 60)
    places = {}
    for group in groups:
        inner = group.kv_cache_spec
        own = inner.kv_cache_specs if isinstance(inner, UniformTypeKVCacheSpecs) else {}
        for tensor in found.kv_cache_tensors:
            if tensor.layers[0] not in group.layer_names:
                continue
            raw = torch.empty(tensor.size, dtype=torch.int8, device="meta")
            spec = own.get(tensor.layers[0], inner)
            views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[order], tensor)
            for name, view in zip(tensor.layers, views, strict=True):
                places[name] = (view, own.get(name, inner))
    return groups, places, found.kv_cache_tensors[0].size


def same(one: Model, tp: int, block: int, order: str, pp_rank: int = 0, pp_size: int = 1) -> None:
    """Compare every layer's bytes in every block with vLLM's view of them."""
    stage = range(*get_pp_indices(len(one.layers), pp_rank, pp_size))
    groups, places, size = allocated(specs_of(one, tp, block), order, stage)
    options = {"tp_size": tp, "pp_rank": pp_rank, "pp_size": pp_size, "block_size": block, "order": order}
    geometry = layout(one, LayoutOptions(num_blocks=BLOCKS, one_storage=True, base=0, **options))
    names = [layer.name for layer in geometry.layers]
    members = [[n for n, y in zip(names, geometry.layers, strict=True) if y.group == at] for at in range(len(groups))]
    assert [sorted(group) for group in members] == [sorted(group.layer_names) for group in groups]
    assert geometry.regions[0].bytes == size
    told = cache_groups(one, tp_size=tp, block_size=block, order=order)  # type: ignore[arg-type]
    held = [[name for name in group.layers if int(name.split(".")[2]) in stage] for group in told]
    assert held == [group.layer_names for group in groups]
    assert [group.block_size for group in geometry.groups] == [group.kv_cache_spec.block_size for group in groups]
    for layer in geometry.layers:
        view, spec = places[layer.name]
        group = geometry.groups[layer.group]
        assert group.window == (spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None)
        assert group.chunk == (spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None)
        item = view.element_size()
        start = view.storage_offset() * item
        assert (layer.offset, layer.block_stride) == (start, view.stride(0) * item), layer.name
        assert told[layer.group].pages[told[layer.group].layers.index(layer.name)] == spec.page_size_bytes
        if isinstance(spec, MambaSpec):
            assert layer.page.nbytes == spec.state_content_size_bytes
            continue
        axes = {axis.name: axis for axis in layer.page.parts[0].axes}
        if len(layer.page.parts) == 1:
            assert axes["tokens"].stride == view.stride(2) * item
            assert axes["tokens"].extent == view.shape[2]
            assert axes["content"].extent * layer.page.parts[0].item_bytes == view.shape[3] * item
        if "heads" in axes:
            assert (axes["heads"].length, axes["heads"].stride) == (view.shape[1], view.stride(1) * item)


GEMMA_4 = Model("gemma-4", ("sliding",) * 5 + ("full",), 16, 256, window=1024, attention=(Attention("full", 4, 512),))
STATE = State("mamba2", 48, 4, 8, 4, 4, 2, "bfloat16", "float32")


STAGED = {
    "gemma": Model("gemma", (("sliding",) * 5 + ("full",)) * 4 + ("sliding",) * 2, 4, 64, window=128),
    "state": Model("state", ("mamba2", "none", "mamba2", "full") * 5, 8, 64, state=STATE),
    "both": Model("both", ("full+mamba2",) * 7, 8, 64, state=STATE),
    "gemma 4": replace(GEMMA_4, layers=GEMMA_4.layers * 3),
}


@pytest.mark.parametrize("order", PAGE_ORDERS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", STAGED)
def test_pipeline_stages(name: str, pp: int, order: str) -> None:
    """Each stage has its layers of the groups that all stages have in common."""
    for rank in range(pp):
        same(STAGED[name], 2, 16, order, rank, pp)


def test_layers_of_stages() -> None:
    for layers in range(1, 97):
        for pp in range(1, min(layers, 24) + 1):
            for rank in range(pp):
                assert stage_layers(layers, rank, pp) == range(*get_pp_indices(layers, rank, pp))


DRAFTS = {
    "wider": Attention("full", 8, 128, name="draft"),
    "of no multiple": Attention("full", 6, 80, name="draft"),
    "narrower": Attention("full", 2, 32, name="draft"),
    "with a window": Attention("sliding", 4, 64, window=32, name="draft"),
}
BODIES = {
    "full": Model("full", ("full",) * 4, 4, 64),
    "windows": Model("windows", ("sliding", "full") * 3, 4, 64, window=128),
    "state": Model("state", ("mamba2", "mamba2", "full") * 2, 8, 64, state=STATE),
    "latent": Model("latent", ("mla",) * 3, 1, 576),
}


@pytest.mark.parametrize("order", PAGE_ORDERS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("body", BODIES)
def test_a_draft_layer_with_heads_of_its_own(body: str, draft: str, tp: int, order: str) -> None:
    one = replace(BODIES[body], layers=(*BODIES[body].layers, "draft"), attention=(DRAFTS[draft],))
    compare(one, tp, 16, order)


def compare(one: Model, tp: int, block: int, order: str) -> bool:
    """Compare, or check that both refuse; if only kvhma refuses, blocks share bytes with each other."""
    try:
        _, places, _ = allocated(specs_of(one, tp, block), order)
    except (ValueError, NotImplementedError, AssertionError, StopIteration):
        places = {}
    # If windows of one length have pages of several sizes, vLLM 0.32 loses layers.
    if len(places) == len(one.specs):
        same(one, tp, block, order)
        return True
    with pytest.raises(LayoutError):
        layout(one, LayoutOptions(num_blocks=BLOCKS, tp_size=tp, block_size=block, order=order))  # type: ignore[arg-type]
    return False


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_layers(seed: int) -> None:
    """Sorts of layers in any number and order, some of which share a window or a size."""
    rng = random.Random(seed)
    equal = 0
    for _ in range(20):
        sorts = [sort(rng, at) for at in range(rng.randint(1, 4))]
        words = [rng.choice(sorts).name for _ in range(rng.randint(1, 14))]
        own = rng.choice([1, 2, 4, 8]), rng.choice([32, 64])
        state = STATE if rng.random() < 0.3 else None
        if state:
            words += ["mamba2"] * rng.randint(1, 6) + ["full"]
            rng.shuffle(words)
        one = Model("any", tuple(str(word) for word in words), *own, state=state, attention=tuple(sorts))
        for order in PAGE_ORDERS:
            equal += compare(one, rng.choice([1, 2]), 16, order)
    assert equal > 20


def sort(rng: random.Random, at: int) -> Attention:
    kind = rng.choice(["full", "full", "sliding", "sliding", "sliding", "chunked", "mla"])
    heads, width = rng.choice([2, 4, 6]), rng.choice([32, 64, 96])
    more = {"window": rng.choice([32, 64])} if kind == "sliding" else {"chunk": 64} if kind == "chunked" else {}
    if kind == "mla":
        return Attention("mla", 1, rng.choice([64, 192]), name=f"s{at}")
    v = rng.choice([None, 32]) if rng.random() < 0.3 else None
    return Attention(kind, heads, width, v, name=f"s{at}", **more)  # type: ignore[arg-type]
