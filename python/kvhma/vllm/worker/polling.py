# SPDX-License-Identifier: Apache-2.0
"""The poller polls the reads of active loads, checks that P held the blocks, and reports the loads."""

from __future__ import annotations

import logging
import queue
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from kvhma._kvhma import Transfer
from kvhma.digests import ContentDigest
from kvhma.geometry import Geometry, Span
from kvhma.vllm.memory import Memory
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.tracing import Trace
from kvhma.vllm.wire.lease_board import mark_of
from kvhma.vllm.wire.messages import MAX_CLAIMS
from kvhma.vllm.worker.active_load import ActiveLoad, errors_end
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.digests import LoadSums, sums_of
from kvhma.vllm.worker.lease import LeaseQuestion
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.worker.results import LoadResults, failure_of
from kvhma.vllm.worker.spans import LoadTimes, Spans

logger = logging.getLogger("vllm.kvhma")

_POLL_SECONDS = 5e-4
_ANSWER_MILLISECONDS = 1
"""Pauses between two polls: with reads in flight, and with only answers of prefill engines missing."""

_STAY_SECONDS = 2e-3
"""How long a thread polls loads that only wait for answers. Most answers come before another thread would wake up."""

_ASK_SECONDS = 2e-3
"""How long a read load waits for other loads of its step, so that one question covers all."""


