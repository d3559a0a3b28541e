# SPDX-License-Identifier: Apache-2.0
"""Layouts of models: every byte has one place, shards add up, and refusals name the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvhma.errors import GeometryError, KvhmaError, LayoutError, UnknownModelError
from kvhma.geometry import Geometry, Layer
from kvhma.models import Attention, Model, State, model, models
from kvhma.models.block_size import hybrid_block_size, kernel_block_size
from kvhma.models.pages import state_bytes
from kvhma.models.shards import conv_split
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.groups import cache_groups, kv_bytes
from support.summary import summary

MAMBA1 = State("mamba1", 16, 4, 16, 1, 4, 0, "bfloat16", "float32")
MAMBA2 = State("mamba2", 48, 4, 4, 8, 4, 2, "bfloat16", "float32")
GDN = State("gdn", 64, 4, 4, 8, 4, 4, "bfloat16", "bfloat16")

SLIDING = Model("sliding", ("sliding", "sliding", "full") * 2, 4, 8, window=8)
CHUNKED = Model("chunked", ("chunked", "full"), 4, 8, chunk=16)
LATENT = Model("latent", ("mla",) * 3, 1, 12)
STATES = [
    Model(f"{state.kind}+full", (state.kind, state.kind, "full", state.kind), 4, 8, state=state)
    for state in (MAMBA1, MAMBA2, GDN)
]
BOTH = Model("both", ("full+mamba2",) * 2, 4, 8, state=MAMBA2)
LATENT_GDN = Model("latent+gdn", ("gdn", "gdn", "mla"), 1, 12, state=GDN)
ONLY_STATE = Model("only state", ("mamba2",) * 3, 1, 8, state=MAMBA2)

GEMMA_4 = Model("gemma-4", ("sliding", "sliding", "full") * 2, 8, 8, window=8, attention=(Attention("full", 2, 16),))
MIMO = Model("mimo", ("full", "sliding"), 4, 12, v_head_dim=8, window=8, attention=(Attention("sliding", 8, 12, 8),))
SPARSE = Model("sparse", ("indexer+mla",) * 2, 1, 12)
DRAFT = replace(
    SLIDING, name="draft", layers=(*SLIDING.layers, "draft"), attention=(Attention("full", 2, 8, name="draft"),)
)
PADDED = replace(SLIDING, name="padded", attention=(Attention("full", 6, 8),))
"""Heads that differ by layer: longer blocks, other V, a latent with an index, one more layer, padding."""

PAGE_ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
ORDERS = (*PAGE_ORDERS, "LHBNC", "BHLNC")


def variants() -> list[Any]:
    """Every combination of forms that can be laid out."""
    found = []
    for one in (SLIDING, CHUNKED, LATENT, *STATES, BOTH, LATENT_GDN, ONLY_STATE, GEMMA_4, MIMO, SPARSE, DRAFT, PADDED):
        for order, kv, kernel in product(ORDERS, ("packed", "split", "apart"), (None, 4)):
            if one.state and (order not in PAGE_ORDERS or kv == "apart"):
                continue
            if kv != "packed" and ({"mla", "indexer+mla"} & {*one.layers} or one.v_head_dim):
                continue
            if one.attention and order not in PAGE_ORDERS:
                continue
            if one is SPARSE and order not in PAGE_ORDERS:
                continue
            if one is PADDED and (kernel or kv == "apart"):
                continue
            if kv == "apart" and (order[0] == "B" or order not in PAGE_ORDERS):
                continue
            for conv, in_page in product(("DS", "SD") if one.state else ("DS",), (True, False)):
                if in_page or (kernel and order[0] == "B"):
                    options = {"order": order, "kv": kv, "kernel_block": kernel, "conv": conv}
                    options |= {"kernel_blocks_in_page": in_page}
                    found.append(pytest.param(one, options, id="-".join(map(str, [one.name, *options.values()]))))
    return found


def addresses(one: Geometry, layer: Layer, block: int) -> Iterator[np.ndarray]:
    """Addresses of every byte of one part of a layer in one logical block."""
    ratio = one.groups[layer.group].ratio
    step = layer.kernel_stride or layer.block_stride // ratio
    start = one.regions[layer.region].base + layer.offset + block * layer.block_stride
    for part, kernel in product(layer.page.parts, range(ratio)):
        found = np.arange(part.item_bytes) + start + kernel * step + part.offset
        for axis in part.axes:
            assert axis.length is not None
            found = np.add.outer(found, np.arange(axis.length) * axis.stride)
        yield found.ravel()


def touched(one: Geometry, group: int, block: int) -> np.ndarray:
    """All bytes of a group's layers in a block."""
    layers = [layer for layer in one.layers if layer.group == group]
    return np.concatenate([part for layer in layers for part in addresses(one, layer, block)])


