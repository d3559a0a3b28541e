# SPDX-License-Identifier: Apache-2.0
"""The steps of a read: what it waits for in each state, and the effects of the machine's table."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Read, Transfer
from kvhma.digests import ContentDigest
from kvhma.errors import PeerLostError, RequestError, TransferError
from kvhma.geometry import Geometry, Span
from kvhma.nixl import TransferHandle
from kvhma.permute import PermutedRead, permuted_reads
from kvhma.vllm.device.memory import Memory
from kvhma.vllm.failures import failure_of
from kvhma.vllm.peers.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.digests import LoadSums, sums_of
from kvhma.vllm.reads.read_machine import ActiveRead, ReadEffect, ReadEvent, ReadState, required
from kvhma.vllm.reads.read_parts import ReadPart, parts_of
from kvhma.vllm.reads.results import LoadResults

logger = logging.getLogger("vllm.kvhma")

_MAX_RESUMES = 2
"""How often lost parts of a read are read again."""

_POST_SECONDS = 5e-3
"""How long a read posts before others get their turn. A transport may copy the bytes of a part within its post."""


class ReadSteps:
    """Takes reads from state to state. Safe to use from several threads, each with its own reads."""

    def __init__(self, context: WorkerContext, memory: Memory, engines: PrefillEngines, results: LoadResults) -> None:
        """Own nothing of this: the memory that reads write to, the engines, and where reads are reported."""
        self._context = context
        self._memory = memory
        self._engines = engines
        self._results = results
        self._waits: Mapping[ReadState, Callable[[ActiveRead], ReadEvent | None]] = {
            ReadState.PLACING: self._places,
            ReadState.ZEROING: self._zeroed,
            ReadState.POSTING: self._posted,
            ReadState.READING: self._all_read,
            ReadState.PERMUTING: lambda read: _device_ended(read, ReadEvent.PERMUTED),
            ReadState.CHECKING: _checked,
            ReadState.ASKED: _answered,
            ReadState.SUMMING: _summed,
            ReadState.COPYING: lambda read: _device_ended(read, ReadEvent.COPIED),
            ReadState.DRAINING: self._drained,
            ReadState.REPORTING: self._report,
        }
        """Each returns the event that the state waits for, or None while it has not happened."""
        self._effects: Mapping[ReadEffect, Callable[[ActiveRead], None]] = {
            ReadEffect.PLAN: self._plan,
            ReadEffect.COMPARE: self._compare,
            ReadEffect.LEAVE_ENGINE: self._leave_engine,
            ReadEffect.PERMUTE: self._permute,
            ReadEffect.NOTE_READ: self._note_read,
            ReadEffect.SUM: self._sum,
            ReadEffect.COPY: self._copy,
            ReadEffect.SAVE_CASE: self._save_case,
            ReadEffect.CLEAN_UP: self._clean_up,
        }

    def advance(self, read: ActiveRead) -> None:
        """Take a read as far as it comes without waiting, and without looking for its engine."""
        before = None
        while read.state is not before and read.state in self._waits:
            before = read.state
            # If even the report of a failure fails, the thread has to log it, and to try again.
            is_last_try = before is ReadState.REPORTING and read.error is not None
            with contextlib.nullcontext() if is_last_try else errors_fail(read):
                event = self._waits[before](read)
                if event is not None:
                    self.move(read, event)

    def move(self, read: ActiveRead, event: ReadEvent) -> None:
        """Give an event to a read, and carry out the effects. An effect that fails the read ends the others."""
        effects = read.apply(event)
        following = read.state
        for effect in effects:
            with errors_fail(read):
                self._effects[effect](read)
            if read.state is not following:
                return

    # --- what the states wait for --------------------------------------------------------------------------

    def _places(self, read: ActiveRead) -> ReadEvent | None:
        read.places = self._memory.take_places(read.command.spans)
        return None if read.places is None else ReadEvent.PLACES

    def _zeroed(self, read: ActiveRead) -> ReadEvent | None:
        event = _device_ended(read, ReadEvent.ZEROED)
        if event is not None and not self._memory.device.is_host:
            self._results.stats.record(zero_seconds=time.monotonic() - read.planned_at)
            self._results.stats.count("delayed_posts", read.waits_for_device)
        return event

    def _posted(self, read: ActiveRead) -> ReadEvent | None:
        read.posted_at = started = time.monotonic()
        unposted = [part for part in read.parts if part.handle is None and not part.is_lost]
        while unposted and read.error is None and read.posted_at - started <= _POST_SECONDS:
            part = unposted.pop(0)
            with _losing(read, part):
                part.handle = self._handle(required(read.engine), part)
            read.posted_at = time.monotonic()
        read.post_seconds += read.posted_at - started
        return None if unposted or read.error is not None else ReadEvent.POSTED

    def _all_read(self, read: ActiveRead) -> ReadEvent | None:
        _poll(read)
        if read.error is not None or read.in_flight:
            return None
        return ReadEvent.LOST if any(part.is_lost for part in read.parts) else ReadEvent.READ

    def _drained(self, read: ActiveRead) -> ReadEvent | None:
        _poll(read)
        if read.in_flight or (read.sums is not None and read.sums.is_running):
            return None
        return _device_ended(read, ReadEvent.DRAINED)

    def _report(self, read: ActiveRead) -> ReadEvent:
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
            if read.sums is None:
                results.succeed_load(name, first_tokens, verified_by_board=bool(read.verified_by_board))
            else:
                results.ask_verdict(name, first_tokens, required(read.sums.result()))
        return ReadEvent.REPORTED

    # --- effects -------------------------------------------------------------------------------------------

    def _plan(self, read: ActiveRead) -> None:
        read.transfer, read.parts, read.permutes = self._planned(read)
        read.planned_at = time.monotonic()
        read.launched = self._memory.zero(read.transfer.zero, read.after)
        read.waits_for_device = _device_ended(read, ReadEvent.ZEROED) is None

    def _planned(self, read: ActiveRead) -> tuple[Transfer, list[ReadPart], NDArray[np.uint64] | None]:
        """Return what to read and zero, the parts, and the ranges to reorder afterwards."""
        engine, command = required(read.engine), read.command
        transfer = engine.plan.transfer(command.num_tokens, list(required(read.places)), list(command.remote.spans))
        reads: Sequence[Read | PermutedRead] = transfer.reads
        permutes: list[NDArray[np.uint64]] = []
        if permute_bytes := self._context.settings.permute_bytes:
            remote = [None if peer is None else peer.geometry for peer in engine.peers]
            permuted = permuted_reads(transfer, self._context.geometry, remote, permute_bytes)
            reads, permutes = permuted, [of_read.permutes for of_read in permuted if len(of_read.permutes)]
        return transfer, parts_of(reads, transfer.bytes), np.concatenate(permutes) if permutes else None

    def _handle(self, engine: PrefillEngine, part: ReadPart) -> TransferHandle:
        peer = engine.peers[part.source]
        if peer is None:
            raise RequestError(f"source {part.source} is not connected")
        return self._context.agent.read(
            peer,
            part.local,
            part.remote,
            local_memory=self._memory.kind,
            remote_memory=peer.geometry.regions[0].memory,
        )

    def _compare(self, read: ActiveRead) -> None:
        _, parts, _ = self._planned(read)
        if len(parts) != len(read.parts) or not all(map(ReadPart.is_same, parts, read.parts)):
            raise PeerLostError(f"{read.lost}; P's caches are at other addresses since")
        for part in read.parts:
            part.is_lost = False

    def _leave_engine(self, read: ActiveRead) -> None:
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

    def _permute(self, read: ActiveRead) -> None:
        if read.permutes is not None:
            read.launched = self._memory.permute(read.permutes)

    def _note_read(self, read: ActiveRead) -> None:
        read.read_at = time.monotonic()
        self._results.note_load_read()

    def _sum(self, read: ActiveRead) -> None:
        if not read.has_digest:
            return
        context, command = self._context, read.command
        sums = sums_of(
            required(read.engine).plan,
            required(read.transfer),
            command,
            required(read.places),
            context.geometry,
            context.cp_tp_size,
        )

        def timed() -> ContentDigest:
            started = time.monotonic()
            digest = sums()
            self._results.stats.record(digest_seconds=time.monotonic() - started)
            return digest

        seed = command.remote.content_seed or 0
        # P's sums come with its steps, which take seconds if P is overloaded.
        read.sums = LoadSums(command, seed, timed, context.settings.replies_timeout)

    def _copy(self, read: ActiveRead) -> None:
        read.launched = self._memory.copy_in(required(read.places), read.command.spans, read.after)

    def _save_case(self, read: ActiveRead) -> None:
        if read.engine is not None:
            self._results.cases.save_failed_load(read.command, read.engine.plan, read.places)

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
    """Any error raised within, a panic of Rust included, fails those of the reads that are not reported yet.

    But a signal in the engine's thread, while it starts a read, ends the engine.
    """
    try:
        yield
    except BaseException as error:
        for read in reads:
            if read.state is not ReadState.REPORTED:
                read.fail(error)
        if isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise


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


def _device_ended(read: ActiveRead, event: ReadEvent) -> ReadEvent | None:
    """Return the event if no launched work can write to the blocks; None before."""
    if read.launched is not None:
        try:
            if not read.launched.query():
                return None
        except BaseException:  # after a device error nothing runs there any more
            read.launched = None
            raise
        read.launched = None
    return event


def _checked(read: ActiveRead) -> ReadEvent | None:
    if read.command.piece:
        return ReadEvent.PIECE
    if read.verified_by_board:
        return ReadEvent.ON_BOARD
    return None if read.question is None else ReadEvent.QUESTION


def _answered(read: ActiveRead) -> ReadEvent | None:
    question, index = required(read.question)
    if not question.poll():
        if read.sums is not None:
            read.sums.check_deadline()
        return None
    question.check(index, read.command.remote.incarnation)
    if read.sums is None:
        return ReadEvent.HELD
    if read.sums.take_prefill_digest(question.content(index)):
        return ReadEvent.DIGEST
    read.question = None
    return ReadEvent.NO_DIGEST


def _summed(read: ActiveRead) -> ReadEvent | None:
    return None if required(read.sums).result() is None else ReadEvent.SUMMED


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
