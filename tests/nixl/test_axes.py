# SPDX-License-Identifier: Apache-2.0
"""Every way in which two engines can differ, over NIXL: bytes, counts and which ranks are read."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region
from kvhma.models import Model, State
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.ranks import ENCODINGS, Moved, Ranks
from support.tables import draw_tables

pytestmark = pytest.mark.nixl

BLOCKS = 64
RANKS = 4

WINDOWED = Model("windowed", ("sliding", "sliding", "full") * 2, 8, 16, window=40)
CHUNKED = Model("chunked", ("chunked", "full") * 2, 4, 16, chunk=32)
GROUPED = Model("two kv heads", ("full",) * 3, 2, 16)
SIX_HEADS = Model("six kv heads", ("full", "sliding") * 2, 6, 16, window=40)
LATENT = Model("latent", ("mla",) * 4, 1, 24)
MAMBA2 = Model(
    "mamba2", ("mamba2", "mamba2", "full") * 2, 2, 32,
    state=State("mamba2", 8 * 16 + 2 * 16, 4, 8, 16, 16, 1, "bfloat16", "float32"),
)  # fmt: skip
MAMBA1 = Model(
    "mamba1", ("mamba1", "full") * 2, 2, 32, state=State("mamba1", 64, 4, 64, 1, 8, 0, "bfloat16", "float32")
)
GDN = Model(
    "gdn", ("gdn", "gdn", "full", "gdn"), 2, 32,
    state=State("gdn", 2 * 4 * 16 + 8 * 16, 4, 8, 16, 16, 4, "bfloat16", "bfloat16"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A pair of engines and a request.

    Attributes:
        p: ranks of P.
        d: ranks of D.
        sources: for each rank of D, from how many ranks of P it reads.
        tokens: tokens that P computed.
        hit: for each group of D, leading entries of its block table that D holds already.
        own_tables: whether each rank of P has separate block tables.
        has_views: whether the plan can be prepared; if not, it has to report that.
    """

    p: Sequence[Geometry]
    d: Sequence[Geometry]
    sources: Sequence[int]
    tokens: int = 77
    hit: Sequence[int] | None = None
    own_tables: bool = False
    has_views: bool = True


def engine(one: Model, tp: int = 1, **options: Any) -> list[Geometry]:
    return [layout(one, LayoutOptions(num_blocks=BLOCKS, tp_rank=rank, tp_size=tp, **options)) for rank in range(tp)]


def with_layers(geometry: Geometry, keep: Callable[[int], bool]) -> Geometry:
    return replace(geometry, layers=tuple(layer for at, layer in enumerate(geometry.layers) if keep(at)))


