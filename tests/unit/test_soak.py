# SPDX-License-Identifier: Apache-2.0
"""The judge of `make soak` finds the errors that it exists for; without engines."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from soak.clients import changed
from soak.fleet import read_counters
from soak.journal import Journal
from soak.judge import Allowance, Census, Outcome, Tally, Verdict, judge, leaks_of_pool, leaks_of_process, shorten
from soak.plot import plot
from soak.samples import Sample
from soak.schedule import KINDS, schedule
from support.engines import Answer, EngineFailed

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
        (EngineFailed("engine 17 ended, see /x/p1.log:\nmore"), Outcome.REFUSED),
        (None, Outcome.HUNG),
    ],
)
def test_answers(answer: Answer | Exception | None, outcome: Outcome) -> None:
    assert verdict_of(answer).outcome is outcome


def test_aborted() -> None:
    begun = like(token_ids=[5], logprobs=[-1.0], finish_reason="abort")
    assert verdict_of(begun, aborted=True).outcome is Outcome.ABORTED
    assert verdict_of(begun).outcome is Outcome.REFUSED, "it was never requested"
    # The answer until then is compared all the same.
    assert verdict_of(dataclasses.replace(begun, token_ids=[4]), aborted=True).outcome is Outcome.WRONG
    assert verdict_of(PLAIN, aborted=True).outcome is Outcome.RIGHT, "the abort came too late"
    assert verdict_of(None, aborted=True).outcome is Outcome.HUNG


def test_causes_are_the_same_for_many_requests() -> None:
    one, other = (
        "load of c1-77-d-ab12cd34 failed after 3.5 s, see /a",
        "load of c2-8-d-ffee0011 failed after 12 s, see /b",
    )
    assert shorten(one) == shorten(other) == "load of cN-N-d-N failed after N s"


def test_leaks() -> None:
    assert leaks_of_pool("p1", {"requests": {}, "free_blocks": 99, "all_blocks": 100}) == []
    held = leaks_of_pool("p1", {"requests": {"c1": "RUNNING"}, "free_blocks": 96, "all_blocks": 100})
    assert held == ["p1: 1 requests are held: ['c1']", "p1: 3 of 99 blocks are not free"]
    assert leaks_of_pool("p1", {"requests": {}, "free_blocks": 98, "all_blocks": 100})
    allowed = Allowance(files=5, threads=2)
    assert leaks_of_process("p1", Census(10, 5), Census(15, 7), allowed) == []
    assert leaks_of_process("p1", Census(10, 5), Census(16, 7), allowed) == [
        "p1: 16 files at the end, 10 when it was ready"
    ]
    assert len(leaks_of_process("p1", Census(10, 5), Census(99, 99), allowed)) == 2


@pytest.mark.parametrize("what", ["wrong", "hung", "leak", "crash"])
def test_what_fails_a_run(what: str) -> None:
    tally = Tally()
    tally.add("ordinary", Verdict(Outcome.RIGHT), explained=True)
    tally.add("ordinary", Verdict(Outcome.REFUSED, "the load failed"), explained=True)
    tally.add("aborted", Verdict(Outcome.ABORTED), explained=True)
    assert not tally.failed
    if what in ("wrong", "hung"):
        tally.add("slow", Verdict(Outcome(what), "why"), explained=True)
    else:
        {"leak": tally.leaks, "crash": tally.crashes}[what].append("d1: why")
    assert tally.failed
    assert any("why" in line for line in tally.lines())


def test_refusals_without_a_reason_are_marked() -> None:
    tally = Tally()
    for explained, cause in ((True, "killed"), (False, "no reason")):
        tally.add("ordinary", Verdict(Outcome.REFUSED, cause), explained=explained)
    marked = [line for line in tally.lines() if "UNEXPLAINED" in line]
    assert len(marked) == 1
    assert "no reason" in marked[0]
    assert tally.unexplained == 1


def test_the_schedule_follows_from_the_seed() -> None:
    targets = ("p1", "d1")
    events = schedule(7, 3600, targets)
    assert events == schedule(7, 3600, targets)
    assert events != schedule(8, 3600, targets)
    assert {event.kind for event in events} == set(KINDS)
    assert {event.target for event in events} == set(targets)
    assert all(5 < event.at <= 3540 for event in events)
    assert {event.kind for event in schedule(7, 3600, targets, without=["kill", "stop"])} == set(KINDS) - {
        "kill",
        "stop",
    }
    assert schedule(7, 3600, targets, without=list(KINDS)) == []


def test_changed_parameters_differ_in_one_thing() -> None:
    good = {"remote_host": "h", "remote_port": 5, "kvhma": {"version": 2, "spans": [[0, "1-2"]]}}
    for seed in range(200):
        got = changed(good, random.Random(seed))
        flat = [good | good["kvhma"], got | got["kvhma"] if isinstance(got.get("kvhma"), dict) else got]
        keys = (flat[0].keys() | flat[1].keys()) - {"kvhma"}
        differ = [key for key in keys if repr(flat[0].get(key, ...)) != repr(flat[1].get(key, ...))]
        assert len(differ) == 1 or not isinstance(got.get("kvhma"), dict)
        assert good["kvhma"] == {"version": 2, "spans": [[0, "1-2"]]}


def test_counters() -> None:
    text = (
        'vllm:kvhma_failed_loads_total{cause="expired",engine="0",model_name="m"} 3.0\n'
        'vllm:kvhma_load_seconds_count{engine="0",model_name="m"} 17.0\n'
        'vllm:kvhma_load_seconds_bucket{engine="0",le="0.1",model_name="m"} 9.0\n'
        'vllm:kvhma_expired_total{engine="0",model_name="m"} 0.0\n'
    )
    assert read_counters(text) == {"failed_loads expired": 3, "load_seconds": 17}


def test_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note("event", kind="kill", odd={1, 2})
    journal.close()
    journal.note("too late")
    first, second = (tmp_path / "journal").read_text().splitlines()
    assert '"utc"' in first
    assert '"what": "event", "kind": "kill"' in second


def test_the_picture() -> None:
    samples = [Sample(at, "p1", 1, "worker", 9, 1000 + at, 900, 90, 10, 5, 3) for at in range(3)]
    svg = plot([samples], schedule(1, 60, ["p1"]), 60)
    assert svg.startswith("<svg")
    assert svg.count("<polyline") == 1
    assert svg.rstrip().endswith("</svg>")
