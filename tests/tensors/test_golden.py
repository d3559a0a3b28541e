# SPDX-License-Identifier: Apache-2.0
"""Published shapes and strides; and the same models as `kvhma.models.vllm_layout` lays them out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

from kvhma.errors import LayoutError
from kvhma.geometry import Shard
from kvhma.models import Attention, Model, State, model, models
from kvhma.models.vllm_layout import LayoutOptions
from kvhma.models.vllm_layout import layout as hybrid_layout
from kvhma.torch import AllocatorOptions, allocate, model_specs

GEMMA_2 = {"kv_heads": 4, "head_dim": 256, "window": 4096}


@pytest.mark.parametrize(
    ("kinds", "num_blocks", "shape"),
    [
        (("full",) * 26, 7842, (7842, 26, 2, 16, 4, 256)),
        (("sliding", "full") * 13, 15685, (15685, 13, 2, 16, 4, 256)),
    ],
    ids=["one group", "two groups"],
)
def test_gemma_2_2b(kinds, num_blocks, shape):
    specs = model_specs(Model("gemma-2-2b", kinds, **GEMMA_2), kv="split")
    assert len(specs) == len(set(kinds))
    (buffer,) = allocate(specs, num_blocks, layout="BLNHC", device="meta").buffers
    assert buffer.kind == "default"
    assert buffer.cross_layer.shape == shape
    assert buffer.cross_layer.is_contiguous()
    assert buffer.cross_layer.dtype == torch.bfloat16
    assert buffer.tensor.shape == (*shape[:2], 2 * 16 * 4 * 256 * 2)


def test_gpt_oss_20b_on_one_rank():
    specs = model_specs(model("gpt-oss-20b"), kv="split", dim_order="SBNHC")
    cache = allocate(specs, 136756, layout="BLNHC", device="meta")
    (buffer,) = cache.buffers
    assert buffer.kind == "default"
    assert buffer.dims == ("blocks", "layers", "bytes")
    assert (buffer.tensor.dtype, buffer.tensor.shape) == (torch.int8, (136756, 12, 32768))
    assert buffer.tensor.stride() == (393216, 32768, 1)
    for group in specs:
        for at, name in enumerate(group):
            view = cache.views[name]
            assert (view.dtype, view.shape) == (torch.bfloat16, (2, 136756, 16, 8, 64))
            assert view.stride() == (8192, 196608, 512, 64, 1)
            assert view.storage_offset() == at * 16384


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_gpt_oss_20b_on_one_of_two_ranks(tp_rank):
    specs = model_specs(
        model("gpt-oss-20b"), AllocatorOptions(tp_rank=tp_rank, tp_size=2), kv="split", dim_order="BSNHC"
    )
    cache = allocate(specs, 66511, layout="BHLNC", device="meta", tp_rank=tp_rank, tp_size=2)
    (buffer,) = cache.buffers
    assert buffer.kind == "ordered"
    assert buffer.dims == ("blocks", "heads", "layers", "bytes")
    assert buffer.tensor.shape == (66511, 4, 12, 4096)
    assert buffer.tensor.stride() == (196608, 49152, 4096, 1)
    for group in specs:
        for at, name in enumerate(group):
            view = cache.views[name]
            assert view.shape == (66511, 2, 16, 4, 64)
            assert view.stride() == (98304, 1024, 64, 24576, 1)
            assert view.storage_offset() == at * 2048
    axes = {axis.name: axis for axis in cache.geometry.layers[0].page.parts[0].axes}
    assert (axes["heads"].extent, axes["heads"].start, axes["heads"].length) == (8, 4 * tp_rank, 4)


def test_a_state_beside_attention():
    """The shapes of granite-4.0-h-tiny, 400 tokens a block: the state's page is padded to that of attention."""
    specs = model_specs(model("granite-4.0-h-tiny"), AllocatorOptions(conv="SD"), dim_order="BNHC")
    cache = allocate(specs, 18525, layout="BLNHC", device="meta")
    (buffer,) = cache.buffers
    assert buffer.tensor.shape == (18525, 4, 819200)
    conv, ssm = cache.views["model.layers.0.mixer"]
    assert (conv.shape, ssm.shape) == ((18525, 3, 3328), (18525, 48, 64, 128))
    assert conv.stride() == (4 * 819200 // 2, 3328, 1)
    assert ssm.stride() == (4 * 819200 // 2, 64 * 128, 128, 1)
    assert ssm.storage_offset() * 2 == 3 * 3328 * 2
    attention = cache.views["model.layers.5.self_attn.attn"]
    assert attention.shape == (18525, 400, 4, 256)
    assert cache.references.tensors[0].page_bytes == 819200
    (data,) = [data for group in cache.references.groups for data in group if data.layer == "model.layers.0.mixer"]
    assert [segment.nbytes for segment in data.segments] == [3 * 3328 * 2, 48 * 64 * 128 * 2]


def test_a_short_convolution_has_no_state_proper():
    """The shapes of LFM2: two rows of every channel beside attention."""
    state = State("short_conv", 64, 3, 64, 1, 0, 0, "bfloat16", "bfloat16")
    specs = model_specs(
        Model("short", ("short_conv", "full", "short_conv"), 2, 8, state=state), AllocatorOptions(tp_rank=1, tp_size=2)
    )
    cache = allocate(specs, 3, device="meta", tp_rank=1, tp_size=2)
    (conv,) = cache.views["model.layers.0.mixer"]
    assert conv.shape == (3, 32, 2)
    (part,) = cache.geometry.layer_by_name["model.layers.0.mixer"].page.parts
    assert (part.name, part.axes[0].shard) == ("x", Shard(64, 32, 32))


def comparable():
    """Return all models in all orders that `hybrid.layout` lays out the same way."""
    for name, one in models().items():
        for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"):
            # It wants contiguous pages beside a state, and has gaps where heads come before layers in a short group.
            short = len({len(group) for group in model_specs(one)}) > 1
            if not (one.state and order in ("LHBNC", "BHLNC")) and not (short and order == "BHLNC"):
                yield pytest.param(name, order, id=f"{name}-{order}")


@pytest.mark.parametrize(("name", "order"), list(comparable()))
def test_the_hybrid_allocator_has_the_same_geometry(name, order):
    """Two descriptions of where bytes are: equal but for the addresses of regions."""
    one = model(name)
    # Kernel blocks where a page is contiguous: elsewhere they are placed otherwise here.
    if one.state is None:
        options = {"block_size": 32, "kernel_block": 16 if order == "LBHNC" else None}
    else:
        options = {"kernel_block": "flashinfer" if order[0] == "L" else None}
    specs = model_specs(one, AllocatorOptions(**options))
    cache = allocate(specs, 3, layout=order, device="meta")
    expected = hybrid_layout(one, LayoutOptions(num_blocks=3, order=order, **options))
    layers = {layer.name: layer for layer in cache.geometry.layers}
    assert cache.geometry.groups == expected.groups
    for layer in expected.layers:
        found = layers[layer.name]
        assert sorted_axes(found.page) == sorted_axes(layer.page)
        if expected.groups[layer.group].ratio == 1:  # an unused stride
            layer = replace(layer, kernel_stride=None)
        assert replace(found, page=layer.page, region=0) == replace(layer, region=0)
    pairs = {(layers[layer.name].region, layer.region) for layer in expected.layers}
    assert len(pairs) == len(expected.regions)  # the same layers share a region
    assert [r.bytes for r in cache.geometry.regions] == [r.bytes for r in expected.regions]


def sorted_axes(page):
    # An axis of one index has no stride that matters.
    def rows(axes):
        return sorted((a.name, a.extent, a.start, a.length, a.stride if a.length > 1 else None) for a in axes)

    return [(part.name, part.dtype, part.offset, rows(part.axes)) for part in page.parts]


def test_references_as_json():
    specs = model_specs(model("gpt-oss-20b"), AllocatorOptions(tp_size=2), kv="split")
    cache = allocate(specs, 10, layout="BHLNC", device="meta")
    form = json.loads(cache.references.to_json())
    assert form["kvhma_references"] == 1
    (tensor,) = form["tensors"]
    assert (tensor["kind"], tensor["page_bytes"], tensor["nbytes"]) == ("ordered", 16384, 10 * 12 * 16384)
    assert tensor["layers"][0] == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    third = form["groups"][1][2]
    assert third == {
        "layer": "model.layers.5.self_attn.attn",
        "tensor": 0,
        "num_blocks": 10,
        "block_stride": 196608,
        "segments": [{"offset": 2 * 4096, "nbytes": 16384, "heads": 4, "head_stride": 49152}],
    }


def test_heads_by_layer():
    """gemma-4: a full layer has a quarter of the heads, twice as long, and twice the tokens in a block."""
    one = Model("gemma-4", ("sliding", "full"), 16, 256, window=64, attention=(Attention("full", 4, 512),))
    sliding, full = (next(iter(group.values())) for group in model_specs(one, AllocatorOptions(tp_rank=1, tp_size=2)))
    assert (sliding.heads.length, sliding.head_dim, sliding.block_size) == (8, 256, 16)
    assert (full.heads.length, full.head_dim, full.block_size) == (2, 512, 32)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Model("mimo", ("full",), 4, 192, v_head_dim=128), "v_head_dim 128"),
        (Model("v3.2", ("indexer+mla",), 1, 576), "indexer attention"),
    ],
)
def test_what_tensors_have_no_spec_for(one, text):
    with pytest.raises(LayoutError, match=text):
        model_specs(one)