def in_stages(ranks: Sequence[Geometry], count: int) -> list[Geometry]:
    """Cut the layers of every rank into pipeline stages."""
    size = -(-len(ranks[0].layers) // count)
    return [with_layers(rank, lambda at, s=stage: at // size == s) for stage in range(count) for rank in ranks]


def in_context_ranks(one: Geometry, count: int) -> list[Geometry]:
    """Split a rank into several that share the sequence block by block."""
    return [
        replace(one, groups=tuple(replace(group, cp_rank=rank, cp_size=count) for group in one.groups))
        for rank in range(count)
    ]


def by_heads(shards: Sequence[tuple[int, int]], heads: int = 4, tokens: int = 16) -> list[Geometry]:
    """Make ranks of one full layer, each with some heads: ``(first, number)``."""
    ranks = []
    for rank, (start, length) in enumerate(shards):
        row = 32
        axes = (Axis("heads", heads, tokens * row, start, length), Axis("tokens", tokens, row), Axis("content", 16, 2))
        page = Page((Part("kv", "bfloat16", 2, 0, axes),))
        stride = length * tokens * row + 64  # bytes that no transfer may touch
        layer = Layer("layers.0", 0, 0, 0, BLOCKS, stride, page)
        region = Region(1 << 20, BLOCKS * stride)
        ranks.append(Geometry((region,), (Group("full", tokens),), (layer,), rank, len(shards)))
    return ranks


def renamed(geometry: Geometry, old: str, new: str) -> Geometry:
    layers = tuple(replace(layer, name=layer.name.replace(old, new)) for layer in geometry.layers)
    return replace(geometry, layers=layers)


CASES: dict[str, Callable[[], Case]] = {
    # recurrent state
    "mamba2-1-to-2": lambda: Case(engine(MAMBA2), engine(MAMBA2, 2), [1, 1]),
    "mamba2-2-to-1": lambda: Case(engine(MAMBA2, 2), engine(MAMBA2), [2]),
    "mamba1-2-to-1": lambda: Case(engine(MAMBA1, 2), engine(MAMBA1), [2]),
    "gdn-2-to-1": lambda: Case(engine(GDN, 2), engine(GDN), [2]),
    "gdn-1-to-2": lambda: Case(engine(GDN), engine(GDN, 2), [1, 1]),
    "conv-ds-to-sd": lambda: Case(engine(MAMBA2, conv="DS"), engine(MAMBA2, conv="SD"), [1]),
    "conv-sd-to-ds-2-to-1": lambda: Case(engine(GDN, 2, conv="SD"), engine(GDN, conv="DS"), [2]),
    "speculative-slots": lambda: Case(engine(MAMBA2), engine(MAMBA2, speculative=2), [1]),
    # blocks
    "blocks-16-24": lambda: Case(engine(WINDOWED), engine(WINDOWED, block_size=24), [1]),
    "blocks-24-16": lambda: Case(engine(WINDOWED, block_size=24), engine(WINDOWED), [1]),
    "blocks-64-16": lambda: Case(engine(WINDOWED, block_size=64), engine(WINDOWED), [1]),
    "blocks-16-64": lambda: Case(engine(WINDOWED), engine(WINDOWED, block_size=64), [1]),
    "ratios-6-10-prefix": lambda: Case(
        engine(SIX_HEADS, 2, block_size=24, kernel_block=4),
        engine(SIX_HEADS, 3, block_size=40, kernel_block=4),
        [1, 2, 1], tokens=131, hit=[1, 2],
    ),
    "ratios-10-6-state-prefix": lambda: Case(
        engine(MAMBA2, 1, kernel_block=4, align=40), engine(MAMBA2, 2, kernel_block=4, align=24), [1, 1],
        tokens=157, hit=[0, 0, 2],
    ),
    # layouts
    "lbhnc-blhnc": lambda: Case(engine(WINDOWED), engine(WINDOWED, order="BLHNC"), [1]),
    "lbhnc-bhlnc": lambda: Case(engine(WINDOWED), engine(WINDOWED, order="BHLNC"), [1]),
    "bhlnc-lhbnc-tp": lambda: Case(engine(WINDOWED, 2, order="BHLNC"), engine(WINDOWED, 4, order="LHBNC"), [1] * 4),
    "lbnhc-lhbnc": lambda: Case(engine(WINDOWED, order="LBNHC"), engine(WINDOWED, order="LHBNC"), [1]),
    "blnhc-bhlnc-kernel": lambda: Case(
        engine(WINDOWED, order="BLNHC", block_size=32, kernel_block=8), engine(WINDOWED, order="BHLNC"), [1],
        has_views=False,
    ),
    "one-storage": lambda: Case(
        engine(WINDOWED, one_storage=True), engine(WINDOWED, one_storage=True, order="BLHNC"), [1]
    ),
    "kv-apart-split": lambda: Case(engine(GROUPED, kv="apart"), engine(GROUPED, kv="split", order="BLNHC"), [1]),
    "state-blocks-first": lambda: Case(engine(GDN, order="BLHNC"), engine(GDN, 2, order="LBNHC"), [1, 1]),
    # positions
    "prefix-per-group": lambda: Case(engine(WINDOWED), engine(WINDOWED), [1], tokens=133, hit=[6, 7, 3]),
    "window-clipped": lambda: Case(engine(WINDOWED), engine(WINDOWED, block_size=24), [1], tokens=300),
    "chunk-clipped": lambda: Case(engine(CHUNKED, 2), engine(CHUNKED), [2], tokens=77, hit=[0, 1]),
    "all-held": lambda: Case(engine(WINDOWED), engine(WINDOWED), [0], tokens=80, hit=[5, 5, 5]),
    # tokens
    "tokens-one": lambda: Case(engine(MAMBA2), engine(MAMBA2), [1], tokens=1),
    "tokens-aligned": lambda: Case(engine(WINDOWED), engine(WINDOWED, block_size=32), [1], tokens=96),
    # layers
    "layers-one-sided": lambda: Case(
        [renamed(rank, "layers.2.", "draft.0.") for rank in engine(WINDOWED)],
        [renamed(rank, "layers.3.", "draft.1.") for rank in engine(WINDOWED)],
        [1],
    ),
    "stages-at-p": lambda: Case(in_stages(engine(WINDOWED), 2), engine(WINDOWED), [2], own_tables=True),
    "stages-at-p-tp": lambda: Case(in_stages(engine(MAMBA2, 2), 2), engine(MAMBA2), [4]),
    "stages-at-d": lambda: Case(engine(WINDOWED), in_stages(engine(WINDOWED), 2), [1, 1]),
    # context parallelism
    "cp-at-p": lambda: Case(in_context_ranks(engine(LATENT)[0], 2), engine(LATENT), [2], tokens=133),
    "cp-at-d": lambda: Case(engine(LATENT), in_context_ranks(engine(LATENT)[0], 2), [1, 1], tokens=133),
    "cp-2-to-4": lambda: Case(
        in_context_ranks(engine(GROUPED)[0], 2), in_context_ranks(engine(GROUPED)[0], 4), [1] * 4, tokens=133
    ),
    # tensor parallelism
    "tp-equal": lambda: Case(engine(WINDOWED, 2), engine(WINDOWED, 2), [1, 1]),
    "tp-more-at-d": lambda: Case(engine(WINDOWED, 2), engine(WINDOWED, 4), [1] * 4),
    "tp-more-at-p": lambda: Case(engine(WINDOWED, 4), engine(WINDOWED, 2), [2, 2]),
    "tp-4-to-1": lambda: Case(engine(CHUNKED, 4), engine(CHUNKED), [4]),
    "tp-1-to-4": lambda: Case(engine(CHUNKED), engine(CHUNKED, 4), [1] * 4),
    "tp-2-to-3": lambda: Case(engine(SIX_HEADS, 2), engine(SIX_HEADS, 3), [1, 2, 1]),
    "tp-3-to-2": lambda: Case(engine(SIX_HEADS, 3), engine(SIX_HEADS, 2), [2, 2]),
    "tp-uneven-heads": lambda: Case(by_heads([(0, 2), (2, 2)]), by_heads([(0, 1), (1, 1), (2, 2)]), [1, 1, 1]),
    "tp-overlapping-heads": lambda: Case(by_heads([(0, 2), (2, 2)]), by_heads([(0, 2), (1, 2), (2, 2)]), [1, 2, 1]),
    "gqa-replicated-at-d": lambda: Case(engine(GROUPED, 2), engine(GROUPED, 4), [1] * 4),
    "gqa-replicated-at-p": lambda: Case(engine(GROUPED, 4), engine(GROUPED, 2), [1, 1]),
    "gqa-replicated-4-to-1": lambda: Case(engine(GROUPED, 4), engine(GROUPED), [2]),
    "mla-replicated-at-p": lambda: Case(engine(LATENT, 4), engine(LATENT), [1]),
    "mla-replicated-at-d": lambda: Case(engine(LATENT), engine(LATENT, 3), [1] * 3),
    "mla-replicated": lambda: Case(engine(LATENT, 4), engine(LATENT, 2), [1, 1]),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(RANKS)) as ranks:
        yield ranks


def hand_off(ranks: Ranks, case: Case, seed: str, **options: Any) -> list[dict[str, Moved]]:
    """Let every rank of D load a request; return what it moved, by encoding.

    Each rank has checked that every byte is right; this checks that NIXL moved what was planned.
    """
    rng = random.Random(seed)
    theirs = [draw_tables(rank, case.tokens, rng) for rank in case.p]
    remote = [
        kvhma.live_spans(rank, case.tokens, theirs[at if case.own_tables else 0]) for at, rank in enumerate(case.p)
    ]
    ours = draw_tables(case.d[0], case.tokens, rng, ahead=1)
    local = [kvhma.live_spans(rank, case.tokens, ours, case.hit) for rank in case.d]
    found = []
    for fetched in ranks.hand_off(case.p, remote, case.d, local, case.tokens, **options):
        assert list(fetched) == list(ENCODINGS)
        there_are = {encoding: moved for encoding, moved in fetched.items() if isinstance(moved, Moved)}
        assert list(there_are) == list(ENCODINGS if case.has_views else ENCODINGS[:1]), fetched
        for encoding, moved in there_are.items():
            assert moved.measured == moved.planned, encoding
            # Each byte is read once, even if several ranks hold it.
            assert moved.bytes == moved.report.moved
        found.append(there_are)
    return found


@pytest.mark.parametrize("name", CASES)
def test_axis(ranks: Ranks, name: str) -> None:
    case = CASES[name]()
    for fetched, sources in zip(hand_off(ranks, case, name), case.sources, strict=True):
        for encoding, moved in fetched.items():
            assert len(moved.planned) == sources, encoding


@pytest.mark.parametrize("one", [GROUPED, LATENT], ids=["gqa", "mla"])
def test_replicas_share_the_load(ranks: Ranks, one: Model) -> None:
    """Two ranks of D that could read from the same rank of P do not."""
    case = Case(engine(one, 4), engine(one, 2), [1, 1])
    first, second = hand_off(ranks, case, one.name)
    for encoding in ENCODINGS:
        assert not set(first[encoding].planned) & set(second[encoding].planned)


def test_a_last_block_exact_or_whole(ranks: Ranks) -> None:
    """Heads before tokens: every head of a cut block needs a separate descriptor."""
    case = Case(engine(WINDOWED), engine(WINDOWED), [1])
    (exact,) = hand_off(ranks, case, "tail", descriptor_bytes=0)
    (whole,) = hand_off(ranks, case, "tail", descriptor_bytes=1 << 40)
    assert exact["direct"].excess_bytes == 0
    assert whole["direct"].excess_bytes > 0
    assert whole["direct"].bytes - exact["direct"].bytes == whole["direct"].excess_bytes
    # Six layers of eight heads, of which one descriptor each is left when the block is whole.
    assert exact["direct"].descriptors - whole["direct"].descriptors >= 6 * 7
    # Views have whole kernel blocks only.
    assert exact["strided"].excess_bytes == whole["strided"].excess_bytes == whole["direct"].excess_bytes
