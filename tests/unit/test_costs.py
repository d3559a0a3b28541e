# SPDX-License-Identifier: Apache-2.0
"""`kvhma.cost` counts what the plans of a request with known blocks count."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import kvhma
from kvhma.cli.block_tables import pool_ids
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Geometry
from kvhma.models import model, models
from support.cli_run import cli, refused
from support.pairs import HERE, THERE, heads, latent, rank, state

ROOM = 40_000
PAIRS = (
    ({}, {}),
    ({"tp_size": 2}, {"tp_size": 4}),
    ({"tp_size": 4}, {"tp_size": 2}),
    ({"block_size": 16}, {"block_size": 64}),
    ({"tp_size": 2, "block_size": 64}, {"block_size": 16}),
    ({"tp_size": 2, "block_size": 48, "order": "LBNHC"}, {"block_size": 32, "order": "LBNHC"}),
    ({"pp_size": 2}, {"tp_size": 2, "pp_size": 2}),
)
"""Options of P and of D."""


@cache
def engines(name: str, pair: int) -> tuple[list[Geometry], list[Geometry]]:
    """Ranks of D and of P, with room for scattered blocks."""
    prefill, decode = (EngineOptions(**options) for options in PAIRS[pair])
    hand_off = of_model(model(name), prefill, decode, RequestOptions(ROOM, 0, "used"))
    return list(hand_off.decode), list(hand_off.prefill)


@cache
def costs(name: str, pair: int) -> kvhma.HandOffCost:
    return kvhma.cost(*engines(name, pair))


def tables(geometry: Geometry, num_tokens: int, ids: Sequence[int] | None = None) -> list[list[int]]:
    """Block tables: consecutive ids and a block between groups, or the given ids from the second on."""
    made, next_id = [], 1
    for group in geometry.groups:
        count = 1 + group.speculative if group.kind == "ssm" else -(-num_tokens // (group.block_size * group.cp_size))
        numbers = range(next_id, next_id + count)
        made.append(list(numbers) if ids is None else [ids[number] for number in numbers])
        next_id += count + 1
    return made


def planned(
    sides: tuple[list[Geometry], list[Geometry]], num_tokens: int, held: Sequence[int], seed: int | None = None
) -> list[kvhma.Transfer]:
    """What every rank of D reads, by its plan and the connector's rule for live blocks."""
    local, remote = sides
    pools = [None if seed is None else pool_ids(ranks[0].layers[0].num_blocks, "used", seed + 1) for ranks in sides]
    own, other = (tables(ranks[0], num_tokens, ids) for ranks, ids in zip(sides, pools, strict=True))
    cached = [
        (len(table) if hit == num_tokens else 0) if group.kind == "ssm" else hit // (group.block_size * group.cp_size)
        for group, table, hit in zip(local[0].groups, own, held, strict=True)
    ]
    spans = kvhma.live_spans(local[0], num_tokens, own, cached), kvhma.live_spans(remote[0], num_tokens, other)
    # A state that D has is not read.
    for index, (group, hit) in enumerate(zip(local[0].groups, held, strict=True)):
        if group.kind == "ssm" and hit == num_tokens:
            spans[0][index] = kvhma.Span(0, [])
    return [kvhma.plan(each, remote).transfer(num_tokens, *spans) for each in local]