@pytest.mark.parametrize(("one", "options"), variants())
@pytest.mark.parametrize("one_storage", [False, True])
def test_every_byte_has_one_place(one: Model, options: dict[str, Any], one_storage: bool) -> None:
    """No byte is used twice in a group; blocks never overlap, for any groups; nothing is outside."""
    blocks = 4
    geometry = layout(
        one, LayoutOptions(num_blocks=blocks, block_size=8, align=8, one_storage=one_storage, base=0, **options)
    )
    size = max(region.base + region.bytes for region in geometry.regions)
    owner = np.full(size, -1)
    inside = np.zeros(size, np.bool_)
    for region in geometry.regions:
        inside[region.base : region.base + region.bytes] = True
    used = np.zeros(size, np.bool_)
    for block, group in product(range(blocks), range(len(geometry.groups))):
        found = touched(geometry, group, block)
        assert len(np.unique(found)) == len(found)
        assert inside[found].all()
        assert set(np.unique(owner[found])) <= {-1, block}
        owner[found] = block
        used[found] = True
    if not one.state and not one.attention and len(cache_groups(one)[0].layers) == len(geometry.regions):
        assert (used == inside).all()  # attention has no padding


@pytest.mark.parametrize(("one", "options"), variants())
def test_core_takes_every_variant(one: Model, options: dict[str, Any]) -> None:
    geometry = layout(one, LayoutOptions(num_blocks=3, block_size=8, align=8, tp_rank=1, tp_size=2, **options))
    assert Geometry.from_json(geometry.to_json()) == geometry


ONE_GROUP = replace(STATES[1], name="mamba2 of one group", state=replace(MAMBA2, conv_dim=40, n_groups=1))


@pytest.mark.parametrize("one", [*STATES, BOTH, ONE_GROUP], ids=lambda one: one.name)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_hold_everything_once(one: Model, tp_size: int) -> None:
    """The shards are the whole axis, each item once, except for a single group, which every rank holds."""
    assert one.state is not None
    if one.state.kind == "mamba2" and one.state.n_groups == 2 and tp_size == 4:
        with pytest.raises(LayoutError, match=r"tp_size 4: state\.n_groups 2"):
            layout(one, LayoutOptions(num_blocks=2, tp_size=tp_size))
        return
    ranks = [layout(one, LayoutOptions(num_blocks=2, tp_rank=rank, tp_size=tp_size)) for rank in range(tp_size)]
    for layer in ranks[0].layers:
        for part in layer.page.parts:
            held: dict[str, list[int]] = {axis.name: [] for axis in part.axes}
            for rank in ranks:
                mine = next(p for p in rank.layer_by_name[layer.name].page.parts if p.name == part.name)
                for axis in mine.axes:
                    assert axis.length is not None
                    held[axis.name] += range(axis.start, axis.start + axis.length)
            for axis in part.axes:
                times = 1 if axis.name in ("heads", "channels") else tp_size
                if part.name in "BC" and one.state.n_groups == 1:
                    times = tp_size
                assert sorted(held[axis.name]) == sorted([*range(axis.extent)] * times), (
                    part.name,
                    axis.name,
                )


