# SPDX-License-Identifier: Apache-2.0
"""The way of a read from its order to its report, from top to bottom: each wait is a `yield`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Read, Transfer
from kvhma.errors import PeerLostError, RequestError, TransferError
from kvhma.geometry import Geometry, Span
from kvhma.nixl import Peer
from kvhma.permute import PermutedRead, permuted_reads
from kvhma.vllm.device.memory import DeviceMemory, Memory
from kvhma.vllm.failures import failure_of
from kvhma.vllm.peers.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.active_read import ActiveRead, ReadState, required
from kvhma.vllm.reads.read_parts import ReadPart, TransferInFlight, parts_of
from kvhma.vllm.reads.results import LoadResults

logger = logging.getLogger("vllm.kvhma")

_MAX_RESUMES = 2
"""How often lost parts of a read are read again."""

_POST_SECONDS = 5e-3
"""How long a read posts before others get their turn. A transport may copy the bytes of a part within its post."""

_PERMUTE_BYTES = 1 << 20
"""How many bytes a device permutes to save a descriptor: it takes microseconds for them. A CPU copies them twice."""


class ReadSteps:
    """Takes reads from their order to their report."""

    def __init__(
        self,
        context: WorkerContext,
        memory: Memory,
        engines: PrefillEngines,
        results: LoadResults,
    ) -> None:
        """Own nothing of this: the memory that reads write to, the engines, and where reads are reported."""
        self._context = context
        self._memory = memory
        self._engines = engines
        self._results = results
        self._permute = memory.permute if isinstance(memory, DeviceMemory) and not memory.device.is_host else None

    def advance(self, read: ActiveRead) -> None:
        """Take a read as far as it comes without waiting, and without looking for its engine."""
        if read.steps is None:
            read.steps = self.steps(read)
        next(read.steps, None)
        if read.state is ReadState.REPORTING:
            # If even the report of a failure fails, the thread has to log it, and to try again.
            with errors_fail(read) if read.error is None else contextlib.nullcontext():
                self._report(read)

    def steps(self, read: ActiveRead) -> Iterator[None]:
        """Read, until only the report is missing.

        An error ends the read at its next wait. Then nothing may write to its blocks any more, because vLLM gives them
        to another request as soon as the read is reported.
        """
        with errors_fail(read):
            yield from self._read(read)
        while read.error is not None:
            with errors_fail(read):
                if _is_drained(read):
                    break
            yield
        read.state = ReadState.REPORTING
        with errors_fail(read):
            if read.error is not None and read.engine is not None:
                self._results.cases.save_failed_load(read.command, read.engine.plan, read.places)
        with errors_fail(read):
            self._clean_up(read)
        with errors_fail(read):
            for judge in self._context.rooms.judge if read.error is None else ():
                yield from judge(read)
        read.state = ReadState.REPORTING

    def _read(self, read: ActiveRead) -> Iterator[None]:
        """Read, prove that P held the blocks while they were read, and fill D's."""
        yield from wait_in(read, ReadState.QUEUED, _has_engine)
        yield from wait_in(read, ReadState.PLACING, self._take_places)
        self._plan(read)
        yield from wait_in(read, ReadState.ZEROING, _device_ended)
        self._count_zeroing(read)
        while True:
            yield from wait_in(read, ReadState.POSTING, self._post)
            yield from wait_in(read, ReadState.READING, _transfers_ended)
            if not any(part.is_lost for part in read.parts):
                break
            self._leave_engine(read)
            yield from wait_in(read, ReadState.QUEUED, _has_engine)
            self._compare(read)
        if read.permutes is not None:
            read.launched = required(self._permute)(read.permutes)
        yield from wait_in(read, ReadState.PERMUTING, _device_ended)
        read.read_at = time.monotonic()
        self._results.note_load_read()
        if not read.command.piece:  # the last piece proves all of them
            yield from _prove(read)
        read.launched = self._memory.copy_in(required(read.places), read.command.spans, read.after)
        yield from wait_in(read, ReadState.COPYING, _device_ended)
        for inspect in self._context.rooms.inspect:
            yield from inspect(read)

    def _take_places(self, read: ActiveRead) -> bool:
        read.places = self._memory.take_places(read.command.spans)
        return read.places is not None

    def _count_zeroing(self, read: ActiveRead) -> None:
        if not self._memory.device.is_host:
            self._results.stats.record(zero_seconds=time.monotonic() - read.planned_at)
            self._results.stats.count("delayed_posts", read.waits_for_device)

    def _post(self, read: ActiveRead) -> bool:
        """Post for a moment; return whether all is posted."""
        read.posted_at = started = time.monotonic()
        unposted = [part for part in read.parts if part.handle is None and not part.is_lost]
        while unposted and read.error is None and read.posted_at - started <= _POST_SECONDS:
            part = unposted.pop(0)
            with _losing(read, part):
                part.handle = self._handle(required(read.engine), part)
            read.posted_at = time.monotonic()
        read.post_seconds += read.posted_at - started
        return not unposted

    def _report(self, read: ActiveRead) -> None:
        name, results = read.command.request_id, self._results
        read.ended_at = time.monotonic()
        if read.command.piece:
            results.end_piece(name, read.error)
        elif read.error is not None:
            results.fail_load(name, failure_of(read.error))
        else:
            first_tokens = first_filled_tokens(
                self._context.geometry, read.command.spans, required(read.transfer).first_tokens
            )
            results.succeed_load(name, first_tokens, verified_by_board=bool(read.verified_by_board))
        read.state = ReadState.REPORTED

    def _plan(self, read: ActiveRead) -> None:
        read.transfer, read.parts, read.permutes = self._planned(read)
        read.planned_at = time.monotonic()
        read.launched = self._memory.zero(read.transfer.zero, read.after)
        read.waits_for_device = not _device_ended(read)

    def _planned(self, read: ActiveRead) -> tuple[Transfer, list[ReadPart], NDArray[np.uint64] | None]:
        """Return what to read and zero, the parts, and the ranges to reorder afterwards."""
        engine, command = required(read.engine), read.command
        transfer = engine.plan.transfer(command.num_tokens, list(required(read.places)), list(command.remote.spans))
        reads: Sequence[Read | PermutedRead] = transfer.reads
        permutes: list[NDArray[np.uint64]] = []
        # A row that an option copies costs less than its permutation.
        if self._permute is not None and not any(map(self._reader, filter(None, engine.peers))):
            remote = [None if peer is None else peer.geometry for peer in engine.peers]
            permuted = permuted_reads(transfer, self._context.geometry, remote, _PERMUTE_BYTES)
            reads, permutes = permuted, [of_read.permutes for of_read in permuted if len(of_read.permutes)]
        return transfer, parts_of(reads, transfer.bytes), np.concatenate(permutes) if permutes else None

    def _reader(self, peer: Peer) -> Callable[[ReadPart], TransferInFlight] | None:
        return next(filter(None, (reader(peer) for reader in self._context.rooms.reader)), None)

    def _handle(self, engine: PrefillEngine, part: ReadPart) -> TransferInFlight:
        peer = engine.peers[part.source]
        if peer is None:
            raise RequestError(f"source {part.source} is not connected")
        if (by_option := self._reader(peer)) is not None:
            return by_option(part)
        return self._context.agent.read(
            peer,
            part.local,
            part.remote,
            local_memory=self._memory.kind,
            remote_memory=peer.geometry.regions[0].memory,
        )

    def _compare(self, read: ActiveRead) -> None:
        """Have lost parts read again. What was read before still counts, if P's caches are where they were."""
        _, parts, _ = self._planned(read)
        if len(parts) != len(read.parts) or not all(map(ReadPart.is_same, parts, read.parts)):
            raise PeerLostError(f"{read.lost}; P's caches are at other addresses since")
        for part in read.parts:
            part.is_lost = False

    def _leave_engine(self, read: ActiveRead) -> None:
        """Release P's engine, whose connection has lost parts."""
        read.resumes += 1
        lost = [part for part in read.parts if part.is_lost]
        self._results.stats.count("resumed_loads")
        self._results.stats.count("reread_bytes", sum(int(part.local[:, 1].sum()) for part in lost))
        logger.warning(
            "kvhma: lost %d of %d parts of %s, reading them again: %s",
            len(lost),
            len(read.parts),
            read.command.request_id,
            read.lost,
        )
        self._release_engine(read)

    def _clean_up(self, read: ActiveRead) -> None:
        with errors_fail(read):
            self._release_engine(read)
        with errors_fail(read):
            if read.question is not None:
                read.question[0].close()  # without effect, unless it has raised the error
        places, read.places = read.places, None
        if places is not None:
            self._memory.release_places(places)

    def _release_engine(self, read: ActiveRead) -> None:
        engine, read.engine = read.engine, None
        if engine is not None:
            self._engines.release_engine(engine)