def requests(groups: int, rng: random.Random) -> list[tuple[int, list[int]]]:
    """Lengths with a hit of D in each group."""
    lengths = [1, 15, 16, 33, 640, 1000, rng.randrange(2, 4000), rng.randrange(4000, ROOM // 2)]
    same = [(length, [0] * groups) for length in lengths]
    same += [(length, [rng.randrange(length)] * groups) for length in lengths]
    return [
        *same,
        *((length, [rng.choice((0, length, rng.randrange(length))) for _ in range(groups)]) for length in lengths),
    ]


@pytest.mark.parametrize("pair", range(len(PAIRS)))
@pytest.mark.parametrize("name", sorted(models()))
def test_costs_are_those_of_plans(name: str, pair: int) -> None:
    try:
        sides = engines(name, pair)
        found = costs(name, pair)
    except KvhmaError as error:
        pytest.skip(f"no such pair: {error}")
    rng = random.Random(f"{name} {pair}")
    asked = requests(len(found.groups), rng)
    # Of a long request P has dropped what is before its windows, maybe within a block of D.
    for num_tokens, held in (asked[7], *rng.sample(asked, 3)):
        transfers = planned(sides, num_tokens, held)
        cost = found.of(num_tokens, held)
        assert cost.bytes == sum(transfer.bytes for transfer in transfers), (num_tokens, held)
        assert cost.descriptors == sum(transfer.descriptors for transfer in transfers), (num_tokens, held)
        seconds = [found.link.seconds(transfer.descriptors, transfer.bytes) for transfer in transfers]
        assert cost.seconds == pytest.approx(max(seconds, default=0), rel=1e-12)
        scattered = planned(sides, num_tokens, held, rng.randrange(1000))
        assert cost.bytes == sum(transfer.bytes for transfer in scattered)
        assert sum(transfer.descriptors for transfer in scattered) <= cost.most_descriptors


def small(groups: Sequence[kvhma.Group], base: int, *, blocks: int = 30) -> Geometry:
    """A layer of each group, with kernel blocks of all tokens of a logical block."""
    layers = [(f"layer {index}", index, latent(group.kernel_block_size)) for index, group in enumerate(groups)]
    return rank(base, groups, layers, blocks=blocks)


@pytest.mark.parametrize("interleave", [None, 2])
def test_ranks_that_take_turns_in_a_sequence(interleave: int | None) -> None:
    local = [
        small([kvhma.Group("full", 8, cp_rank=number, cp_size=2, cp_interleave=interleave)], HERE + (number << 20))
        for number in range(2)
    ]
    sides = local, [small([kvhma.Group("full", 4)], THERE, blocks=100)]
    found = kvhma.cost(*sides)
    for num_tokens in range(1, 130):
        transfers = planned(sides, num_tokens, [16 if num_tokens > 20 else 0])
        cost = found.of(num_tokens, 16 if num_tokens > 20 else 0)
        assert cost.bytes == sum(transfer.bytes for transfer in transfers), num_tokens
        assert cost.descriptors == sum(transfer.descriptors for transfer in transfers), num_tokens
        assert cost.seconds == max(found.link.seconds(transfer.descriptors, transfer.bytes) for transfer in transfers)


def test_a_hit_may_end_anywhere_within_a_period() -> None:
    """Blocks of 6 and 4 tokens with heads outside: how often they cut each other depends on the first token."""
    sides = [
        [rank(base, [kvhma.Group("full", size)], [("a", 0, heads(2, tokens=size))])]
        for base, size in ((HERE, 6), (THERE, 4))
    ]
    found = kvhma.cost(*sides)
    for num_tokens in range(1, 80):
        for hit in range(0, num_tokens, 5):
            (transfer,) = planned((sides[0], sides[1]), num_tokens, [hit])
            cost = found.of(num_tokens, hit)
            assert (cost.bytes, cost.descriptors) == (transfer.bytes, transfer.descriptors), (num_tokens, hit)


def test_opaque_blocks_move_from_the_hit_on() -> None:
    group = kvhma.Group("opaque", 8)
    sides = [rank(HERE, [group], [("a", 0, state())])], [rank(THERE, [group], [("a", 0, state())])]
    found = kvhma.cost(*sides)
    for num_tokens in (1, 8, 9, 100):
        assert found.of(num_tokens).bytes == planned(sides, num_tokens, [0])[0].bytes == 12 * -(-num_tokens // 8)
    assert found.of(100, 50).bytes == planned(sides, 100, [50])[0].bytes


def test_a_pool_has_to_hold_only_the_request() -> None:
    """Three periods do not fit: what fits is counted, what does not is refused."""
    group = kvhma.Group("full", 16)
    found = kvhma.cost(small([group], HERE, blocks=3), small([group], THERE, blocks=3))
    assert found.of(20).bytes == 40
    with pytest.raises(RequestError, match="number of blocks") as error:
        found.of(40)
    assert (error.value.place, error.value.value) == ("local group 0", 3)


def test_counted_phases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhma.costs._MAX_ROWS", 5)
    group = kvhma.Group("full", 16)
    found = kvhma.cost(small([group], HERE), small([group], THERE))
    expected = kvhma.cost(small([group], HERE), small([group], THERE)).of(300)
    for num_tokens in range(1, 400):
        found.of(num_tokens)
        assert len(found._blocks[0]._rows) <= 5
    assert found.of(300) == expected


def test_ranks_that_differ_are_kept_apart() -> None:
    """One rank of two has twice the bytes: the time is its time, the bytes are those of both."""
    group = kvhma.Group("full", 16)

    def ranks(base: int) -> list[Geometry]:
        layers = [("a", 0, latent(16)), ("b", 0, latent(16))]
        return [rank(base, [group], layers[:1]), rank(base + (1 << 24), [group], layers)]

    found = kvhma.cost(
        ranks(HERE), rank(THERE, [group], [("a", 0, latent(16)), ("b", 0, latent(16))]), kvhma.Link(1, 1)
    )
    cost = found.of(160)
    assert (cost.bytes, cost.descriptors, cost.seconds) == (3 * 320, 3, 640 + 2)
    assert (cost.most_descriptors, cost.most_seconds) == (30, 640 + 20)


def test_scattered_blocks_reach_the_bound() -> None:
    group = kvhma.Group("full", 16)
    found = kvhma.cost(small([group], HERE, blocks=90), small([group], THERE, blocks=90))
    for num_tokens in (1, 16, 17, 100, 640):
        count = -(-num_tokens // 16)
        spans = [kvhma.Span(0, list(range(1, 2 * count, 2)))]
        plan = kvhma.plan(small([group], HERE, blocks=90), small([group], THERE, blocks=90))
        assert found.of(num_tokens).most_descriptors == plan.transfer(num_tokens, spans, spans).descriptors == count


def test_compute_times_are_of_the_tokens_after_the_shortest_hit() -> None:
    sides = engines("NVIDIA-Nemotron-3-Nano-30B-A3B", 0)
    found = kvhma.cost(*sides, tokens_per_second=100, remote_tokens_per_second=1000, fixed_seconds=7)
    hits = [600] * len(found.groups)
    hits[0] = 500
    cost = found.of(1000, hits, 900)
    assert (cost.compute_seconds, cost.remote_compute_seconds) == (5, 0.1)
    assert cost.seconds - 7 == pytest.approx(kvhma.cost(*sides).of(1000, hits).seconds)
    assert kvhma.cost(*sides).of(1000)[-2:] == (None, None)


@pytest.mark.parametrize("pair", range(len(PAIRS)))
@pytest.mark.parametrize("name", ["gemma-3-4b", "Llama-4-Scout-17B-16E", "NVIDIA-Nemotron-3-Nano-30B-A3B"])
def test_many_costs_are_those_of_each(name: str, pair: int) -> None:
    try:
        found = costs(name, pair)
    except KvhmaError as error:
        pytest.skip(f"no such pair: {error}")
    rng = random.Random(f"{name} {pair}")
    asked = [one for _ in range(20) for one in requests(len(found.groups), rng)]
    lengths, held = (np.array(column) for column in zip(*asked, strict=True))
    each = found.of_each(lengths, held.T)
    for index, (num_tokens, hits) in enumerate(asked):
        assert tuple(column[index] for column in each) == pytest.approx(found.of(num_tokens, hits)[:5], rel=1e-12)
    assert found.of_each(np.array([], int)).bytes.shape == (0,)


def test_an_array_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lengths = costs("gemma-3-4b", 1), np.arange(1, 100)
    whole = found.of_each(lengths, lengths // 2)
    monkeypatch.setattr("kvhma.costs._PART", 7)
    for one, other in zip(whole, found.of_each(lengths, lengths // 2), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("name", "gigabits", "cached"),
    [("Llama-4-Scout-17B-16E", 25, 0), ("gpt-oss-120b", 10, 0), ("gemma-3-4b", 10, 1000)],
)
def test_lengths_that_are_read_faster(name: str, gigabits: float, cached: int, scattered: bool) -> None:
    """Every length is in a range exactly if reading it takes less time."""
    link = kvhma.Link(3e-6, gigabits * 1e9 / 8)
    found = kvhma.cost(*engines(name, 0), link, tokens_per_second=30_000)
    ranges = found.faster_lengths(cached, 20_000, scattered=scattered)
    faster = set()
    for num_tokens in range(cached + 1, 20_001):
        cost = found.of(num_tokens, cached)
        if (cost.most_seconds if scattered else cost.seconds) < (num_tokens - cached) / 30_000:
            faster.add(num_tokens)
    assert faster == {number for first, last in ranges for number in range(first, last + 1)}
    assert len(ranges) == sum(number - 1 not in faster for number in faster)
    assert 0 < len(faster) < 20_000 - cached


def test_chunks_have_no_length_from_which_on_reading_is_faster() -> None:
    """After 8,192 tokens the chunk is new and the cache short; until 16,384 it grows faster than its prompt."""
    link = kvhma.Link(3e-6, 25e9 / 8)
    found = kvhma.cost(*engines("Llama-4-Scout-17B-16E", 0), link, tokens_per_second=30_000)
    ranges = found.faster_lengths(max_tokens=16_383)
    assert any(first <= 8_192 <= last for first, last in ranges)
    assert not any(first <= 14_000 <= last for first, last in ranges)


LENGTHS, POSITIVE = "an integer of 1 to 1099511627776", "a positive number"
GOOD = (small([kvhma.Group("full", 16)], HERE), small([kvhma.Group("full", 16)], THERE))
SPEED = kvhma.cost(*GOOD, tokens_per_second=1)


@pytest.mark.parametrize(
    ("call", "field", "value", "expected"),
    [
        (lambda: kvhma.cost(*GOOD).of(0), "num_tokens", "0", LENGTHS),
        (lambda: kvhma.cost(*GOOD).of(True), "num_tokens", "True", LENGTHS),
        (lambda: kvhma.cost(*GOOD).of(2 << 40), "num_tokens", "2199023255552", LENGTHS),
        (lambda: kvhma.cost(*GOOD).of(10, 11), "cached", "11", "an integer of 0 to the 10 of num_tokens"),
        (lambda: kvhma.cost(*GOOD).of(10, -1), "cached", "-1", "an integer of 0 to the 10 of num_tokens"),
        (lambda: kvhma.cost(*GOOD).of(10, [1, 2]), "cached", "[1, 2]", "one number, or one for each of 1 groups"),
        (lambda: kvhma.cost(*GOOD).of(10, 0, [0.5]), "remote_cached", "0.5", "an integer of 0 to the 10 of num_tokens"),
        (lambda: kvhma.cost(*GOOD).of(10, None), "cached", "None", "one number, or one for each of 1 groups"),
        (lambda: kvhma.cost(*GOOD).faster_lengths(), "tokens_per_second", "None", "given, to compare with computing"),
        (lambda: kvhma.cost(*GOOD, tokens_per_second=1).faster_lengths(5, 5), "cached", "5", "an integer of 0 to 4"),
        (lambda: SPEED.faster_lengths(0, 1 << 30), "max_tokens", str(1 << 30), "an integer of 1 to 4194304"),
        (lambda: SPEED.of_each(np.array([1, 0])), "num_tokens", "[1, 0]", "an array of integers of 1 to 4294967296, "),
        (lambda: SPEED.of_each(np.array([2.0])), "num_tokens", "'float64'", "integers"),
        (lambda: SPEED.of_each(np.array([2, 5]), 3), "cached", "3", "0 to the num_tokens of its request"),
        (lambda: SPEED.of_each(np.array([2]), np.zeros((2, 1), int)), "cached", "(2, 1)", "of a shape that fits"),
        (lambda: kvhma.cost(*GOOD, tokens_per_second=0), "tokens_per_second", "0", POSITIVE),
        (lambda: kvhma.cost(*GOOD, remote_tokens_per_second=float("nan")), "remote_tokens_per_second", "nan", POSITIVE),
        (lambda: kvhma.cost(*GOOD, fixed_seconds=-1), "fixed_seconds", "-1", POSITIVE),
        (lambda: kvhma.cost(*GOOD, 3), "link", "3", "a Link"),
        (lambda: kvhma.cost([], GOOD[1]), "local", "'list'", "a Geometry or a list of them"),
        (lambda: kvhma.cost(GOOD[0], [GOOD[1], 3]), "remote", "'list'", "a Geometry or a list of them"),
        (
            lambda: kvhma.cost([GOOD[0], small([kvhma.Group("full", 32)], 1 << 24)], GOOD[1]),
            "local[1].groups",
            "[('full', 32)]",
            "[('full', 16)], as those of local[0]",
        ),
        (
            lambda: kvhma.cost(small([kvhma.Group("full", 4099)], HERE), small([kvhma.Group("full", 4111)], THERE)),
            "group 0 block_size",
            "[4099, 4111]",
            "sizes of P and D that repeat within 4096 blocks",
        ),
        (lambda: kvhma.Link(0, 1), "seconds_per_descriptor", "0", POSITIVE),
        (lambda: kvhma.Link(1, "fast"), "bytes_per_second", "'fast'", POSITIVE),
        (lambda: kvhma.Link.from_form({"kvhma_link": 1}), "seconds_per_descriptor", "None", POSITIVE),
    ],
)  # fmt: skip
def test_errors_have_the_field_and_both_values(call: Any, field: str, value: str, expected: str) -> None:
    with pytest.raises(RequestError) as error:
        call()
    assert (error.value.field, error.value.value) == (field, value)
    assert error.value.expected.startswith(expected)
    assert field in str(error.value)
    assert expected in str(error.value)


def test_a_link_is_stored_and_read() -> None:
    link = kvhma.Link(2e-6, 5e9, "here")
    assert kvhma.Link.from_form(json.loads(link.to_json())) == link
    for form in ([], {"kvhma_link": 2}):
        with pytest.raises(RequestError, match="not written by `kvhma bench link`"):
            kvhma.Link.from_form(form)


def test_a_group_is_counted_alone() -> None:
    plan = kvhma.plan(*GOOD)
    assert plan.count(0, 0, 33) == (66, 1)
    assert plan.count(0, 20, 33) == (26, 1)
    for arguments, field in (((1, 0, 3), "group"), ((0, 3, 3), "num_tokens"), ((0, 0, (1 << 40) + 1), "num_tokens")):
        with pytest.raises(RequestError) as error:
            plan.count(*arguments)
        assert error.value.field == field


def test_the_command_prints_what_the_function_returns() -> None:
    pair = ("gemma-3-4b", "--prefill", "tp=2", "--decode", "tp=4", "--tokens", 5000)
    done = cli("cost", *pair, "--cached", 1000, "--prefill-tokens-per-second", "20k/10k", "--fixed-ms", 2, "--json")
    assert (done.code, done.err) == (0, "")
    found = kvhma.cost(
        *engines("gemma-3-4b", 1), tokens_per_second=10_000, remote_tokens_per_second=20_000, fixed_seconds=0.002
    )
    assert done.form.items() >= found.of(5000, 1000)._asdict().items()
    for name, scattered in (("in_a_row", False), ("scattered", True)):
        assert done.form["faster_lengths"][name] == [list(ends) for ends in found.faster_lengths(scattered=scattered)]
    assert done.form["bytes"] == cli("plan", *pair, "--cached", 1000, "--json").form["bytes"]
    groups = ",".join(["1k"] + ["0"] * (len(found.groups) - 1))
    by_group = cli("cost", *pair, "--cached-by-group", groups, "--json")
    assert by_group.form["bytes"] == found.of(5000, [1000] + [0] * (len(found.groups) - 1)).bytes
    assert by_group.form["faster_lengths"] is None


def test_the_command_refuses_hits_that_do_not_fit() -> None:
    assert "one for each of" in refused("cost", "gemma-3-4b", "--cached-by-group", "1,2")
    assert "remote_cached 9000: must be an integer of 0 to the 8192" in refused(
        "cost", "gemma-3-4b", "--prefill-cached", 9000
    )
