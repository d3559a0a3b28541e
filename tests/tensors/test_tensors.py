# SPDX-License-Identifier: Apache-2.0
"""Geometries of views that an engine made itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

import kvhma
from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Group, Part, Region, Shard
from kvhma.tensors import LayerTensors, TensorPart, geometry_from_tensors

FULL = Group("full", 16)
BHNC = ("blocks", "heads", "tokens", "content")


def one(*parts, group=FULL, **more):
    return geometry_from_tensors([group], {"a": LayerTensors(0, parts)}, **more)


def test_layers_in_one_storage():
    """As vLLM registers them: one storage, views of four dimensions at offsets, groups over the same bytes."""
    storage = torch.zeros(2 * 10 * 4096, dtype=torch.int8)
    views = {}
    for name, group, at in (("s0", 0, 0), ("s1", 0, 1), ("f0", 1, 0), ("f1", 1, 1)):
        view = storage.view(torch.bfloat16).as_strided((10, 2, 16, 64), (2048, 1024, 64, 1), at * 20480)
        part = TensorPart("kv", view, BHNC, {"heads": Shard(8, 4, 2)})
        views[name] = LayerTensors(group, (part,))
    groups = [Group("sliding", 16, window=24), FULL]
    found = geometry_from_tensors(groups, views, tp_rank=2, tp_size=4)
    assert found.regions == (Region(storage.data_ptr(), storage.nbytes),)
    assert [layer.offset for layer in found.layers] == [0, 40960, 0, 40960]
    layer = found.layer_by_name["f1"]
    assert (layer.group, layer.num_blocks, layer.block_stride, layer.kernel_stride) == (1, 10, 4096, None)
    axes = (Axis("heads", 8, 2048, 4, 2), Axis("tokens", 16, 128), Axis("content", 64, 2))
    assert layer.page.parts == (Part("kv", "bfloat16", 2, 0, axes),)
    assert (found.tp_rank, found.tp_size) == (2, 4)


def test_k_and_v_before_blocks():
    """As FlashAttention had them: (2, blocks, tokens, heads, dim)."""
    tensor = torch.zeros(2, 10, 16, 4, 8, dtype=torch.float16)
    axes = ("blocks", "tokens", "heads", "content")
    found = one(*(TensorPart(name, tensor[at], axes) for at, name in enumerate("kv")))
    k, v = found.layers[0].page.parts
    assert (k.offset, v.offset) == (0, 10 * 16 * 4 * 8 * 2)
    assert found.layers[0].block_stride == 16 * 4 * 8 * 2
    assert found.regions[0].bytes == tensor.nbytes


def test_kernel_blocks_in_one_dimension_and_in_two():
    tensor = torch.zeros(12, 2, 4, 8)
    group = Group("full", 12, ratio=3)
    flat = one(TensorPart("kv", tensor, BHNC), group=group)
    assert (flat.layers[0].num_blocks, flat.layers[0].block_stride, flat.layers[0].kernel_stride) == (4, 768, None)
    axes = ("blocks", "kernel_blocks", "heads", "tokens", "content")
    both = one(TensorPart("kv", tensor.view(4, 3, 2, 4, 8), axes), group=group)
    assert both == flat
    # Kernel blocks outside of blocks.
    far = one(TensorPart("kv", tensor.view(3, 4, 2, 4, 8).transpose(0, 1), axes), group=group)
    assert (far.layers[0].block_stride, far.layers[0].kernel_stride) == (256, 1024)
    # A padded block.
    padded = torch.zeros(4 * 800 // 4).as_strided((4, 3, 2, 4, 8), (200, 64, 32, 8, 1))
    found = one(TensorPart("kv", padded, axes), group=group)
    assert (found.layers[0].block_stride, found.layers[0].kernel_stride) == (800, 256)


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_single_block_has_a_stride_too(ratio):
    group = Group("full", 4 * ratio, ratio=ratio)
    found = one(TensorPart("kv", torch.zeros(ratio, 2, 4, 8), BHNC), group=group)
    assert (found.layers[0].num_blocks, found.layers[0].block_stride) == (1, 256 * ratio)


def test_a_state_of_slices():
    """Both convolution orders; the state's dimensions of one name are one axis."""
    page = torch.zeros(6, 1024, dtype=torch.int8)
    conv = page.view(torch.bfloat16).as_strided((6, 3, 20), (512, 20, 1), 0)
    ssm = page.view(torch.float32).as_strided((6, 2, 5, 4), (256, 20, 4, 1), 30)
    rows = ("blocks", "rows", "channels")
    parts = [
        TensorPart("x", conv[..., :12], rows, {"channels": Shard(24, 12, 12)}),
        TensorPart("B", conv[..., 12:16], rows),
        TensorPart("C", conv[..., 16:], rows),
        TensorPart("ssm", ssm, ("blocks", "heads", "content", "content"), {"heads": Shard(4, 2)}),
    ]
    found = one(*parts, group=Group("ssm", 1))
    assert [part.offset for part in found.layers[0].page.parts] == [0, 24, 32, 120]
    assert found.layers[0].page.parts[3].axes == (Axis("heads", 4, 80, 2, 2), Axis("content", 20, 4))
    assert found.layers[0].page.parts[0].axes == (Axis("rows", 3, 40), Axis("channels", 24, 2, 12, 12))
    assert found.layers[0].block_stride == 1024


