# SPDX-License-Identifier: Apache-2.0
"""The judge of `make soak` finds the errors that it exists for; without engines."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import Future

import pytest

from soak.judge import (
    MEMORY,
    Outcome,
    Tally,
    Verdict,
    growth_beyond,
    judge,
)
from support.engines import Answer, EngineFailed
from support.front import Refused

PLAIN = Answer([5, 6, 7], [-1.0, -2.0, -3.0], [0.5, 0.5, 0.5], "length", None, None, 0, 0.1, 0.2)
NOISE = 1e-4


def verdict_of(answer: Answer | Exception | None, *, aborted: bool = False) -> Verdict:
    future: Future[Answer] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    elif answer is not None:
        future.set_result(answer)
    return judge(future, PLAIN, NOISE, limit=0.05, aborted=aborted)


def like(**changes: object) -> Answer:
    return dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (PLAIN, Outcome.RIGHT),
        (like(others=(PLAIN, PLAIN)), Outcome.RIGHT),
        (like(token_ids=[5, 6, 8]), Outcome.WRONG),
        (like(logprobs=[-1.0, -2.0, -3.01]), Outcome.WRONG),
        (like(token_ids=[5, 6], logprobs=[-1.0, -2.0]), Outcome.WRONG),
        (like(finish_reason="stop"), Outcome.WRONG),
        # One wrong sample among several is a wrong answer, even if the first is right.
        (like(others=(PLAIN, like(token_ids=[5, 9, 7]))), Outcome.WRONG),
        (like(finish_reason="error", others=(like(token_ids=[1, 1, 1]),)), Outcome.WRONG),
        (like(error="RuntimeError: no"), Outcome.REFUSED),
        (like(token_ids=[], logprobs=[], finish_reason="error"), Outcome.REFUSED),
        (Refused("decode_failed: 500"), Outcome.REFUSED),
        (EngineFailed("engine 17 ended, see /x/p1.log:\nmore"), Outcome.LOST),
        (like(error="EngineDeadError: EngineCore encountered an issue. See"), Outcome.LOST),
        (ConnectionResetError("the stream has no end"), Outcome.LOST),
        (TimeoutError("timed out"), Outcome.HUNG),
        (None, Outcome.HUNG),
    ],
)
def test_answers(answer: Answer | Exception | None, outcome: Outcome) -> None:
    assert verdict_of(answer).outcome is outcome


def test_aborted() -> None:
    """The answer until then is compared all the same."""
    begun = like(token_ids=[5], logprobs=[-1.0], finish_reason="abort")
    assert verdict_of(begun, aborted=True).outcome is Outcome.ABORTED
    assert verdict_of(begun).outcome is Outcome.REFUSED, "it was never requested"
    assert verdict_of(dataclasses.replace(begun, token_ids=[4]), aborted=True).outcome is Outcome.WRONG


def request(
    what: str, kind: str = "ordinary", *, cause: str = "", explained: bool = True, at: float = 1.0
) -> dict[str, object]:
    """A line of the journal."""
    return {"t": at, "what": what, "kind": kind, "cause": cause, "explained": explained}


@pytest.mark.parametrize(
    "line",
    [
        request("wrong", cause="why"),
        request("hung", cause="why"),
        request("lost", cause="why", explained=False),
        {"t": 1.0, "what": "leak", "text": "d1: why"},
        {"t": 1.0, "what": "crash", "text": "d1: why"},
    ],
)
def test_what_fails_a_run(line: dict[str, object]) -> None:
    good = [
        request("right"),
        request("refused"),
        request("aborted"),
        request("lost"),
        request("refused", explained=False),
    ]
    assert not Tally.of(good).failed
    tally = Tally.of([*good, line])
    assert tally.failed
    assert any("why" in text for text in tally.lines())


def process(leak: float, seconds: int, every: float = 2.0) -> list[tuple[float, float]]:
    """Memory in MiB of a process with caches that fill in its first minute, noise, peaks, and a leak in MiB an hour."""
    rng = random.Random(f"{leak} {seconds}")
    found = []
    for step in range(int(seconds / every)):
        at = step * every
        peak = 200 if rng.random() < 0.1 else 0
        found.append((at, 800 + min(at, 60) + leak * at / 3600 + rng.gauss(0, 4) + 6 * (step % 30 > 15) + peak))
    return found


@pytest.mark.parametrize(("minutes", "smallest"), [(60, 120), (30, 190), (15, 370), (5, 1300)])
def test_a_leak_is_found_and_noise_is_not(minutes: int, smallest: int) -> None:
    assert growth_beyond(MEMORY, process(0, 60 * minutes)) is None
    found = growth_beyond(MEMORY, process(smallest, 60 * minutes))
    assert found is not None
    assert found.startswith("resident memory grew by ")