@contextlib.contextmanager
def errors_fail(*reads: ActiveRead) -> Iterator[None]:
    """Any error raised within, a panic of Rust included, fails those of the reads that are not reported yet."""
    try:
        yield
    except GeneratorExit:  # the read is dropped as the pump closes
        raise
    except BaseException as error:
        for read in reads:
            if read.state is not ReadState.REPORTED:
                read.fail(error)


@contextlib.contextmanager
def _losing(read: ActiveRead, part: ReadPart) -> Iterator[None]:
    """An error raised within fails the read. A lost connection loses the part instead, unless it was lost too often."""
    with errors_fail(read):
        try:
            yield
        except TransferError as error:
            part.handle, part.is_lost, read.lost = None, True, error
            if read.command.piece or read.resumes == _MAX_RESUMES:
                raise


def _poll(read: ActiveRead) -> None:
    """Poll the transfers in flight."""
    for part in read.in_flight:
        with _losing(read, part):
            required(part.handle).poll()


def wait_in(read: ActiveRead, state: ReadState, is_over: Callable[[ActiveRead], bool]) -> Iterator[None]:
    """Wait in a state.

    Raises:
        BaseException: the error of the read, which may also have been found where no step of it runs.
    """
    read.state = state
    while read.error is None and not is_over(read):
        yield
    if read.error is not None:
        raise read.error


