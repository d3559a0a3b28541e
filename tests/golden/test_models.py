# SPDX-License-Identifier: Apache-2.0
"""Published and upstream numbers about real models, reproduced from their configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhma import lowlevel
from kvhma.geometry import Geometry, Layer
from kvhma.models import Model, State, model, models
from kvhma.models.block_size import hybrid_block_size
from kvhma.models.pages import state_bytes
from kvhma.models.shards import conv_split
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.groups import cache_groups
from support.needed import needed
from support.summary import summary

MIB = 2**20

# Groups, tensors, empty places, logical block, FlashInfer kernel block, ratio, state bytes, KV bytes per
# token.
ALLOCATIONS = {
    "gemma-3-4b": ({"sliding": 6, "full": 1}, 5, 1, 16, 16, 1, 0, 4096),
    "gemma-3-27b": ({"sliding": 6, "full": 1}, 10, 8, 16, 16, 1, 0, 8192),
    "gpt-oss-20b": ({"sliding": 1, "full": 1}, 12, 0, 16, 16, 1, 0, 2048),
    "gpt-oss-120b": ({"sliding": 1, "full": 1}, 18, 0, 16, 16, 1, 0, 2048),
    "Llama-4-Scout-17B-16E": ({"chunked": 3, "full": 1}, 12, 0, 16, 16, 1, 0, 4096),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": ({"mamba2": 4, "full": 1}, 6, 1, 2096, 16, 131, 2134016, 1024),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv": ({"mamba2": 4, "full": 1}, 6, 1, 4176, 16, 261, 2134016, 512),
    "Nemotron-H-8B": ({"mamba2": 6, "full": 1}, 4, 0, 1040, 16, 65, 4255744, 4096),
    "Qwen3-Next-80B-A3B": ({"gdn": 3, "full": 1}, 12, 0, 544, 32, 17, 1097728, 2048),
    "granite-4.0-h-tiny": ({"mamba2": 9, "full": 1}, 4, 0, 400, 16, 25, 806400, 2048),
    "Falcon-H1-7B": ({"full": 1, "mamba2": 1}, 44, 0, 1568, 32, 49, 1594368, 1024),
    "DeepSeek-V3": ({"mla": 1}, 61, 0, 16, 16, 1, 0, 1152),
}

LAYERS = {
    "gemma-3-4b": (34, 34),
    "gemma-3-12b": (48, 48),
    "gemma-3-27b": (62, 62),
    "gpt-oss-20b": (24, 24),
    "gpt-oss-120b": (36, 36),
    "Llama-4-Scout-17B-16E": (48, 48),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (52, 29),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv": (52, 29),
    "Nemotron-H-8B": (52, 28),
    "Qwen3-Next-80B-A3B": (48, 48),
    "Qwen3.5-0.8B": (24, 24),
    "granite-4.0-h-tiny": (40, 40),
    "granite-4.0-h-small": (40, 40),
    "Falcon-H1-7B": (44, 88),
    "Falcon-H1-34B": (72, 144),
    "Jamba-v0.1": (32, 32),
    "DeepSeek-V3": (61, 61),
}
"""Layers of the model, and caches: an MLP layer has none, a Falcon-H1 layer two."""

TOKENS = (128, 1000, 5000, 32000)
# What is needed for 128, 1000, 5000 and 32000 tokens: descriptors, MiB.
REQUESTS = {
    "gemma-3-4b": (
        (272, 17.0),
        (2142, 133.9),
        (3450, 215.6),
        (11856, 741.0),
    ),
    "gemma-3-27b": (
        (496, 62.0),
        (3906, 488.2),
        (6510, 813.8),
        (23328, 2916.0),
    ),
    "gpt-oss-20b": (
        (192, 6.0),
        (864, 27.0),
        (3864, 120.8),
        (24096, 753.0),
    ),
    "gpt-oss-120b": (
        (288, 9.0),
        (1296, 40.5),
        (5796, 181.1),
        (36144, 1129.5),
    ),
    "Llama-4-Scout-17B-16E": (
        (384, 24.0),
        (3024, 189.0),
        (15024, 939.0),
        (40704, 2544.0),
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        (94, 47.6),
        (424, 52.7),
        (1924, 76.2),
        (12046, 234.3),
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv": (
        (94, 47.2),
        (424, 49.8),
        (1924, 61.5),
        (12046, 140.6),
    ),
    "Nemotron-H-8B": (
        (80, 99.4),
        (300, 113.2),
        (1300, 175.7),
        (8048, 597.4),
    ),
    "Qwen3-Next-80B-A3B": (
        (120, 40.7),
        (456, 61.7),
        (1956, 155.4),
        (12072, 787.7),
    ),
    "granite-4.0-h-tiny": (
        (104, 28.7),
        (324, 35.6),
        (1324, 66.8),
        (8072, 277.7),
    ),
    "Falcon-H1-7B": (
        (264, 72.4),
        (1496, 110.9),
        (6996, 282.8),
        (44088, 1441.9),
    ),
    "DeepSeek-V3": (
        (488, 8.6),
        (3843, 67.6),
        (19093, 335.6),
        (122000, 2144.5),
    ),
}


def geometry_for(name: str, num_tokens: int) -> Geometry:
    one = model(name)
    groups = len(cache_groups(one))
    blocks = groups * (num_tokens // hybrid_block_size(one) + 2) + 1
    return layout(one, LayoutOptions(num_blocks=blocks, kernel_block="flashinfer"))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_caches(name: str) -> None:
    one = models()[name]
    assert (len(one.layers), len(one.specs)) == LAYERS[name]


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_what_the_allocator_makes(name: str) -> None:
    one = summary(model(name))
    assert (
        dict(one.groups), one.tensors, one.padded_slots, one.block_size, one.kernel_block, one.ratio,
        one.state_bytes, one.kv_bytes,
    ) == ALLOCATIONS[name]  # fmt: skip


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_geometry_agrees_with_the_summary(name: str) -> None:
    one = geometry_for(name, 1000)
    groups, tensors, padded, block, _, ratio, state, kv = ALLOCATIONS[name]
    assert len(one.groups) == sum(groups.values())
    assert len(one.regions) == tensors
    assert len(one.groups) * tensors - len(one.layers) == padded
    for layer in one.layers:
        group = one.groups[layer.group]
        if group.kind == "ssm":
            assert (group.ratio, layer.page.nbytes) == (1, state)
        else:
            assert (group.block_size, group.ratio) == (block, ratio)
            assert layer.page.nbytes * ratio == block * kv
        assert layer.block_stride == block * kv
        assert layer.num_blocks * layer.block_stride == one.regions[layer.region].bytes


@pytest.mark.parametrize("index", range(len(TOKENS)), ids=map(str, TOKENS))
@pytest.mark.parametrize("name", REQUESTS)
def test_one_request(name: str, index: int) -> None:
    """Every figure of the table: a state is two descriptors, windows are exact."""
    num_tokens = TOKENS[index]
    least = needed(geometry_for(name, num_tokens), num_tokens)
    descriptors, mib = REQUESTS[name][index]
    assert least.descriptors == descriptors
    assert least.bytes / MIB == pytest.approx(mib, abs=0.0501)


def test_gemma_4b_4284_to_1650_descriptors() -> None:
    """63 blocks of 64 tokens, K and V apart: 63*34*2 against (6*17+63)*5*2."""
    one = layout(model("gemma-3-4b"), LayoutOptions(num_blocks=7 * 63 + 1, block_size=64, kv="apart"))
    assert (len(one.layers), len(one.groups), len(one.regions)) == (34, 7, 5)
    windows = [0 if group.window is None else lowlevel.window_blocks(group.window, 64) for group in one.groups]
    tables = [list(range(1 + 63 * group, 64 + 63 * group)) for group in range(7)]
    clipped = lowlevel.clip_blocks(tables, windows)
    assert sorted(map(len, clipped)) == [17] * 6 + [63]
    blocks = one.layers[0].num_blocks
    assert len(lowlevel.descriptor_ids(tables[:1], [blocks] * 34 * 2, [0] * 34 * 2)) == 4284
    assert len(lowlevel.descriptor_ids(clipped, [blocks] * 5 * 2, [tuple(range(7))] * 5 * 2)) == 1650


def test_gpt2_registers_one_tensor_per_layer() -> None:
    one = layout(Model("gpt-2", ("full",) * 12, 12, 64), LayoutOptions(num_blocks=4))
    assert (len(one.regions), len(one.groups)) == (12, 1)


def test_nemotron_nano_fp8_in_two_views() -> None:
    """RFC 36780: attention sees (780390, 2, 16, 2, 128), state (2990, 3, 6144), over the same bytes."""
    one = layout(
        model("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv"),
        LayoutOptions(num_blocks=2990, kernel_block="flashinfer", order="LBNHC", kv="split", conv="SD"),
    )  # fmt: skip
    attention, state = layer_of(one, "full"), layer_of(one, "ssm")
    group = one.groups[attention.group]
    assert (attention.num_blocks * group.ratio, attention.num_blocks, group.ratio) == (780390, 2990, 261)
    assert [part.name for part in attention.page.parts] == ["k", "v"]
    assert shape(attention, 0) == (16, 2, 128)
    assert conv_shape(state) == (3, 6144)
    assert same_bytes(attention, state)


def test_nemotron_nano_fp8_prepared_list() -> None:
    """The same, packed: kernel blocks of every region, then four entries per state and logical block."""
    one = layout(
        model("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv"), LayoutOptions(num_blocks=2990, kernel_block="flashinfer")
    )
    assert prepared_entries(one) == [780390] * 6 + [2990] * 24


def test_granite_tiny_shapes() -> None:
    """conv (18525, 3, 3328), ssm (18525, 48, 64, 128), attention (18525, 400, 4, 128) for K and for V."""
    one = layout(model("granite-4.0-h-tiny"), LayoutOptions(num_blocks=18525, order="LBNHC", kv="split", conv="SD"))
    attention, state = layer_of(one, "full"), layer_of(one, "ssm")
    assert attention.num_blocks == state.num_blocks == 18525
    assert shape(attention, 0) == shape(attention, 1) == (400, 4, 128)
    assert conv_shape(state) == (3, 3328)
    ssm = state.page.parts[-1]
    assert [axis.length for axis in ssm.axes] == [48, 64 * 128]
    assert same_bytes(attention, state)


def test_gpt_oss_one_buffer_over_layers() -> None:
    """PR 34373, TP1: buffer (136756, 12, 32768), strides (393216, 32768, 1), view (2, 136756, 16, 8, 64)."""
    one = layout(model("gpt-oss-20b"), LayoutOptions(num_blocks=136756, order="BLNHC", kv="split"))
    assert [region.bytes for region in one.regions] == [136756 * 12 * 32768]
    assert {layer.block_stride for layer in one.layers} == {393216}
    assert sorted({layer.offset for layer in one.layers}) == [32768 * slot for slot in range(12)]
    assert shape(one.layers[0], 1) == (16, 8, 64)


def test_gpt_oss_heads_before_layers() -> None:
    """PR 34373, TP2: buffer (66511, 4, 12, 4096), strides (196608, 49152, 4096, 1)."""
    one = layout(model("gpt-oss-20b"), LayoutOptions(num_blocks=66511, order="BHLNC", tp_size=2))
    first, second = (layer for layer in one.layers if layer.group == 0 and layer.offset <= 4096)
    assert [region.bytes for region in one.regions] == [66511 * 196608]
    assert (first.block_stride, first.page.parts[0].axes[0].stride) == (196608, 49152)
    assert (first.page.parts[0].axes[0].length, second.offset - first.offset) == (4, 4096)


def test_gemma_2_2b_one_group_or_two() -> None:
    """(7842, 26, 2, 16, 4, 256) becomes (15685, 13, 2, 16, 4, 256) with the hybrid allocator."""
    hybrid = Model("gemma-2-2b", ("sliding", "full") * 13, 4, 256, window=4096)
    uniform = replace(hybrid, layers=("full",) * 26)
    two, one = layout(hybrid, LayoutOptions(num_blocks=15685)), layout(uniform, LayoutOptions(num_blocks=7842))
    assert (len(two.groups), len(two.regions)) == (2, 13)
    assert (len(one.groups), len(one.regions)) == (1, 26)
    assert sum(r.bytes for r in two.regions) - sum(r.bytes for r in one.regions) == 13 * 2 * 16 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("name", "tp_size", "columns"),
    [
        ("Nemotron-H-8B", 1, (8192, 1024, 1024)),
        ("Nemotron-H-8B", 4, (2048, 256, 256)),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 1, (4096, 1024, 1024)),
        ("Qwen3.5-0.8B", 1, (2048, 2048, 2048)),
        ("Qwen3.5-0.8B", 4, (512, 512, 512)),
    ],
)
def test_conv_split(name: str, tp_size: int, columns: tuple[int, ...]) -> None:
    state = model(name).state
    assert state is not None
    names = ("q", "k", "v") if state.kind == "gdn" else ("x", "B", "C")
    for rank in range(tp_size):
        parts = conv_split(state, tp_rank=rank, tp_size=tp_size)
        assert tuple(parts) == names
        assert tuple(part.length for part in parts.values()) == columns
        assert tuple(part.start for part in parts.values()) == tuple(rank * length for length in columns)


@pytest.mark.parametrize(
    ("name", "tp_size", "user_block", "kernel", "logical", "ratio"),
    [
        # The two NIXL runs of upstream's CI use --block-size 128, which is also the alignment.
        ("Qwen3.5-0.8B", 4, 128, 64, 384, 6),
        ("Qwen3.5-0.8B", 2, 128, 64, 640, 10),
        ("granite-4.0-h-small", 1, 16, 16, 528, 33),
        # FP8 cache of 16-token kernel blocks: at TP4 its one head and a quarter of the state give half the
        # ratio.
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv", 1, 16, 16, 4176, 261),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv", 2, 16, 16, 4176, 261),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv", 4, 16, 16, 2096, 131),
        # P TP4 -> D TP1 of the expansion case: only block 64 with 32-token kernel blocks gives both 34 and
        # 66.
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 4, 64, 32, 1088, 34),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 1, 64, 32, 2112, 66),
    ],
)
def test_logical_blocks_of_other_runs(
    name: str, tp_size: int, user_block: int, kernel: int, logical: int, ratio: int
) -> None:
    one = summary(model(name), tp_size=tp_size, block_size=user_block, kernel_block=kernel)
    assert (one.block_size, one.ratio) == (logical, ratio)


@pytest.mark.parametrize(
    ("name", "mib"),
    [("NVIDIA-Nemotron-3-Nano-30B-A3B", 46.8), ("granite-4.0-h-small", 73.7), ("Falcon-H1-7B", 66.9)],
)
def test_state_of_a_request(name: str, mib: float) -> None:
    one = model(name)
    assert one.state is not None
    layers = sum(cache.kind == one.state.kind for _, cache in one.specs)
    assert layers * state_bytes(one.state) / MIB == pytest.approx(mib, abs=0.05)


@pytest.mark.parametrize(("tp_size", "sizes"), [(1, (36864, 2097152)), (2, (18432, 1048576)), (4, (9216, 524288))])
def test_nemotron_nano_state_per_rank(tp_size: int, sizes: tuple[int, int]) -> None:
    one = layout(model("NVIDIA-Nemotron-3-Nano-30B-A3B"), LayoutOptions(num_blocks=2, tp_size=tp_size))
    *conv, ssm = layer_of(one, "ssm").page.parts
    assert (sum(part.nbytes for part in conv), ssm.nbytes) == sizes


TINY_NEMOTRON_H = Model(
    "tiny-nemotron-h",
    ("mamba2", "full", "mamba2", "none", "mamba2", "full"),
    kv_heads=2,
    head_dim=32,
    state=State("mamba2", 320, 4, 8, 32, 32, 1, "bfloat16", "float32"),
)
TINY_QWEN3_NEXT = Model(
    "tiny-qwen3-next",
    ("gdn", "gdn", "gdn", "full") * 2,
    kv_heads=2,
    head_dim=32,
    state=State("gdn", 256, 4, 4, 32, 32, 2, "bfloat16", "float32"),
)


def test_tiny_nemotron_h_as_dumped_from_an_engine() -> None:
    """Groups {0,4} {2} {1,5}, block 160, page 40960, second tensor at 536862720; 131070 local descriptors."""
    one = layout(TINY_NEMOTRON_H, LayoutOptions(num_blocks=13107, block_size=32, one_storage=True))
    assert members(TINY_NEMOTRON_H) == [[0, 4], [2], [1, 5]]
    assert {group.block_size for group in one.groups if group.kind == "full"} == {160}
    assert {layer.block_stride for layer in one.layers} == {40960}
    assert sorted({layer.offset for layer in one.layers}) == [0, 536862720]
    offsets = [(part.offset, part.nbytes) for part in layer_of(one, "ssm").page.parts]
    assert offsets == [(0, 1536), (1536, 192), (1728, 192), (1920, 32768)]
    entries = prepared_entries(one)
    assert entries == [13107] * 10
    assert (sum(entries[:2]), sum(entries)) == (26214, 131070)


def test_tiny_qwen3_next_as_dumped_from_an_engine() -> None:
    """GDN groups {0,4} {1,5} {2,6}, attention {3,7}, block 96, page 24576, state 17920 bytes of it."""
    one = layout(TINY_QWEN3_NEXT, LayoutOptions(num_blocks=21845, block_size=32, one_storage=True))
    assert members(TINY_QWEN3_NEXT) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert one.groups[3].block_size == 96
    assert {layer.block_stride for layer in one.layers} == {24576}
    assert sorted({layer.offset for layer in one.layers}) == [0, 536862720]
    assert layer_of(one, "ssm").page.nbytes == 17920


def test_tiny_gemma_and_gpt_oss_groups() -> None:
    gemma = Model("tiny-gemma-3", ("sliding",) * 5 + ("full", "sliding"), 2, 32, window=64)
    assert members(gemma) == [[0], [1], [2], [3], [4], [6], [5]]
    assert {layer.offset for layer in layout(gemma, LayoutOptions(num_blocks=4, one_storage=True)).layers} == {0}
    gpt_oss = Model("tiny-gpt-oss", ("sliding", "full") * 2, 2, 32, window=64)
    oss = layout(gpt_oss, LayoutOptions(num_blocks=65536, block_size=32, one_storage=True))
    assert [(layer.group, layer.offset) for layer in oss.layers] == [
        (0, 0),
        (1, 0),
        (0, 536870912),
        (1, 536870912),
    ]


@pytest.mark.parametrize(
    ("order", "block_stride", "head_stride", "token_stride", "layer_step"),
    [
        ("LBHNC", 4096, 2048, 64, 341 * 4096),
        ("LBNHC", 4096, 64, 128, 341 * 4096),
        ("LHBNC", 2048, 341 * 2048, 64, 341 * 4096),
        ("BLHNC", 12288, 2048, 64, 4096),
        ("BLNHC", 12288, 64, 128, 4096),
        ("BHLNC", 12288, 6144, 64, 2048),
    ],
)
def test_stride_orders_of_a_small_llama(
    order: Any, block_stride: int, head_stride: int, token_stride: int, layer_step: int
) -> None:
    """Views of upstream's own functions, in items of 2 bytes: 3 layers, 2 heads, 32 tokens, K and V of 32."""
    llama = Model("tiny-llama", ("full",) * 3, 2, 32)
    one = layout(llama, LayoutOptions(num_blocks=341, block_size=32, order=order, one_storage=True))
    assert one.layers[0].block_stride == 2 * block_stride
    axes = one.layers[0].page.parts[0].axes
    assert [axis.stride for axis in axes] == [2 * head_stride, 2 * token_stride, 2]
    assert [layer.offset for layer in one.layers] == [2 * layer_step * slot for slot in range(3)]


