# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of one request, two readers and a prefill engine, around P's real table of leases.

P's side is :class:`LeaseTable` itself, with a clock of whole ticks. D's side is what the protocol allows a reader. It
renews at any time, reads in two halves, asks whether P still holds the blocks, and releases. Each question and each
answer may arrive, be lost, or arrive after its sender has stopped waiting for it. P may free blocks as soon as the
table allows it, and an adversary overwrites them then. P may restart once, with an empty table.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from kvhma.vllm.holds.lease_table import LATE_READER_SECONDS, OVERDUE_SECONDS, LeaseTable
from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey
from support.leases import Clock
from support.tries import TICKS

LEASE = 2
"""Ticks of P's lease; a tick is a second of the table's clock."""

DIGEST = bytes(16)

ResultT = TypeVar("ResultT")


class Phase(Enum):
    """How far a reader is."""

    WANTED = 0
    HALF_READ = 1
    READ = 2
    ACCEPTED = 3
    FAILED = 4


class Asked(Enum):
    """Where the question "does P still hold the blocks" is."""

    NOT = 0
    AT_P = 1
    HELD = 2
    """P has confirmed it, and the answer is on its way."""
    FINISHED = 4
    """The same, and P has released the claim by the same question."""
    REFUSED = 3


class Reader(NamedTuple):
    """A reader.

    Attributes:
        phase: how far it is.
        right: whether all that it read was the content that P computed for it.
        asked: its question.
        renewing: whether a renewal of it is on its way; one may arrive after the release.
        releasing: its release, while that is on its way.
    """

    phase: Phase = Phase.WANTED
    right: bool = True
    asked: Asked = Asked.NOT
    renewing: bool = False
    releasing: Outcome | None = None


class World(NamedTuple):
    """The state of the model.

    Attributes:
        now: P's clock, in ticks.
        table: P's leases, by the number that the explorer gave this state of them.
        good: whether the blocks still have the content that P computed.
        restarted: whether P has restarted.
        readers: both.
    """

    now: int
    table: int
    good: bool
    restarted: bool
    readers: tuple[Reader, ...]


@dataclass(frozen=True)
class Rules:
    """The protocol, or a variant with one defect, which the exploration must find.

    Attributes:
        ask_after_read: whether the question is asked after the last byte was read; else a reader may ask before it
            reads, and trust the answer.
        free_after_end: whether P frees blocks only once the table says that the request has left it.
    """

    ask_after_read: bool = True
    free_after_end: bool = True


