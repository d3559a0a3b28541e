# SPDX-License-Identifier: Apache-2.0
"""The way of a read: wherever an error strikes, its blocks are left alone, and then it is reported once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhma.errors import HandshakeTimeoutError, PeerLostError, TransferError
from kvhma.vllm.reads import read_steps
from kvhma.vllm.reads.active_read import ActiveRead, ReadState, required
from kvhma.vllm.reads.read_parts import ReadPart
from kvhma.vllm.reads.read_steps import ReadSteps, wait_in

POLLS = 3
"""How often the read looks at some work until it is over."""

BEGIN, END = "QUEUED PLACING ZEROING READING", "COPYING REPORTED"
AGAIN = "QUEUED READING"
STORIES = {
    "usual": f"{BEGIN} PERMUTING CHECKING {END}",
    "unknown engine": f"QUEUED CONNECTING {BEGIN} PERMUTING CHECKING {END}",
    "piece": f"{BEGIN} PERMUTING {END}",
    "asked": f"{BEGIN} PERMUTING CHECKING ASKED {END}",
    "option": f"{BEGIN} PERMUTING CHECKING COPYING INSPECTING JUDGING REPORTED",
    "lost once": f"{BEGIN} {AGAIN} PERMUTING CHECKING {END}",
    "lost twice": f"{BEGIN} {AGAIN} {AGAIN} PERMUTING CHECKING {END}",
}
"""The states in which a read is seen."""

LOST = {"lost once": 1, "lost twice": 2, "lost thrice": 3, "moved": 1}
"""How often the second part is lost with its connection."""


class Work:
    """A transfer, or work of the device or of a thread: it is over after some polls, and may end with an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        """Begin."""
        self.polls, self.error, self.finished, self.telemetry = POLLS, error, False, None

    def query(self) -> bool:
        if self.finished:
            return True
        self.polls -= 1
        self.finished = self.polls == 0
        if self.finished and self.error is not None:
            raise self.error
        return self.finished

    poll = query


