# SPDX-License-Identifier: Apache-2.0
"""Failed allocations: the error names the layer and both values, and no memory stays allocated."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

from kvhma.errors import AllocationError, KvhmaError, LayoutError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region
from kvhma.models import Model, State, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.torch import allocate

STATE = State("mamba2", 2 * 4 + 2 * 2, 4, 2, 4, 2, 1, "bfloat16", "float32")
FULL = Model("full", ("full",) * 4, 4, 8)
HYBRID = Model("hybrid", ("full", "mamba2"), 4, 8, state=STATE)


def geometry_of(one=FULL, num_blocks=4, **options):
    return layout(one, LayoutOptions(num_blocks=num_blocks, **options))


def refused(geometry, error=LayoutError, **more):
    with pytest.raises(error) as caught:
        allocate(geometry, **more)
    assert isinstance(caught.value, KvhmaError)
    return str(caught.value)


def opaque(dtype="uint8", item=1, offset=0):
    page = Page((Part("opaque", dtype, item, offset, (Axis("bytes", 10, item),)),))
    layer = Layer("own", 0, 0, 0, 3, 10 * item + offset, page)
    return Geometry((Region(4096, 3 * layer.block_stride),), (Group("opaque", 1),), (layer,))


def test_bytes_that_only_their_owner_understands():
    cache = allocate(opaque(dtype="own-format"))
    assert (cache.views["own"].dtype, cache.views["own"].shape) == (torch.int8, (3, 10))
    assert [buffer.kind for buffer in cache.buffers] == ["isolated"]
    text = refused(opaque(dtype="own-format", item=2))
    assert text == "layer 'own': dtype 'own-format' of 2 bytes: torch has none"
    assert refused(opaque("bfloat16", 2, 1)) == "layer 'own': 1 bytes are no multiple of an item's 2"


@pytest.mark.parametrize("dims", ["BNC", "HBHNC", "BSHNC", "", "BHNX"])
def test_dimensions_that_a_layer_lacks(dims):
    text = refused(geometry_of(), dims=dims)
    assert text == f"dims {dims!r}: layer 'model.layers.0.self_attn.attn' has the dimensions BHNC"


def test_dimensions_of_a_latent():
    """Heads do not count: a latent has none."""
    cache = allocate(geometry_of(Model("latent", ("mla",), 1, 8)), dims="HNBC")
    assert cache.views["model.layers.0.self_attn.attn"].shape == (16, 4, 8)


def test_kernel_blocks_that_are_not_evenly_spaced():
    options = {"order": "BLHNC", "kernel_block": 8}
    text = refused(geometry_of(**options))
    assert text == (
        "layer 'model.layers.0.self_attn.attn': 2 kernel blocks every 1024 bytes, and a block every 8192: a view needs "
        "kernel blocks that are evenly spaced"
    )
    cache = allocate(geometry_of(**options, kernel_blocks_in_page=False))
    assert cache.views["model.layers.0.self_attn.attn"].shape == (8, 4, 8, 16)


def test_the_shape_of_a_head():
    geometry = geometry_of(HYBRID)
    assert allocate(geometry, head_shape=(4, 2)).views["model.layers.1.mixer"][1].shape == (4, 2, 4, 2)
    assert allocate(geometry).views["model.layers.1.mixer"][1].shape == (4, 2, 8)
    text = refused(geometry, head_shape=(4, 3))
    assert text == "head_shape (4, 3): a head of layer 'model.layers.1.mixer' has 8 items"


def test_layers_that_are_not_evenly_spaced():
    """A region with gaps between its layers is bytes, and every layer still has its view."""
    geometry = geometry_of(order="BLHNC")
    first, second, *_ = geometry.layers
    third = replace(second, name="third", offset=3 * second.offset)
    cache = allocate(replace(geometry, layers=(first, second, third)))
    (buffer,) = cache.buffers
    assert (buffer.dims, buffer.tensor.shape, buffer.cross_layer) == (("bytes",), (4 * 4 * 2048,), None)
    assert cache.views["third"].storage_offset() == 3 * second.offset // 2


def test_a_device_that_is_not_there():
    assert "device 'nowhere'" in refused(geometry_of(), device="nowhere")


def test_a_view_is_refused_before_memory_is_taken(monkeypatch):
    zeros = torch.zeros

    def never(*shape, **more):
        assert more["device"].type == "meta"
        return zeros(*shape, **more)

    monkeypatch.setattr(torch, "zeros", never)
    refused(geometry_of(), dims="BNC")


def test_more_than_there_is():
    text = refused(geometry_of(model("gpt-oss-20b"), 2**27, order="BLHNC"), error=AllocationError)
    assert text.startswith(f"1 buffers need {2**27 * 12 * 32768} bytes, cpu had no room after the first 0: ")
    assert isinstance(AllocationError(), MemoryError)


def test_out_of_memory_in_the_middle(monkeypatch):
    """The device refuses the third of four buffers: the others are freed."""
    made = []
    zeros = torch.zeros

    def third(*shape, **more):
        if more["device"].type == "meta":
            return zeros(*shape, **more)
        if len(made) == 2:
            raise torch.OutOfMemoryError("out of memory\nand more of it")
        tensor = zeros(*shape, **more)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "zeros", third)
    with pytest.raises(AllocationError) as caught:
        allocate(geometry_of(order="LBHNC"))
    assert str(caught.value).endswith("need 32768 bytes, cpu had no room after the first 16384: out of memory")
    gc.collect()
    # Although the error is still held, and with it the frames it went through.
    assert len(made) == 2
    assert all(ref() is None for ref in made)