class Explorer:
    """Visits every world that the rules allow, each exactly once."""

    def __init__(
        self,
        rules: Rules,
        clock: Clock,
        new_table: Callable[[], LeaseTable],
        hand_over: Callable[[LeaseTable], LeaseKey],
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._came_from: dict[World, tuple[World, str] | None] = {}
        self._tables: list[LeaseTable] = []
        self._numbers: dict[str, int] = {}
        self._results: dict[tuple[object, ...], tuple[int, object]] = {}
        clock.now = 0
        table, restarted = new_table(), new_table()
        self._key = hand_over(table)
        hand_over(restarted)
        self._first, self._restarted = self._number(table), self._number(restarted)

    def explore(self) -> Iterator[World]:
        """Yield every world, those that few steps lead to first."""
        first = World(0, self._first, True, False, (Reader(), Reader()))
        self._came_from[first] = None
        waiting = deque([first])
        while waiting:
            world = waiting.popleft()
            yield world
            for what, following in self._steps(world):
                if following not in self._came_from:
                    self._came_from[following] = (world, what)
                    waiting.append(following)

    def path(self, world: World) -> list[str]:
        """Return the steps that lead to a world."""
        steps = []
        while (step := self._came_from[world]) is not None:
            world, what = step
            steps.append(f"{world.now}: {what}")
        return steps[::-1]

    def frees_at_last(self, world: World) -> bool:
        """Return whether P has no request left after a lease and the table's graces without any message."""

        def silence(table: LeaseTable) -> bool:
            for seconds in (LEASE + LATE_READER_SECONDS, OVERDUE_SECONDS):
                self._clock.now += seconds
                table.drain_ended()
            return table.usage().requests == 0

        return self._at_p(world, silence, "silence")[1]

    # --- P's table: each of its states once, and each of its answers once ----------------------------------

    def _number(self, table: LeaseTable) -> int:
        state = repr((vars(table)["_held"], table.ended))
        number = self._numbers.setdefault(state, len(self._tables))
        if number == len(self._tables):
            self._tables.append(table)
        return number

    def _at_p(self, world: World, do: Callable[[LeaseTable], ResultT], *what: object) -> tuple[int, ResultT]:
        """Return the table after something, named by `what`, was done to it, and what it answered."""
        known = (world.table, world.now, *what)
        if known not in self._results:
            table = self._tables[world.table]
            lock = vars(table)["_lock"]
            table = copy.deepcopy(table, {id(lock): lock})
            self._clock.now = world.now
            answer = do(table)
            self._results[known] = (self._number(table), answer)
        return self._results[known]  # type: ignore[return-value]

    def _claim(self, index: int) -> LeaseClaim:
        return LeaseClaim(self._key, index + 1, DIGEST)

    def _renew(self, world: World, index: int) -> tuple[int, bool]:
        return self._at_p(world, lambda at: at.renew([self._claim(index)]) == [LeaseState.HELD], "renew", index)

    def _finish(self, world: World, index: int, outcome: Outcome) -> tuple[int, bool]:
        def finish(at: LeaseTable) -> bool:
            return at.check_and_release([self._claim(index)], [outcome]) == [LeaseState.HELD]

        return self._at_p(world, finish, "finish", index, outcome)

    def _release(self, world: World, index: int, outcome: Outcome) -> int:
        return self._at_p(world, lambda at: at.release([self._claim(index)], outcome), "release", index, outcome)[0]

    # --- what may happen next ------------------------------------------------------------------------------

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.now < TICKS:
            yield "a tick", world._replace(now=world.now + 1)
        # P's scheduler asks which requests have ended, and frees them; the adversary overwrites their blocks.
        table, ended = self._at_p(world, lambda at: any(at.drain_ended().values()), "drain")
        yield "P looks for what has ended", world._replace(table=table, good=world.good and not ended)
        if not self._rules.free_after_end:
            yield "P frees too early", world._replace(good=False)
        if not world.restarted:
            # It has other content in the blocks, and offers a request of the same name.
            yield "P restarts", world._replace(table=self._restarted, good=False, restarted=True)
        for index, reader in enumerate(world.readers):
            for what, table, following in (*self._read(world, reader, index), *self._tell(world, reader, index)):
                readers = (following, world.readers[1]) if index == 0 else (world.readers[0], following)
                yield f"reader {index} {what}", world._replace(table=table, readers=readers)

    def _read(self, world: World, reader: Reader, index: int) -> Iterator[tuple[str, int, Reader]]:
        """The reader's next steps: read, ask, conclude."""
        table = world.table
        if reader.phase in (Phase.WANTED, Phase.HALF_READ):
            after = Phase.HALF_READ if reader.phase is Phase.WANTED else Phase.READ
            yield "reads a half", table, reader._replace(phase=after, right=reader.right and world.good)
        early = reader.phase is Phase.WANTED and not self._rules.ask_after_read
        if reader.asked is Asked.NOT and (reader.phase is Phase.READ or early):
            yield "asks", table, reader._replace(asked=Asked.AT_P)
        if reader.asked is Asked.AT_P:
            asked, held = self._renew(world, index)
            yield "is answered", asked, reader._replace(asked=Asked.HELD if held else Asked.REFUSED)
            for outcome in (Outcome.READ, Outcome.READ_SHARED) if reader.phase is Phase.READ else ():
                asked, held = self._finish(world, index, outcome)
                state = Asked.FINISHED if held else Asked.REFUSED
                yield f"is answered and released, {outcome.value}", asked, reader._replace(asked=state)
        if reader.phase is Phase.READ and reader.asked is Asked.HELD:
            for outcome in (Outcome.READ, Outcome.READ_SHARED):
                yield "accepts", table, Reader(Phase.ACCEPTED, reader.right, Asked.NOT, reader.renewing, outcome)
        if reader.phase is Phase.READ and reader.asked is Asked.FINISHED:
            yield "accepts", table, Reader(Phase.ACCEPTED, reader.right, Asked.NOT, reader.renewing)
        if reader.phase is Phase.READ and reader.asked is not Asked.NOT:
            # P refused it, or its question or the answer is lost: it computes the prompt itself, or fails.
            for outcome in (Outcome.READ, Outcome.UNREAD):
                yield "fails", table, Reader(Phase.FAILED, True, Asked.NOT, reader.renewing, outcome)

    def _tell(self, world: World, reader: Reader, index: int) -> Iterator[tuple[str, int, Reader]]:
        """The messages of a reader's scheduler to P meanwhile."""
        if reader.renewing:
            renewed, _ = self._renew(world, index)
            yield "renews its claim", renewed, reader._replace(renewing=False)
            yield "loses a renewal", world.table, reader._replace(renewing=False)
        elif reader.phase not in (Phase.ACCEPTED, Phase.FAILED):
            yield "sends a renewal", world.table, reader._replace(renewing=True)
        if reader.releasing is not None:
            released = self._release(world, index, reader.releasing)
            yield "releases its claim", released, reader._replace(releasing=None)
            yield "loses a release", world.table, reader._replace(releasing=None)