def _prove(read: ActiveRead) -> Iterator[None]:
    """Wait for P's lease board or P's answer to show that P held the blocks.

    :func:`kvhma.vllm.reads.lease_checks.check_leases` looks at the board and asks P.
    """
    yield from wait_in(read, ReadState.CHECKING, _is_checked)
    if not read.verified_by_board:
        yield from wait_in(read, ReadState.ASKED, _is_answered)
        question, index = required(read.question)
        question.check(index, read.command.remote.incarnation)


def _has_engine(read: ActiveRead) -> bool:
    return read.engine is not None


def _device_ended(read: ActiveRead) -> bool:
    """Return whether no launched work can write to the blocks."""
    if read.launched is not None:
        try:
            if not read.launched.query():
                return False
        except BaseException:  # after a device error nothing runs there any more
            read.launched = None
            raise
        read.launched = None
    return True


def _transfers_ended(read: ActiveRead) -> bool:
    _poll(read)
    return not read.in_flight


def _is_checked(read: ActiveRead) -> bool:
    return bool(read.verified_by_board) or read.question is not None


def _is_answered(read: ActiveRead) -> bool:
    return required(read.question)[0].poll()


def _is_drained(read: ActiveRead) -> bool:
    return _transfers_ended(read) and _device_ended(read)


def first_filled_tokens(geometry: Geometry, spans: Sequence[Span], first_tokens: Sequence[int]) -> dict[int, int]:
    """Return the first filled token of each group whose blocks begin before it, by index of the group.

    A window or a chunk may begin inside a block of D that also has older tokens, which P has freed::

        D's first block   | zeroed ...... | filled ........ |
                          ^ span.first    ^ first token

    Args:
        geometry: D's.
        spans: D's blocks of the read, for each group.
        first_tokens: of the transfer that filled them.
    """
    groups = enumerate(zip(geometry.groups, spans, first_tokens, strict=True))
    return {
        index: token
        for index, (group, span, token) in groups
        if len(span.ids) and token > span.first * group.tokens_per_entry
    }