class LoadPoller:
    """Drives active loads to their end, in its own thread. The thread that starts loads may do the first polls."""

    def __init__(
        self,
        context: WorkerContext,
        memory: Memory,
        engines: PrefillEngines,
        results: LoadResults,
        queued: queue.SimpleQueue[ActiveLoad | None],
    ) -> None:
        """Start the thread.

        Args:
            context: of the worker.
            memory: that reads write to.
            engines: that loads read from.
            results: that loads are reported to.
            queued: the loader's queue, for loads that have lost a part.
        """
        self._geometry = context.geometry
        self._memory = memory
        self._engines = engines
        self._results = results
        self._queued = queued
        self._timeout = context.settings.handshake_timeout
        """Seconds to wait for an answer of a prefill engine."""
        self._rank = str(context.rank)
        """The label under which transfers are counted."""
        self._spans = Spans(context.rank, results.stats)
        self._cp_tp_size = context.cp_tp_size
        self._group_labels = [f"{index} {group.kind}" for index, group in enumerate(self._geometry.groups)]
        self._incoming: queue.SimpleQueue[list[ActiveLoad] | None] = queue.SimpleQueue()
        self._active: list[ActiveLoad] = []
        self._finishing = False
        self._unmeasured: deque[tuple[ActiveLoad, Transfer, float]] = deque()
        """Reported loads, and when they were reported."""
        self._questions: WeakKeyDictionary[PrefillEngine, LeaseQuestion] = WeakKeyDictionary()
        """The last question to each engine."""
        self._thread = SupervisedThread("kvhma-poll", memory.device.chosen(self._run), results.stats)

    def add_loads(self, loads: list[ActiveLoad]) -> None:
        """Give active loads to the thread. The caller must not touch them any more."""
        if loads:
            self._incoming.put(loads)

    def finish_loads(self) -> None:
        """End the thread once every load has ended. No load may be added after this."""
        self._incoming.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread ends."""
        self._thread.join(timeout)

    def advance(self, loads: list[ActiveLoad], *, more_to_come: bool = False) -> list[ActiveLoad]:
        """Poll each load once; report the loads that have ended and return the others.

        Args:
            loads: owned by the calling thread.
            more_to_come: whether the thread will have more loads in a moment, so that one question can cover them too.
        """
        for active in loads:
            self._poll_reads(active)
        self._ask(loads, more_to_come=more_to_come)
        return [active for active in loads if not self._end(active) and not self._resume(active)]

    def stay_with(self, loads: list[ActiveLoad], has_time: Callable[[], bool]) -> list[ActiveLoad]:
        """Poll loads, and wait a little if only answers are missing; return the loads that have not ended.

        Args:
            loads: owned by the calling thread.
            has_time: whether the thread has nothing else to do.
        """
        deadline = time.monotonic() + _STAY_SECONDS
        loads = self.advance(loads)
        while loads and has_time() and time.monotonic() < deadline:
            if any(active.read_at is None for active in loads):
                break
            self.wait_for_answers(loads)
            loads = self.advance(loads)
        return loads

    def measure(self) -> None:
        """Have the thread measure reported loads, while the engine continues."""
        if self._unmeasured:
            self._incoming.put([])

    def _run(self) -> None:
        while self._active or not self._finishing:
            self._measure_reported()
            added = self._next()
            if added is None:
                self._finishing = True
            else:
                self._active += added
            self._active = self.advance(self._active)
        self._measure_reported()
        self._spans.close(self._timeout)

    def _next(self) -> list[ActiveLoad] | None:
        """Pause until the next poll and return the loads that were added meanwhile; None after :meth:`finish_loads`."""
        if not self._active:
            return self._incoming.get()
        try:
            if any(active.read_at is None for active in self._active):
                return self._incoming.get(timeout=_POLL_SECONDS)
            self.wait_for_answers(self._active)
            return self._incoming.get_nowait()
        except queue.Empty:
            return []

    def wait_for_answers(self, loads: Sequence[ActiveLoad]) -> None:
        """Pause until a prefill engine has answered about a load, for a moment at most."""
        answers = select.poll()
        for question in {active.question[0] for active in loads if active.question is not None}:
            if (fileno := question.fileno()) is not None:
                answers.register(fileno, select.POLLIN)
        answers.poll(_ANSWER_MILLISECONDS)

    def _poll_reads(self, active: ActiveLoad) -> None:
        active.poll()
        if active.read_at is not None or not active.has_read or active.may_resume or not active.is_device_done():
            return
        if active.error is None and not active.permuted and active.permutes is not None and len(active.permutes):
            active.permuted = True
            with errors_end(active):
                active.launched = self._memory.permute(active.permutes)
            if not active.is_device_done():
                return
        active.read_at = time.monotonic()
        self._results.note_load_read()
        if active.has_digest and active.error is None:
            with errors_end(active):
                self._sum(active)

    def _resume(self, active: ActiveLoad) -> bool:
        """Queue a load with lost parts to be read again, after a new connection; return whether it has lost parts."""
        if not active.may_resume:
            return False
        engine, active.engine = active.engine, None
        active.resumes += 1
        with errors_end(active):
            if engine is not None:
                self._engines.release_engine(engine)
        lost = [part for part in active.parts if part.handle is None]
        self._results.stats.count("resumed_loads")
        self._results.stats.count("reread_bytes", sum(int(part.local[:, 1].sum()) for part in lost))
        logger.warning(
            "kvhma: lost %d of %d parts of %s, reading them again: %s",
            len(lost),
            len(active.parts),
            active.load.request_id,
            active.lost,
        )
        self._queued.put(active)
        return True

    def _sum(self, active: ActiveLoad) -> None:
        """Begin to sum what a load has read."""
        load, engine = active.load, active.engine
        if engine is None or active.transfer is None or active.places is None:
            return
        sums = sums_of(engine.plan, active.transfer, load, active.places, self._geometry, self._cp_tp_size)

        def timed() -> ContentDigest:
            started = time.monotonic()
            digest = sums()
            self._results.stats.record(digest_seconds=time.monotonic() - started)
            return digest

        active.sums = LoadSums(load, load.remote.content_seed or 0, timed, self._timeout)

    def _ask(self, loads: Sequence[ActiveLoad], *, more_to_come: bool) -> None:
        """Find out if P held the blocks of read loads: from its board, or else by asking.

        There is one question to an engine at a time, about all loads that are ready by then. Loads with digests have
        separate questions, because P must not release their blocks before the digests were compared.
        """
        ready: dict[tuple[PrefillEngine, bool], list[ActiveLoad]] = {}
        for active in loads:
            if active.engine is not None and active.wants_answer:
                ready.setdefault((active.engine, active.has_digest), []).append(active)
        for (engine, _), of_engine in ready.items():
            waited = time.monotonic() - min(active.read_at or 0.0 for active in of_engine)
            if more_to_come and waited <= _ASK_SECONDS:
                continue
            unverified: list[ActiveLoad] = []
            with errors_end(*of_engine):
                unverified = self._unverified(engine, of_engine)
            to_ask, asked = unverified[:MAX_CLAIMS], self._questions.get(engine)
            if to_ask and (asked is None or not asked.open):
                with errors_end(*to_ask):
                    self._ask_engine(engine, to_ask)

    def _unverified(self, engine: PrefillEngine, loads: list[ActiveLoad]) -> list[ActiveLoad]:
        """Look at P's boards; return the loads that D has to ask P about. Other loads may still wait for the boards."""
        if not engine.boards or loads[0].has_digest:  # D has to ask P for the digest anyway
            return loads
        new = [active for active in loads if active.verified_by_board is None]
        if new:
            since = max(active.read_at or 0.0 for active in new)
            board_times, boards = zip(*(board.look(since) for board in engine.boards), strict=True)
            for active in new:
                if (active.read_at or 0.0) < min(board_times):
                    remote = active.load.remote
                    mark = mark_of(remote.lease_key, remote.digest)
                    active.verified_by_board = all(mark in board for board in boards)
        return [active for active in loads if active.verified_by_board is False]

    def _ask_engine(self, engine: PrefillEngine, loads: Sequence[ActiveLoad]) -> None:
        claims = [active.load.remote.claim(active.load.reader) for active in loads]
        # All loads have an outcome or none has: it depends on the number of ranks of this engine.
        outcomes = [active.load.outcome for active in loads if active.load.outcome is not None]
        contents = loads[0].has_digest
        question = LeaseQuestion(engine.clients, claims, self._timeout, engine.proving, outcomes, contents=contents)
        self._questions[engine] = question
        for index, active in enumerate(loads):
            active.question = question, index

    def _end(self, active: ActiveLoad) -> bool:
        """Report a load if it has ended; return whether it has been reported."""
        if active.read_at is None:
            return False
        if not (active.copied or active.verified_by_board or active.load.piece) and active.error is None:
            if active.question is None:
                return False
            question, index = active.question
            with errors_end(active):
                if not question.poll():
                    return False
                question.check(index)
                if active.sums is not None and not self._has_sums(active, active.sums, question.content(index)):
                    return False
        if not active.reported:
            if not self._has_copied(active):
                return False
            self._report(active)
        return True

    def _has_copied(self, active: ActiveLoad) -> bool:
        """Return whether the bytes are in the load's blocks. Bytes of a failed load are not copied there."""
        if active.error is None and not active.copied and active.places is not None:
            active.copied = True
            with errors_end(active):
                active.launched = self._memory.copy_in(active.places, active.load.spans, active.after)
        return active.is_device_done()

    def _has_sums(self, active: ActiveLoad, sums: LoadSums, content: bytes | None) -> bool:
        """Return whether both digests of a load are there. If P has none yet, D asks again."""
        if not sums.take_prefill_digest(content):
            active.question = None
            return False
        return sums.result() is not None

    def _report(self, active: ActiveLoad) -> None:
        """Release the resources of a load, and report it."""
        first_tokens: dict[int, int] = {}
        with errors_end(active):
            engine, active.engine = active.engine, None
            if active.error is not None and engine is not None:
                self._results.cases.save_failed_load(active.load, engine.plan, active.places)
            if engine is not None:
                self._engines.release_engine(engine)
            if active.question is not None:
                active.question[0].close()  # without effect, unless it has raised the error
        with errors_end(active):
            if active.error is None and active.transfer is not None and active.places is not None:
                first_tokens = first_filled_tokens(self._geometry, active.load.spans, active.transfer.first_tokens)
        with errors_end(active):
            if active.sums is not None:
                active.sums.close()
            places, active.places = active.places, None
            if places is not None:
                self._memory.release_places(places)
        ended_at = time.monotonic()
        digest = None
        if active.sums is not None and active.error is None:
            digest = active.sums.result()
        if active.load.piece:
            self._results.end_piece(active.load.request_id, active.error)
        elif active.error is not None:
            self._results.fail_load(active.load.request_id, failure_of(active.error))
        elif digest is not None:
            self._results.ask_verdict(active.load.request_id, first_tokens, digest)
        else:
            self._results.succeed_load(
                active.load.request_id, first_tokens, verified_by_board=bool(active.verified_by_board)
            )
        active.reported = True
        if active.load.trace is not None:
            self._spans.queue_spans(_times(active, active.load.trace, ended_at, self._rank))
        if active.error is None and active.transfer is not None:
            self._unmeasured.append((active, active.transfer, ended_at))

    def _measure_reported(self) -> None:
        while self._unmeasured:
            self._measure(*self._unmeasured.popleft())

    def _measure(self, active: ActiveLoad, transfer: Transfer, ended_at: float) -> None:
        load = active.load
        transfer_seconds = (active.read_at or ended_at) - active.posted_at + active.post_seconds
        clipped = [
            max(0, span.first * group.block_size - load.cached)
            for group, span in zip(self._geometry.groups, load.spans, strict=True)
            if group.kind in ("sliding", "chunked")
        ]
        permuted = 0 if active.permutes is None else int(active.permutes[:, 2:].prod(axis=1).sum())
        handles = [part.handle for part in active.parts if part.handle is not None]
        posted = [handle.telemetry.descriptors for handle in handles if handle.telemetry is not None]
        series: dict[str, float] = {
            "load_seconds": ended_at - active.ordered_at,
            "post_seconds": active.post_seconds,
            "transfer_seconds": transfer_seconds,
            "bytes": transfer.bytes,
            "selected_descriptors": sum(len(part.local) for part in active.parts),
            "posted_descriptors": sum(posted),
        }
        sums: dict[str, float] = {
            "zeroed_bytes": int(transfer.zero[:, 1].sum()),
            "permuted_bytes": permuted,
            "tokens_loaded": load.num_tokens - load.cached,
            "tokens_cached": load.cached,
            "tokens_clipped": sum(clipped),
        }
        if load.piece:  # the last piece is counted as the load
            series, sums = (
                {},
                {"pieces": 1, "piece_bytes": transfer.bytes}
                | {name: sums[name] for name in ("zeroed_bytes", "permuted_bytes")},
            )
        by_rank: dict[str, float] = {
            "rank_bytes": transfer.bytes,
            "rank_descriptors": transfer.descriptors,
            "rank_seconds": transfer_seconds,
        }
        by_group = {"group_bytes": transfer.bytes_by_group, "group_descriptors": transfer.descriptors_by_group}
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("kvhma: loaded %s from %s: %s", load.request_id, load.remote.engine_id, series | sums)
        with self._results.stats.together() as stats:
            stats.record(**series)
            if not load.piece:
                stats.count("lease_checks", label="board" if active.verified_by_board else "question")
            for name, number in sums.items():
                stats.count(name, number)
            for name, number in by_rank.items():
                stats.count(name, number, label=self._rank)
            for name, numbers in by_group.items():
                for label, of_group in zip(self._group_labels, numbers, strict=True):
                    stats.count(name, of_group, label=label)


