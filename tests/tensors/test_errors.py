# SPDX-License-Identifier: Apache-2.0
"""Failed allocations: the error names the layers and both values, and no memory is kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

from kvhma.errors import AllocationError, GeometryError, KvhmaError, LayoutError
from kvhma.geometry import Shard
from kvhma.models import model
from kvhma.torch import AttentionSpec, ConvPart, MLASpec, OpaqueSpec, StateSpec, allocate, model_specs
from kvhma.torch import memory as memory_module

FULL = AttentionSpec(Shard(4), 8, torch.bfloat16, 16)
STATE = StateSpec(
    (ConvPart("x", Shard(8)), ConvPart("B", Shard(4))), 3, torch.bfloat16, Shard(2), (4, 4), torch.float32
)
PAGE = FULL.nbytes


def refused(groups, num_blocks=4, error=LayoutError, **more):
    with pytest.raises(error) as caught:
        allocate(groups, num_blocks, **more)
    assert isinstance(caught.value, KvhmaError)
    return str(caught.value)


def test_sizes_that_disagree_on_a_shared_tensor():
    larger = replace(FULL, head_dim=16)
    text = refused([{"a": FULL}, {"b": larger}], shared=[["a", "b"]])
    assert text == (
        f"shared[0]: a page of layer 'a' has {PAGE} bytes, of layer 'b' {2 * PAGE}; page_bytes pads the smaller one"
    )
    padded = replace(FULL, page_bytes=2 * PAGE)
    (buffer,) = allocate([{"a": padded}, {"b": larger}], 4, shared=[["a", "b"]]).buffers
    assert buffer.tensor.nbytes == 4 * 2 * PAGE


def test_keys_that_disagree_on_a_shared_tensor():
    other = replace(FULL, heads=Shard(2), head_dim=16)
    text = refused([{"a": FULL}, {"b": other}], shared=[["a", "b"]], layout="LHBNC")
    assert "layer 'a' has pages of 2048 bytes, 4 heads outside of blocks" in text
    assert "layer 'b' pages of 2048 bytes, 2 heads outside of blocks" in text
    text = refused([{"a": FULL}, {"b": OpaqueSpec(PAGE)}], shared=[["a", "b"]])
    assert "'a' has pages of 2048 bytes, each block contiguous over layers" in text
    assert "'b' pages of 2048 bytes, opaque" in text
    refused([{"a": OpaqueSpec(PAGE)}, {"b": OpaqueSpec(PAGE)}], shared=[["a", "b"]])


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ([["a", "b"], ["c"]], "shared[0]: layers 'a' and 'b' of group 0 would write the same blocks"),
        ([["a", "c"]], "shared: no tensor for 'b'"),
        ([["a", "c"], ["b", "c"]], "shared[1]: layer 'c' has a tensor already"),
        ([["a", "x"]], "shared[0]: layer 'x' is in no group"),
        ([["a", "c"], [], ["b"]], "shared[1] has no layers"),
    ],
)
def test_tensors_that_are_no_partition(shared, words):
    assert refused([{"a": FULL, "b": FULL}, {"c": FULL}], shared=shared) == words


def test_layers_may_share_in_another_order():
    groups = [{"a": FULL, "b": FULL}, {"c": FULL, "d": FULL}]
    cache = allocate(groups, 4, shared=[["b", "c"], ["a"], ["d"]])
    (buffer,) = cache.buffers
    assert buffer.layers == (("b", "c"), ("a",), ("d",))
    offsets = {layer.name: layer.offset // PAGE for layer in cache.geometry.layers}
    assert offsets == {"a": 1, "b": 0, "c": 0, "d": 2}


def test_references_follow_buffers_that_regions_do_not():
    """Buffers are sorted by pages, regions by layers."""
    large = replace(FULL, head_dim=16)
    cache = allocate([{"a": FULL, "b": large, "c": FULL}], 4, layout="LBHNC")
    assert [buffer.layers for buffer in cache.buffers] == [(("a",),), (("c",),), (("b",),)]
    for reference, buffer in zip(cache.references.tensors, cache.buffers, strict=True):
        assert (reference.base, reference.nbytes) == (buffer.tensor.data_ptr(), buffer.tensor.nbytes)
    for data in cache.references.groups[0]:
        start = cache.references.tensors[data.tensor].base + data.segments[0].offset
        assert start == cache.views[data.layer].data_ptr()


def test_a_kernel_block_that_does_not_divide():
    assert refused([{"a": replace(FULL, kernel_block=5)}]) == "layer 'a': kernel_block 5: must divide block_size 16"


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC"])
def test_kernel_blocks_of_a_block_that_is_not_dense(layout):
    padded = replace(FULL, page_bytes=PAGE + 64, kernel_block=8)
    text = refused([{"a": padded}], layout=layout)
    assert text == (
        "layer 'a': page padded from 2048 to 2112 bytes: the block is not dense, so its 2 kernel blocks of 8 tokens "
        "are not evenly spaced; kernel_block 16 would be, or page_bytes 2048"
    )
    # The suggestion in the error works.
    for helped in (replace(padded, kernel_block=16), replace(padded, page_bytes=2048)):
        assert allocate([{"a": helped}], 4, layout=layout).views["a"].shape[0] in (4, 8)


def test_a_layout_that_is_impossible_for_a_page_mix():
    state = replace(STATE, page_bytes=PAGE)
    text = refused([{"attention": FULL}, {"state": state}], layout="LHBNC")
    assert "layers 'attention' and 'state' would share memory" in text
    assert "4 heads outside of blocks" in text
    assert "each page contiguous" in text
    text = refused([{"attention": replace(FULL, kv="apart")}, {"state": state}])
    assert "K and V apart" in text
    # Without equal pages they do not share, and each has separate buffers.
    cache = allocate([{"attention": FULL}, {"state": STATE}], 4, layout="LHBNC")
    assert len(cache.buffers) == 2
    # Heads before layers and a state in one buffer: the content of a block belongs to its group.
    cache = allocate([{"attention": FULL}, {"state": state}], 4, layout="BHLNC")
    assert len(cache.buffers) == 1


def test_padding_where_it_has_no_place():
    text = refused([{"a": replace(FULL, page_bytes=PAGE + 64)}], layout="LHBNC")
    assert text.startswith("layer 'a': page padded from 2048 to 2112 bytes: kv 'packed' in layout 'LHBNC' has no place")


def test_heads_before_layers_keep_items_in_line():
    odd = AttentionSpec(Shard(1), 3, torch.uint8, 1, kv="packed", page_bytes=16)
    even = AttentionSpec(Shard(1), 2, torch.float32, 1, page_bytes=16)
    text = refused([{"a": odd, "b": even}], layout="BHLNC")
    assert "layer 'b' of torch.float32 would start at byte 6" in text
    assert "must be a multiple of 4 bytes" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 8), ("kind", "chunked"), ("block_size", 32), ("kernel_block", 8)],
)
def test_layers_of_a_group_that_disagree(field, value):
    more = {"kind": "sliding", "window": 4}
    other = {field: value} | ({"chunk": 4, "window": None} if field == "kind" else {})
    text = refused([{"a": replace(FULL, **more), "b": replace(FULL, **(more | other))}])
    assert "layer 'a'" in text
    assert "layer 'b'" in text
    assert {"kernel_block": "ratio"}.get(field, field) in text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(FULL, heads=Shard(4, 3, 2)), "heads 3..5: must be a range within the extent 4"),
        (replace(FULL, heads=Shard(0)), "heads 0..0: must be a range"),
        (replace(FULL, heads=Shard(4.0)), "heads: extent 4.0: must be an integer"),
        (replace(FULL, head_dim=0), "head_dim 0: must be an integer of at least 1"),
        (replace(FULL, block_size="16"), "block_size '16': must be an integer of at least 1"),
        (replace(FULL, dtype="bfloat16"), "dtype 'bfloat16': must be a torch.dtype"),
        (replace(FULL, kv="both"), "kv 'both': known are packed, split, apart"),
        (replace(FULL, dim_order="BNC"), "dim_order 'BNC': must be an order of BHNC, with kv 'packed'"),
        (replace(FULL, page_bytes=2047), "page_bytes 2047: a block holds 2048 bytes"),
        (replace(FULL, page_bytes=2049), "page of 2049 bytes: must be a multiple of its items' 2 bytes"),
        (MLASpec(0, torch.bfloat16, 16), "width 0: must be an integer of at least 1"),
        (MLASpec(8, torch.bfloat16, 16, 3), "kernel_block 3: must divide block_size 16"),
        (MLASpec(8, torch.bfloat16, 16, dim_order="HBHNC"), "dim_order 'HBHNC': must be an order of BNC or BHNC"),
        (StateSpec((), 0, torch.int8, None, (), torch.int8), "conv () and ssm_heads None"),
        (replace(STATE, conv_order="XY"), "conv_order 'XY': known are DS, SD"),
        (replace(STATE, conv_rows=0), "conv_rows 0: must be"),
        (replace(STATE, ssm_shape=(4, 0)), "ssm_shape[1] 0: must be"),
        (replace(STATE, speculative=-1), "speculative -1: must be"),
        (replace(STATE, ssm_heads=Shard(2, 2)), "ssm_heads 2..2"),
        (replace(STATE, conv=(ConvPart("x", Shard(8)), ConvPart("x", Shard(8)))), "conv x, x: must be parts of"),
        (replace(STATE, conv=(ConvPart("x", Shard(3)),)), "18 bytes of convolution state: must be a multiple of"),
        (OpaqueSpec(0), "nbytes 0: must be an integer of at least 1"),
        ("full", "spec is str; OpaqueSpec takes any bytes"),
    ],
)
def test_specs_that_contradict_themselves(spec, words):
    text = refused([{"good": FULL}, {"bad": spec}])
    assert text.startswith("layer 'bad': ")
    assert words in text


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        ([], {}, "groups (): there is no layer"),
        ([{}], {}, "group 0 has no layers"),
        ([{"a": FULL}, {"a": FULL}], {}, "layer 'a' is in two groups, the second is 1"),
        ([{"a": FULL}], {"layout": "NHBLC"}, "layout 'NHBLC': known are LBHNC"),
        ([{"a": FULL}], {"num_blocks": 0}, "num_blocks 0: must be an integer of at least 1"),
        ([{"a": FULL}], {"device": "nowhere"}, "device 'nowhere'"),
    ],
)
def test_other_arguments(groups, more, words):
    assert words in refused(groups, **more)


def test_what_only_a_geometry_refuses_is_refused_before_memory_is_taken(monkeypatch):
    def never(plans, device):
        assert device.type == "meta"
        return make(plans, device)

    make = memory_module.make_buffers
    monkeypatch.setattr("kvhma.torch.cache.make_buffers", never)
    refused([{"a": replace(FULL, kind="sliding")}], error=GeometryError)
    refused([{"a": FULL}], error=GeometryError, tp_rank=2, tp_size=2)


def test_more_than_there_is():
    text = refused(model_specs(model("gpt-oss-20b")), 2**27, error=AllocationError)
    need = 2**27 * 12 * 32768
    assert (
        f"1 buffers of 24 layers 'model.layers.0.self_attn.attn' to 'model.layers.23.self_attn.attn' need {need}"
        in text
    )
    assert "cpu has " in text
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
        allocate([{"a": FULL, "b": FULL, "c": FULL, "d": FULL}], 4, layout="LBHNC")
    assert str(caught.value).endswith("need 32768 bytes, cpu had no room after the first 16384: out of memory")
    gc.collect()
    # Although the error is still held, and with it the frames it went through.
    assert len(made) == 2
    assert all(ref() is None for ref in made)
