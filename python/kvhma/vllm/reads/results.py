# SPDX-License-Identifier: Apache-2.0
"""Results of loads, from the threads of a worker to the engine's thread, and the metrics of the worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvhma.vllm.failures import CLIENTS_CAUSES, Failure, failure_of
from kvhma.vllm.metadata import ReadCommand, WorkerReport
from kvhma.vllm.reads.case_folder import CaseFolder
from kvhma.vllm.telemetry.stats import StatsCollector
from kvhma.vllm.wire import peer_log

logger = logging.getLogger("vllm.kvhma")

_NEXT_READ_SECONDS = 2e-3
_MAX_WAIT_SECONDS = 1e-2
"""How long a step waits for the next completed read, and for all loads together."""


@dataclass
class _Unreported:
    """A load that has not ended.

    Attributes:
        load: None if the load was refused.
        since: when it was ordered.
        slow: whether it was logged as slow.
    """

    load: ReadCommand | None
    since: float
    slow: bool = False


class LoadResults:
    """Reports each load exactly once. Safe to use from several threads.

    Attributes:
        stats: metrics of this worker.
        cases: writes failed loads as case files.
    """

    def __init__(self, case_folder: str | None = None) -> None:
        """Start without loads."""
        self.cases = CaseFolder(case_folder)
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._unreported: dict[str, _Unreported] = {}
        """By request, in the order of the scheduler."""
        self.stats = StatsCollector(self._gauges, busy=self._unreported)
        self._need_step: set[str] = set()
        """Loads that an option lets wait for another step."""
        self._reads = 0
        self._ended: set[str] = set()
        self._pieces: set[str] = set()
        """Requests with a piece in flight."""
        self._report = WorkerReport()

    def expect(self, loads: Sequence[ReadCommand], refusals: Iterable[str] = ()) -> None:
        """Expect results of more loads, and of requests that are not read."""
        now = time.monotonic()
        with self._lock:
            for load in loads:
                if load.piece:
                    self._pieces.add(load.request_id)
                else:
                    self._unreported[load.request_id] = _Unreported(load, now)
            for request_id in refusals:
                self._unreported[request_id] = _Unreported(None, now)

    def note_load_read(self) -> None:
        """Note that one more load was read. Its lease may still have to be checked."""
        with self._lock:
            self._reads += 1

    def succeed_load(self, request_id: str, first_tokens: dict[int, int], *, verified_by_board: bool = False) -> None:
        """Report a load that succeeded.

        Args:
            request_id: of the load.
            first_tokens: as in :class:`kvhma.vllm.metadata.WorkerReport`.
            verified_by_board: whether P's board has verified the load, so that D did not ask P.
        """
        with self._lock:
            if not self._end(request_id):
                return
            if first_tokens:
                self._report.first_tokens[request_id] = first_tokens
            if verified_by_board:
                self._report.verified_by_board.add(request_id)

    def need_step(self, request_id: str) -> None:
        """Note that a load waits for another step, so that this step need not wait for the load."""
        with self._lock:
            self._need_step.add(request_id)
            self._has_ended.notify()

    def fail_load(self, request_id: str, failure: Failure) -> None:
        """Report a load that failed."""
        log = peer_log.logger if failure.cause in CLIENTS_CAUSES else logger
        log.warning("kvhma: the load of %s failed (%s): %s", request_id, failure.cause, failure.text)
        with self._lock:
            load = expected.load if (expected := self._unreported.get(request_id)) is not None else None
            if not self._end(request_id):
                return
            self._reads += 1  # nothing more comes of it, so a step may wait for the next one
            optional = load is not None and load.optional
            self._report.failures[request_id] = replace(failure, optional=optional)
        self.stats.count("failed_loads", label=failure.cause)

    def end_piece(self, request_id: str, error: BaseException | None) -> None:
        """Report that a piece was read, or could not be read."""
        if error is not None:
            failure = failure_of(error)
            logger.warning("kvhma: a piece of %s was not read (%s): %s", request_id, failure.cause, failure.text)
        with self._lock:
            if request_id in self._pieces:
                self._pieces.discard(request_id)
                self._report.pieces[request_id] = 1
                if error is not None:
                    self._report.lost_pieces[request_id] = failure.text
                self._has_ended.notify()

    def _end(self, request_id: str) -> bool:
        """Note the result of a load; return whether it was expected and is the first result."""
        self._need_step.discard(request_id)
        if self._unreported.pop(request_id, None) is None:
            return False
        self._ended.add(request_id)
        self._has_ended.notify()
        return True

    def wait(self, *, for_pieces: bool = False) -> None:
        """Wait until all loads are reported; stop if no load was read for 2 ms, and after 10 ms.

        With `for_pieces` and nothing to report, it also waits for a piece.
        """

        def is_over() -> bool:
            if self._unreported.keys() - self._need_step:
                return False
            return not (for_pieces and self._pieces) or bool(self._ended or self._report.pieces)

        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        with self._lock:
            reads_before = None
            while not is_over() and self._reads != reads_before and time.monotonic() < deadline:
                reads_before = self._reads
                self._has_ended.wait_for(is_over, _NEXT_READ_SECONDS)

    def take_results(self) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended since the last call, and the report for the scheduler."""
        with self._lock:
            ended, self._ended = self._ended, set()
            report, self._report = self._report, WorkerReport()
            slow = self._new_slow_loads()
        for load, seconds in slow:
            logger.warning(
                "kvhma: the load of %s from %s has taken %.0f s, its lease at P is %.0f s; it holds %d blocks here and "
                "%r at P until it ends",
                load.request_id,
                load.remote.address,
                seconds,
                load.remote.lease,
                sum(len(span.ids) for span in load.spans),
                load.remote.lease_key.request_id,
            )
            self.stats.count("slow_loads")
        return ended, report

    def unreported(self) -> int:
        """Return the number of loads whose end vLLM does not know yet."""
        with self._lock:
            return len(self._unreported) + len(self._ended) + len(self._pieces)

    def _new_slow_loads(self) -> list[tuple[ReadCommand, float]]:
        """Return loads that now last longer than their lease, with their seconds; the lock is held."""
        now = time.monotonic()
        found = []
        for expected in self._unreported.values():
            load, seconds = expected.load, now - expected.since
            if load is not None and not expected.slow and seconds > load.remote.lease:
                expected.slow = True
                found.append((load, seconds))
        return found

    def _gauges(self) -> dict[str, float]:
        with self._lock:
            oldest = min((expected.since for expected in self._unreported.values()), default=None)
            seconds = 0.0 if oldest is None else time.monotonic() - oldest
            return {"loads_in_flight": len(self._unreported), "oldest_load_seconds": seconds}
