# SPDX-License-Identifier: Apache-2.0
"""The Rust core against the plain Python version of the same maths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvhma
from kvhma import lowlevel
from support import reference as _reference
from support.generate import Case, generate
from support.recipe import AXES, EQUAL_RANK, Recipe

SEEDS = st.integers(0, 1 << 32)
MAX_TOKENS = 64


def recipes(axes: dict[str, tuple[str, ...]]) -> st.SearchStrategy[Recipe]:
    """Recipes that shrink to the simplest choice of each axis."""
    return st.builds(Recipe, **{axis: st.sampled_from(choices) for axis, choices in axes.items()})


def planned(case: Case) -> kvhma.Transfer:
    plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=0)
    return plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)


def both(case: Case) -> tuple[kvhma.Transfer, _reference.Transfer]:
    request = (case.num_tokens, case.local_spans, case.remote_spans)
    return planned(case), _reference.transfer(case.local, case.remotes, *request)


def covered(rows: NDArray[np.uint64]) -> set[int]:
    """Return the addresses of all bytes of some descriptors."""
    return {address for start, size, _ in rows.tolist() for address in range(start, start + size)}


@given(SEEDS, recipes(EQUAL_RANK))
def test_equal_ranks_give_the_same_rows(seed: int, recipe: Recipe) -> None:
    case = generate(seed, recipe, max_tokens=MAX_TOKENS)
    fast, slow = both(case)
    assert fast.excess_bytes == 0
    assert covered(fast.zero) == covered(slow.zero)
    assert fast.descriptors == slow.descriptors
    assert fast.bytes == slow.bytes
    found = [read for read in fast.reads if read.bytes]
    assert [read.source for read in found] == [read.source for read in slow.reads]
    for one, other in zip(found, slow.reads, strict=True):
        np.testing.assert_array_equal(one.local, other.local)
        np.testing.assert_array_equal(one.remote, other.remote)


@given(SEEDS, recipes(AXES))
def test_unequal_engines_give_the_same_bytes(seed: int, recipe: Recipe) -> None:
    # If several ranks hold a byte, any of them may give it, so only D's side is compared.
    case = generate(seed, recipe, max_tokens=MAX_TOKENS)
    fast, slow = both(case)
    assert covered(fast.zero) == covered(slow.zero)
    for one, other in ((fast, slow), (slow, fast)):
        mine = set().union(*(covered(read.local) for read in one.reads))
        theirs = set().union(*(covered(read.local) for read in other.reads))
        assert mine <= theirs
    assert fast.bytes == slow.bytes


@given(SEEDS, recipes(AXES))
def test_first_tokens_are_where_the_transfer_begins(seed: int, recipe: Recipe) -> None:
    case = generate(seed, recipe, max_tokens=MAX_TOKENS)
    fast = planned(case)
    moved = set().union(*(covered(read.local) for read in fast.reads))
    sourced = {layer.name for remote in case.remotes for layer in remote.layers}
    assert len(fast.first_tokens) == len(case.local.groups)
    for layer in case.local.layers:
        group, first = case.local.groups[layer.group], fast.first_tokens[layer.group]
        if group.kind in ("ssm", "opaque"):
            assert first == 0
            continue
        by_token: dict[int, set[bool]] = {}
        for item, place in _reference.layer_bytes(case.local, layer, case.local_spans[layer.group]):
            part = next(part for part in layer.page.parts if part.name == item.part)
            if item.token < case.num_tokens and any(axis.name == "tokens" for axis in part.axes):
                by_token.setdefault(item.token, set()).add(place.address in moved)
        if layer.name in sourced:
            assert {token: {token >= first} for token in by_token} == by_token


@given(st.lists(st.integers(1, 1 << 20), max_size=40), st.integers(1, 200), st.integers(1, 64))
def test_the_static_rule_never_keeps_less_than_the_exact_one(ids: list[int], window: int, block_size: int) -> None:
    group = kvhma.Group("sliding", block_size, window=window)
    for num_tokens in {len(ids) * block_size, max(0, (len(ids) - 1) * block_size + 1)}:
        exact = _reference.clip_tokens(kvhma.Span(0, ids), group, num_tokens)
        static = _reference.clip_window(ids, window, block_size)
        assert list(exact.ids) == static[len(static) - len(exact.ids) :]


IDS = st.lists(st.integers(1, 1 << 20), max_size=40, unique=True)


@given(IDS, st.integers(0, 5), st.integers(1, 200), st.integers(1, 64))
def test_static_windows(ids: list[int], nulls: int, window: int, block_size: int) -> None:
    keep = lowlevel.window_blocks(window, block_size)
    assert keep == _reference.cdiv(window, block_size) + 1
    clipped = lowlevel.clip_blocks([[0] * nulls + ids, ids], [keep, 0])
    assert [list(found) for found in clipped] == [_reference.clip_window(ids, window, block_size), ids]


@given(IDS, st.integers(0, 5), st.integers(0, 3))
def test_state_slots(ids: list[int], nulls: int, speculative: int) -> None:
    (clipped,) = lowlevel.clip_blocks([[0] * nulls + ids], [0], speculative=[speculative])
    assert list(clipped) == _reference.clip_state(ids, speculative)


@given(st.lists(st.integers(0, 1 << 20), max_size=40), st.integers(1, 300))
def test_kernel_blocks(ids: list[int], ratio: int) -> None:
    assert lowlevel.expand_blocks(ids, ratio).tolist() == _reference.expand_blocks(ids, ratio)


@given(SEEDS, recipes({axis: AXES[axis] for axis in ("blocks", "positions", "tokens")}))
def test_live_spans_are_the_exact_clip(seed: int, recipe: Recipe) -> None:
    case = generate(seed, recipe)
    geometry, tokens = case.local, case.num_tokens
    # A block table as the engine's manager has it: null blocks fill the entries before the span.
    if geometry.null_block is None:
        return
    tables = [
        [geometry.null_block] * (0 if group.kind == "ssm" else span.first) + list(span.ids)
        for group, span in zip(geometry.groups, case.local_spans, strict=True)
    ]
    live = kvhma.live_spans(geometry, tokens, tables)
    for group, span, found in zip(geometry.groups, case.local_spans, live, strict=True):
        if group.kind == "ssm":
            assert list(found.ids) == _reference.clip_state(list(span.ids), group.speculative)
        elif group.kind != "opaque":
            # The manager's blocks after the last token stay: D zeroes them.
            exact = _reference.clip_tokens(span, group, tokens)
            assert list(found.ids)[: len(exact.ids)] == list(exact.ids)
            assert not exact.ids or found.first == exact.first
