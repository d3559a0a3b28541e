# SPDX-License-Identifier: Apache-2.0
"""Block ids are right or refused by their values alone: not by their order, nor by the form in which they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.errors import BlockIdError

BLOCKS = 40
WRONG = (-(1 << 63), -1, BLOCKS, 1 << 31, (1 << 32) + 3, 1 << 40, (1 << 63) - 1)


def side(base: int, null: int | None) -> Geometry:
    axes = (Axis("tokens", 4, 8), Axis("content", 8, 1))
    layer = Layer("a", 0, 0, 0, BLOCKS, 32, Page((Part("kv", "uint8", 1, 0, axes),)))
    return Geometry((Region(base, 32 * BLOCKS),), (Group("full", 4),), (layer,), null_block=null)


PLANS = {null: kvhma.plan(side(1 << 20, null), side(1 << 30, null)) for null in (None, 0, 5)}


@st.composite
def requests(draw: st.DrawFn) -> tuple[int | None, list[int]]:
    ids = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=12, unique=True))
    order = draw(st.sampled_from(("rising", "falling", "any")))
    if order != "any":
        ids.sort(reverse=order == "falling")
    if draw(st.booleans()):
        ids[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from((*WRONG, 0, 5, ids[0], ids[-1])))
    return draw(st.sampled_from(list(PLANS))), ids


@given(requests())
def test_ids_are_blocks_of_their_cache_each_once(asked: tuple[int | None, list[int]]) -> None:
    null, ids = asked
    is_right = all(0 <= block < BLOCKS and block != null for block in ids) and len(set(ids)) == len(ids)
    tokens, remote = 4 * len(ids), [Span(0, range(10, 10 + len(ids)))]
    narrow = [np.array(ids, np.int32)] if all(-(1 << 31) <= block < 1 << 31 for block in ids) else []
    texts = set()
    for given_ids in (ids, tuple(ids), np.array(ids, np.int64), np.array([0, *ids], np.int64)[1:], *narrow):
        local = [Span(0, given_ids)]
        if is_right:
            read = PLANS[null].ids(tokens, local, remote).reads[0]
            pairs = sorted(zip(ids, range(10, 10 + len(ids)), strict=True))
            assert list(zip(read.local.tolist(), read.remote.tolist(), strict=True)) == pairs
            continue
        for call in (PLANS[null].ids, PLANS[null].transfer):
            with pytest.raises(BlockIdError) as refused:
                call(tokens, local, remote)
            texts.add(str(refused.value))
    assert len(texts) == (0 if is_right else 1)