class World:
    """All that is around one read. It notes what the read does, and what it must not do."""

    def __init__(self, story: str = "usual", raises: tuple[str, BaseException] | None = None, fails: int = -1) -> None:
        """Prepare a read, of which the call `raises` raises once, or the work with the number `fails` fails."""
        self.story, self.raises, self.fails = story, raises, fails
        self.calls: list[str] = []
        self.works: list[Work] = []
        self.wrong: list[str] = []
        self.held: list[str] = []
        self.states = ["QUEUED"]
        self.place_polls = self.planned = 0
        memory: Any = SimpleNamespace(
            take_places=self.take_places,
            zero=lambda *_: self.launch("zero"),
            copy_in=lambda *_: self.launch("copy"),
            release_places=lambda _: self.release("places"),
            device=SimpleNamespace(is_host=True),
        )
        engines: Any = SimpleNamespace(release_engine=lambda _: self.release("engine"))
        results: Any = SimpleNamespace(
            note_load_read=lambda: self.call("read"),
            stats=SimpleNamespace(count=lambda *_: None),
            cases=SimpleNamespace(save_failed_load=lambda *_: self.call("case")),
            succeed_load=lambda *_, **__: self.report("succeeded"),
            fail_load=lambda *_: self.report("failed"),
            end_piece=lambda _, error: self.report("succeeded" if error is None else "failed"),
        )
        option = (self,) if story == "option" else ()
        rooms = SimpleNamespace(judge=[of.judge for of in option], inspect=[of.inspect for of in option])
        context: Any = SimpleNamespace(geometry=None, rooms=rooms)
        steps: Any = ReadSteps(context, memory, engines, results)
        steps._planned, steps._handle = self.plan, self.post
        steps._permute = lambda _: self.launch("permute")
        self.steps: ReadSteps = steps
        remote = SimpleNamespace(incarnation=None)
        command: Any = SimpleNamespace(request_id="r", spans=(), piece=story == "piece", remote=remote)
        self.read = ActiveRead(command, 0.0)

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.raises is not None and self.raises[0] == name:
            error, self.raises = self.raises[1], None
            raise error

    def expect(self, name: str, *, is_right: bool) -> None:
        if not is_right:
            self.wrong.append(name)

    @property
    def is_busy(self) -> bool:
        return any(not work.finished for work in self.works)

    def work(self, error: BaseException | None = None) -> Work:
        fails = RuntimeError("fails") if len(self.works) == self.fails else error
        self.works.append(Work(fails))
        return self.works[-1]

    def launch(self, name: str) -> Work:
        self.expect(f"{name}, and something else may write", is_right=not self.is_busy)
        if name == "copy":
            is_proved = self.story == "piece" or bool({"board", "held"} & set(self.calls))
            self.expect("the blocks get what P may not have held", is_right=is_proved)
            self.expect("the blocks get what failed", is_right=self.read.error is None)
        self.call(name)
        return self.work()

    def take_places(self, _: object) -> list[str] | None:
        self.place_polls += 1
        if self.place_polls < POLLS:
            return None
        self.call("take places")
        self.held.append("places")
        return self.held

    def plan(self, _: ActiveRead) -> Any:
        self.call("plan")
        rows = np.full((1, 3), self.planned if self.story == "moved" else 0, np.uint64)
        self.planned += 1
        return SimpleNamespace(zero=rows, first_tokens=()), [ReadPart(source, rows, rows) for source in range(3)], rows

    def post(self, _: object, part: ReadPart) -> Work:
        self.expect("the device may zero what is read", is_right=self.works[0].finished)
        self.call(f"post {part.source}")
        is_lost = part.source == 1 and self.calls.count("post 1") <= LOST.get(self.story, 0)
        return self.work(TransferError("cut off") if is_lost else None)

    def inspect(self, read: ActiveRead) -> Iterator[None]:
        """As an option whose thread looks at the places."""
        self.call("inspect")
        read.state = ReadState.INSPECTING
        work = self.work()
        while not work.query():
            yield

    def judge(self, read: ActiveRead) -> Iterator[None]:
        """As an option that waits for the scheduler."""
        self.call("judge")
        self.expect("an option still waits, and holds something", is_right=not self.held)
        work = Work()
        yield from wait_in(read, ReadState.JUDGING, lambda _: work.query())

    def ask(self) -> Any:
        work = Work()

        def check(*_: object) -> None:
            self.call("held")

        return SimpleNamespace(poll=work.query, check=check, close=lambda: self.call("close"))

    def release(self, name: str) -> None:
        self.expect(f"{name} released, and something may write", is_right=not self.is_busy)
        self.held.remove(name)
        self.call(f"release {name}")

    def report(self, how: str) -> None:
        self.expect("it is reported, and something may write", is_right=not self.is_busy)
        self.expect("it is reported, and holds something", is_right=not self.held)
        self.call("report")
        self.calls.append(how)

    def drive(self) -> None:
        """Do what the pump does in the state of the read, once."""
        read = self.read
        if read.state is ReadState.QUEUED and self.story == "unknown engine" and not read.handshakes:
            read.state = ReadState.CONNECTING
        elif read.state is ReadState.QUEUED:
            read.engine = SimpleNamespace(plan=None)  # type: ignore[assignment]
            self.held.append("engine")
        elif read.state is ReadState.CONNECTING:
            read.handshakes += 1
            read.state = ReadState.QUEUED
        elif read.state is ReadState.CHECKING and self.story == "asked":
            read.question = self.ask(), 0
        elif read.state is ReadState.CHECKING:
            self.calls.append("board")
            read.verified_by_board = True
        self.steps.advance(read)
        if read.state.name != self.states[-1]:
            self.states.append(read.state.name)

    def run(self) -> World:
        for _ in range(100):
            self.drive()
        assert self.read.state is ReadState.REPORTED, "it waits for ever"
        return self

    def has_failed(self) -> None:
        """Check that the read has failed well."""
        outcomes = [call for call in self.calls if call in ("succeeded", "failed")]
        assert (self.wrong, self.held, outcomes) == ([], [], ["failed"]), self.calls
        assert self.read.error is not None


