# SPDX-License-Identifier: Apache-2.0
"""Which block is copied to which: the numeric cases of vLLM's own connector tests, planned, down to kernel blocks.

Upstream counts blocks from 0. Here block 0 is the null block, so every id below is one logical block higher in the
plan, and shifted back before it is compared. Where upstream's own answer is wrong, the test has the right one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvhma
from kvhma import Axis, BlockIdError, Geometry, Group, Layer, Page, Part, Region, Span, UnsupportedPairError, lowlevel
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import Oracle
from support.pairs import HERE, KERNEL, THERE, Moved, heads, latent, rank, state, up

# --- Prefix hits ----------------------------------------------------------------------------------------


def mamba_hybrid(base: int, ratio: int) -> Geometry:
    groups = (Group("full", KERNEL * ratio, ratio), Group("ssm", KERNEL * ratio))
    return rank(base, groups, [("fa", 0, latent()), ("ssm", 1, state())])


def through(ratios: tuple[int, int], tokens: int, local: list[Span], remote: list[Span]) -> Moved:
    shifted = [[Span(span.first, up(span.ids)) for span in spans] for spans in (local, remote)]
    return Moved(mamba_hybrid(HERE, ratios[0]), mamba_hybrid(THERE, ratios[1]), tokens, *shifted)


@pytest.mark.parametrize(
    ("ratios", "local", "remote", "kernels", "zero"),
    [
        ((6, 10), [0, 1], [0], 10, [10, 11]),
        ((10, 6), [0], [0, 1], 10, []),
        ((10, 6), [0, 1], [0, 1], 12, [*range(12, 20)]),
    ],
)
def test_ratios_that_only_round_the_allocation(ratios, local, remote, kernels, zero):
    moved = through(ratios, kernels * KERNEL, [Span(0, local), Span(0, [42])], [Span(0, remote), Span(0, [42])])
    assert moved.of("fa") == ([*range(kernels)], [*range(kernels)])
    assert moved.of("ssm") == ([42], [42])
    assert moved.zero("fa") == zero


@pytest.mark.parametrize(
    ("ratios", "tokens", "local", "remote", "expected", "zero"),
    [
        # Upstream marks both as expected failures: it drops from the front and would pair kernel block 6 with 0. That
        # is safe only because the handshake refuses such engines.
        ((6, 10), 640, Span(1, [1]), Span(0, [0]), [6, 7, 8, 9], [10, 11]),
        ((10, 6), 960, Span(1, [1]), Span(0, [0, 1, 2]), [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]),
    ],
)
def test_a_prefix_hit_where_kernel_blocks_per_block_differ(ratios, tokens, local, remote, expected, zero):
    moved = through(ratios, tokens, [local, Span(0, [42])], [remote, Span(0, [42])])
    assert moved.of("fa") == (expected, expected)
    assert moved.zero("fa") == zero


def test_the_ratios_of_a_real_model():
    # Qwen3.5-0.8B with kernel blocks of 64: 384 tokens a block with 4 ranks, 640 with 2.
    small = replace(model("Qwen3.5-0.8B"), layers=("gdn", "full"))

    def ranks(size: int, base: int) -> list[Geometry]:
        found = (
            layout(
                small,
                LayoutOptions(num_blocks=5, tp_rank=r, tp_size=size, align=128, kernel_block=64, base=base + (r << 28)),
            )
            for r in range(size)
        )
        return list(found)

    decode, prefill = ranks(4, HERE), ranks(2, 1 << 40)
    assert [next(g.ratio for g in side[0].groups if g.kind == "full") for side in (decode, prefill)] == [6, 10]
    for local in decode:
        plan = kvhma.plan(local, prefill)
        spans = ([Span(0, [3]), Span(1, [4])], [Span(0, [2]), Span(0, [3])])
        report = Oracle(local, prefill).check(640, *spans, plan.transfer(640, *spans))
        # Of the full layer the four kernel blocks after the hit: one head, K and V of 256 items.
        assert report.moved == 4 * 64 * 2 * 256 * 2 + local.layer_by_name["model.layers.0.mixer"].page.nbytes
        assert report.zeroed == 2 * 64 * 2 * 256 * 2


def test_tails_of_different_blocks_do_not_meet():
    # Upstream's own functions pair D's token 256 with P's 224, and D's 192 with P's 224.
    def engine(base: int, kind: str, block: int, window: int | None) -> Geometry:
        return rank(base, [Group(kind, block, window=window)], [("kv", 0, latent(block))])

    full = Moved(
        engine(HERE, "full", 64, None), engine(THERE, "full", 32, None), 280, [Span(4, [5])], [Span(0, [*range(1, 10)])]
    )
    assert full.pairs == {0: {"kv": ([5], [9])}}
    wide, narrow = engine(HERE, "sliding", 64, 64), engine(THERE, "sliding", 32, 64)
    # The token after 300 sees 237..: D's blocks 192 and 256, P's 224, 256 and 288.
    spans = [Span(3, [4, 5])], [Span(7, [8, 9, 10])]
    sliding = Moved(wide, narrow, 300, *spans)
    assert sliding.pairs == {0: {"kv": ([4, 5, 5], [8, 9, 10])}}
    assert sliding.transfer.reads[0].local[0].tolist() == [HERE + 4 * 128 + 2 * 32, 2 * (300 - 224), 0]


@pytest.mark.parametrize(
    ("local", "remote", "pair"),
    [
        ([42], [40, 41, 42, 43], (42, 43)),
        ([99], [10, 20, 99], (99, 99)),
        ([1, 2, 3, 4], [8, 9], (4, 9)),
        ([7], [7], (7, 7)),
    ],
)
def test_the_last_state_slot_meets_the_last(local, remote, pair):
    # Upstream refuses four slots against two ("unpairable"); only the last of them is the state, on both sides.
    fa = Span(6, [6, 7, 8, 9]), Span(0, [*range(10)])
    moved = through((1, 1), 10 * KERNEL, [fa[0], Span(0, local)], [fa[1], Span(0, remote)])
    assert moved.of("fa") == ([6, 7, 8, 9], [6, 7, 8, 9])
    assert moved.of("ssm") == ([pair[0]], [pair[1]])


# --- Context parallelism --------------------------------------------------------------------------------


def parallel(base: int, cp_rank: int, cp_size: int) -> Geometry:
    group = Group("mla", 16, cp_rank=cp_rank, cp_size=cp_size)
    return rank(base, [group], [("mla", 0, latent(16))], blocks=400, tp=(cp_rank, cp_size))


@pytest.mark.parametrize(
    ("local", "remote", "source", "cp", "remote_size", "cached", "blocks", "expected", "others"),
    [
        # D has blocks 0, 1, 2 of the sequence; P's rank 1 has 1 and 3, its rank 0 has 0 and 2.
        ([100, 101, 102], [200, 201], 1, (0, 1), 2, 0, 3, ([101], [200]), {0: ([100, 102], [200, 201])}),
        # D's rank 1 of 2 has block 3 of the sequence left; P has only block 0. Upstream moves nothing either, but
        # leaves D's block as it was; here it is zeroed.
        ([100], [200], 0, (1, 2), 1, 1, 1, ([], []), {}),
        # D's entry 3 on rank 0 of 2 is block 6; P's entry 1 on rank 2 of 4 is block 6.
        ([100], [200, 201], 2, (0, 2), 4, 3, 7, ([100], [201]), {0: ([], []), 1: ([], []), 3: ([], [])}),
        # Equal ranks: D's entries 2 and 3 are P's entries 2 and 3, blocks 5 and 7.
        ([100, 101], [200, 201, 202, 203], 1, (1, 2), 2, 2, 8, ([100, 101], [202, 203]), {0: ([], [])}),
    ],
)
def test_context_parallel_blocks(local, remote, source, cp, remote_size, cached, blocks, expected, others):
    # Upstream's convention is ours. Entry i of a rank's table is block i * cp_size + cp_rank of the sequence. A request
    # has the same ids on all ranks of an engine.
    prefill = [parallel(THERE + (r << 20), r, remote_size) for r in range(remote_size)]
    moved = Moved(parallel(HERE, *cp), prefill, 16 * blocks, [Span(cached, up(local))], [Span(0, up(remote))])
    assert moved.of("mla", source) == expected
    for other, pairs in others.items():
        assert moved.of("mla", other) == pairs
    assert moved.zero("mla") == ([100] if not expected[0] else [])


@pytest.mark.parametrize(
    ("tp_rank", "tp_size", "remote_tp", "cp", "remote_cp", "sources"),
    [
        (0, 1, 8, 1, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0, 4, 4, 1, 4, [0, 1, 2, 3]),
        (2, 4, 4, 4, 4, [2]),
        (0, 2, 4, 2, 4, [0, 2]),
        (3, 4, 2, 4, 2, [1]),
    ],
)
def test_sources_of_a_context_parallel_latent(tp_rank, tp_size, remote_tp, cp, remote_cp, sources):
    def side(base: int, r: int, size: int, ranks: int) -> Geometry:
        return rank(base, [Group("mla", 16, cp_rank=r % ranks, cp_size=ranks)], [("mla", 0, latent(16))], tp=(r, size))

    prefill = [side(THERE + (r << 20), r, remote_tp, remote_cp) for r in range(remote_tp)]
    moved = Moved(
        side(HERE, tp_rank, tp_size, cp), prefill, 16 * 16, [Span(0, up(range(16 // cp)))], [Span(0, up(range(16)))]
    )
    assert moved.plan.sources == sources
    assert sorted(moved.pairs) == sources


def test_ranks_that_take_turns_by_token():
    # Of seven tokens of a byte each, rank 0 has 0, 2, 4 and 6 one after the other in its block 2, rank 1 has 1, 3 and
    # 5. Token 7 of D's block 1 does not exist yet.
    prefill = [
        rank(at, [Group("mla", 4, cp_rank=r, cp_size=2, cp_interleave=1)], [("kv", 0, latent(4, 1))])
        for r, at in enumerate((THERE, THERE + (1 << 20)))
    ]
    moved = Moved(rank(HERE, [Group("mla", 8)], [("kv", 0, latent(8, 1))]), prefill, 7, [Span(0, [1])], [Span(0, [2])])
    block, *blocks = HERE + 8, THERE + 2 * 4, THERE + (1 << 20) + 2 * 4
    for read, tokens in zip(moved.transfer.reads, ((0, 2, 4, 6), (1, 3, 5)), strict=True):
        assert read.local.tolist() == [[block + token, 1, 0] for token in tokens]
        assert read.remote.tolist() == [[blocks[read.source] + at, 1, 0] for at in range(len(tokens))]
    assert moved.transfer.zero.tolist() == [[block + 7, 1, 0]]


def test_ranks_that_take_equal_turns_read_whole_blocks():
    # Rank 1 of 2 by two tokens, in blocks of 4 here and of 8 there: of 18 tokens 2, 3, 6, 7, 10, 11, 14 and 15.
    def side(at, block):
        group = Group("mla", block, cp_rank=1, cp_size=2, cp_interleave=2)
        return rank(at, [group], [("kv", 0, latent(block, 1))])

    moved = Moved(side(HERE, 4), side(THERE, 8), 18, [Span(0, [1, 2, 3])], [Span(0, [5, 6])])
    (read,) = moved.transfer.reads
    assert read.local.tolist() == [[HERE + 4, 8, 0]]
    assert read.remote.tolist() == [[THERE + 5 * 8, 8, 0]]
    assert moved.transfer.zero.tolist() == [[HERE + 3 * 4, 4, 0]]


@pytest.mark.parametrize(("kind", "limit"), [("sliding", 4), ("chunked", 8)])
def test_a_rank_that_owes_nothing_may_have_no_blocks(kind, limit):
    # Of tokens 8..10 rank 2 of 3 has all. Ranks 0 and 1 have none of them, and hold nothing; D's block begins at
    # token 6, where rank 1 would come in.
    bound = {"window": limit} if kind == "sliding" else {"chunk": limit}

    def side(base: int, block: int, cp_rank: int, cp_size: int) -> Geometry:
        return rank(base, [Group(kind, block, cp_rank=cp_rank, cp_size=cp_size, **bound)], [("kv", 0, latent(block))])

    prefill = [side(THERE + (r << 20), 4, r, 3) for r in range(3)]
    spans = [Span(1, [1])], [[Span(0, [])], [Span(0, [])], [Span(0, [1])]]
    moved = Moved(side(HERE, 6, 0, 1), prefill, 11, *spans)
    assert moved.pairs == {2: {"kv": ([1], [1])}}


# --- Token-exact, for any number of allocated blocks -----------------------------------------------------


@pytest.mark.parametrize("ratios", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("tokens", [160, 224])
@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("spare", [0, 1])
def test_region_pull_ignores_allocation_padding(ratios, tokens, cached, spare):
    # Two layers: one group of P, two groups of D, of which the first has a hit. `spare` blocks are allocated for
    # tokens to come.
    ours, other = ratios
    valid = -(-tokens // KERNEL)
    allocated = -(-valid // ours) + spare
    layers = ("first", "second")
    local = rank(HERE, [Group("mla", KERNEL * ours, ours)] * 2, [(name, i, latent()) for i, name in enumerate(layers)])
    remote = rank(THERE, [Group("mla", KERNEL * other, other)], [(name, 0, latent()) for name in layers])
    local_ids = [range(30, 30 + allocated)[cached:], range(40, 40 + allocated)]
    spans = (
        [Span(cached, up(local_ids[0])), Span(0, up(local_ids[1]))],
        [Span(0, up(range(10, 10 + -(-valid // other))))],
    )
    moved = Moved(local, remote, tokens, *spans)
    assert moved.of("first") == (
        [*range((30 + cached) * ours, 30 * ours + valid)],
        [*range(10 * other + cached * ours, 10 * other + valid)],
    )
    assert moved.of("second") == ([*range(40 * ours, 40 * ours + valid)], [*range(10 * other, 10 * other + valid)])
    # Every allocated kernel block after the last one that holds a token; inside of it the cut is exact.
    assert moved.zero("first") == [*range(30 * ours + valid, (30 + allocated) * ours)]
    assert moved.zero("second") == [*range(40 * ours + valid, (40 + allocated) * ours)]
    assert moved.report.moved == 2 * (2 * tokens - cached * ours * KERNEL)
    assert moved.report.excess == 0


# --- Heads over ranks -----------------------------------------------------------------------------------


def attention(base: int, total: int, tp_rank: int, tp_size: int, **page: int) -> Geometry:
    made = heads(total, tp_size, tp_rank, **page)
    tokens = page.get("tokens", 4)
    return rank(base, [Group("full", tokens)], [("fa", 0, made)], blocks=6, tp=(tp_rank, tp_size))


def engine(total: int, tp_size: int, **page: int) -> list[Geometry]:
    return [attention(THERE + (r << 20), total, r, tp_size, **page) for r in range(tp_size)]


ONE = ([Span(0, [3])], [Span(0, [5])])


@pytest.mark.parametrize(
    ("total", "tp_rank", "tp_size", "remote_tp", "sources"),
    [
        (4, 1, 2, 2, [1]),
        (4, 2, 4, 2, [1]),
        (4, 0, 1, 2, [0, 1]),
        # Fewer heads than ranks: one rank of those that hold the same head.
        (2, 0, 1, 4, [0, 2]),
        (2, 1, 2, 8, [4]),
        (8, 5, 16, 8, [2]),
    ],
)
def test_sources_of_heads(total, tp_rank, tp_size, remote_tp, sources):
    moved = Moved(attention(HERE, total, tp_rank, tp_size), engine(total, remote_tp), 4, *ONE)
    assert moved.plan.sources == sources
    assert sorted(moved.pairs) == sources


@pytest.mark.parametrize("remote_tp", [1, 2, 4, 8])
def test_a_block_is_split_evenly_over_its_sources(remote_tp):
    page = {"tokens": 16, "content": 8}
    moved = Moved(attention(HERE, 8, 0, 1, **page), engine(8, remote_tp, **page), 16, *ONE)
    size = 1024 // remote_tp
    assert [read.local.tolist() for read in moved.transfer.reads] == [
        [[HERE + 3 * 1024 + j * size, size, 0]] for j in range(remote_tp)
    ]


def test_replicated_attention_beside_a_split_state():
    # Blocks of 200 bytes at 1000 and of 400 bytes at 3000, block 0 of each.
    def side(bases: tuple[int, int], r: int, size: int) -> Geometry:
        pages = (heads(1, tokens=10, content=20), state(2, size, r, content=200))
        groups = (Group("full", 10), Group("ssm", 10))
        layers = tuple(
            Layer(name, i, i, 0, 1, page.nbytes, page)
            for i, (name, page) in enumerate(zip(("fa", "ssm"), pages, strict=True))
        )
        regions = tuple(Region(base, page.nbytes) for base, page in zip(bases, pages, strict=True))
        return Geometry(regions, groups, layers, r, size, null_block=None)

    prefill = [side((THERE + (r << 20), THERE + (r << 20) + 4096), r, 2) for r in range(2)]
    spans = [Span(0, [0]), Span(0, [0])]
    transfer = kvhma.plan(side((1000, 3000), 0, 1), prefill).transfer(10, spans, spans)
    assert [read.local[:, :2].tolist() for read in transfer.reads] == [[[1000, 200], [3000, 200]], [[3200, 200]]]


def test_the_second_rank_reads_the_second_half():
    local = attention(HERE, 2, 1, 2)
    size = local.layers[0].page.nbytes
    whole = attention(0x1000, 2, 0, 1)
    transfer = kvhma.plan(local, whole).transfer(4, [Span(0, [3])], [Span(0, [1])])
    # Upstream's block 0 of region 0x1000 is [0x1000 + local_len, local_len]; block 1 is a remote block further.
    assert transfer.reads[0].remote.tolist() == [[0x1000 + 2 * size + size, size, 0]]


@pytest.mark.parametrize(
    ("total", "tp_size", "remote_tp", "upstream"),
    [
        (2, 1, 2, False),
        (2, 2, 1, False),
        (2, 1, 1, True),
        (2, 2, 4, True),
        (2, 4, 2, True),
        (4, 2, 4, False),
        (4, 2, 2, True),
        (4, 4, 8, True),
    ],
)
def test_across_the_boundary_where_heads_repeat(total, tp_size, remote_tp, upstream):
    # Upstream allows sparse-attention pairs only if a rank holds as many heads on both sides. Heads meet by range
    # here, so every pair is right.
    for tp_rank in range(tp_size):
        local = attention(HERE, total, tp_rank, tp_size)
        prefill = engine(total, remote_tp)
        assert (local.layers[0].page.nbytes == prefill[0].layers[0].page.nbytes) == upstream
        moved = Moved(local, prefill, 4, *ONE)
        assert moved.report.moved == local.layers[0].page.nbytes


@pytest.mark.parametrize(
    ("total", "tp_size", "remote_tp", "times"), [(8, 16, 8, 1), (32, 4, 2, 2), (2, 8, 4, 1), (8, 2, 4, None)]
)
def test_pages_follow_the_ratio_of_heads_not_of_ranks(total, tp_size, remote_tp, times):
    for tp_rank in range(tp_size):
        local, prefill = attention(HERE, total, tp_rank, tp_size), engine(total, remote_tp)
        moved = Moved(local, prefill, 4, *ONE)
        if times is not None:
            assert prefill[0].layers[0].page.nbytes == times * local.layers[0].page.nbytes
            assert moved.transfer.descriptors == 1


@pytest.mark.parametrize(
    ("tp_rank", "tp_size", "remote_tp", "total", "offset"), [(3, 8, 1, 8, 3), (5, 8, 2, 8, 1), (5, 16, 1, 8, 2)]
)
def test_a_draft_with_heads_beside_a_latent_target(tp_rank, tp_size, remote_tp, total, offset):
    def side(base: int, r: int, size: int) -> Geometry:
        layers = [("mla", 0, latent(4)), ("draft", 1, heads(total, size, r))]
        return rank(base, [Group("mla", 4), Group("full", 4)], layers, blocks=6, tp=(r, size))

    prefill = [side(THERE + (r << 20), r, remote_tp) for r in range(remote_tp)]
    moved = Moved(side(HERE, tp_rank, tp_size), prefill, 4, [Span(0, [1]), Span(0, [2])], [Span(0, [4]), Span(0, [5])])
    starts = {}
    for read in moved.transfer.reads:
        remote = prefill[read.source]
        for address, _, _ in read.remote.tolist():
            index, inside = next(
                (i, address - region.base)
                for i, region in enumerate(remote.regions)
                if 0 <= address - region.base < region.bytes
            )
            layer = remote.layers[index]
            starts[layer.name] = inside % layer.block_stride // (8 if layer.name == "draft" else 1)
    assert starts == {"mla": 0, "draft": offset}


# --- Regions --------------------------------------------------------------------------------------------


def unequal() -> Geometry:
    """Two layers of 16-byte pages, in pools of 2 and of 3 blocks."""
    layers = tuple(Layer(f"layer.{i}", i, i, 0, 2 + i, 16, latent(4, 4)) for i in range(2))
    return Geometry((Region(100, 32), Region(1000, 48)), (Group("mla", 4),) * 2, layers, null_block=None)


def test_every_pool_has_its_own_capacity():
    plan = kvhma.plan(unequal(), unequal())
    views, _ = plan.views(0)
    assert lowlevel.expand_views(views)[:, 0].tolist() == [100, 116, 1000, 1016, 1032]
    good = [Span(0, [1]), Span(0, [2])]
    assert plan.ids(4, good, good).reads[0].local.tolist() == [1, 2 + 2]
    with pytest.raises(BlockIdError, match=r"group 0: block id 2 at index 0 is outside 0\.\.2"):
        plan.transfer(4, [Span(0, [2]), Span(0, [1])], good)


def test_padding_after_the_blocks_moves_nothing():
    plain = mamba_hybrid(HERE, 2)
    padded = replace(plain, regions=tuple(replace(region, bytes=region.bytes + 7) for region in plain.regions))
    spans = ([Span(0, [3, 1]), Span(0, [2])], [Span(0, [1, 4]), Span(0, [5])])
    found = []
    for local in (plain, padded):
        transfer = kvhma.plan(local, mamba_hybrid(THERE, 2)).transfer(200, *spans)
        read = transfer.reads[0]
        found.append([rows.tolist() for rows in (transfer.zero, read.local, read.remote)])
    assert found[0] == found[1]


def test_windows_cover_one_block():
    small = replace(model("granite-4.0-h-tiny"), layers=("mamba2", "full", "mamba2"))
    geometry = layout(small, LayoutOptions(num_blocks=3, kernel_block="flashinfer"))
    rows = lowlevel.expand_views(kvhma.plan(geometry, geometry).views(0)[0])
    stride = geometry.layers[0].block_stride
    base = end = geometry.regions[0].base
    # State pages are padded, attention pages are not: together they use every byte of the one tensor.
    for start, size, _ in sorted(rows.tolist()):
        assert (start - base) // stride == (start + size - 1 - base) // stride
        assert start <= end
        end = max(end, start + size)
    assert end == base + geometry.regions[0].bytes


def test_pages_that_do_not_mean_the_same_are_refused():
    def side(base: int, page: Page, block: int = 12, ratio: int = 3) -> Geometry:
        return rank(base, [Group("mla", block, ratio)], [("mla", 0, page)])

    with pytest.raises(UnsupportedPairError, match=r'axis "content": extent cannot be paired: 3 with 6'):
        kvhma.plan(side(HERE, latent(4, 6)), side(THERE, latent(4, 3)))
    with pytest.raises(UnsupportedPairError, match="dtype cannot be paired: bfloat16/amx-32 with bfloat16/amx-64"):
        kvhma.plan(side(HERE, latent(4, 6, "bfloat16/amx-32")), side(THERE, latent(4, 6, "bfloat16/amx-64")))
    # The page of another kernel block size is not wrong, it is only another page.
    wide = side(HERE, latent(8, 6), 24, 3)
    moved = Moved(wide, side(THERE, latent(4, 6), 8, 2), 19, [Span(0, [1])], [Span(0, [1, 2, 3])])
    assert moved.of("mla") == ([0, 0, 1, 1, 2], [0, 1, 2, 3, 4])


def test_packed_rows_of_other_kernel_blocks_are_refused():
    def side(base: int, block: int) -> Geometry:
        part = Part("kv", "bfloat16/amx-32", 1, 0, (Axis("packed", block * 4, 1),))
        return rank(base, [Group("full", block)], [("fa", 0, Page((part,)))])

    with pytest.raises(UnsupportedPairError, match="extent cannot be paired: 128 with 256"):
        kvhma.plan(side(HERE, 64), side(THERE, 32))


def test_sparse_attention_with_scratch_and_two_kinds_of_state():
    """Ids [1,3,5,7, 4,6, 9,11,13,15, 17] upstream: four regions of two blocks, then 4 + 1 state parts."""
    whole = [Part("kv", "uint8", 1, 0, (Axis("content", 16, 1),))]
    parts = [
        Part(name, "uint8", 1, at, (Axis("channels", 4, 1),))
        for name, at in (("q", 0), ("k", 4), ("v", 8), ("ssm", 12))
    ]
    groups = (Group("full", 4), Group("opaque", 2), Group("ssm", 1), Group("ssm", 1))
    content, scratch, sharded, ple = Page(tuple(whole)), Page(tuple(whole)), Page(tuple(parts)), Page((parts[0],))
    place = [("main.0", 0, 0), ("main.1", 0, 1), ("compressed.0", 0, 2), ("compressed.1", 0, 3)]
    place += [("scratch.0", 1, 2), ("scratch.1", 1, 3), ("mamba.sharded", 2, 0), ("mamba.ple", 3, 0)]
    pages = [content] * 4 + [scratch] * 2 + [sharded, ple]

    def side(base: int) -> Geometry:
        regions = tuple(Region(base + 256 * i, 5 * 16) for i in range(4))
        layers = tuple(Layer(n, g, r, 0, 5, 16, page) for (n, g, r), page in zip(place, pages, strict=True))
        return Geometry(regions, groups, layers)

    # Upstream has block 1 in three groups at once and block 0 in the scratch group: here every group has other blocks.
    spans = [Span(0, [1]), Span(0, [2]), Span(0, [3]), Span(0, [4])]
    moved = Moved(side(HERE), side(THERE), 4, spans, spans)
    assert moved.pairs == {0: {name: ([group + 1], [group + 1]) for name, group, _ in place}}
    states = [Span(0, []), Span(0, []), Span(0, [3]), Span(0, [4])]
    with pytest.raises(kvhma.RequestError, match="local group 0: blocks hold no token 0"):
        Moved(side(HERE), side(THERE), 4, states, states)
    # The start of an empty span shows a full hit of the paged groups.
    only = [Span(1, []), Span(0, []), Span(0, [3]), Span(0, [4])]
    assert set(Moved(side(HERE), side(THERE), 4, only, spans).pairs[0]) == {"mamba.sharded", "mamba.ple"}


def test_pages_of_two_sizes_in_one_block_are_moved_whole():
    # Layers of 2 and of 3 heads at the same place: upstream keeps the first one's length for both, and one head of
    # the other is never moved.
    def side(base: int) -> Geometry:
        pages = (heads(2, tokens=4, content=8), heads(3, tokens=4, content=8))
        layers = tuple(Layer(f"layer.{i}", i, 0, 0, 4, 96, page) for i, page in enumerate(pages))
        return Geometry((Region(base, 4 * 96),), (Group("full", 4), Group("sliding", 4, window=8)), layers)

    spans = [Span(0, [1]), Span(0, [2])]
    moved = Moved(side(HERE), side(THERE), 4, spans, spans)
    assert moved.transfer.reads[0].local[:, 1].tolist() == [64, 96]


def test_places_without_a_layer_are_not_moved():
    # Nemotron-H with two attention layers in one group and three state layers in two groups of two places. Upstream
    # reads 20 descriptors and 302,592 bytes, of which one state of 34,688 bytes belongs to no layer.
    page, size = 40_960, 34_688
    full = Page((Part("kv", "uint8", 1, 0, (Axis("tokens", 16, page // 16), Axis("content", page // 16, 1))),))
    recurrent = Page((Part("ssm", "uint8", 1, 0, (Axis("content", size, 1),)),))

    def side(base: int) -> Geometry:
        place = [("fa.0", 0, 0), ("fa.1", 0, 1), ("m.0", 1, 0), ("m.1", 1, 1), ("m.2", 2, 0)]
        layers = tuple(Layer(n, g, r, 0, 8, page, recurrent if g else full) for n, g, r in place)
        regions = tuple(Region(base + r * (1 << 20), 8 * page) for r in range(2))
        return Geometry(regions, (Group("full", 16), Group("ssm", 16), Group("ssm", 16)), layers)

    spans = [Span(0, [1, 2]), Span(0, [5]), Span(0, [7])]
    local, remote = side(HERE), side(THERE)
    transfer = kvhma.plan(local, remote).transfer(32, spans, spans)
    Oracle(local, [remote]).check(32, spans, spans, transfer)
    assert transfer.bytes == 302_592 - 34_688
    # Two neighbouring blocks of two layers, and three states.
    assert transfer.descriptors == 2 + 3
