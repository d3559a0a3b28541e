# SPDX-License-Identifier: Apache-2.0
"""Three published errors of other engines, each as bytes: our transfer is right, and the oracle catches theirs.

A transfer of the other engine is ours with the rows of one part replaced by that engine's rule, a few lines each
below. The same replacement with the right rule passes, so the oracle rejects the rule.

* vllm#55208: Mamba2 groups that every rank holds whole are divided by the ranks.
* sglang#23746: decode ranks beyond the KV heads read the wrong head. The convolution is cut in equal slices although
  ``q``, ``k`` and ``v`` are sharded separately (vllm#53078 fixes the same in another connector).
* sglang#22060: the convolution of each prefill rank is copied as one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

import kvhma
from kvhma import Geometry, Layer, Span
from kvhma.errors import OracleError
from kvhma.geometry import Shard
from kvhma.models import Model, State, model
from kvhma.models.pages import ConvOrder
from kvhma.models.shards import conv_split
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import Oracle
from support.reference import Read, Transfer

Piece = tuple[int, int, int, int]
"""Channels of the convolution: first on D, source, first there, how many."""

TOKENS = 40
LOCAL, REMOTE = [Span(0, [2]), Span(0, [3])], [Span(0, [1]), Span(0, [2])]


def small(name: str) -> Model:
    """One state and one attention layer of a model; they share a tensor as all its layers do."""
    full = model(name)
    kinds = dict.fromkeys(kind for kind in full.layers if kind != "none")
    return replace(full, layers=tuple(kinds))


def ranks(of: Model, size: int, conv: ConvOrder, base: int) -> list[Geometry]:
    return [
        layout(
            of,
            LayoutOptions(
                num_blocks=4, tp_rank=r, tp_size=size, kernel_block="flashinfer", conv=conv, base=base + (r << 30)
            ),
        )
        for r in range(size)
    ]


class Pair:
    """One D rank, all P ranks, and a request."""

    def __init__(self, name: str, sizes: tuple[int, int], rank: int, conv: ConvOrder) -> None:
        """Make the pair; `sizes` are the ranks of P and of D."""
        of = small(name)
        assert of.state is not None
        self.state: State = of.state
        self.remote_tp, self.local_tp = sizes
        self.rank, self.conv = rank, conv
        self.remotes = ranks(of, self.remote_tp, conv, 1 << 40)
        self.local = ranks(of, self.local_tp, conv, 1 << 20)[rank]
        self.oracle = Oracle(self.local, self.remotes)
        found = kvhma.plan(self.local, self.remotes, descriptor_bytes=0).transfer(TOKENS, LOCAL, REMOTE)
        self.ours = Transfer(tuple(Read(r.source, r.local, r.remote) for r in found.reads), found.zero)

    def check(self, transfer: Transfer) -> None:
        self.oracle.check(TOKENS, LOCAL, REMOTE, transfer)

    def layer(self, geometry: Geometry, state: bool) -> Layer:
        return next(x for x in geometry.layers if (geometry.groups[x.group].kind == "ssm") == state)

    def columns(self, source: int | None = None) -> tuple[Shard, ...]:
        """Return the channels of D, or of one source."""
        if source is None:
            return tuple(conv_split(self.state, tp_rank=self.rank, tp_size=self.local_tp).values())
        return tuple(conv_split(self.state, tp_rank=source, tp_size=self.remote_tp).values())

    def with_conv(self, pieces: Sequence[Piece]) -> Transfer:
        """Return our transfer with other rows for the convolution."""
        here = self._page(self.local, LOCAL)
        size = self.layer(self.local, True).page.parts[-1].offset
        rows = list(self._outside(here, here + size))
        for mine, source, theirs, count in pieces:
            there = self._page(self.remotes[source], REMOTE)
            spots = zip(
                self._channels(self.columns(), mine, count),
                self._channels(self.columns(source), theirs, count),
                strict=True,
            )
            rows += [(source, here + a, there + b, length) for (a, length), (b, _) in spots]
        return self._transfer(rows)

    def with_head(self, shift: int) -> Transfer:
        """Return our transfer with attention read `shift` heads further on."""
        layer = self.layer(self.local, False)
        here = self.local.regions[0].base + LOCAL[layer.group].ids[0] * layer.block_stride
        step = {axis.name: axis.stride for axis in self.layer(self.remotes[0], False).page.parts[0].axes}["heads"]
        inside = range(here, here + layer.block_stride)
        return self._transfer(
            (source, to, start + (shift * step if to in inside else 0), size)
            for source, to, start, size in self._rows()
        )

    def _page(self, geometry: Geometry, spans: Sequence[Span]) -> int:
        layer = self.layer(geometry, True)
        return geometry.regions[0].base + spans[layer.group].ids[0] * layer.block_stride

    def _channels(self, columns: Sequence[Shard], first: int, count: int) -> list[tuple[int, int]]:
        """Return offset and length of some channels: one range with channels outermost, else one for each row."""
        rows, item = self.state.d_conv - 1, 2
        if self.conv == "DS":
            return [(first * rows * item, count * rows * item)]
        width = sum(part.length for part in columns)
        return [((row * width + first) * item, count * item) for row in range(rows)]

    def _rows(self) -> Iterator[tuple[int, int, int, int]]:
        for read in self.ours.reads:
            for (to, size, _), (start, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
                yield read.source, to, start, size

    def _outside(self, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        for source, to, start, size in self._rows():
            for low, high in ((to, min(to + size, first)), (max(to, end), to + size)):
                if low < high:
                    yield source, low, start + low - to, high - low

    def _transfer(self, rows: Iterator[tuple[int, int, int, int]] | list[tuple[int, int, int, int]]) -> Transfer:
        reads = []
        found = sorted(rows, key=lambda row: row[1])
        for source in range(len(self.remotes)):
            mine = [(to, size, 0) for at, to, _, size in found if at == source]
            theirs = [(start, size, 0) for at, _, start, size in found if at == source]
            reads.append(Read(source, *(np.array(side, np.uint64).reshape(-1, 3) for side in (mine, theirs))))
        return Transfer(tuple(reads), self.ours.zero)


def meeting(pair: Pair) -> list[Piece]:
    """The right rule: every part by the channels both ranks hold, from the first source that holds them."""
    pieces: list[Piece] = []
    before = [0, *accumulate(part.length for part in pair.columns())]
    for index, part in enumerate(pair.columns()):
        at = part.start
        while at < part.start + part.length:
            for source in range(pair.remote_tp):
                theirs = pair.columns(source)
                other = theirs[index]
                if other.start <= at < other.start + other.length:
                    count = min(part.start + part.length, other.start + other.length) - at
                    behind = sum(column.length for column in theirs[:index])
                    pieces.append((before[index] + at - part.start, source, behind + at - other.start, count))
                    at += count
                    break
    return pieces


def rejected(pair: Pair, wrong: Transfer) -> str:
    assert wrong.bytes == pair.ours.bytes, "the other rule moves as many bytes: no count can tell"
    with pytest.raises(OracleError, match="wrong bytes") as info:
        pair.check(wrong)
    return str(info.value)


CONV = pytest.mark.parametrize("conv", ["DS", "SD"])


# --- vllm#55208 -----------------------------------------------------------------------------------------


def divided_groups(pair: Pair) -> list[Piece]:
    """Groups are what is left of the convolution of all ranks, divided by the ranks: right if ranks divide them."""
    size, inner = pair.local_tp, pair.state.n_heads * pair.state.head_dim
    conv = sum(part.length for part in pair.columns())
    parts = (inner // size, (conv * size - inner) // 2 // size, (conv * size - inner) // 2 // size)
    starts = (0, parts[0], parts[0] + parts[1])
    if size >= pair.remote_tp:
        ratio = size // pair.remote_tp
        source, slot = divmod(pair.rank, ratio)
        return [(at, source, at * ratio + slot * n, n) for at, n in zip(starts, parts, strict=True)]
    ratio = pair.remote_tp // size
    return [
        (at + slot * (n // ratio), pair.rank * ratio + slot, at // ratio, n // ratio)
        for slot in range(ratio)
        for at, n in zip(starts, parts, strict=True)
    ]


@CONV
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "Falcon-H1-7B"])
def test_a_group_that_all_ranks_hold_is_not_divided_over_more_of_them(name: str, rank: int, conv: ConvOrder) -> None:
    pair = Pair(name, (1, 2), rank, conv)
    assert [part.length == part.extent for part in pair.columns()] == [False, True, True]
    pair.check(pair.ours)
    pair.check(pair.with_conv(meeting(pair)))
    text = rejected(pair, pair.with_conv(divided_groups(pair)))
    if conv == "DS":
        # Rank 0 finds the recurrent state where it looks for C, rank 1 finds C where it looks for B.
        part, found = [("C", "ssm"), ("B", "C")][rank]
        assert f"mixer/{part}): expected" in text
        assert f"found model.layers.0.mixer/{found} state" in text


@CONV
def test_a_group_that_all_ranks_hold_is_not_gathered_from_fewer(conv: ConvOrder) -> None:
    pair = Pair("granite-4.0-h-tiny", (2, 1), 0, conv)
    pair.check(pair.ours)
    pair.check(pair.with_conv(meeting(pair)))
    text = rejected(pair, pair.with_conv(divided_groups(pair)))
    if conv == "DS":
        # Half of B comes twice.
        assert "mixer/B): expected model.layers.0.mixer/B state rows=0 channels=64" in text
        assert "found model.layers.0.mixer/B state rows=0 channels=0" in text


@pytest.mark.parametrize(("sizes", "rank"), [((1, 2), 1), ((2, 1), 0), ((2, 4), 3), ((2, 2), 1)])
def test_the_rule_is_right_where_ranks_divide_the_groups(sizes: tuple[int, int], rank: int) -> None:
    pair = Pair("NVIDIA-Nemotron-3-Nano-30B-A3B", sizes, rank, "DS")
    pair.check(pair.with_conv(divided_groups(pair)))


# --- sglang#23746, sglang#22060 ---------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("rule", "right"), [("first", (0, 1)), ("modulo", (0, 3)), ("shared", (0, 1, 2, 3))])
def test_four_decode_ranks_of_two_heads(rule: str, right: tuple[int, ...], rank: int) -> None:
    # Ranks 0 and 1 share head 0, ranks 2 and 3 head 1.
    pair = Pair("Qwen3.5-0.8B", (1, 4), rank, "DS")
    pair.check(pair.ours)
    head = {"first": 0, "modulo": rank % 2, "shared": rank // 2}[rule]
    moved = pair.with_head(head - rank // 2)
    if rank in right:
        pair.check(moved)
    else:
        assert f"self_attn.attn/kv token 0): expected model.layers.1.self_attn.attn/kv token 0 heads={rank // 2}" in (
            rejected(pair, moved)
        )


@CONV
@pytest.mark.parametrize("rank", range(4))
def test_equal_slices_of_the_convolution(rank: int, conv: ConvOrder) -> None:
    pair = Pair("Qwen3.5-0.8B", (1, 4), rank, conv)
    width = sum(part.length for part in pair.columns())
    pair.check(pair.ours)
    pair.check(pair.with_conv(meeting(pair)))
    rejected(pair, pair.with_conv([(0, 0, rank * width, width)]))


@CONV
@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3-Next-80B-A3B"])
def test_the_convolution_of_a_rank_as_one_chunk(name: str, conv: ConvOrder) -> None:
    pair = Pair(name, (2, 1), 0, conv)
    width = sum(part.length for part in pair.columns(0))
    pair.check(pair.ours)
    pair.check(pair.with_conv(meeting(pair)))
    text = rejected(pair, pair.with_conv([(source * width, source, 0, width) for source in range(2)]))
    # q of the first rank is followed by its k, where the second rank's q belongs.
    assert "mixer/q): expected model.layers.0.mixer/q" in text
    assert "found model.layers.0.mixer/k" in text
