# SPDX-License-Identifier: Apache-2.0
"""The times of a load as OpenTelemetry spans. A separate thread makes them after the load was reported.

the client's span
  |- llm_request                   vLLM's, of P and of D
  '- kvhma.load                    of each rank
       |- kvhma.claim              from the request to the order of the load, in the scheduler
       |- kvhma.plan               a handshake if it is needed, places to read into, the plan
       |- kvhma.post               posting to the transport
       |- kvhma.read               until the last byte has arrived
       '- kvhma.check              until P has confirmed that it held the blocks
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import __version__
from kvhma.vllm.counters import Counters
from kvhma.vllm.options.doors import WorkerDoor
from kvhma.vllm.options.spans.scheduler import Trace
from kvhma.vllm.threads import SupervisedThread

if TYPE_CHECKING:  # optional dependency
    from opentelemetry.trace import Tracer

    from kvhma.vllm.device.memory import Memory
    from kvhma.vllm.peers.worker_context import WorkerContext
    from kvhma.vllm.reads.results import LoadResults

logger = logging.getLogger("vllm.kvhma")

_MAX_WAITING = 1024
"""Most loads that wait for their spans. Spans of further loads are dropped."""


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """The times of a load, on the monotonic clock; 0 for a stage that it did not reach.

    Attributes:
        trace: of its request.
        ordered_at: when the scheduler ordered it.
        planned_at: when it was planned.
        post_began: when posting began.
        posted_at: when all its reads were posted.
        read_at: when the last read had ended.
        ended_at: when it was reported.
        error: name of the error that it failed with; empty if it succeeded.
        attributes: of its span.
    """

    trace: Trace
    ordered_at: float
    planned_at: float
    post_began: float
    posted_at: float
    read_at: float
    ended_at: float
    error: str = ""
    attributes: Mapping[str, str | int] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end of each stage that it reached. A stage in which it failed ends with the load."""
        began = (self.ordered_at, self.post_began, self.posted_at, self.read_at)
        ended = (self.planned_at, self.posted_at, self.read_at, self.ended_at)
        for name, start, end in zip(("plan", "post", "read", "check"), began, ended, strict=True):
            if start:
                yield name, start, end or self.ended_at


class Room(WorkerDoor):
    """Makes the spans of traced loads. Safe to use from several threads."""

    def __init__(self, context: WorkerContext, memory: Memory, results: LoadResults) -> None:
        """Start without a thread; the first traced load starts it."""
        self._rank = context.rank
        self._counters: Counters = results.stats
        self._queue: queue.Queue[LoadTimes | None] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: SupervisedThread | None = None

    def on_read_reported(self, read: Any) -> None:
        """Queue the spans of a read whose request is traced."""
        if (trace := read.command.extras.get("spans")) is not None:
            self.queue_spans(_times_of(read, trace, self._rank))

    def queue_spans(self, times: LoadTimes) -> None:
        """Queue the spans of a load that has ended; returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = SupervisedThread("kvhma-trace", self._run, self._counters)
        try:
            self._queue.put_nowait(times)
        except queue.Full:
            logger.debug("kvhma: more than %d loads wait for their spans; dropping some spans", _MAX_WAITING)

    def close(self, timeout: float) -> None:
        """Make the queued spans, and stop."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
            thread.join(timeout)

    def _run(self) -> None:
        try:
            tracer = _tracer()
        except ImportError as error:
            logger.warning("kvhma: no spans of loads: %s", error)
            tracer = None
        while (times := self._queue.get()) is not None:
            if tracer is not None:
                _make(tracer, times, claims=self._rank == 0)


def _times_of(read: Any, trace: Trace, rank: int) -> LoadTimes:
    command, transfer = read.command, read.transfer
    attributes: dict[str, str | int] = {
        "gen_ai.request.id": command.request_id,
        "kvhma.prefill_engine": command.remote.engine_id,
        "kvhma.rank": str(rank),
        "kvhma.handshakes": read.handshakes,
        "kvhma.tokens_loaded": command.num_tokens - command.cached,
        "kvhma.tokens_cached": command.cached,
    }
    if transfer is not None:
        attributes |= {"kvhma.bytes": transfer.bytes, "kvhma.descriptors": transfer.descriptors}
    return LoadTimes(
        trace,
        read.ordered_at,
        read.planned_at,
        read.posted_at - read.post_seconds,
        read.posted_at,
        read.read_at,
        read.ended_at,
        "" if read.error is None else type(read.error).__name__,
        attributes,
    )


def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("kvhma", __version__)


def _make(tracer: Tracer, times: LoadTimes, *, claims: bool) -> None:
    """Make the spans of a load.

    Args:
        tracer: of vLLM's provider.
        times: of the load.
        claims: whether to make the span `kvhma.claim`, which is the same for all ranks.
    """
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    to_wall = time.time() - time.monotonic()

    def wall(at: float) -> int:
        return int((to_wall + at) * 1e9)

    taken_at = times.ordered_at - times.trace.waited
    parent = TraceContextTextMapPropagator().extract({"traceparent": times.trace.parent})
    load = tracer.start_span(
        "kvhma.load",
        parent,
        attributes=dict(times.attributes),
        start_time=wall(taken_at if claims else times.ordered_at),
    )
    within = set_span_in_context(load)
    claim = [("claim", taken_at, times.ordered_at)] if claims else []
    for name, start, end in (*claim, *times.parts()):
        tracer.start_span(f"kvhma.{name}", within, start_time=wall(start)).end(wall(end))
    if times.error:
        load.set_status(Status(StatusCode.ERROR, times.error))
    load.end(wall(times.ended_at))
