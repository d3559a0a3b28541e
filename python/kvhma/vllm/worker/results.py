# SPDX-License-Identifier: Apache-2.0
"""How loads ended, from the threads of a worker to the engine's thread, and what was measured meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from kvhma.errors import (
    HandshakeError,
    HandshakeTimeoutError,
    KvhmaError,
    LeaseEndedError,
    LeaseUnknownError,
    PeerLostError,
    TransferError,
    UnsupportedPairError,
)
from kvhma.vllm.metadata import Failure, WorkerReport
from kvhma.vllm.stats import TransferStats

logger = logging.getLogger("vllm.kvhma")

_NEXT_READ_SECONDS = 2e-3
_MAX_WAIT_SECONDS = 1e-2
"""How long a step waits for the next load to be read, and for all of them together."""


class LoadResults:
    """Reports each load exactly once. Safe to use from several threads."""

    def __init__(self) -> None:
        """Start without loads."""
        self._lock = threading.Lock()
        self._all_reported = threading.Condition(self._lock)
        self._unreported = 0
        self._reads = 0
        self._ended: set[str] = set()
        self._report = WorkerReport()
        self._stats = TransferStats()

    def expect(self, loads: int) -> None:
        """Expect the results of some more loads."""
        with self._lock:
            self._unreported += loads

    def note_read(self) -> None:
        """Take note that the bytes of one more load are here. Its lease may still have to be checked."""
        with self._lock:
            self._reads += 1

    def succeed(self, request_id: str, first_tokens: dict[int, int]) -> None:
        """Report a load that is right; `first_tokens` as in :class:`kvhma.vllm.metadata.WorkerReport`."""
        with self._lock:
            if first_tokens:
                self._report.first_tokens[request_id] = first_tokens
            self._end(request_id)

    def fail(self, request_id: str, failure: Failure) -> None:
        """Report a load that failed."""
        logger.warning("kvhma: the load of %s failed (%s): %s", request_id, failure.cause, failure.text)
        with self._lock:
            self._stats.count("failed_loads", label=failure.cause)
            self._report.failures[request_id] = failure
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._ended.add(request_id)
        self._unreported -= 1
        if not self._unreported:
            self._all_reported.notify()

    def wait(self) -> None:
        """Wait until every load is reported, but no longer than one more load is read every 2 ms, and at most 10 ms."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        with self._lock:
            reads_before = None
            while self._unreported and self._reads != reads_before and time.monotonic() < deadline:
                reads_before = self._reads
                self._all_reported.wait_for(lambda: not self._unreported, _NEXT_READ_SECONDS)

    def take(self) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended since the last call, and the report for the scheduler."""
        with self._lock:
            ended, self._ended = self._ended, set()
            report, self._report = self._report, WorkerReport()
        return ended, report

    @contextlib.contextmanager
    def stats(self) -> Iterator[TransferStats]:
        """Hold the lock while something is counted."""
        with self._lock:
            yield self._stats

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call; None if nothing was."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, TransferStats()
        return stats


_CAUSES: tuple[tuple[type[Exception], str, bool], ...] = (
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


def failure_of(error: Exception) -> Failure:
    """Return the failure of a load in which this was raised."""
    for kind, cause, passing in _CAUSES:
        if isinstance(error, kind):
            return Failure(cause, str(error), passing)
    logger.error("kvhma: internal error during a load", exc_info=error)
    return Failure("internal", f"{type(error).__name__}: {error}", passing=False)