def prepared_entries(one: Geometry) -> list[int]:
    """Entries of each view of a prepared list: attention in every tensor, then each part of a state in every tensor."""
    attention, state = layer_of(one, "full"), layer_of(one, "ssm")
    starts = sorted({one.regions[layer.region].base + layer.offset for layer in one.layers})
    page, ratio = attention.page.nbytes, one.groups[attention.group].ratio
    parts = [(part.offset, part.nbytes) for part in state.page.parts]

    def each(value: int) -> list[int]:
        return [value] * len(starts)

    kv = lowlevel.fa_views(starts, each(page), each(page), each(attention.num_blocks * ratio))
    states = lowlevel.ssm_views(starts, parts, each(state.block_stride), each(state.num_blocks))
    return [int(count) for count in (*kv[:, 4], *states[:, 4])]


def members(one: Model) -> list[list[int]]:
    """Layer indices of every group."""
    return [[int(name.split(".")[2]) for name in group.layers] for group in cache_groups(one)]


def layer_of(one: Geometry, kind: str) -> Layer:
    return next(layer for layer in one.layers if one.groups[layer.group].kind == kind)


def shape(layer: Layer, part: int) -> tuple[int, ...]:
    """Lengths of a part's axes, outermost first."""
    axes = sorted(layer.page.parts[part].axes, key=lambda axis: -axis.stride)
    return tuple(axis.length or 0 for axis in axes)


def conv_shape(layer: Layer) -> tuple[int, int]:
    """Rows and channels of a convolution state in SD order, over its parts."""
    *conv, _ = layer.page.parts
    rows = {axis.length or 0 for part in conv for axis in part.axes if axis.name == "rows"}
    strides = {axis.stride for part in conv for axis in part.axes if axis.name == "rows"}
    channels = sum(axis.length or 0 for part in conv for axis in part.axes if axis.name == "channels")
    assert strides == {channels * conv[0].item_bytes}
    return rows.pop(), channels


def same_bytes(one: Layer, other: Layer) -> bool:
    """Whether block b of one layer is block b of the other, so that the views overlap and blocks do not."""
    return (one.region, one.offset, one.block_stride) == (other.region, other.offset, other.block_stride)
