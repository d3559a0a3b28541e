# SPDX-License-Identifier: Apache-2.0
"""How loads ended, from the threads of a worker to the engine's thread, and what was measured meanwhile."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kvhma.digests import ContentDigest
from kvhma.errors import (
    DigestError,
    HandshakeError,
    HandshakeTimeoutError,
    KvhmaError,
    LeaseEndedError,
    LeaseUnknownError,
    PeerLostError,
    TransferError,
    UnsupportedPairError,
)
from kvhma.text import one_line
from kvhma.vllm.case_folder import CaseFolder
from kvhma.vllm.metadata import CLIENTS_CAUSES, Failure, Load, LoadDigest, WorkerReport
from kvhma.vllm.stats import StatsCollector
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.params import LeaseKey

logger = logging.getLogger("vllm.kvhma")

_NEXT_READ_SECONDS = 2e-3
_MAX_WAIT_SECONDS = 1e-2
"""How long a step waits for the next load to be read, and for all of them together."""


@dataclass
class _Unreported:
    """A load that has not ended.

    Attributes:
        load: None for one that was refused.
        since: when it was ordered.
        slow: whether it was logged that it lasts.
    """

    load: Load | None
    since: float
    slow: bool = False


class LoadResults:
    """Reports each load exactly once. Safe to use from several threads.

    Attributes:
        stats: what this worker counts.
        cases: where loads that fail are written.
    """

    def __init__(self, case_folder: str | None = None) -> None:
        """Start without loads."""
        self.cases = CaseFolder(case_folder)
        self.stats = StatsCollector(self._gauges, busy=lambda: bool(self._unreported))
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._unreported: dict[str, _Unreported] = {}
        """By request, in the order in which they were ordered."""
        self._unjudged: dict[str, dict[int, int]] = {}
        """First tokens of loads whose digests the scheduler compares."""
        self._verdicts: dict[str, Failure | None] = {}
        """What it has said of loads that have not come that far here."""
        self._reads = 0
        self._ended: set[str] = set()
        self._pieces: set[str] = set()
        """Requests of which a piece is being read."""
        self._report = WorkerReport()

    def expect(self, loads: Sequence[Load], refusals: Iterable[str] = ()) -> None:
        """Expect the results of some more loads, and those of requests of which nothing is read."""
        now = time.monotonic()
        with self._lock:
            for load in loads:
                if load.piece:
                    self._pieces.add(load.request_id)
                else:
                    self._verdicts.pop(load.request_id, None)
                    self._unreported[load.request_id] = _Unreported(load, now)
            for request_id in refusals:
                self._unreported[request_id] = _Unreported(None, now)

    def note_read(self) -> None:
        """Take note that the bytes of one more load are here. Its lease may still have to be checked."""
        with self._lock:
            self._reads += 1

    def succeed(self, request_id: str, first_tokens: dict[int, int], *, shown: bool = False) -> None:
        """Report a load that is right.

        Args:
            request_id: of the load.
            first_tokens: as in :class:`kvhma.vllm.metadata.WorkerReport`.
            shown: whether P's board has shown so, and P was not asked.
        """
        with self._lock:
            if not self._end(request_id):
                return
            if first_tokens:
                self._report.first_tokens[request_id] = first_tokens
            if shown:
                self._report.shown.add(request_id)

    def ask_verdict(self, request_id: str, first_tokens: dict[int, int], digest: LoadDigest) -> None:
        """Report what a load has read; the scheduler says whether it is right when all ranks have."""
        with self._lock:
            if request_id not in self._unreported:
                return
            self._report.digests[request_id] = digest
            self._unjudged[request_id] = first_tokens
            self._has_ended.notify()  # nothing is waited for in this step
            verdicts = {request_id: self._verdicts.pop(request_id)} if request_id in self._verdicts else {}
        self.judge(verdicts)

    def judge(self, verdicts: Mapping[str, Failure | None]) -> None:
        """Report loads of which the scheduler knows whether they are right."""
        for request_id, failure in verdicts.items():
            with self._lock:
                first_tokens = self._unjudged.get(request_id)
                if first_tokens is None:
                    if request_id in self._unreported:
                        self._verdicts[request_id] = failure
                    continue
            if failure is not None:
                self.fail(request_id, failure)
            else:
                self.succeed(request_id, first_tokens)

    def note_prefill_digest(self, key: LeaseKey, digest: ContentDigest) -> None:
        """Report the digest of a finished request's blocks."""
        with self._lock:
            self._report.prefill_digests[key] = digest, 1

    def fail(self, request_id: str, failure: Failure) -> None:
        """Report a load that failed."""
        log = peer_log.logger if failure.cause in CLIENTS_CAUSES else logger
        log.warning("kvhma: the load of %s failed (%s): %s", request_id, failure.cause, failure.text)
        with self._lock:
            load = one.load if (one := self._unreported.get(request_id)) is not None else None
            if not self._end(request_id):
                return
            optional = load is not None and load.optional
            self._report.failures[request_id] = replace(failure, optional=optional)
        self.stats.count("failed_loads", label=failure.cause)

    def end_piece(self, request_id: str, error: BaseException | None) -> None:
        """Report that a piece was read, or could not be."""
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
        """Return whether this is the first result of a load that is expected."""
        self._unjudged.pop(request_id, None)
        self._verdicts.pop(request_id, None)
        if self._unreported.pop(request_id, None) is None:
            return False
        self._ended.add(request_id)
        self._has_ended.notify()
        return True

    def wait(self, loads: Set[str] | None = None, *, for_pieces: bool = False) -> None:
        """Wait until some loads are reported, but no longer than one more load is read every 2 ms, and at most 10 ms.

        None are all. Without any, and with nothing to report, wait as long for a piece if that is wanted.
        """

        def is_over() -> bool:
            # Those that are to be judged do not end without another step.
            awaited = self._unreported.keys() if loads is None else self._unreported.keys() & loads
            if awaited - self._unjudged.keys():
                return False
            return not (for_pieces and self._pieces) or bool(self._ended or self._report.pieces)

        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        with self._lock:
            reads_before = None
            while not is_over() and self._reads != reads_before and time.monotonic() < deadline:
                reads_before = self._reads
                self._has_ended.wait_for(is_over, _NEXT_READ_SECONDS)

    def take(self) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended since the last call, and the report for the scheduler."""
        with self._lock:
            ended, self._ended = self._ended, set()
            report, self._report = self._report, WorkerReport()
            slow = self._new_slow_ones()
        for load, seconds in slow:
            logger.warning(
                "kvhma: the load of %s from %s has taken %.0f s, its lease at P is %.0f s; it keeps %d blocks here and "
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
        """Return how many loads vLLM has not been told the end of."""
        with self._lock:
            return len(self._unreported) + len(self._ended) + len(self._pieces)

    def _new_slow_ones(self) -> list[tuple[Load, float]]:
        """Return the loads that have come to last longer than their lease, and how long they do; the lock is held."""
        now = time.monotonic()
        found = []
        for one in self._unreported.values():
            if one.load is not None and not one.slow and now - one.since > one.load.remote.lease:
                one.slow = True
                found.append((one.load, now - one.since))
        return found

    def _gauges(self) -> dict[str, float]:
        with self._lock:
            oldest = min((one.since for one in self._unreported.values()), default=None)
            seconds = 0.0 if oldest is None else time.monotonic() - oldest
            return {"loads_in_flight": len(self._unreported), "oldest_load_seconds": seconds}


_CAUSES: tuple[tuple[type[KvhmaError], str, bool], ...] = (
    (DigestError, "digest", True),
    (LeaseUnknownError, "expired", True),
    (LeaseEndedError, "expired", False),
    (PeerLostError, "peer_lost", True),
    (HandshakeTimeoutError, "handshake", True),
    (HandshakeError, "handshake", False),
    (UnsupportedPairError, "unsupported", False),
    (TransferError, "transfer", True),
    (KvhmaError, "request", False),
)
"""What each error is reported as, and whether another try may help; the first that fits counts."""


def failure_of(error: BaseException) -> Failure:
    """Return the failure of a load in which this was raised."""
    for kind, cause, passing in _CAUSES:
        if isinstance(error, kind):
            return Failure(cause, str(error), passing)
    logger.error("kvhma: internal error during a load", exc_info=error)
    # A text that cannot be had raises nothing here.
    text = traceback.format_exception_only(type(error), error)[-1]
    return Failure("internal", one_line(text.rstrip()), passing=False)