def _times(active: ActiveLoad, trace: Trace, ended_at: float, rank: str) -> LoadTimes:
    """Return the times of a load, for its spans."""
    load, transfer = active.load, active.transfer
    attributes: dict[str, str | int] = {
        "gen_ai.request.id": load.request_id,
        "kvhma.prefill_engine": load.remote.engine_id,
        "kvhma.rank": rank,
        "kvhma.handshakes": active.handshakes,
        "kvhma.tokens_loaded": load.num_tokens - load.cached,
        "kvhma.tokens_cached": load.cached,
    }
    if transfer is not None:
        attributes |= {"kvhma.bytes": transfer.bytes, "kvhma.descriptors": transfer.descriptors}
    return LoadTimes(
        trace,
        active.ordered_at,
        active.planned_at,
        active.posted_at - active.post_seconds,
        active.posted_at,
        (active.read_at or 0.0) if active.posted_at else 0.0,
        ended_at,
        "" if active.error is None else type(active.error).__name__,
        attributes,
    )


def first_filled_tokens(geometry: Geometry, spans: Sequence[Span], first_tokens: Sequence[int]) -> dict[int, int]:
    """Return the first filled token of each group whose blocks begin before it, by index of the group.

    A window or a chunk may begin inside a block of D that also has older tokens, which P has freed::

        D's first block   | zeroed ...... | filled ........ |
                          ^ span.first    ^ first token

    Args:
        geometry: D's.
        spans: D's blocks of the load, for each group.
        first_tokens: of the transfer that filled them.
    """
    groups = enumerate(zip(geometry.groups, spans, first_tokens, strict=True))
    return {
        index: token
        for index, (group, span, token) in groups
        if len(span.ids) and token > span.first * group.block_size * group.cp_size
    }
