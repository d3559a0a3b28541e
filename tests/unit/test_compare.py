# SPDX-License-Identifier: Apache-2.0
"""What other connectors would select: upstream's own small cases, NIXL's merge rules, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvhma._kvhma import first_needed_tokens
from kvhma.cli.block_tables import sequence_blocks
from kvhma.cli.compare.selection import Count, select_all, select_vllm
from kvhma.cli.compare.views import View, vllm_views
from kvhma.errors import AddressOverflowError, BlockIdError, RequestError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region
from kvhma.models import Model, State
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle.labels import first_needed
from support.needed import needed
from support.pairs import HERE, latent, rank
from support.tables import undropped_blocks
from support.views import view_ids

MAMBA1 = State("mamba1", 16, 4, 16, 1, 4, 0, "bfloat16", "float32")
MAMBA2 = State("mamba2", 40, 4, 4, 8, 4, 1, "bfloat16", "float32")
GDN = State("gdn", 64, 4, 4, 8, 4, 4, "bfloat16", "bfloat16")

FULL = Model("full", ("full",) * 2, 4, 8)
SLIDING = Model("sliding", ("sliding", "full") * 2, 4, 8, window=24)
LINEAR = Model("linear", ("linear", "mla"), 1, 576, state=State("linear", 0, 1, 4, 8, 8, 0, "bfloat16", "bfloat16"))
HYBRID = Model("hybrid", ("mamba2", "mamba2", "full") * 2, 4, 8, state=MAMBA2)


def geometry(users: Sequence[Sequence[int]], kinds: Sequence[str], *, blocks: int, ratio: int = 1) -> Geometry:
    """Regions of 256-byte pages; `users` are the groups that have a layer in each."""
    kv = Page((Part("kv", "int8", 1, 0, (Axis("tokens", 4, 64 // ratio), Axis("content", 64 // ratio, 1))),))
    parts, at = [], 0
    for name in ("x", "B", "C", "ssm"):
        parts.append(Part(name, "int8", 1, at, (Axis("heads", 48, 1),)))
        at += 48
    groups = tuple(
        Group("ssm", 4 * ratio) if kind == "ssm" else Group(kind, 4 * ratio, ratio=ratio)  # type: ignore[arg-type]
        for kind in kinds
    )
    layers = tuple(
        Layer(
            f"{region}.{group}",
            group,
            region,
            0,
            blocks,
            256,
            Page(tuple(parts)) if kinds[group] == "ssm" else kv,
        )
        for region, found in enumerate(users)
        for group in found
    )
    return Geometry(tuple(Region(4096 * 1000 * (i + 1), blocks * 256) for i in range(len(users))), groups, layers)


def ids_of(one: Geometry, *tables: Sequence[int]) -> list[int]:
    found: list[int] = view_ids(vllm_views(one), [np.array(table, np.int64) for table in tables]).tolist()
    return found


@pytest.mark.parametrize(
    ("ratio", "full", "state", "expected"),
    [
        (1, [3, 5], [1, 2], [3, 5, 103, 105, 201, 202, 301, 302, 401, 402, 501, 502]),
        (4, [3, 7], [1, 2], [3, 7, 403, 407, 801, 802, 901, 902, 1001, 1002, 1101, 1102]),
        (4, [3, 5], [1], [3, 5, 403, 405, 801, 901, 1001, 1101]),
    ],
)
def test_attention_and_state_ids(ratio: int, full: list[int], state: list[int], expected: list[int]) -> None:
    """Two regions of 100 blocks, one of them with state: four more rows after the attention rows."""
    one = geometry([[0, 1], [0]], ["full", "ssm"], blocks=100, ratio=ratio)
    assert ids_of(one, full, state) == expected


@pytest.mark.parametrize(
    ("users", "kinds", "tables", "expected"),
    [
        ([[0], [0], [1]], 2, [[1, 2], [7]], [1, 2, 11, 12, 27]),
        ([[1], [1], [0]], 2, [[1, 2], [7]], [21, 22, 7, 17]),
        ([[0], [0, 1, 2], [2]], 3, [[1], [2], [3]], [1, 11, 12, 13, 23]),
        ([[0, 1], [0, 1]], 2, [[1, 2], [7]], [1, 2, 7, 11, 12, 17]),
    ],
)
def test_regions_of_single_groups(
    users: list[list[int]], kinds: int, tables: list[list[int]], expected: list[int]
) -> None:
    """A region of a single group gets that group's blocks only; shared regions get all groups' blocks."""
    assert ids_of(geometry(users, ["full"] * kinds, blocks=10), *tables) == expected


def test_latent_and_state_list() -> None:
    """12-token blocks of 3 kernel blocks, 4 of them, 2 shared tensors: rows of 12, 12, then eight of 4."""
    state = State("gdn", 12, 4, 1, 4, 4, 1, "float32", "float32")
    one = layout(
        Model("latent+state", ("gdn", "mla") * 2, 1, 12, state=state),
        LayoutOptions(num_blocks=4, block_size=12, align=12, kernel_block=4),
    )
    rows = vllm_views(one)
    assert [row.count for row in rows] == [12, 12] + [4] * 8
    assert {row.length for row in rows[:2]} == {one.layers[0].block_stride // 3}


def test_mamba1_has_two_rows_per_region() -> None:
    one = layout(Model("mamba1", ("mamba1", "full"), 4, 8, state=MAMBA1), LayoutOptions(num_blocks=4))
    assert [row.length for row in vllm_views(one)] == [one.layers[1].page.nbytes, 16 * 3 * 2, 16 * 4 * 4]


@pytest.mark.parametrize(
    ("speculative", "blocks", "sent"),
    [
        (2, [0, 0, 7, 8, 9], 7),
        (2, [0, 6, 7, 8, 9], 7),
        (2, [7, 8, 9], 7),
        (2, [5], 5),
        (2, [], None),
        (0, [7, 8], 8),
    ],
)
def test_state_block_before_the_speculative_ones(speculative: int, blocks: list[int], sent: int | None) -> None:
    one = layout(HYBRID, LayoutOptions(num_blocks=12, speculative=speculative))
    tables = [[], blocks, []] if one.groups[0].kind == "full" else [blocks, [], []]
    chosen = select_vllm(one, one, tables, tables)
    entries = sum(row.count for row in vllm_views(one)[:2])
    expected = [] if sent is None else [entries + 12 * row + sent for row in range(8)]
    assert ids_of(one, *chosen.local_tables) == ids_of(one, *chosen.remote_tables) == expected


def test_window_of_24_needs_three_blocks_of_16_at_most() -> None:
    """Static clip ceil(24/16)+1; the full group has everything. Null blocks in front do not count."""
    one = layout(SLIDING, LayoutOptions(num_blocks=40))
    for dead in (0, 3):
        sliding, full = [*[0] * dead, *range(10 + dead, 20)], list(range(20, 30))
        chosen = select_vllm(one, one, [sliding, full], [sliding, full])
        assert ids_of(one, *chosen.local_tables) == [i + 40 * row for row in range(2) for i in [17, 18, 19, *full]]


def test_sides_meet_at_the_end() -> None:
    """D holds the first two blocks already and requests the last three of five."""
    one = layout(FULL, LayoutOptions(num_blocks=40))
    chosen = select_vllm(one, one, [[20, 21, 22]], [[1, 2, 3, 4, 5]])
    assert ids_of(one, *chosen.remote_tables) == [3, 4, 5, 43, 44, 45]
    assert (chosen.descriptors, chosen.posted, chosen.bytes) == (6, 2, 6 * 16 * 4 * 8 * 2 * 2)


@pytest.mark.parametrize(("here", "there"), [(6, 10), (10, 6)])
def test_sides_meet_at_the_start_if_their_ratios_differ(here: int, there: int) -> None:
    """Local 6/remote 10: 12 and 10 kernel blocks, both lists become the first 10; and the reverse."""
    d, p = (
        layout(FULL, LayoutOptions(num_blocks=9, block_size=16 * ratio, kernel_block=16)) for ratio in (here, there)
    )
    counts = {6: [0, 1], 10: [0]}
    p, d = (replace(one, null_block=None) for one in (p, d))
    chosen = select_vllm(d, p, [counts[here]], [counts[there]])
    assert ids_of(d, *chosen.local_tables)[:10] == ids_of(p, *chosen.remote_tables)[:10] == list(range(10))
    assert chosen.descriptors == 20


@pytest.mark.parametrize(
    ("local", "remote", "posted"),
    [
        (range(1, 65), range(101, 165), 1),
        (range(64, 0, -1), range(164, 100, -1), 64),
        (range(1, 65), range(164, 100, -1), 64),
        ([*range(1, 17), *range(33, 49)], range(1, 33), 2),
        ([1, 2, 4, 5], [1, 2, 3, 4], 2),
        ([7], [9], 1),
        ([], [], 0),
    ],
)
def test_merging_in_dense_rows(local: Sequence[int], remote: Sequence[int], posted: int) -> None:
    one = layout(FULL, LayoutOptions(num_blocks=200))
    chosen = select_vllm(one, one, [list(local)], [list(remote)])
    assert chosen.descriptors == 2 * len(local)
    assert chosen.posted == 2 * posted


@pytest.mark.parametrize(
    ("options", "per_block", "posted"),
    [
        ({}, 2, 2),
        (
            {"one_storage": True},
            2,
            2,
        ),  # ids of two regions are never adjacent: between them is the null block
        ({"order": "LBNHC"}, 2, 2),
        ({"order": "LHBNC"}, 8, 8),
        ({"order": "BLHNC"}, 2, 128),
        ({"order": "BHLNC"}, 1, 1),
        ({"kv": "split"}, 2, 2),  # a page is one entry, with any parts
        ({"kv": "apart"}, 4, 4),
        ({"block_size": 64, "kernel_block": 16}, 8, 2),
        # Only kernel blocks of one logical block touch.
        ({"block_size": 64, "kernel_block": 16, "order": "BLHNC"}, 8, 128),
    ],
)
def test_merging_depends_on_the_order(options: dict[str, Any], per_block: int, posted: int) -> None:
    one = layout(FULL, LayoutOptions(num_blocks=65, **options))
    chosen = select_vllm(one, one, [range(1, 65)], [range(1, 65)])
    assert (chosen.descriptors, chosen.posted) == (64 * per_block, posted)
    assert chosen.bytes == 64 * 2 * one.layers[0].page.nbytes * one.groups[0].ratio


def test_a_dense_side_does_not_merge_with_a_strided_one() -> None:
    """D of TP2 reads half pages: dense here, every second half page there."""
    d, p = layout(FULL, LayoutOptions(num_blocks=65, tp_rank=1, tp_size=2)), layout(FULL, LayoutOptions(num_blocks=65))
    ids = [list(range(1, 65))]
    for local, remote in ((d, p), (p, d)):
        chosen = select_vllm(local, remote, ids, ids)
        assert (chosen.descriptors, chosen.posted) == (128, 128)
        assert chosen.bytes == 128 * d.layers[0].page.nbytes


def test_ranks_without_a_common_head_exchange_nothing() -> None:
    d, p = (layout(HYBRID, LayoutOptions(num_blocks=9, tp_rank=rank, tp_size=2)) for rank in range(2))
    tables = [[1], [2], [3]]
    assert select_vllm(d, p, tables, tables).descriptors == 0
    assert select_vllm(d, d, tables, tables).descriptors > 0


def test_repeated_heads_meet_where_state_does_not() -> None:
    """One KV head on four ranks, state in quarters."""
    model = replace(HYBRID, kv_heads=1)
    d, p = (layout(model, LayoutOptions(num_blocks=9, tp_rank=rank, tp_size=4)) for rank in range(2))
    tables = [[1], [2], [3]]
    assert select_vllm(d, p, tables, tables).descriptors == 2


def test_state_never_merges_and_absent_layers_move() -> None:
    """Five state layers in three groups over two tensors: six places, one without a layer."""
    model = replace(HYBRID, layers=("mamba2", "mamba2", "mamba2", "full", "mamba2", "mamba2", "full"))
    one = layout(model, LayoutOptions(num_blocks=9))
    tables = [[1], [2], [3], [4]]
    chosen = select_vllm(one, one, tables, tables)
    assert (chosen.descriptors, chosen.posted) == (3 * 2 * 4 + 2, 3 * 2 * 4 + 2)
    state = one.layers[0].page.nbytes
    page = one.layers[0].block_stride
    assert chosen.bytes == 6 * state + 2 * page
    assert needed(one, 1) == Count(5 * 2 + 2, 5 * state + 2 * page)


def test_select_all_takes_every_layer_for_full_attention() -> None:
    one = layout(HYBRID, LayoutOptions(num_blocks=40, kernel_block="flashinfer"))
    ratio = one.groups[2].ratio
    chosen = select_all(one, one, [5, 6, 7], [1, 2, 3])
    assert chosen.descriptors == 6 * 3 * ratio
    assert chosen.posted == 6
    assert chosen.bytes == 6 * 3 * one.layers[0].block_stride


@pytest.mark.parametrize(
    ("options", "descriptors", "posted"),
    [
        ({"kv": "split"}, 4 * 8, 4),
        ({"kv": "apart"}, 4 * 2 * 8, 4 * 2),
        ({"order": "LHBNC"}, 4 * 4 * 8, 4 * 4),
        ({"order": "BHLNC"}, 8, 1),
    ],
)
def test_select_all_in_other_forms(options: dict[str, Any], descriptors: int, posted: int) -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40, **options))
    chosen = select_all(one, one, list(range(1, 9)), list(range(1, 9)))
    assert (chosen.descriptors, chosen.posted) == (descriptors, posted)
    assert chosen.bytes == 4 * 8 * one.layers[0].page.nbytes


def test_select_all_without_attention() -> None:
    one = layout(Model("only state", ("mamba2",) * 3, 1, 8, state=MAMBA2), LayoutOptions(num_blocks=9))
    chosen = select_all(one, one, [1, 2], [1, 2])
    assert (chosen.descriptors, chosen.posted, chosen.bytes) == (6, 3, 6 * one.layers[0].page.nbytes)
    assert select_vllm(one, one, [[1]], [[1]]).descriptors == 3 * 4


def test_needed_counts_live_kernel_blocks() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40, block_size=16, kernel_block=4))
    page = one.layers[0].page.nbytes
    # From token 50 - 24 + 1 = 27 on: kernel blocks 6..12 of the sliding layers, 0..12 of the full ones.
    assert needed(one, 50) == Count(2 * 7 + 2 * 13, (2 * 7 + 2 * 13) * page)
    assert needed(one, 0) == Count(0, 0)


@pytest.mark.parametrize(
    ("group", "tokens", "first"),
    [
        (Group("full", 16), 100, 0),
        (Group("mla", 16), 100, 0),
        (Group("sliding", 16, window=24), 24, 1),
        (Group("sliding", 16, window=24), 23, 0),
        (Group("sliding", 16, window=24), 100, 77),
        (Group("sliding", 16, window=1), 100, 100),
        (Group("chunked", 16, chunk=32), 31, 0),
        (Group("chunked", 16, chunk=32), 32, 32),
        (Group("chunked", 16, chunk=32), 100, 96),
    ],
)
def test_first_needed(group: Group, tokens: int, first: int) -> None:
    """The oracle and the core state the rule independently."""
    assert first_needed(group, tokens) == first
    assert first_needed_tokens(rank(HERE, (group,), [("layer", 0, latent(16, 1))], blocks=2), tokens) == [first]


def test_sequence_blocks() -> None:
    one = layout(SLIDING, LayoutOptions(num_blocks=40))
    assert [table.tolist() for table in sequence_blocks(one, 100)] == [[0, 0, 0, 0, 1, 2, 3], [*range(4, 11)]]
    assert [len(table) for table in undropped_blocks(one, 100)] == [7, 7]
    bare = replace(one, null_block=None)
    assert [table.tolist() for table in sequence_blocks(bare, 100)] == [[1, 2, 3], [*range(4, 11)]]
    hybrid = layout(HYBRID, LayoutOptions(num_blocks=40, speculative=2))
    assert [len(table) for table in sequence_blocks(hybrid, 17)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("local", "remote", "text"),
    [
        (layout(FULL, LayoutOptions(num_blocks=4)), layout(SLIDING, LayoutOptions(num_blocks=4)), "group kinds"),
        (
            layout(FULL, LayoutOptions(num_blocks=4)),
            layout(FULL, LayoutOptions(num_blocks=4, block_size=32)),
            "kernel block tokens",
        ),
        (
            layout(FULL, LayoutOptions(num_blocks=4)),
            layout(replace(FULL, layers=("full",)), LayoutOptions(num_blocks=4)),
            "regions",
        ),
        (
            layout(FULL, LayoutOptions(num_blocks=4)),
            layout(FULL, LayoutOptions(num_blocks=4, order="LBNHC")),
            "axes of a page",
        ),
        (
            layout(FULL, LayoutOptions(num_blocks=4, order="LBNHC")),
            layout(FULL, LayoutOptions(num_blocks=4, order="LBNHC", tp_size=2)),
            "heads can only be split",
        ),
        (
            layout(FULL, LayoutOptions(num_blocks=4, order="BHLNC")),
            layout(FULL, LayoutOptions(num_blocks=4, order="BHLNC", tp_size=2)),
            "heads can only be split",
        ),
        (
            layout(LINEAR, LayoutOptions(num_blocks=4)),
            layout(LINEAR, LayoutOptions(num_blocks=4)),
            "state of ssm; vLLM 0.32 moves only states of Mamba and GDN",
        ),
        (
            layout(HYBRID, LayoutOptions(num_blocks=4, conv="SD")),
            layout(HYBRID, LayoutOptions(num_blocks=4)),
            "SD order",
        ),
    ],
)
def test_pairs_that_vllm_refuses(local: Geometry, remote: Geometry, text: str) -> None:
    with pytest.raises(UnsupportedPairError, match=text):
        select_vllm(local, remote, [[1]] * len(local.groups), [[1]] * len(remote.groups))


@pytest.mark.parametrize(("change", "text"), [({"kind": "opaque"}, "opaque"), ({"cp_size": 2}, "cp_size 2")])
def test_groups_that_no_list_is_made_of(change: dict[str, Any], text: str) -> None:
    page = Page((Part("bytes", "int8", 1, 0, (Axis("bytes", 256, 1),)),))
    group = Group(**{"kind": "full", "block_size": 4, **change})
    one = Geometry((Region(4096, 1024),), (group,), (Layer("0", 0, 0, 0, 4, 256, page),))
    with pytest.raises(UnsupportedPairError, match=text):
        needed(one, 1)
    with pytest.raises(UnsupportedPairError, match=text):
        vllm_views(one)


def test_bad_requests() -> None:
    one = layout(FULL, LayoutOptions(num_blocks=4))
    with pytest.raises(RequestError, match="local_blocks has 2 lists for 1 groups"):
        select_vllm(one, one, [[1], [2]], [[1]])
    with pytest.raises(RequestError, match="float64"):
        select_all(one, one, [1.5], [1])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="2 dimensions"):
        select_all(one, one, np.ones((1, 1), np.int64), [1])
    with pytest.raises(BlockIdError, match=r"4\.\.4"):
        select_vllm(one, one, [[1]], [[4]])
    with pytest.raises(BlockIdError, match="-1"):
        select_all(one, one, [-1], [1])
    for call in (needed, sequence_blocks):
        with pytest.raises(RequestError, match="num_tokens -1"):
            call(one, -1)


def test_list_too_long_for_int32_ids() -> None:
    one = layout(replace(FULL, layers=("full",)), LayoutOptions(num_blocks=2**31 - 1))
    big = layout(FULL, LayoutOptions(num_blocks=2**30 + 1))
    assert ids_of(one, *select_vllm(one, one, [[2**31 - 2]], [[1]]).local_tables) == [2**31 - 2]
    with pytest.raises(AddressOverflowError, match="int32"):
        select_vllm(big, big, [[1]], [[1]])


def test_view_offsets() -> None:
    view = View(0, 8, 8, 100, 10, 4, (0,))
    assert view.offsets(np.array([0, 1, 3, 4, 7])).tolist() == [0, 10, 30, 100, 130]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("one", "options", "local_options"),
    [
        *[(SLIDING, {"order": order}, {}) for order in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")],
        (SLIDING, {"kv": "split"}, {}),
        (SLIDING, {"kv": "apart"}, {}),
        (SLIDING, {"one_storage": True}, {}),
        (SLIDING, {"block_size": 64, "kernel_block": 16}, {}),
        (SLIDING, {"block_size": 64, "kernel_block": 16, "order": "BLHNC"}, {}),
        (SLIDING, {}, {"tp_size": 2, "tp_rank": 1}),
        (HYBRID, {"kernel_block": "flashinfer"}, {}),
        (HYBRID, {"order": "BLHNC"}, {}),
    ],
)
def test_nixl_posts_as_many(one: Model, options: dict[str, Any], local_options: dict[str, Any]) -> None:
    """NIXL's own counts of descriptors and bytes, for scattered and for contiguous blocks."""
    library = pytest.importorskip("kvhma.nixl.library")
    rng = np.random.default_rng(7)
    agent = library.open_nixl("compare", library.AgentOptions())
    memory, sides = [], []
    for extra in (local_options, {}):
        size = sum(
            region.bytes + 4096 for region in layout(one, LayoutOptions(num_blocks=99, **options, **extra)).regions
        )
        memory.append(np.zeros(size + 4096, np.uint8))
        base = memory[-1].ctypes.data
        sides.append(layout(one, LayoutOptions(num_blocks=99, base=base, **options, **extra)))
        ranges = np.array([[region.base, region.bytes, 0] for region in sides[-1].regions], np.uint64)
        agent.register_memory(ranges, "DRAM")
    tables = []
    for side in sides:
        counts = [1 if group.kind == "ssm" else 12 for group in side.groups]
        pool = np.sort(rng.choice(np.arange(1, 99), sum(counts), replace=False))
        pool[:12] = np.arange(1, 13)
        tables.append(np.split(pool, np.cumsum(counts)[:-1]))
    chosen = select_vllm(sides[0], sides[1], tables[0], tables[1])
    lists = [vllm_views(side) for side in sides]
    prepared = []
    for name, rows, others in ((library.LOCAL_SIDE, *lists), (agent.name, *reversed(lists))):
        found = []
        for row, other in zip(rows, others, strict=True):
            start = row.start + row.offsets(np.arange(row.count))
            length = np.full(row.count, min(row.length, other.length))
            found.append(np.stack([start, length, np.zeros_like(start)], axis=1))
        entries = agent.get_xfer_descs(np.concatenate(found).astype(np.uint64), "DRAM")
        prepared.append(agent.prep_xfer_dlist(name, entries, "DRAM"))
    tables = (chosen.local_tables, chosen.remote_tables)
    local_ids, remote_ids = (view_ids(*side) for side in zip(lists, tables, strict=True))
    read = agent.make_prepped_xfer("READ", prepared[0], local_ids, prepared[1], remote_ids)
    state = agent.transfer(read)
    while state == "PROC":
        state = agent.check_xfer_state(read)
    counted = agent.get_xfer_telemetry(read)
    assert (state, counted.descCount, counted.totalBytes) == ("DONE", chosen.posted, chosen.bytes)
    agent.release_xfer_handle(read)
