# SPDX-License-Identifier: Apache-2.0
"""The judge of `make soak` finds the errors that it exists for; without engines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from soak import site
from soak.census import BLOCK, draw_prompts
from soak.clients import changed
from soak.fleet import Fleet, Slot, read_counters
from soak.journal import Journal, read_lines
from soak.judge import (
    FILES,
    MEMORY,
    Outcome,
    Tally,
    Verdict,
    growth_beyond,
    judge,
    leaks_of_pool,
    leaks_of_process,
    shorten,
)
from soak.report import report
from soak.samples import Sample
from soak.schedule import ALL, KINDS, OF_ALL, Event, schedule
from support.engines import Answer, Engine, EngineFailed
from support.front import Refused, answer_in, read_events

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
    ready = {"files": 10, "threads": 5}
    assert leaks_of_process("p1", ready, {"files": 58, "threads": 17}) == []
    one = leaks_of_process("p1", ready, {"files": 59, "threads": 17})
    assert one == ["p1: 59 files at the end, 10 when it was ready"]
    assert len(leaks_of_process("p1", ready, {"files": 99, "threads": 99})) == 2


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


def test_refusals_without_a_reason_are_marked() -> None:
    tally = Tally.of(
        [request("refused", cause="killed"), request("refused", cause="no reason", explained=False), request("right")]
    )
    marked = [line for line in tally.lines() if "UNEXPLAINED" in line]
    assert len(marked) == 1
    assert "no reason" in marked[0]
    assert tally.unexplained(Outcome.REFUSED) == 1


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


def test_a_process_that_has_just_started_grows() -> None:
    assert growth_beyond(MEMORY, process(100_000, 120)) is None, "only 30 samples after its first minute"
    assert growth_beyond(MEMORY, process(100_000, 200)) is not None


def test_descriptors_are_bounded_too() -> None:
    crowd = [(2.0 * step, 90 + (100 if step % 10 < 3 else 0)) for step in range(600)]
    assert growth_beyond(FILES, crowd) is None, "untrusted clients come and go"
    lost = [(at, files + at / 12) for at, files in crowd]
    assert growth_beyond(FILES, lost) is not None


def test_the_schedule_follows_from_the_seed() -> None:
    targets = ("p1", "d1")
    events = schedule("7", 3600, targets)
    assert events == schedule("7", 3600, targets)
    assert events != schedule("8", 3600, targets)
    assert {event.kind for event in events} == set(KINDS)
    assert {event.target for event in events} == {*targets, ALL}
    assert all((event.target == ALL) == (event.kind in OF_ALL) for event in events)
    assert all(5 < event.at <= 3540 for event in events)
    kinds = {event.kind for event in schedule("7", 3600, targets, without=["kill", "stop"])}
    assert kinds == set(KINDS) - {"kill", "stop"}
    assert schedule("7", 3600, targets, without=list(KINDS)) == []


def test_some_engines_live_through_the_second_half() -> None:
    events = schedule("7", 3600, ("p1", "p2", "d1", "d2"), ("p2", "d2"))
    kills = [event for event in events if event.kind.startswith("kill")]
    assert {event.target for event in kills if event.at <= 1800} == {"p1", "p2", "d1", "d2"}
    assert {event.target for event in kills if event.at > 1800} == {"p1", "d1"}
    assert {"p2", "d2"} <= {event.target for event in events if event.at > 1800}


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
    first, second = read_lines(tmp_path / "journal")
    assert first["what"] == "begins"
    assert "utc" in first
    assert (second["what"], second["kind"]) == ("event", "kill")


def test_prompts_follow_from_the_seed() -> None:
    prompts, ends = draw_prompts("7 gemma3")
    assert (prompts, ends) == draw_prompts("7 gemma3")
    assert prompts != draw_prompts("7 nemotron_h")[0]
    assert [end // BLOCK for end in ends[0]] == list(range(1, len(prompts[0]) // BLOCK + 1)), "each block of the first"
    for prompt, of in zip(prompts, ends, strict=True):
        assert all(BLOCK < end < len(prompt) for end in of)


def sample(seconds: float, name: str = "p1", **changes: object) -> Sample:
    return dataclasses.replace(Sample(seconds, name, 1, "worker", 9, 900_000, 50, 3), **changes)


def test_the_report(tmp_path: Path) -> None:
    """It counts what happened, and finds what a process has not closed."""
    lines: list[dict[str, object]] = [
        {"t": 10.0, "what": "load", "model": "gemma3"},
        {"t": 11.0, "what": "event", "kind": "rotate", "engine": ALL, "life": 0, "seconds": 2},
        request("right", at=12.0),
        request("refused", cause="the load failed", at=30.0),
        request("right", "alone", at=40.5) | {"cached": 64},
        {"t": 41.0, "what": "event", "kind": "kill", "engine": "p1", "life": 1, "seconds": 2},
        {"t": 44.0, "what": "event over", "kind": "kill", "engine": "p1", "life": 1},
        {"t": 45.0, "what": "rotated", "step": 2, "trouble": 4},
        {"t": 46.0, "what": "counters", "engine": "d1", "life": 1, "counters": {"handshakes": 2}},
        {"t": 47.0, "what": "counters", "engine": "d1", "life": 2, "counters": {"handshakes": 3}},
        {"t": 48.0, "what": "counters", "engine": "d1", "life": 2, "counters": {"handshakes": 5}},
        {"t": 50.0, "what": "load over", "model": "gemma3"},
        {"t": 51.0, "what": "quiet", "engine": "p1", "life": 1},
        {"t": 52.0, "what": "model over", "model": "gemma3", "back": "4 of 4 engines"},
    ]
    write = (tmp_path / "journal.jsonl").write_text
    write("".join(json.dumps(line) + "\n" for line in lines))
    rows = [dataclasses.astuple(sample(at)) for at in (12.0, 20.0, 42.0)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "samples.csv").write_text(text)
    got, failed = report(tmp_path)
    assert not failed
    assert "under load: gemma3 40 s" in got
    assert any(line.startswith("right 2, wrong 0, refused 1, lost 0") for line in got)
    assert any("kill 1" in line and "rotate 1" in line for line in got)
    assert any(line.endswith("{'on a full disk': 1}") for line in got)
    assert "asked D alone: 1 right answers, 1 of them hit 64 tokens" in got
    assert "d1: handshakes 7" in got
    assert "gemma3: blocks back 4 of 4 engines" in got
    # With more files at the end than it had, which it should have closed.
    (tmp_path / "samples.csv").write_text(
        text + ",".join(map(str, dataclasses.astuple(sample(53.0, files=150)))) + "\n"
    )
    got, failed = report(tmp_path)
    assert failed
    assert any("150 files at the end, 50 when it was ready" in line for line in got)


def test_growth_counts_under_load_only(tmp_path: Path) -> None:
    """The process grows while it is asked for something else afterwards, and then does so under load."""
    lines = [{"t": 0.0, "what": "load", "model": "gemma3"}]
    samples = [sample(2.0 * step, rss=(800 + (100 if step > 200 else 0)) << 10) for step in range(400)]
    (tmp_path / "samples.csv").write_text(
        "".join(",".join(map(str, dataclasses.astuple(one))) + "\n" for one in samples)
    )
    for end, failed in ((400.0, False), (800.0, True)):
        over = {"t": end, "what": "load over", "model": "gemma3"}
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, over]))
        got = report(tmp_path)
        assert got[1] is failed
        assert any("p1-1 worker 9: resident memory grew by 100 MiB" in line for line in got[0]) is failed


EVENTS = [{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": None}]}]


def stream(*events: object) -> list[bytes]:
    return [line for event in events for line in (b"data: " + json.dumps(event).encode() + b"\n", b"\n")]


def test_an_answer_over_http() -> None:
    last = {"choices": [{"token_ids": [6], "logprobs": {"token_logprobs": [-2.0]}, "finish_reason": "length"}]}
    got = answer_in(read_events([*stream(*EVENTS, last), b"data: [DONE]\n"]), 1.0)
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([5, 6], [-1.0, -2.0], "length")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (stream(*EVENTS), ConnectionResetError),
        (stream(*EVENTS, {"error": {"type": "decode_lost", "message": "m"}}), ConnectionResetError),
        (stream({"error": {"type": "decode_unreachable", "message": "m"}}), ConnectionResetError),
        (stream({"error": {"type": "decode_failed", "message": "m"}}), Refused),
    ],
)
def test_an_answer_over_http_that_fails(lines: list[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        answer_in(read_events(lines), 1.0)


class Reader:
    """Stands for an engine that reads its secrets when it is asked whether it has."""

    name = "p1"

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seen: list[list[bytes]] = []

    def has_read(self, number: int) -> Callable[[], bool]:
        before = len(self.seen)

        def read() -> bool:
            self.seen.append(self._file.read_bytes().splitlines())
            return len(self.seen) > before + 1 and len(self.seen[-1]) == number

        return read


def test_an_engine_has_read_its_secrets_if_its_log_says_so(tmp_path: Path) -> None:
    journal, log = Journal(tmp_path / "journal"), tmp_path / "p1-1.log"
    slot = Slot("p1", cast("Engine", None), journal, None, cast("site.Site", None), ())
    slot.engine = cast("Engine", SimpleNamespace(log=log, alive=True))
    log.write_text("kvhma: 2 secrets read from /x\n")
    assert slot.has_read(2)(), "an engine that is not up reads the file when it starts"
    slot.up.set()
    has_read = slot.has_read(2)
    assert not has_read(), "the line is of an earlier step"
    with log.open("a") as file:
        file.write("kvhma: 1 secrets read from /x\n")
        file.flush()
        assert not has_read()
        file.write("kvhma: 2 secrets read from /x\n")
        file.flush()
        assert has_read()
    waiting = slot.has_read(3)
    assert not waiting()
    slot.life += 1
    assert waiting(), "its next life reads the file when it starts"
    journal.close()


def test_an_engine_without_its_core_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot("p1", cast("Engine", None), cast("Journal", None), None, cast("site.Site", None), ())
    slot.engine = cast("Engine", SimpleNamespace(alive=True, pids=lambda: [1]))
    names = {1: "front end"}
    monkeypatch.setattr("soak.fleet.process_name", names.get)
    assert not slot.crashed(), "it has not been ready"
    slot.up.set()
    assert not slot.crashed(), "an event ends it"
    slot.meant_to_end = False
    assert slot.crashed()
    names[1] = "VLLM::EngineCore"
    assert not slot.crashed()


class Ending(Slot):
    """An engine that ends by itself once, and the run with it."""

    fleet: Fleet

    def crashed(self) -> bool:
        return not self.fleet.stop.is_set()

    def note_crash(self) -> None:
        self.fleet.stop.set()

    def do(self, event: Event, stop: threading.Event) -> None:
        self.replaced = event.kind


def test_an_engine_that_ends_between_two_events_is_replaced(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    slot = Ending("p1", cast("Engine", None), journal, None, cast("site.Site", None), ())
    slot.fleet = Fleet([slot], cast("site.Site", None), journal)
    slot.fleet.run([], 60.0)
    slot.fleet.settle()
    journal.close()
    assert slot.replaced == "kill"


@pytest.mark.parametrize("trouble", range(9))
def test_the_three_steps_of_a_rotation(trouble: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has a secret in common with the one before, and the last has another than the first."""
    journal = Journal(tmp_path / "journal")
    filled: list[tuple[Path, bool]] = []
    monkeypatch.setattr(site, "mount_memory", lambda folder, size: None)

    def fill(folder: Path) -> contextlib.nullcontext[None]:
        filled.append((folder, made.starting.locked()))
        return contextlib.nullcontext()

    monkeypatch.setattr(site, "full", fill)
    made = site.Site(tmp_path, journal, 0.0, mounted=True)
    reader = Reader(made.file)
    first = made.file.read_bytes().splitlines()
    made.do(Event(0.0, "rotate", ALL, 0.01, (trouble + 0.5) / 9), [reader], threading.Event())
    steps = [first]
    steps += [
        lines for number, lines in enumerate(reader.seen) if lines != (reader.seen[number - 1] if number else first)
    ]
    old, new = first[0], steps[-1][0]
    assert steps == [[old], [old, new], [new, old], [new]]
    assert old != new
    assert filled == ([(made.disk, True)] if 3 <= trouble < 6 else []), "no engine starts meanwhile"
    journal.close()
    rotated = [line for line in read_lines(tmp_path / "journal") if line["what"] == "rotated"]
    assert [line["step"] for line in rotated] == [0, 1, 2]
    assert not made.starting.locked()


def test_a_full_disk_is_empty_afterwards(tmp_path: Path) -> None:
    (tmp_path / "ballast").symlink_to("/dev/full")
    with site.full(tmp_path):
        assert (tmp_path / "ballast").is_symlink(), "the error of a full disk ends the filling, nothing else"
    assert not (tmp_path / "ballast").is_symlink()