@pytest.mark.parametrize(("heads", "tp_size", "shards"), [
    (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
    (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
    (1, 2, [(0, 1), (0, 1)]),
])  # fmt: skip
def test_heads_repeat_when_there_are_more_ranks(heads: int, tp_size: int, shards: list[tuple[int, int]]) -> None:
    one = Model("heads", ("full",), heads, 8)
    for rank, shard in enumerate(shards):
        part = layout(one, LayoutOptions(num_blocks=2, tp_rank=rank, tp_size=tp_size)).layers[0].page.parts[0]
        axis = part.axes[0]
        assert (axis.name, axis.extent, (axis.start, axis.length)) == ("heads", heads, shard)


def test_mla_is_whole_on_every_rank() -> None:
    ranks = [layout(LATENT, LayoutOptions(num_blocks=2, tp_rank=rank, tp_size=4)) for rank in range(4)]
    assert len({rank.layers[0].page for rank in ranks}) == 1
    assert [axis.name for axis in ranks[0].layers[0].page.parts[0].axes] == ["tokens", "content"]


@pytest.mark.parametrize(("n_groups", "tp_size", "held"), [
    (1, 2, [0, 0]),
    (1, 4, [0, 0, 0, 0]),
    (2, 2, [0, 1]),
    (4, 4, [0, 1, 2, 3]),
])  # fmt: skip
def test_groups_repeat_when_there_are_more_ranks(n_groups: int, tp_size: int, held: list[int]) -> None:
    """A rank's heads use group ``head * n_groups // n_heads``, which it holds whole."""
    state = State("mamba2", 32 + 2 * n_groups * 4, 4, 8, 4, 4, n_groups, "bfloat16", "float32")
    for rank, group in enumerate(held):
        x, b, c = conv_split(state, tp_rank=rank, tp_size=tp_size).values()
        assert (x.start, x.length, x.extent) == (rank * 32 // tp_size, 32 // tp_size, 32)
        for part in (b, c):
            assert (part.start, part.length, part.extent) == (4 * group, 4, 4 * n_groups)
        used = {head * n_groups // 8 for head in range(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)}
        assert used == {group}


def test_conv_of_one_group_where_tp_size_does_not_divide() -> None:
    """What P (TP1) and D (TP2) hold of the tiny NemotronH, in bytes; vLLM 0.32 derives other numbers."""
    state = State("mamba2", 320, 4, 8, 32, 32, 1, "bfloat16", "float32")
    one = Model("tiny", ("mamba2", "full"), 2, 32, state=state)
    p, d = (layout(one, LayoutOptions(num_blocks=2, block_size=32, tp_size=size)) for size in (1, 2))
    for geometry, spans in (
        (p, [(0, 1536), (1536, 192), (1728, 192), (1920, 32768)]),
        (d, [(0, 768), (768, 192), (960, 192), (1152, 16384)]),
    ):
        assert [(part.offset, part.nbytes) for part in geometry.layers[0].page.parts] == spans


@pytest.mark.parametrize(("conv", "strides"), [("DS", (6, 2)), ("SD", (2, 96))])
def test_conv_orders(conv: Any, strides: tuple[int, int]) -> None:
    """48 channels of 3 rows: a part is 3-item runs, or 3 runs of its channels."""
    x, b, c, ssm = layout(STATES[1], LayoutOptions(num_blocks=2, conv=conv)).layers[0].page.parts
    for part, start in ((x, 0), (b, 32), (c, 40)):
        channels, rows = part.axes
        assert (channels.stride, rows.stride) == strides
        assert part.offset == start * channels.stride
    assert ssm.offset == 48 * 3 * 2
    assert [axis.stride for axis in ssm.axes] == [8 * 4 * 4, 4]


def test_state_page_is_padded_to_the_attention_page() -> None:
    one = layout(STATES[1], LayoutOptions(num_blocks=2))
    state, attention = one.layers[0], one.layers[2]
    assert state.page.nbytes == state_bytes(MAMBA2) < attention.page.nbytes == state.block_stride


def test_block_grows_only_as_far_as_the_state_needs() -> None:
    one = STATES[1]
    tokens = hybrid_block_size(one, align=1)
    per_token = kv_bytes(one)
    assert (tokens - 1) * per_token < state_bytes(MAMBA2) <= tokens * per_token
    assert hybrid_block_size(one, block_size=48) % 48 == 0
    assert hybrid_block_size(SLIDING, block_size=48) == 48
    assert hybrid_block_size(LATENT_GDN) == 128  # MLA kernels need 128
    assert hybrid_block_size(ONLY_STATE) == 16
    assert layout(ONLY_STATE, LayoutOptions(num_blocks=2)).layers[0].block_stride == state_bytes(MAMBA2)


def test_groups_are_padded_only_when_buckets_are_alike() -> None:
    def sizes(sliding: int, full: int) -> list[int]:
        layers = ("sliding",) * sliding + ("full",) * full
        return [len(group.layers) for group in cache_groups(replace(SLIDING, layers=layers))]

    assert sizes(5, 4) == [5, 4]
    assert sizes(6, 4) == [3, 3, 4]
    assert sizes(5, 2) == [2, 2, 1, 2]


def test_kernel_blocks() -> None:
    assert [kernel_block_size("flashinfer", size) for size in (16, 48, 96, 128, 400)] == [16, 16, 32, 64, 16]
    one = layout(SLIDING, LayoutOptions(num_blocks=2, block_size=64, kernel_block=16))
    assert {group.ratio for group in one.groups} == {4}
    assert one.layers[0].kernel_stride is None
    rows = layout(SLIDING, LayoutOptions(num_blocks=2, block_size=64, kernel_block=16, order="BLHNC"))
    assert rows.layers[0].kernel_stride == rows.layers[0].page.nbytes
    assert rows.layers[0].block_stride == 2 * 4 * rows.layers[0].page.nbytes


@pytest.mark.parametrize(
    ("one", "options", "text"),
    [
        (STATES[1], {"order": "LHBNC"}, "order 'LHBNC'"),
        (STATES[1], {"order": "BHLNC"}, "order 'BHLNC'"),
        (SLIDING, {"order": "NHD"}, "order 'NHD'"),
        (SLIDING, {"kv": "k"}, "kv 'k'"),
        (SLIDING, {"conv": "D"}, "conv 'D'"),
        (LATENT, {"kv": "split"}, "kv 'split'"),
        (SLIDING, {"kv": "apart", "order": "LHBNC"}, "kv 'apart'"),
        (SLIDING, {"kv": "apart", "order": "BLHNC"}, "kv 'apart'"),
        (STATES[1], {"kv": "apart"}, "kv 'apart'"),
        (SLIDING, {"tp_size": 3}, "tp_size 3: kv_heads 4"),
        (SLIDING, {"tp_size": 6}, "tp_size 6: kv_heads 4"),
        (STATES[2], {"tp_size": 8}, "tp_size 8: state.n_groups 4"),
        (BOTH, {"tp_size": 8}, "tp_size 8: state.n_heads 4"),
        (SLIDING, {"tp_rank": 2, "tp_size": 2}, "tp_rank 2"),
        (SLIDING, {"tp_rank": -1}, "tp_rank -1"),
        (SLIDING, {"num_blocks": 0}, "num_blocks 0"),
        (SLIDING, {"block_size": 0}, "block_size 0"),
        (SLIDING, {"region_align": 0}, "region_align 0"),
        (STATES[1], {"align": 0}, "align 0"),
        (SLIDING, {"kernel_block": 5}, "kernel_block 5"),
        (SLIDING, {"kernel_block": "fa"}, "kernel_block 'fa'"),
        (SLIDING, {"kernel_block": "flashinfer", "block_size": 24}, "block_size 24"),
        (replace(SLIDING, layers=("none",)), {}, "layers"),
        (replace(SLIDING, query_heads=6), {"tp_size": 4}, "tp_size 4: query_heads 6"),
        (model("granite-4.0-h-tiny"), {"tp_size": 8}, "tp_size 8: query_heads 12"),
        (model("Falcon-H1-34B"), {"tp_size": 4}, "tp_size 4: state.n_groups 2"),
        (GEMMA_4, {"order": "LHBNC"}, "order 'LHBNC': pages of"),
        (GEMMA_4, {"kernel_block": 32}, "kernel_block 32: must divide"),
        (replace(GEMMA_4, v_head_dim=4), {"kv": "split"}, "head_dim 8 and v_head_dim 4"),
        (PADDED, {"order": "BHLNC"}, "order 'BHLNC': pages of"),
        (PADDED, {"order": "LHBNC"}, "order 'LHBNC': pages of"),
        (PADDED, {"kv": "apart"}, "kv 'apart': padded pages"),
        (PADDED, {"kernel_block": 8}, "kernel_block 8: a page of"),
        (
            replace(LATENT, layers=("mla", "chunked"), chunk=8, attention=(Attention("chunked", 1, 10),)),
            {},
            "layers: a page of model.layers.0",
        ),
    ],
)
def test_refusals_name_the_field_and_the_value(one: Model, options: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text) as caught:
        layout(one, LayoutOptions(**{"num_blocks": 2, **options}))
    assert isinstance(caught.value, KvhmaError)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"conv_dim": 47}, "conv_dim 47"),
        ({"kind": "rwkv"}, "state kind 'rwkv'"),
        ({"ssm_dtype": "int3"}, "dtype 'int3'"),
        ({"n_groups": 0}, "n_groups 0"),
        ({"d_conv": 1}, "d_conv"),
        ({"d_state": 0}, "positive"),
    ],
)
def test_state_is_checked(change: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        replace(MAMBA2, **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": None}, "window"),
        ({"layers": ("chunked",)}, "chunk"),
        ({"layers": ("gdn",)}, "gdn layers, but state is None"),
        ({"layers": ("full", "quadratic")}, "layer 1 is 'quadratic'"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"kv_heads": 0}, "kv_heads 0"),
    ],
)
def test_model_is_checked(change: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        replace(SLIDING, **change)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Attention("ring", 1, 8), "attention kind 'ring'"),  # type: ignore[arg-type]
        (lambda: Attention("full", 0, 8), "kv_heads 0"),
        (lambda: Attention("mla", 2, 8), "kv_heads 2"),
        (lambda: Attention("indexer", 1, 64), "head_dim 64"),
        (lambda: Attention("full", 1, 8, dtype="int3"), "dtype 'int3'"),
        (lambda: replace(SLIDING, attention=(Attention("full", 2, 8),) * 2), "attention 'full' appears twice"),
        (lambda: replace(SLIDING, attention=(Attention("full", 2, 8, name="gdn"),)), "attention 'gdn'"),
        (lambda: replace(SLIDING, attention=(Attention("full", 2, 8, name="a+b"),)), "attention 'a\\+b'"),
        (lambda: replace(SLIDING, layers=("full+full",)), "two caches of one place"),
        (lambda: replace(SLIDING, query_heads=0), "query_heads 0"),
        (lambda: replace(SPARSE, dtype="float8_e4m3fn"), "dtype float8_e4m3fn next to an index"),
    ],
)
def test_attention_is_checked(make: Callable[[], object], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        make()


def test_heads_by_layer() -> None:
    """gemma-4: the same model, in blocks of 16 and 32 tokens; with more ranks than global heads in equal ones."""
    gemma = Model("gemma-4", ("sliding",) * 5 + ("full",), 16, 256, window=1024, attention=(Attention("full", 4, 512),))
    for tp_size, blocks, heads in ((1, {16, 32}, (16, 4)), (4, {16, 32}, (4, 1)), (8, {16}, (2, 1))):
        one = layout(gemma, LayoutOptions(num_blocks=3, tp_size=tp_size, tp_rank=tp_size - 1))
        assert {group.block_size for group in one.groups} == blocks
        sliding, full = (one.layers[at].page.parts[0].axes for at in (0, 5))
        assert (sliding[0].length, full[0].length) == heads
        assert (sliding[0].extent, full[0].extent) == (16, 4)
        assert (sliding[2].extent, full[2].extent) == (512, 1024)
        assert {layer.block_stride for layer in one.layers} == {16 * 16 // tp_size * 512 * 2}


def test_an_index_is_keys_then_scales() -> None:
    index, latent = layout(SPARSE, LayoutOptions(num_blocks=2, block_size=64)).layers[:2]
    assert [(part.name, part.offset, part.nbytes) for part in index.page.parts] == [
        ("data", 0, 64 * 128),
        ("scales", 64 * 128, 64 * 4),
    ]
    assert index.group == latent.group
    assert (index.block_stride, latent.block_stride) == (64 * 132, 64 * 24)


def test_table_of_models() -> None:
    assert model("gemma-3-4b") is models()["gemma-3-4b"]
    with pytest.raises(UnknownModelError, match=r"'gemma-4'; known are gemma-3-4b, .*DeepSeek-V3") as caught:
        model("gemma-4")
    assert isinstance(caught.value, KvhmaError)
    with pytest.raises(TypeError):
        models()["mine"] = SLIDING  # type: ignore[index]


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("order", PAGE_ORDERS)
def test_every_model_of_the_table(name: str, order: Any) -> None:
    one = layout(model(name), LayoutOptions(num_blocks=3, order=order, kernel_block="flashinfer", tp_rank=1, tp_size=2))
    assert [layer.name for layer in one.layers] == [layer for layer, _ in model(name).specs]
    assert len(one.groups) == sum(count for _, count in summary(model(name), tp_size=2).groups)
