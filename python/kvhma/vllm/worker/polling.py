# SPDX-License-Identifier: Apache-2.0
"""Active loads: their reads are polled, then their leases checked, then they are reported."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from kvhma._kvhma import Transfer
from kvhma.geometry import Geometry, Span
from kvhma.nixl import TransferHandle
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Load
from kvhma.vllm.worker.lease import Lease
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.worker.results import LoadResults, failure_of

logger = logging.getLogger("vllm.kvhma")

_POLL_SECONDS = 5e-4
_ANSWER_SECONDS = 1e-3
"""Pauses between two polls: while reads are in flight, and while only answers of prefill engines are missing."""


@dataclass(eq=False)
class ActiveLoad:
    """A load whose reads are in flight. It belongs to one thread: the loader, then the poller.

    Attributes:
        load: what the scheduler ordered.
        queued_at: when it did.
        engine: where the load reads, acquired for it.
        lease: under which it reads.
        transfer: what it reads and zeroes.
        handles: of the reads that were posted.
        posted_at: when the last one was.
        post_seconds: how long posting took.
        read_at: when the last read had ended; None until then.
        error: the first one; the load fails once its reads have ended.
    """

    load: Load
    queued_at: float
    engine: PrefillEngine
    lease: Lease
    transfer: Transfer
    handles: list[TransferHandle] = field(default_factory=list)
    posted_at: float = 0.0
    post_seconds: float = 0.0
    read_at: float | None = None
    error: Exception | None = None


class LoadPoller:
    """Drives active loads to their end, in a thread of its own; the loader may do the first polls itself."""

    def __init__(self, geometry: Geometry, memory: Memory, engines: PrefillEngines, results: LoadResults) -> None:
        """Start the thread."""
        self._geometry = geometry
        self._memory = memory
        self._engines = engines
        self._results = results
        self._incoming: queue.SimpleQueue[list[ActiveLoad] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvhma-poll", daemon=True)
        self._thread.start()

    def add(self, loads: list[ActiveLoad]) -> None:
        """Hand over active loads; the caller must not touch them, nor their leases, any more."""
        self._incoming.put(loads)

    def finish(self) -> None:
        """Let the thread end once every load has; nothing may be added any more."""
        self._incoming.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def advance(self, loads: Sequence[ActiveLoad]) -> list[ActiveLoad]:
        """Poll each load once; report those that have ended and return the others."""
        unfinished = []
        for active in loads:
            try:
                ended = self._is_ready(active)
                if ended:
                    self._report(active)
            except Exception as error:
                self._results.fail(active.load.request_id, failure_of(error))
            else:
                if not ended:
                    unfinished.append(active)
        return unfinished

    def _run(self) -> None:
        active: list[ActiveLoad] = []
        finishing = False
        while active or not finishing:
            added = self._next(active)
            if added is None:
                finishing = True
            else:
                active += added
            active = self.advance(active)

    def _next(self, active: Sequence[ActiveLoad]) -> list[ActiveLoad] | None:
        """Pause until the next poll and return what was handed over meanwhile; None: there will be no more."""
        if not active:
            return self._incoming.get()
        sockets = {one.lease.socket for one in active} - {None}
        only_answers_missing = all(one.read_at is not None for one in active)
        try:
            if sockets and only_answers_missing:
                zmq.select(list(sockets), [], [], _ANSWER_SECONDS)
                return self._incoming.get_nowait()
            return self._incoming.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return []

    def _is_ready(self, active: ActiveLoad) -> bool:
        """Poll a load; return whether its reads have ended and, unless one failed, its lease is known to cover them."""
        for handle in active.handles:
            try:
                handle.poll()
            except Exception as error:
                active.error = active.error or error
        if not all(handle.finished for handle in active.handles):
            return False
        if active.read_at is None:
            active.read_at = time.monotonic()
            self._results.note_read()
        if active.error is None:
            try:
                return bool(active.lease.covers(active.read_at))
            except Exception as error:
                active.error = error
        return True

    def _report(self, active: ActiveLoad) -> None:
        """Let go of what a load held, and report it."""
        if active.error is None:
            try:
                self._memory.copy_in(active.load.spans)
            except Exception as error:
                active.error = error
        active.lease.close()
        self._engines.release(active.engine)
        with self._results.stats() as stats:
            stats.count("late_checks", active.lease.late_checks)
        if active.error is not None:
            self._results.fail(active.load.request_id, failure_of(active.error))
            return
        self._measure(active)
        first_tokens = first_filled_tokens(self._geometry, active.load.spans, active.transfer.first_tokens)
        self._results.succeed(active.load.request_id, first_tokens)

    def _measure(self, active: ActiveLoad) -> None:
        load, transfer = active.load, active.transfer
        now = time.monotonic()
        transfer_seconds = (active.read_at or now) - active.posted_at + active.post_seconds
        clipped = [
            max(0, span.first * group.block_size - load.cached)
            for group, span in zip(self._geometry.groups, load.spans, strict=True)
            if group.kind in ("sliding", "chunked")
        ]
        posted = [handle.telemetry.descriptors for handle in active.handles if handle.telemetry is not None]
        series = {
            "load_seconds": now - active.queued_at,
            "post_seconds": active.post_seconds,
            "transfer_seconds": transfer_seconds,
            "bytes": transfer.bytes,
            "selected_descriptors": transfer.descriptors,
            "posted_descriptors": sum(posted),
        }
        sums: dict[str, float] = {
            "zeroed_bytes": int(transfer.zero[:, 1].sum()),
            "tokens_loaded": load.num_tokens - load.cached,
            "tokens_cached": load.cached,
            "tokens_clipped": sum(clipped),
        }
        by_rank: dict[str, float] = {
            "rank_bytes": transfer.bytes,
            "rank_descriptors": transfer.descriptors,
            "rank_seconds": transfer_seconds,
        }
        by_group = {"group_bytes": transfer.bytes_by_group, "group_descriptors": transfer.descriptors_by_group}
        logger.debug("kvhma: loaded %s from %s: %s", load.request_id, load.remote.engine_id, series | sums)
        with self._results.stats() as stats:
            stats.record(**series)
            for name, number in sums.items():
                stats.count(name, number)
            for name, number in by_rank.items():
                stats.count(name, number, label=str(self._geometry.tp_rank))
            for name, numbers in by_group.items():
                for index, (group, of_group) in enumerate(zip(self._geometry.groups, numbers, strict=True)):
                    stats.count(name, of_group, label=f"{index} {group.kind}")


def first_filled_tokens(geometry: Geometry, spans: Sequence[Span], first_tokens: Sequence[int]) -> dict[int, int]:
    """Return the first filled token of each group whose blocks begin before it, by index of the group.

    A window or a chunk may begin inside a block of D that holds older tokens too, which P has freed::

        D's first block   | zeroed ...... | filled ........ |
                          ^ span.first    ^ first token

    Args:
        geometry: D's.
        spans: D's blocks of a load, for each group.
        first_tokens: of the transfer that filled them.
    """
    groups = enumerate(zip(geometry.groups, spans, first_tokens, strict=True))
    return {
        index: token
        for index, (group, span, token) in groups
        if len(span.ids) and token > span.first * group.block_size * group.cp_size
    }
