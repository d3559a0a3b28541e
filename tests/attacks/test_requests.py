# SPDX-License-Identifier: Apache-2.0
"""Requests that no planner should trust: each gets a typed error with the numbers, and nothing is computed."""

import time

import numpy as np
import pytest

import kvhma
from kvhma import BlockIdError, KvhmaError, RequestError, Span, lowlevel
from support.tiny import tiny_hybrid

TOKENS = 40
GOOD = [Span(0, [1, 2, 3]), Span(0, [4, 5, 6]), Span(0, [7])]


@pytest.fixture(scope="module")
def plan():
    return kvhma.plan(tiny_hybrid(50), tiny_hybrid(50, base=1 << 30))


@pytest.fixture(params=["transfer", "ids"])
def move(plan, request):
    return getattr(plan, request.param)


def with_full(ids, first=0):
    return [Span(first, ids), *GOOD[1:]]


def test_the_request_the_others_spoil_is_good(move):
    assert move(TOKENS, GOOD, GOOD).bytes > 0


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([1, -2, 3], BlockIdError, "group 0: block id -2 at index 1 is outside 0..50"),
        ([1, 2, 50], BlockIdError, "group 0: block id 50 at index 2 is outside 0..50"),
        ([1, 2**40, 3], BlockIdError, "block id 1099511627776 at index 1"),
        ([1, 2, 1], BlockIdError, "group 0: block id 1 is listed twice"),
        ([1, 0, 3], BlockIdError, "group 0: block id 0 at index 1 is the null block"),
        ([1, 2**70, 3], RequestError, "is not an integer of 64 bits"),
        ([1, None, 3], RequestError, "None of type NoneType is not an integer"),
        (None, RequestError, "NoneType is not a list or array"),
        (np.array([1, 2, 2**63], dtype=np.uint64), RequestError, "9223372036854775808 is not an integer of 64 bits"),
        ([], RequestError, "group 0: blocks hold no token 0, needed are tokens 0..40"),
        ([1, 2], RequestError, "group 0: blocks hold no token 32, needed are tokens 0..40"),
    ],
)
def test_bad_ids(move, side, ids, error, text):
    arguments = (with_full(ids), GOOD) if side == "local" else (GOOD, with_full(ids))
    with pytest.raises(error) as info:
        move(TOKENS, *arguments)
    assert text in str(info.value)
    assert side in str(info.value)


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("spans", [[], GOOD[:2], [*GOOD, Span(0, [9])]])
def test_wrong_group_count(move, side, spans):
    arguments = (spans, GOOD) if side == "local" else (GOOD, spans)
    with pytest.raises(RequestError, match=f"{side} spans has {len(spans)} entries, expected 3"):
        move(TOKENS, *arguments)


@pytest.mark.parametrize("spans", [None, 5, "abc", [1, 2, 3], [(0,), (0,), (0,)], [Span(0, [1]), 7, None], object()])
def test_spans_of_the_wrong_type(move, spans):
    with pytest.raises(RequestError):
        move(TOKENS, spans, GOOD)
    with pytest.raises(RequestError):
        move(TOKENS, GOOD, spans)


@pytest.mark.parametrize("first", [-1, 2**64, 1.5, None, "0", 2**63, 2**58])
def test_bad_first(move, first):
    with pytest.raises(RequestError, match="first"):
        move(TOKENS, with_full([1, 2, 3], first), GOOD)


@pytest.mark.parametrize("tokens", [0, -1, 2**41, 2**64, 1.5, None, "40"])
def test_bad_token_count(move, tokens):
    with pytest.raises(RequestError, match="num_tokens"):
        move(tokens, GOOD, GOOD)


def test_more_sources_than_there_are(move):
    with pytest.raises(RequestError, match="remote spans by source has 2 entries, expected 1"):
        move(TOKENS, GOOD, [GOOD, GOOD])


def test_one_block_in_two_groups_is_an_overlap(move):
    spans = [Span(0, [1, 2, 3]), Span(0, [3, 5, 6]), Span(0, [7])]
    with pytest.raises(KvhmaError, match=r"overlap|listed in two groups"):
        move(TOKENS, spans, GOOD)


def test_a_remote_that_lost_the_window_is_refused(move):
    with pytest.raises(RequestError, match="remote group 1: blocks hold no token 0"):
        move(TOKENS, GOOD, [GOOD[0], Span(1, [5, 6]), GOOD[2]])


def test_a_remote_without_state_is_refused(move):
    with pytest.raises(RequestError, match="remote state slots has 0 entries"):
        move(TOKENS, GOOD, [*GOOD[:2], Span(0, [])])


def test_a_full_hit_moves_the_state_only(move):
    moved = move(TOKENS, [Span(3, []), Span(3, []), Span(0, [7])], GOOD)
    assert moved.bytes == 2 * (20 * 3 * 2 + 4 * 32 * 4)
    assert len(moved.zero) == 0


def test_nothing_at_all(move):
    moved = move(TOKENS, [Span(3, []), Span(3, []), Span(0, [])], GOOD)
    assert (moved.bytes, moved.descriptors, moved.reads, len(moved.zero)) == (0, 0, [], 0)