def test_regions_are_storages_in_order_of_use_and_joined_where_they_overlap():
    first, second = torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8)
    layers = {
        name: LayerTensors(0, (TensorPart("kv", tensor, BHNC),))
        for name, tensor in (("b", second), ("a", first), ("c", second))
    }
    found = geometry_from_tensors([FULL], layers)
    assert [region.base for region in found.regions] == [second.data_ptr(), first.data_ptr()]
    assert [layer.region for layer in found.layers] == [0, 1, 0]
    # Two storages over the same bytes, as from two frameworks.
    raw = bytearray(4 * 4096 * 2)
    whole = torch.frombuffer(raw, dtype=torch.float32)
    half = torch.frombuffer(raw, dtype=torch.float32, offset=4096 * 4)
    views = [whole[:4096].view(4, 2, 16, 32), half.view(4, 2, 16, 32)]
    layers = {str(at): LayerTensors(0, (TensorPart("kv", view, BHNC),)) for at, view in enumerate(views)}
    found = geometry_from_tensors([FULL], layers)
    assert found.regions == (Region(whole.data_ptr(), len(raw)),)
    assert [layer.offset for layer in found.layers] == [0, 16384]


def test_registered_memory_in_place_of_storages():
    storage = torch.zeros(3, 4, 2, 16, 8)
    registered = [Region(storage.data_ptr() + at * storage[0].nbytes, storage[0].nbytes) for at in (2, 0)]
    parts = {name: LayerTensors(0, (TensorPart("kv", storage[at], BHNC),)) for name, at in (("a", 0), ("b", 2))}
    found = geometry_from_tensors([FULL], parts, regions=registered)
    assert found.regions == tuple(registered)
    assert [(layer.region, layer.offset) for layer in found.layers] == [(1, 0), (0, 0)]
    with pytest.raises(GeometryError, match=r"layer 'c' part 'kv': bytes 0x.* are in no region of"):
        geometry_from_tensors(
            [FULL], parts | {"c": LayerTensors(0, (TensorPart("kv", storage[1], BHNC),))}, regions=registered
        )


def test_meta_tensors_have_made_up_addresses():
    views = [torch.empty(4, 2, 16, 8, device="meta") for _ in range(3)]
    layers = {str(at): LayerTensors(0, (TensorPart("kv", view, BHNC),)) for at, view in enumerate([*views, views[0]])}
    found = geometry_from_tensors([FULL], layers)
    assert [layer.region for layer in found.layers] == [0, 1, 2, 0]
    ends = [region.base + region.bytes for region in found.regions]
    assert all(region.base % 4096 == 0 for region in found.regions)
    assert all(end <= region.base for end, region in zip(ends, found.regions[1:], strict=False))


def test_packed_content_and_a_whole_axis():
    """Content that only its kernel understands: no tokens, and a special dtype."""
    tensor = torch.zeros(4, 2, 16 * 8, dtype=torch.bfloat16)
    part = TensorPart("kv", tensor, ("blocks", "heads", "packed"), dtype="bfloat16/isa-32")
    found = one(part)
    assert found.layers[0].page.parts[0].dtype == "bfloat16/isa-32"
    assert kvhma.validate(found, found) == []


KV = torch.zeros(4, 2, 16, 8)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "layer 'a': parts (), a layer has at least one"),
        ([("kv", KV, ("blocks", "heads"))], "2 axes ('blocks', 'heads') for shape (4, 2, 16, 8)"),
        ([("kv", KV, ("heads", "rows", "tokens", "content"))], "have no 'blocks'"),
        ([("kv", KV[:0], BHNC)], "shape (0, 2, 16, 8) has no items"),
        ([("kv", KV[:, :1].expand(4, 2, 16, 8), BHNC)], "2 indices of 'heads' with stride 0"),
        ([("kv", KV.tolist(), BHNC)], "tensor is list, expected torch.Tensor"),
        ([("kv", KV.to_sparse(), BHNC)], "tensor has layout torch.sparse_coo, expected torch.strided"),
        ([("kv", KV, ("blocks", "content", "tokens", "content"))], "name 'content' in places that do not follow"),
        ([("kv", KV[..., ::2].transpose(1, 2), ("blocks", "content", "content", "x"))], "'content' is unevenly spaced"),
        ([("kv", KV, BHNC, {"heads": Shard(8, 0, 4)})], "shard of 'heads' holds 4, the view has 2"),
        ([("kv", KV, BHNC, {"heads": Shard(8, 7, 2)})], "shard of 'heads' 7..9: must be a range within the extent 8"),
        ([("kv", KV, BHNC, {"head": Shard(8)})], "shards of head, axes are ("),
        ([("k", KV, BHNC), ("v", KV.clone(), BHNC)], "part 'k' is in region 0, part 'v' in region 1"),
        ([("k", KV[:, :1], BHNC), ("v", KV[:3, 1:], BHNC)], "blocks of part 'k' are 4, 1024 bytes apart"),
        ([("kv", KV[:, :, :8], BHNC)], 'axis "tokens": extent is 8, has to be block_size 16'),
        ([("k", KV, BHNC), ("v", KV, BHNC)], "parts may not overlap"),
        (
            [("kv", KV.transpose(0, 1), ("blocks", "kernel_blocks", "tokens", "content"))],
            "4 'kernel_blocks', the group's ratio is 1",
        ),
    ],
)
def test_views_that_cannot_be_described(parts, words):
    with pytest.raises(GeometryError) as caught:
        one(*(TensorPart(*part) for part in parts))
    assert words in str(caught.value)


def test_kernel_blocks_that_are_not_whole_blocks():
    with pytest.raises(
        GeometryError, match="layer 'a' part 'kv': 4 kernel blocks, not a multiple of the group's ratio 3"
    ):
        one(TensorPart("kv", KV, BHNC), group=Group("full", 48, ratio=3))


def test_a_group_that_is_not_there():
    with pytest.raises(GeometryError, match="layer 'a': group 1, there are 1"):
        geometry_from_tensors([FULL], {"a": LayerTensors(1, (TensorPart("kv", KV, BHNC),))})
