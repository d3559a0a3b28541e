# SPDX-License-Identifier: Apache-2.0
"""The state machine of a read: one command of the scheduler, from its order to its report.

`TABLE` has all states and all that changes them: a state and an event give the next state and the effects.
:class:`kvhma.vllm.reads.read_steps.ReadSteps` finds the events and carries out the effects. Nothing here does I/O. A
read belongs to one thread at a time.

The usual way is::

    QUEUED -- known --> PLACING -- places --> ZEROING -- zeroed --> POSTING -- posted --> READING -- read -->
    PERMUTING -- permuted --> CHECKING -- on board --> COPYING -- copied --> REPORTING -- reported --> REPORTED

An unknown P needs a handshake first (CONNECTING). If P's lease board does not show that P held the blocks, D asks P
(ASKED). If P makes content digests, D waits for both of them (SUMMING). A part that is lost with its connection is
read again: the read is QUEUED a second time.

An error leads to DRAINING from anywhere. There the read waits until nothing writes to its blocks any more, because vLLM
gives them to another request as soon as the read is reported.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvhma.errors import HandshakeError, KvhmaError, PeerLostError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvhma._kvhma import Transfer
    from kvhma.geometry import Span
    from kvhma.vllm.metadata import ReadCommand
    from kvhma.vllm.peers.lease_question import LeaseQuestion
    from kvhma.vllm.peers.prefill_engines import PrefillEngine
    from kvhma.vllm.reads.digests import LoadSums
    from kvhma.vllm.reads.read_parts import ReadPart

ResourceT = TypeVar("ResourceT")


class ReadState(enum.Enum):
    """What a read waits for."""

    __hash__ = object.__hash__  # `TABLE` is asked at each move: Enum's own would hash the name, in Python

    QUEUED = "the pump looks up P's engine"
    CONNECTING = "a handshake with P"
    PLACING = "places to read into: the blocks themselves, or slots in host memory with `kv_buffer_device`"
    ZEROING = "the device has zeroed what no transfer fills"
    POSTING = "the transport has all transfers"
    READING = "the transfers have ended"
    PERMUTING = "the device has reordered what was read"
    CHECKING = "P's lease board, or that D may ask P"
    ASKED = "P's answer"
    SUMMING = "the digest of what was read"
    COPYING = "the device has copied what was read to the blocks"
    DRAINING = "nothing writes to its places any more"
    REPORTING = "its result is noted for the scheduler"
    REPORTED = "nothing"


class ReadEvent(enum.Enum):
    """What happens to a read."""

    __hash__ = object.__hash__  # `TABLE` is asked at each move: Enum's own would hash the name, in Python

    KNOWN = "P's engine is known, and the read has acquired it"
    KNOWN_AGAIN = "the same, after lost parts"
    HANDSHAKE = "P's engine is unknown: a handshake has begun"
    HANDSHAKE_ENDED = "the handshake has ended"
    PLACES = "it has places to read into"
    ZEROED = "the device does not write there any more"
    POSTED = "all transfers are posted"
    LOST = "nothing is in flight, and the transfers of some parts have failed"
    READ = "all parts are read"
    PERMUTED = "they are in order"
    PIECE = "it is a piece, of which D asks P nothing"
    ON_BOARD = "P's lease board shows that P held the blocks"
    QUESTION = "D has asked P"
    HELD = "P has answered that it held the blocks"
    NO_DIGEST = "P held the blocks, and has no digest of them yet"
    DIGEST = "P held the blocks, and has sent its digest"
    SUMMED = "D has its own digest too"
    COPIED = "the blocks are filled"
    DRAINED = "nothing is in flight"
    REPORTED = "the result is noted"
    FAILED = "an error, or one more"


class ReadEffect(enum.Enum):
    """What is done about an event."""

    PLAN = "plan the transfers, and begin to zero what none of them fills"
    COMPARE = "check that P's caches are where they were: parts that were read before still count"
    LEAVE_ENGINE = "release P's engine, and count the lost parts"
    PERMUTE = "begin to reorder"
    NOTE_READ = "note when the last byte arrived"
    SUM = "begin the digest, if P makes one too"
    COPY = "begin to copy to the blocks, if it was read to other places"
    SAVE_CASE = "write a case file, if `case_folder` is set"
    CLEAN_UP = "release P's engine, the question, the digest and the places"


_S, _E, _F = ReadState, ReadEvent, ReadEffect

TABLE: Mapping[tuple[ReadState, ReadEvent], tuple[ReadState, tuple[ReadEffect, ...]]] = {
    (_S.QUEUED, _E.KNOWN): (_S.PLACING, ()),
    (_S.QUEUED, _E.KNOWN_AGAIN): (_S.POSTING, (_F.COMPARE,)),
    (_S.QUEUED, _E.HANDSHAKE): (_S.CONNECTING, ()),
    (_S.CONNECTING, _E.HANDSHAKE_ENDED): (_S.QUEUED, ()),
    (_S.PLACING, _E.PLACES): (_S.ZEROING, (_F.PLAN,)),
    (_S.ZEROING, _E.ZEROED): (_S.POSTING, ()),
    (_S.POSTING, _E.POSTED): (_S.READING, ()),
    (_S.READING, _E.LOST): (_S.QUEUED, (_F.LEAVE_ENGINE,)),
    (_S.READING, _E.READ): (_S.PERMUTING, (_F.PERMUTE,)),
    (_S.PERMUTING, _E.PERMUTED): (_S.CHECKING, (_F.NOTE_READ, _F.SUM)),
    (_S.CHECKING, _E.PIECE): (_S.COPYING, (_F.COPY,)),
    (_S.CHECKING, _E.ON_BOARD): (_S.COPYING, (_F.COPY,)),
    (_S.CHECKING, _E.QUESTION): (_S.ASKED, ()),
    (_S.ASKED, _E.HELD): (_S.COPYING, (_F.COPY,)),
    (_S.ASKED, _E.NO_DIGEST): (_S.CHECKING, ()),
    (_S.ASKED, _E.DIGEST): (_S.SUMMING, ()),
    (_S.SUMMING, _E.SUMMED): (_S.COPYING, (_F.COPY,)),
    (_S.COPYING, _E.COPIED): (_S.REPORTING, (_F.CLEAN_UP,)),
    **{(state, _E.FAILED): (_S.DRAINING, ()) for state in _S if state not in (_S.REPORTING, _S.REPORTED)},
    (_S.DRAINING, _E.DRAINED): (_S.REPORTING, (_F.SAVE_CASE, _F.CLEAN_UP)),
    (_S.REPORTING, _E.FAILED): (_S.REPORTING, ()),
    (_S.REPORTING, _E.REPORTED): (_S.REPORTED, ()),
}
"""The next state, and what is done, for each event that a state can meet."""


@dataclass(eq=False)
class ActiveRead:
    """A command of the scheduler that is being carried out.

    Attributes:
        command: the scheduler's order.
        ordered_at: when the worker got it, on the monotonic clock, as all times here.
        after: device work that has to end before the blocks are written to; None without any.
        state: see `TABLE`; only :meth:`apply` changes it.
        launched: device work that the state waits for; None without any.
        handshakes: number of handshakes that it has waited for.
        engine: the acquired engine that it reads from; None without one.
        places: where it reads into, for each group; None while it has none.
        transfer: what it reads and zeroes; None before PLAN.
        permutes: ranges to reorder after the transfers; None without any.
        parts: of the transfers, in the order in which they are posted; empty before PLAN.
        planned_at: when it was planned, and zeroing began.
        waits_for_device: whether the device was still zeroing after that.
        posted_at: when the last part was posted; 0 before.
        post_seconds: how long posting took.
        lost: error of the part that was lost last; None if no part was lost.
        resumes: how often lost parts were read again.
        read_at: when the last byte had arrived and was in order; 0 before.
        verified_by_board: whether P's board shows that P held the blocks; None before D has looked.
        question: to P, whether it held the blocks, and the index of this read in it; None while D does not ask.
        sums: content digests of the read, if P makes digests; None before the transfers have ended.
        error: the first error; None without one.
        ended_at: when it was reported; 0 before.
    """

    command: ReadCommand
    ordered_at: float
    after: torch.Event | None = None
    state: ReadState = ReadState.QUEUED
    launched: torch.Event | None = None
    handshakes: int = 0
    engine: PrefillEngine | None = None
    places: Sequence[Span] | None = None
    transfer: Transfer | None = None
    permutes: NDArray[np.uint64] | None = None
    parts: list[ReadPart] = field(default_factory=list)
    planned_at: float = 0.0
    waits_for_device: bool = False
    posted_at: float = 0.0
    post_seconds: float = 0.0
    lost: KvhmaError | None = None
    resumes: int = 0
    read_at: float = 0.0
    verified_by_board: bool | None = None
    question: tuple[LeaseQuestion, int] | None = None
    sums: LoadSums | None = None
    error: BaseException | None = None
    ended_at: float = 0.0

    def apply(self, event: ReadEvent) -> tuple[ReadEffect, ...]:
        """Move on, and return what has to be done about it.

        Raises:
            KeyError: the table has no such event in this state, which is an error of the caller's.
        """
        self.state, effects = TABLE[self.state, event]
        return effects

    def fail(self, error: BaseException) -> None:
        """Note an error; the first error counts.

        If a handshake fails after a lost connection, P may have restarted. That is a `PeerLostError`, which is
        transient, and its text names both.
        """
        if self.error is None:
            if self.lost is not None and isinstance(error, HandshakeError):
                error = PeerLostError(f"{self.lost}; and reconnecting: {error}")
            self.error = error
        self.apply(ReadEvent.FAILED)

    @property
    def has_digest(self) -> bool:
        """Whether P makes a digest of its blocks."""
        return self.command.remote.content_seed is not None

    @property
    def in_flight(self) -> list[ReadPart]:
        """Its parts whose transfers have not ended."""
        return [part for part in self.parts if part.in_flight]


def required(resource: ResourceT | None) -> ResourceT:
    """Return what a read holds in its state.

    Raises:
        RuntimeError: it does not hold it, which is an error of this package.
    """
    if resource is None:
        raise RuntimeError("a read does not hold what its state says")
    return resource
