# SPDX-License-Identifier: Apache-2.0
"""A load from its order to its report, and its parts."""

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
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.worker.digests import LoadSums
from kvhma.vllm.worker.lease import LeaseQuestion
from kvhma.vllm.worker.prefill_engines import PrefillEngine

PART_BYTES = 64 << 20
"""Most bytes of one source in one transfer. After a lost connection, completed parts are not read again."""

_MAX_RESUMES = 2
"""How often lost parts of a load are read again."""


@dataclass(eq=False)
class ReadPart:
    """Rows that one transfer reads from one source.

    Attributes:
        source: index of the source in the plan.
        local: rows to write, of shape (n, 3): address, length in bytes, device.
        remote: rows to read, of the same shape.
        handle: of the transfer; None before the part is posted, and after the transfer was lost.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    handle: TransferHandle | None = None

    def is_same(self, part: ReadPart) -> bool:
        """Whether both parts read the same bytes of the same source to the same place."""
        pairs = ((self.local, part.local), (self.remote, part.remote))
        return self.source == part.source and all(np.array_equal(own, compared) for own, compared in pairs)


def parts_of(reads: Iterable[Read | PermutedRead], nbytes: int) -> list[ReadPart]:
    """Cut the reads of a load, `nbytes` in all, into parts of :data:`PART_BYTES`. It never cuts a row."""
    if nbytes <= PART_BYTES:  # nearly every load
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
    """A load from its order to its report. It belongs to one thread: the thread that starts it, then the poller.

    Attributes:
        load: the scheduler's order.
        ordered_at: when the scheduler ordered it.
        after: device work that has to end before the blocks are written to; None without any.
        launched: `after`, and device work that was launched for the load since; None once it is done.
        handshakes: number of handshakes that it has waited for.
        lost: error of the part that was lost last; None if no part was lost.
        resumes: how often lost parts were read again.
        engine: the acquired engine that the load reads from; None before, and after its release.
        transfer: what it reads and zeroes; None before it is planned.
        planned_at: when it was planned, and zeroing began.
        waits_for_device: whether the device was still zeroing then.
        places: where it reads into, for each group; None before it has places.
        permutes: ranges to reorder after the read.
        permuted: whether reordering has begun.
        copied: whether copying from its places to its blocks has begun.
        parts: in the order in which they are posted; empty before the load is planned.
        posted_at: when the last part was posted.
        post_seconds: how long posting took.
        read_at: when the last read had ended; None until then.
        verified_by_board: whether P's board shows that P held the blocks; None before D has read it.
        question: to P, whether it held the blocks, and the index of this load in it; None before D asks.
        sums: content digests of the load, if P makes digests; None before the reads have ended.
        error: the first error. The load fails once its reads have ended.
        reported: whether its result was reported.
    """

    load: ReadCommand
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
    verified_by_board: bool | None = None
    question: tuple[LeaseQuestion, int] | None = None
    sums: LoadSums | None = None
    error: BaseException | None = None
    reported: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether its parts are ready to be posted."""
        return self.engine is not None and self.transfer is not None

    @property
    def wants_answer(self) -> bool:
        """Whether D has to ask P now if it held the blocks."""
        may_ask = not self.load.piece and not self.verified_by_board and (self.sums is None or self.sums.may_ask)
        return self.read_at is not None and self.question is None and self.error is None and may_ask

    @property
    def has_digest(self) -> bool:
        """Whether P makes a digest of its blocks."""
        return self.load.remote.content_seed is not None

    def is_device_done(self) -> bool:
        """Whether no launched work can write to its blocks. Only then D reads into the blocks or cancels the load."""
        if self.launched is not None:
            with errors_end(self):  # after a device error nothing runs there any more
                if not self.launched.query():
                    return False
            self.launched = None
        return True

    @property
    def has_read(self) -> bool:
        """Whether no read is in flight: every posted part has ended or was lost."""
        return all(part.handle is None or part.handle.finished for part in self.parts)

    def poll(self) -> None:
        """Poll the reads in flight. Parts that are lost with their connection can be read again, except of a piece."""
        for part in self.parts:
            if part.handle is None or part.handle.finished:
                continue
            with self.losing(part):
                part.handle.poll()

    @contextlib.contextmanager
    def losing(self, part: ReadPart) -> Iterator[None]:
        """An error raised within fails this load. After a lost connection the part is read again instead."""
        with errors_end(self):
            try:
                yield
            except TransferError as error:
                part.handle, self.lost = None, error
                if self.load.piece or self.resumes == _MAX_RESUMES:
                    raise

    def check_same(self, parts: Sequence[ReadPart]) -> None:
        """Check that the load has the same parts after a new handshake, so that completed parts still count.

        Raises:
            PeerLostError: P's memory is at other addresses.
        """
        if len(parts) != len(self.parts) or not all(map(ReadPart.is_same, parts, self.parts)):
            raise PeerLostError(f"{self.lost}; P's caches are at other addresses since")

    @property
    def may_resume(self) -> bool:
        """Whether nothing is in flight, and lost parts are to be read again."""
        is_posted = self.posted_at > 0 and self.error is None
        return is_posted and self.has_read and any(part.handle is None for part in self.parts)

    def fail(self, error: BaseException | None) -> None:
        """Note an error; the first error counts. If a handshake fails after a lost connection, the text names both."""
        if self.error is None:
            if self.lost is not None and isinstance(error, HandshakeError):
                error = PeerLostError(f"{self.lost}; and reconnecting: {error}")
            self.error = error


@contextlib.contextmanager
def errors_end(*loads: ActiveLoad) -> Iterator[None]:
    """Any error raised within, a panic of Rust included, fails these loads and ends nothing else.

    But a signal in the engine's thread, while it starts a load, ends the engine.
    """
    try:
        yield
    except BaseException as error:
        for active in loads:
            active.fail(error)
        if isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
