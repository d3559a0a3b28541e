# SPDX-License-Identifier: Apache-2.0
"""A case that holds what it needs is accepted and right; a refused case lacked something. There is no third outcome."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvhma import KvhmaError, Span
from kvhma.geometry import Geometry, Group
from kvhma.oracle import cases
from kvhma.oracle.cases import Case
from kvhma.oracle.shrink import spans_of
from support.generate import generate
from support.pairs import HERE, THERE, latent, rank
from support.recipe import draw
from support.save import as_case, is_sound
from support.tries import TRIES

CHUNKS = 4
PER_CHUNK = 1500 * TRIES


def outcome(case: Case) -> str:
    """Return the outcome of a case, and fail if it is not the right one."""
    try:
        verdict = cases.check(case)
    except KvhmaError as error:
        pytest.fail(f"{error}: {case.to_json()!r}")
    except BaseException as error:  # a panic of the core is not an Exception
        pytest.fail(f"{type(error).__name__}: {error}: {case.to_json()!r}")
    assert verdict.outcome != "wrong", f"{verdict.text}: {case.to_json()!r}"
    assert not (verdict.outcome == "refused" and is_sound(case)), f"{verdict.text}: {case.to_json()!r}"
    return verdict.outcome


def test_generated_requests_and_the_same_with_a_block_less() -> None:
    counted: Counter[str] = Counter()
    for seed in range(40):
        case = as_case(generate(seed, draw(seed), max_tokens=16), 0)
        assert is_sound(case), str(seed)
        rng = random.Random(seed)
        spans = [list(spans_of(case, index)) for index in range(len(case.remotes))]
        for _ in range(3):
            spoiled = [list(mine) for mine in spans]
            mine = rng.choice(spoiled)
            group = rng.randrange(len(mine))
            span = mine[group]
            lost = rng.randint(0, len(span.ids))
            mine[group] = rng.choice(
                [Span(span.first, span.ids[: len(span.ids) - lost]), Span(span.first + lost, span.ids[lost:])]
            )
            counted[outcome(replace(case, remote_spans=tuple(map(tuple, spoiled))))] += 1
    assert min(counted["right"], counted["refused"]) > 20


def divisors(value: int) -> list[int]:
    return [number for number in range(1, value + 1) if value % number == 0]


def tiny(rng: random.Random) -> Case:
    """One latent layer; everything about positions drawn: blocks, windows, ranks and their turns, blocks of both."""
    kind = rng.choice(["full", "sliding", "sliding", "chunked"])
    limit = {"sliding": "window", "chunked": "chunk"}.get(kind)
    bound = {limit: rng.randint(1, 12)} if limit else {}
    kernels, ratios = rng.choices(range(1, 5), k=2), rng.choices(range(1, 4), k=2)
    parallel = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 2, 3])
    turns = [rng.choice([None, *divisors(kernels[at] * ratios[at])]) for at in (0, 1)]

    def side(base: int, at: int, cp_rank: int) -> Geometry:
        turn = turns[at] if kind == "full" and parallel[at] > 1 else None
        parallel_rank = {"cp_rank": cp_rank, "cp_size": parallel[at], "cp_interleave": turn}
        group = Group(kind, kernels[at] * ratios[at], ratios[at], **parallel_rank, **bound)
        return rank(base, [group], [("kv", 0, latent(kernels[at], 1))], blocks=40)

    tokens = rng.randint(1, 30)

    def span(at: int, first: int, more: int) -> Span:
        entries = -(-tokens // (kernels[at] * ratios[at] * parallel[at]))
        first = min(first, entries)
        return Span(first, rng.sample(range(1, 40), max(0, entries - first + more)))

    local = side(HERE, 0, rng.randrange(parallel[0]))
    remotes = tuple(side(THERE + (r << 16), 1, r) for r in range(parallel[1]))
    mine = span(0, rng.randint(0, 8), rng.choice([0, 0, 1]))
    theirs = tuple(
        (span(1, rng.choice([0, 0, rng.randint(0, 8)]), rng.choice([0, 0, 0, 1, -1, -40])),) for _ in remotes
    )
    return Case(local, remotes, tokens, (mine,), theirs, rng.choice([0, 1 << 17]))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_positions_of_one_layer(chunk: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        counted[outcome(tiny(random.Random(f"tiny {seed}")))] += 1
    assert min(counted["right"], counted["refused"]) > PER_CHUNK // 8