def test_ten_million_ids_are_refused_at_once(move):
    many = np.arange(10_000_000, dtype=np.int32)
    start = time.perf_counter()
    with pytest.raises(RequestError, match="number of block ids is 10000000, has to be at most the 50"):
        move(TOKENS, with_full(many), GOOD)
    assert time.perf_counter() - start < 30  # a bound against hanging, not a measurement


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: lowlevel.clip_blocks([[1]], [1, 2]), RequestError),
        (lambda: lowlevel.clip_blocks([[1]], [-1]), RequestError),
        (lambda: lowlevel.clip_blocks([[1]], [1], speculative=[]), RequestError),
        (lambda: lowlevel.clip_blocks(5, [1]), RequestError),
        (lambda: lowlevel.clip_blocks([[1]], [1], null_block="0"), RequestError),
        (lambda: lowlevel.clip_blocks([[1]], [1], null_block=2**70), RequestError),
        (lambda: lowlevel.expand_blocks([1], 0), RequestError),
        (lambda: lowlevel.expand_blocks([-1], 2), BlockIdError),
        (lambda: lowlevel.expand_blocks([2**30], 2), BlockIdError),
        (lambda: lowlevel.expand_blocks([2**62], 2**62), kvhma.AddressOverflowError),
        (lambda: lowlevel.expand_blocks([1, 2], 2**63), kvhma.AddressOverflowError),
        (lambda: lowlevel.descriptor_ids([[10]], [10], [0]), BlockIdError),
        (lambda: lowlevel.descriptor_ids([[-1]], [10], [0]), BlockIdError),
        (lambda: lowlevel.descriptor_ids([[1]], [10], [1]), RequestError),
        (lambda: lowlevel.descriptor_ids([[1]], [10, 10], [0]), RequestError),
        (lambda: lowlevel.descriptor_ids([[1]], [2**31], [0]), kvhma.AddressOverflowError),
        (lambda: lowlevel.descriptor_ids([[1]], [2**63, 2**63], [0, 0]), kvhma.AddressOverflowError),
        (lambda: lowlevel.window_blocks(0, 16), RequestError),
        (lambda: lowlevel.window_blocks(16, 0), RequestError),
        (lambda: lowlevel.window_blocks(2**64 - 1, 1), kvhma.AddressOverflowError),
        (lambda: lowlevel.fa_views([2**64 - 10], [16], [16], [1]), kvhma.AddressOverflowError),
        (lambda: lowlevel.fa_views([0], [16], [2**63], [3]), kvhma.AddressOverflowError),
        (lambda: lowlevel.fa_views([0], [2**64 - 1], [1], [2]), kvhma.AddressOverflowError),
        (lambda: lowlevel.fa_views([0], [16], [0], [1]), RequestError),
        (lambda: lowlevel.fa_views([0], [16], [16], [0]), RequestError),
        (lambda: lowlevel.fa_views([0], [0], [16], [1]), RequestError),
        (lambda: lowlevel.fa_views([0, 1], [16], [16], [1]), RequestError),
        (lambda: lowlevel.fa_descriptors([0], [1], [1], [2**31]), kvhma.AddressOverflowError),
        (lambda: lowlevel.ssm_views([2**64 - 1], [(1, 1)], [1], [1]), kvhma.AddressOverflowError),
        (lambda: lowlevel.ssm_views([1], [(1, 1, 1)], [1], [1]), RequestError),
        (lambda: lowlevel.expand_views(np.zeros((1, 3), dtype=np.uint64)), RequestError),
        (lambda: lowlevel.expand_views(np.zeros((1, 5), dtype=np.uint64)), RequestError),
        (lambda: lowlevel.expand_views(np.zeros((1, 5), dtype=np.float64)), RequestError),
    ],
)
def test_low_level_functions(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("source", [-1, 1, 2**64, 1.5, None, "0"])
def test_sources_that_are_not_there(plan, source):
    with pytest.raises(RequestError, match="source"):
        plan.views(source)
    with pytest.raises(RequestError, match="source"):
        plan.id_descriptors(source, [1])


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "0"])
def test_numbers_of_the_wrong_type(plan, value):
    with pytest.raises(RequestError, match="descriptor_bytes"):
        kvhma.plan(tiny_hybrid(5), tiny_hybrid(5), descriptor_bytes=value)
    with pytest.raises(RequestError, match="max_descriptors"):
        kvhma.plan(tiny_hybrid(5), tiny_hybrid(5), max_descriptors=value)
    with pytest.raises(RequestError, match="cached"):
        plan.losses(TOKENS, GOOD, GOOD, np.zeros((0, 3), dtype=np.uint64), cached=value)


def test_block_tables_from_hell():
    geometry = tiny_hybrid(50, speculative=2**64 - 1)
    tables = [[1, 2], [0, 0, 3], [7, 8]]
    assert kvhma.live_spans(geometry, 2**64 - 1, tables)[2].ids == [7]
    assert kvhma.live_spans(geometry, 40, tables, cached=[2**64 - 1] * 3)[0].ids == []
    for bad in ([tables[0]], None, [1.5, [], []], 7):
        with pytest.raises(RequestError):
            kvhma.live_spans(geometry, 40, bad, cached=[0, 0, 0])
