# SPDX-License-Identifier: Apache-2.0
"""A read: one command of the scheduler, and what is known of it. It belongs to one thread at a time.

:meth:`kvhma.vllm.reads.read_steps.ReadSteps.steps` leads it from its order to its report.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

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
    from kvhma.vllm.reads.read_parts import ReadPart

ResourceT = TypeVar("ResourceT")


class ReadState(enum.Enum):
    """What a read waits for."""

    QUEUED = "the pump looks up P's engine"
    CONNECTING = "a handshake with P"
    PLACING = "places to read into: the blocks themselves, or slots in host memory with `kv_buffer_device`"
    ZEROING = "the device has zeroed what no transfer fills"
    POSTING = "the transport has all transfers"
    READING = "the transfers have ended"
    PERMUTING = "the device has reordered what was read"
    CHECKING = "P's lease board, or that D may ask P"
    ASKED = "P's answer"
    COPYING = "the device has copied what was read to the blocks"
    INSPECTING = "options have done their parts"
    DRAINING = "nothing writes to its places any more"
    JUDGING = "options let it be reported"
    REPORTING = "its result is noted for the scheduler"
    REPORTED = "nothing"


@dataclass(eq=False)
class ActiveRead:
    """A command of the scheduler that is being carried out.

    Attributes:
        command: the scheduler's order.
        ordered_at: when the worker got it, on the monotonic clock, as all times here.
        after: device work that has to end before the blocks are written to; None without any.
        state: what it waits for.
        steps: the rest of its way; None before its first step.
        launched: device work that the state waits for; None without any.
        handshakes: number of handshakes that it has waited for.
        engine: the acquired engine that it reads from; None without one.
        places: where it reads into, for each group; None while it has none.
        transfer: what it reads and zeroes; None before it is planned.
        permutes: ranges to reorder after the transfers; None without any.
        parts: of the transfers, in the order in which they are posted; empty before it is planned.
        planned_at: when it was planned, and zeroing began.
        waits_for_device: whether the device was still zeroing after that.
        posted_at: when the last part was posted; 0 before.
        post_seconds: how long posting took.
        lost: error of the part that was lost last; None if no part was lost.
        resumes: how often lost parts were read again.
        read_at: when the last byte had arrived and was in order; 0 before.
        verified_by_board: whether P's board shows that P held the blocks; None before D has looked.
        question: to P, whether it held the blocks, and the index of this read in it; None while D does not ask.
        extras: what options note of it, by option.
        error: the first error; None without one.
        ended_at: when it was reported; 0 before.
    """

    command: ReadCommand
    ordered_at: float
    after: torch.Event | None = None
    state: ReadState = ReadState.QUEUED
    steps: Iterator[None] | None = None
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
    extras: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    ended_at: float = 0.0

    def fail(self, error: BaseException) -> None:
        """Note an error; the first error counts.

        If a handshake fails after a lost connection, P may have restarted. That is a `PeerLostError`, which is
        transient, and its text names both.
        """
        if self.error is None:
            if self.lost is not None and isinstance(error, HandshakeError):
                error = PeerLostError(f"{self.lost}; and reconnecting: {error}")
            self.error = error
        if self.state is not ReadState.REPORTING:  # nothing writes to its places any more
            self.state = ReadState.DRAINING

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
