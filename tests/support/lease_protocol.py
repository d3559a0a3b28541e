# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of one handed-over request, two readers and a prefill engine, around P's real table of leases.

P's side is :class:`LeaseTable` itself, with a clock of whole ticks. D's side is what the protocol allows a reader: it
renews whenever it likes, reads in two halves, asks whether P still holds the blocks, and releases. Each question and
each answer may arrive, be lost, or arrive after its sender has given it up. P may free blocks the moment the table
lets it, which is when an adversary overwrites them; it may restart once, with an empty table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

LEASE = 3
"""Ticks of P's lease; a tick is a second of the table's clock."""

HORIZON = 8
"""Ticks that are explored: two leases, and the table's grace for late readers."""

DIGEST = bytes(16)


class Clock:
    """What the table calls ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Phase(Enum):
    """How far a reader is."""

    WANTED = 0
    HALF_READ = 1
    READ = 2
    ACCEPTED = 3
    FAILED = 4


class Asked(Enum):
    """Where the question after the read is."""

    NOT = 0
    AT_P = 1
    HELD = 2
    """Answered so, and the answer is on its way."""
    REFUSED = 3


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        phase: how far it is.
        right: whether every half that it read was the handed-over content.
        asked: its question after the read.
        renewing: whether a renewal of it is on its way; one may arrive after the release.
        releasing: its release, while that is on its way.
    """

    phase: Phase = Phase.WANTED
    right: bool = True
    asked: Asked = Asked.NOT
    renewing: bool = False
    releasing: Outcome | None = None


@dataclass(frozen=True)
class Rules:
    """The protocol, or one that is wrong in one place, to see that the exploration finds it.

    Attributes:
        ask_after_read: whether the question is asked after the last byte was read; else a reader may ask before it
            reads and trust the answer.
        free_after_end: whether P frees blocks only once the table says that the request has left it.
    """

    ask_after_read: bool = True
    free_after_end: bool = True


@dataclass(frozen=True)
class World:
    """All there is.

    Attributes:
        now: P's clock, in ticks.
        table: P's leases.
        key: under which the request was handed over.
        good: whether the blocks still have the handed-over content.
        restarted: whether P is another one by now.
        readers: both.
        path: how the world came to be.
    """

    now: int
    table: Any
    key: LeaseKey
    good: bool = True
    restarted: bool = False
    readers: tuple[Reader, Reader] = (Reader(), Reader())
    path: tuple[str, ...] = field(default=(), compare=False)

    def signature(self) -> tuple[Any, ...]:
        """What distinguishes worlds; the path does not."""
        return self.now, repr(vars(self.table)["_held"]), self.good, self.restarted, self.readers


