# SPDX-License-Identifier: Apache-2.0
"""A load from its order to its report, and the parts in which it is read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma._kvhma import Read, Transfer
from kvhma.errors import HandshakeError, KvhmaError, PeerLostError, TransferError
from kvhma.geometry import Span
from kvhma.nixl import TransferHandle
from kvhma.permute import PermutedRead
from kvhma.vllm.metadata import Load
from kvhma.vllm.worker.digests import LoadSums
from kvhma.vllm.worker.lease import LeaseQuestion
from kvhma.vllm.worker.prefill_engines import PrefillEngine

PART_BYTES = 64 << 20
"""What of one source is read by one transfer: after a lost connection the parts that had ended are not read again."""

_MAX_RESUMES = 2
"""How often lost parts of a load are read again."""


@dataclass(eq=False)
class ReadPart:
    """Rows that are read from one source by one transfer.

    Attributes:
        source: index of the source in the plan.
        local: rows to write, of shape (n, 3): address, length in bytes, device.
        remote: rows to read, the same.
        handle: of the transfer; None before it is posted, and after it was lost.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    handle: TransferHandle | None = None

    def is_same(self, other: ReadPart) -> bool:
        """Whether both read the same bytes of the same source to the same place."""
        pairs = ((self.local, other.local), (self.remote, other.remote))
        return self.source == other.source and all(np.array_equal(one, two) for one, two in pairs)


def parts_of(reads: Iterable[Read | PermutedRead], nbytes: int) -> list[ReadPart]:
    """Cut what a load reads, `nbytes` in all, into parts of :data:`PART_BYTES`; one row is never cut."""
    if nbytes <= PART_BYTES:  # nearly all
        return [ReadPart(read.source, read.local, read.remote) for read in reads]
    parts = []
    for read in reads:
        #   bytes before each row   0 .... 40 .... 70 .... 130 MiB     rows of a part begin within the same 64 MiB
        before = np.cumsum(read.local[:, 1]) - read.local[:, 1]
        cuts = np.flatnonzero(np.diff(before // np.uint64(PART_BYTES))) + 1
        parts += [
            ReadPart(read.source, local, remote)
            for local, remote in zip(np.split(read.local, cuts), np.split(read.remote, cuts), strict=True)
        ]
    return parts


@dataclass(eq=False)
class ActiveLoad:
    """A load from its order to its report. It belongs to one thread: who starts it, then the poller, which reports it.

    Attributes:
        load: what the scheduler ordered.
        ordered_at: when it did.
        after: what the device has to have done before anything is written to its blocks; None if nothing.
        launched: the same, and what was launched for it since; None if the device has done it.
        handshakes: how many it has waited for.
        lost: why its last lost part was; None if none was.
        resumes: how often lost parts were read again.
        engine: where the load reads, acquired for it; None before, and once it was released.
        transfer: what it reads and zeroes; None before it is planned.
        planned_at: when it was, and zeroing was begun.
        waits_for_device: whether the device had not zeroed by then.
        places: where it is read into, for each group; None before they are taken.
        permutes: what has to be put into order once it was read.
        permuted: whether that was begun.
        copied: whether it was begun to bring what was read from its places to its blocks.
        parts: what it reads, in the order in which it is posted; none before it is planned.
        posted_at: when the last one was.
        post_seconds: how long posting took.
        read_at: when the last read had ended; None until then.
        shown: whether P's board has shown that it held the blocks; None before that was looked at.
        question: to P, whether it held the blocks, and the place of this load in it; None before it is asked.
        sums: of what was read, if P makes digests; None before the reads have ended.
        error: the first one; the load fails once its reads have ended.
        reported: whether its result is known.
    """

    load: Load
    ordered_at: float
    after: torch.Event | None = None
    launched: torch.Event | None = None
    handshakes: int = 0
    lost: KvhmaError | None = None
    resumes: int = 0
    engine: PrefillEngine | None = None
    transfer: Transfer | None = None
    places: Sequence[Span] | None = None
    planned_at: float = 0.0
    waits_for_device: bool = False
    permutes: NDArray[np.uint64] | None = None
    permuted: bool = False
    copied: bool = False
    parts: list[ReadPart] = field(default_factory=list)
    posted_at: float = 0.0
    post_seconds: float = 0.0
    read_at: float | None = None
    shown: bool | None = None
    question: tuple[LeaseQuestion, int] | None = None
    sums: LoadSums | None = None
    error: BaseException | None = None
    reported: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether its parts can be posted."""
        return self.engine is not None and self.transfer is not None

    @property
    def wants_answer(self) -> bool:
        """Whether it has to be found out now if P held its blocks."""
        may_ask = not self.load.piece and not self.shown and (self.sums is None or self.sums.may_ask)
        return self.read_at is not None and self.question is None and self.error is None and may_ask

    @property
    def has_digest(self) -> bool:
        """Whether P sums what it holds."""
        return self.load.remote.content_seed is not None

    def is_device_done(self) -> bool:
        """Whether nothing is launched any more that writes to its blocks: only then they are read into, or given up."""
        if self.launched is not None:
            with errors_end(self):  # after an error of the device nothing runs there any more
                if not self.launched.query():
                    return False
            self.launched = None
        return True

    @property
    def has_read(self) -> bool:
        """Whether no read is in flight: every part that was posted has ended, or was lost."""
        return all(part.handle is None or part.handle.finished for part in self.parts)

    def poll(self) -> None:
        """Make progress with what is in flight. What is lost with its connection can be read again, but for a piece."""
        for part in self.parts:
            if part.handle is None or part.handle.finished:
                continue
            with self.losing(part):
                part.handle.poll()

    @contextlib.contextmanager
    def losing(self, part: ReadPart) -> Iterator[None]:
        """What is raised within ends this load, but for a lost connection: after that the part is read again."""
        with errors_end(self):
            try:
                yield
            except TransferError as error:
                part.handle, self.lost = None, error
                if self.load.piece or self.resumes == _MAX_RESUMES:
                    raise

    def check_same(self, parts: Sequence[ReadPart]) -> None:
        """Check that after a new handshake it would be read in the same parts, so that those that ended still count.

        Raises:
            PeerLostError: P's memory is another.
        """
        if len(parts) != len(self.parts) or not all(map(ReadPart.is_same, parts, self.parts)):
            raise PeerLostError(f"{self.lost}; P's caches lie elsewhere since")

    @property
    def may_resume(self) -> bool:
        """Whether nothing is in flight, and parts were lost that are to be read again."""
        is_posted = self.posted_at > 0 and self.error is None
        return is_posted and self.has_read and any(part.handle is None for part in self.parts)

    def fail(self, error: BaseException | None) -> None:
        """Take note of an error; the first one counts, which may be the lost connection that could not be had again."""
        if self.error is None:
            if self.lost is not None and isinstance(error, HandshakeError):
                error = PeerLostError(f"{self.lost}; and connecting again: {error}")
            self.error = error


@contextlib.contextmanager
def errors_end(*loads: ActiveLoad) -> Iterator[None]:
    """Whatever is raised within, a panic of Rust included, is the error of these loads and ends nothing else.

    But where the engine's thread starts a load, what a signal has raised in it ends the engine.
    """
    try:
        yield
    except BaseException as error:
        for active in loads:
            active.fail(error)
        if isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
