# SPDX-License-Identifier: Apache-2.0
"""Published shapes and strides."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

from kvhma.geometry import Shard
from kvhma.models import Attention, Model, State, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.torch import Cache, allocate

GEMMA_2 = {"kv_heads": 4, "head_dim": 256, "window": 4096}


def cache_of(one: Model, num_blocks: int, order: str, dims: str | None = None, head_shape=None, **options) -> Cache:
    geometry = layout(one, LayoutOptions(num_blocks=num_blocks, order=order, **options))
    return allocate(geometry, device="meta", dims=dims, head_shape=head_shape)


@pytest.mark.parametrize(
    ("kinds", "num_blocks", "shape"),
    [
        (("full",) * 26, 7842, (7842, 26, 2, 16, 4, 256)),
        (("sliding", "full") * 13, 15685, (15685, 13, 2, 16, 4, 256)),
    ],
    ids=["one group", "two groups"],
)
def test_gemma_2_2b(kinds, num_blocks, shape):
    cache = cache_of(Model("gemma-2-2b", kinds, **GEMMA_2), num_blocks, "BLNHC", kv="split")
    assert len(cache.geometry.groups) == len(set(kinds))
    (buffer,) = cache.buffers
    assert buffer.kind == "default"
    assert buffer.cross_layer.shape == shape
    assert buffer.cross_layer.is_contiguous()
    assert buffer.cross_layer.dtype == torch.bfloat16
    assert buffer.tensor.shape == (*shape[:2], 2 * 16 * 4 * 256 * 2)


def test_gpt_oss_20b_on_one_rank():
    cache = cache_of(model("gpt-oss-20b"), 136756, "BLNHC", "SBNHC", kv="split")
    (buffer,) = cache.buffers
    assert buffer.kind == "default"
    assert buffer.dims == ("blocks", "layers", "bytes")
    assert (buffer.tensor.dtype, buffer.tensor.shape) == (torch.int8, (136756, 12, 32768))
    assert buffer.tensor.stride() == (393216, 32768, 1)
    for at, slot in enumerate(buffer.layers):
        assert len(slot) == 2
        for name in slot:
            view = cache.views[name]
            assert (view.dtype, view.shape) == (torch.bfloat16, (2, 136756, 16, 8, 64))
            assert view.stride() == (8192, 196608, 512, 64, 1)
            assert view.storage_offset() == at * 16384


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_gpt_oss_20b_on_one_of_two_ranks(tp_rank):
    cache = cache_of(model("gpt-oss-20b"), 66511, "BHLNC", "BSNHC", kv="split", tp_rank=tp_rank, tp_size=2)
    (buffer,) = cache.buffers
    assert buffer.kind == "ordered"
    assert buffer.dims == ("blocks", "heads", "layers", "bytes")
    assert buffer.tensor.shape == (66511, 4, 12, 4096)
    assert buffer.tensor.stride() == (196608, 49152, 4096, 1)
    for at, slot in enumerate(buffer.layers):
        for name in slot:
            view = cache.views[name]
            assert view.shape == (66511, 2, 16, 4, 64)
            assert view.stride() == (98304, 1024, 64, 24576, 1)
            assert view.storage_offset() == at * 2048
    axes = {axis.name: axis for axis in cache.geometry.layers[0].page.parts[0].axes}
    assert (axes["heads"].extent, axes["heads"].start, axes["heads"].length) == (8, 4 * tp_rank, 4)


def test_a_state_beside_attention():
    """The shapes of granite-4.0-h-tiny, 400 tokens a block: the state's page is padded to that of attention."""
    cache = cache_of(model("granite-4.0-h-tiny"), 18525, "BLNHC", "BNHC", (64, 128), conv="SD")
    (buffer,) = cache.buffers
    assert buffer.tensor.shape == (18525, 4, 819200)
    conv, ssm = cache.views["model.layers.0.mixer"]
    assert (conv.shape, ssm.shape) == ((18525, 3, 3328), (18525, 48, 64, 128))
    assert conv.stride() == (4 * 819200 // 2, 3328, 1)
    assert ssm.stride() == (4 * 819200 // 2, 64 * 128, 128, 1)
    assert ssm.storage_offset() * 2 == 3 * 3328 * 2
    attention = cache.views["model.layers.5.self_attn.attn"]
    assert attention.shape == (18525, 400, 4, 256)
    layer = cache.geometry.layer_by_name["model.layers.0.mixer"]
    assert (layer.block_stride, layer.page.nbytes) == (4 * 819200, 3 * 3328 * 2 + 48 * 64 * 128 * 2)


def test_a_short_convolution_has_no_state_proper():
    """The shapes of LFM2: two rows of every channel beside attention."""
    state = State("short_conv", 64, 3, 64, 1, 0, 0, "bfloat16", "bfloat16")
    one = Model("short", ("short_conv", "full", "short_conv"), 2, 8, state=state)
    cache = cache_of(one, 3, "BLHNC", tp_rank=1, tp_size=2)
    (conv,) = cache.views["model.layers.0.mixer"]
    assert conv.shape == (3, 32, 2)
    (part,) = cache.geometry.layer_by_name["model.layers.0.mixer"].page.parts
    assert (part.name, part.axes[0].shard) == ("x", Shard(64, 32, 32))


def test_kernel_blocks_beside_a_state():
    """RFC 36780: attention sees (780390, 2, 16, 2, 128), state (2990, 3, 6144), over the same bytes."""
    options = {"kernel_block": "flashinfer", "kv": "split", "conv": "SD"}
    cache = cache_of(model("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv"), 2990, "LBNHC", "BSNHC", **options)
    shapes = {
        tuple(tensor.shape)
        for view in cache.views.values()
        for tensor in (view[:1] if isinstance(view, tuple) else [view])
    }
    assert shapes == {(780390, 2, 16, 2, 128), (2990, 3, 6144)}


def test_heads_by_layer():
    """gemma-4: a full layer has a quarter of the heads, twice as long, and twice the tokens in a block."""
    one = Model("gemma-4", ("sliding", "full"), 16, 256, window=64, attention=(Attention("full", 4, 512),))
    cache = cache_of(one, 3, "LBHNC", tp_rank=1, tp_size=2)
    (buffer,) = cache.buffers
    assert buffer.cross_layer is None
    sliding, full = (cache.views[f"model.layers.{index}.self_attn.attn"] for index in range(2))
    assert (sliding.shape, full.shape) == ((3, 8, 16, 512), (3, 2, 32, 1024))