@pytest.fixture(autouse=True)
def first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_steps, "first_filled_tokens", lambda *_: {})


@pytest.mark.parametrize(("story", "states"), STORIES.items())
def test_a_read_without_errors(story: str, states: str) -> None:
    world = World(story).run()
    assert (world.wrong, world.held, world.read.error) == ([], [], None)
    assert (world.calls[-1], world.calls.count("report")) == ("succeeded", 1)
    assert world.states == states.split()
    posts = [world.calls.count(f"post {source}") for source in range(3)]
    assert posts == [1, 1 + LOST.get(story, 0), 1], "only lost parts are read again"


@pytest.mark.parametrize("story", STORIES)
def test_an_error_of_another_thread_at_each_wait(story: str) -> None:
    """For example P's answer cannot be asked for, or a handshake has failed."""
    struck: list[str] = []
    while True:
        world, error = World(story), TransferError("strikes")
        for _ in struck:
            world.drive()
        if world.read.state is ReadState.REPORTED:
            break
        struck.append(world.read.state.name)
        world.read.fail(error)
        world.run().has_failed()
        assert world.read.error is error
    assert [*dict.fromkeys(struck), "REPORTED"] == list(dict.fromkeys(STORIES[story].split()))


@pytest.mark.parametrize("story", STORIES)
def test_an_error_of_each_call(story: str) -> None:
    for call in set(World(story).run().calls) - {"board", "succeeded"}:
        world = World(story, (call, RuntimeError("strikes"))).run()
        world.has_failed()
        assert str(world.read.error) == "strikes"
        assert "case" in world.calls or call.startswith(("release", "close", "judge", "report"))


@pytest.mark.parametrize("story", STORIES)
def test_an_error_of_each_transfer_and_of_each_work_of_the_device(story: str) -> None:
    for number in range(len(World(story).run().works)):
        world = World(story, fails=number).run()
        world.has_failed()
        assert str(world.read.error) == "fails"


def test_an_error_of_the_report_of_a_failure_is_the_threads() -> None:
    world = World(raises=("report", RuntimeError("the report")))
    world.read.fail(TransferError("first"))
    with pytest.raises(RuntimeError, match="the report"):
        world.run()
    world.run().has_failed()
    assert str(world.read.error) == "first"


@pytest.mark.parametrize(("story", "posts"), [("lost thrice", 3), ("moved", 1)])
def test_a_part_that_is_lost_too_often_or_has_moved_fails_the_read(story: str, posts: int) -> None:
    world = World(story).run()
    world.has_failed()
    assert world.calls.count("post 1") == posts
    assert "copy" not in world.calls


def test_a_read_that_is_dropped_as_the_pump_closes_does_nothing_more() -> None:
    world = World()
    world.drive()
    calls = list(world.calls)
    required(world.read.steps).close()  # type: ignore[attr-defined]
    assert (world.calls, world.read.error) == (calls, None)


def test_the_first_error_counts_and_one_after_a_lost_connection_names_both() -> None:
    read = World().read
    first, second = TransferError("first"), TransferError("second")
    read.fail(first)
    read.fail(second)
    assert (read.error, read.state) == (first, ReadState.DRAINING)
    read = World().read
    read.lost = PeerLostError("cut off")
    read.fail(HandshakeTimeoutError("no answer"))
    assert (type(read.error), str(read.error)) == (PeerLostError, "cut off; and reconnecting: no answer")


def test_what_a_read_does_not_hold_is_an_error() -> None:
    assert required(0) == 0
    with pytest.raises(RuntimeError, match="does not hold"):
        required(None)