class Explorer:
    """Visits every world that the rules allow, each once."""

    def __init__(self, rules: Rules, clock: Clock, new_table: Callable[[], Any], hand_over: Callable[[Any], LeaseKey]):
        self.rules = rules
        self.visited = 0
        self._clock = clock
        self._new_table = new_table
        self._hand_over = hand_over

    def explore(self) -> Iterator[World]:
        """Yield every world."""
        self._clock.now = 0
        table = self._new_table()
        first = World(0, table, self._hand_over(table))
        seen, waiting = {first.signature()}, [first]
        while waiting:
            world = waiting.pop()
            self.visited += 1
            yield world
            for following in self._steps(world):
                signature = following.signature()
                if signature not in seen:
                    seen.add(signature)
                    waiting.append(following)

    def frees_at_last(self, world: World) -> bool:
        """Return whether P has no request left once it hears of nobody for a lease and the table's grace."""
        table = self._clone(world.table)
        self._clock.now = world.now + LEASE + 2
        table.drain_ended()
        return len(table) == 0

    def _clone(self, table: Any) -> Any:
        twin = copy.copy(table)
        for name, value in vars(table).items():
            if isinstance(value, (dict, list, set)):
                setattr(twin, name, copy.deepcopy(value))
        return twin

    def _steps(self, world: World) -> Iterator[World]:
        if world.now < HORIZON:
            yield self._do(world, "tick", now=world.now + 1)
        yield from self._free(world)
        if not world.restarted:
            yield self._restart(world)
        for index, reader in enumerate(world.readers):
            for what, following in self._reader_steps(world, reader, index):
                yield replace(following, path=(*world.path, f"reader {index}: {what}"))

    def _do(self, world: World, what: str, **changes: Any) -> World:
        return replace(world, path=(*world.path, what), **changes)

    def _free(self, world: World) -> Iterator[World]:
        """P's scheduler asks which requests have ended, and frees them; the adversary overwrites their blocks."""
        table = self._clone(world.table)
        self._clock.now = world.now
        ended = [name for names in table.drain_ended() for name in names]
        if ended:
            yield self._do(world, "P frees", table=table, good=False)
        elif world.good and not self.rules.free_after_end:
            yield self._do(world, "P frees too early", good=False)

    def _restart(self, world: World) -> World:
        """P starts anew with other content in the blocks, and hands over a request of the same name."""
        self._clock.now = world.now
        table = self._new_table()
        self._hand_over(table)
        return self._do(world, "P restarts", table=table, good=False, restarted=True)

    def _reader_steps(self, world: World, reader: Reader, index: int) -> Iterator[tuple[str, World]]:
        def with_reader(table: Any = None, **changes: Any) -> World:
            readers = list(world.readers)
            readers[index] = replace(reader, **changes)
            return replace(world, readers=tuple(readers), table=world.table if table is None else table)

        ended = reader.phase in (Phase.ACCEPTED, Phase.FAILED)
        if not ended and not reader.renewing:
            yield "sends a renewal", with_reader(renewing=True)
        if reader.renewing:
            table = self._clone(world.table)
            self._renew(world, table, index)
            yield "renewal arrives", with_reader(table, renewing=False)
            yield "renewal is lost", with_reader(renewing=False)
        if reader.releasing is not None:
            table = self._clone(world.table)
            self._clock.now = world.now
            table.release([self._claim(world, index)], reader.releasing)
            yield "release arrives", with_reader(table, releasing=None)
            yield "release is lost", with_reader(releasing=None)
        if reader.phase in (Phase.WANTED, Phase.HALF_READ):
            after = Phase.HALF_READ if reader.phase is Phase.WANTED else Phase.READ
            yield "reads a half", with_reader(phase=after, right=reader.right and world.good)
        may_ask = reader.phase is Phase.READ or (not self.rules.ask_after_read and reader.phase is Phase.WANTED)
        if may_ask and reader.asked is Asked.NOT:
            yield "asks", with_reader(asked=Asked.AT_P)
        if reader.asked is Asked.AT_P:
            table = self._clone(world.table)
            held = self._renew(world, table, index) is LeaseState.HELD
            yield "P answers", with_reader(table, asked=Asked.HELD if held else Asked.REFUSED)
            if reader.phase is Phase.READ:
                yield "hears nothing", with_reader(phase=Phase.FAILED, asked=Asked.NOT, releasing=Outcome.UNREAD)
        if reader.phase is Phase.READ and reader.asked is Asked.HELD:
            for outcome in (Outcome.READ, Outcome.READ_SHARED):
                yield "accepts", with_reader(phase=Phase.ACCEPTED, asked=Asked.NOT, releasing=outcome)
        if reader.phase is Phase.READ and reader.asked in (Asked.HELD, Asked.REFUSED):
            # An answer may be lost; a reader that was refused computes the prompt itself or fails.
            for outcome in (Outcome.READ, Outcome.UNREAD):
                yield "gives up", with_reader(phase=Phase.FAILED, asked=Asked.NOT, releasing=outcome)

    def _claim(self, world: World, index: int) -> LeaseClaim:
        return LeaseClaim(world.key, index + 1, DIGEST)

    def _renew(self, world: World, table: Any, index: int) -> LeaseState:
        self._clock.now = world.now
        (state,) = table.renew([self._claim(world, index)])
        return state
