# SPDX-License-Identifier: Apache-2.0
"""Queued loads become active ones: their engine is found, their reads planned and posted."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from kvhma.errors import KvhmaError, PeerLostError, RequestError
from kvhma.nixl import Agent
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Load
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.worker.polling import ActiveLoad, LoadPoller, errors_end
from kvhma.vllm.worker.prefill_engines import PrefillEngines
from kvhma.vllm.worker.results import LoadResults

_MAX_HANDSHAKES = 3
"""Handshakes that a load waits for. An engine that was lost again after each of them will not serve it."""

_MAX_BATCH = 32
"""Loads that are started before they are handed over to the poller."""


_ANSWERS_SECONDS = 2e-3
"""How long the loader stays with loads that only wait for answers: most come before another thread would be awake."""


class Loader:
    """Starts loads in a thread of its own. What does not end at once is handed over to the poller.

    One thread is enough: most of starting a load is Python, so several would wait for each other, and for vLLM's.
    """

    def __init__(
        self, agent: Agent, memory: Memory, engines: PrefillEngines, poller: LoadPoller, results: LoadResults
    ) -> None:
        """Start the thread."""
        self._agent = agent
        self._memory = memory
        self._engines = engines
        self._poller = poller
        self._queue: queue.SimpleQueue[ActiveLoad | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._batch: deque[ActiveLoad] = deque()
        """Loads that are started next."""
        self._starting: ActiveLoad | None = None
        self._started: list[ActiveLoad] = []
        """Loads that were not handed over yet."""
        self._thread = SupervisedThread("kvhma-load", self._run, results.stats, recover=self._end_starting)

    def add(self, loads: Sequence[Load]) -> None:
        """Queue loads."""
        now = time.monotonic()
        for load in loads:
            self._queue.put(ActiveLoad(load, now))

    def close(self) -> None:
        """Start nothing any more; the poller finishes what was started."""
        self._closed.set()
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self._batch and not self._started:
                self._take_batch()
            self._start_batch()
        self._poller.finish()

    def _end_starting(self, error: BaseException) -> None:
        """After an error of this class itself, the load that was in its hands fails; nobody else's does."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.fail(error)
            self._started.append(starting)

    def _take_batch(self) -> None:
        """Wait for a load and take it with those that are queued after it; none once it is closed."""
        active = self._queue.get()
        while active is not None:
            self._batch.append(active)
            if len(self._batch) == _MAX_BATCH or self._queue.empty():
                return
            active = self._queue.get()  # does not wait: no other thread takes from it

    def _start_batch(self) -> None:
        while self._batch and not self._closed.is_set():
            active = self._starting = self._batch.popleft()
            with errors_end(active):
                self._start(active)
            if active.engine is not None or active.error is not None:
                self._started.append(active)
            self._starting = None
            # Earlier loads may have ended by now: some transports copy inside the post.
            self._started = self._poller.advance(self._started, more_to_come=bool(self._batch))
        self._await_answers()
        self._poller.add(self._started)
        self._started = []

    def _await_answers(self) -> None:
        deadline = time.monotonic() + _ANSWERS_SECONDS
        while self._started and self._queue.empty() and time.monotonic() < deadline:
            if any(active.read_at is None for active in self._started):
                return
            self._poller.wait_for_answers(self._started)
            self._started = self._poller.advance(self._started)

    def _start(self, active: ActiveLoad) -> None:
        """Plan a load, zero what it does not cover, and post its reads; or queue it again after a handshake."""
        if active.error is not None:
            return
        load = active.load
        active.engine = self._engines.acquire(load.remote.incarnation, partial(self._after_handshake, active))
        if active.engine is None:
            return
        active.transfer = active.engine.plan.transfer(load.num_tokens, list(load.spans), list(load.remote.spans))
        self._memory.zero(active.transfer.zero)
        started = time.monotonic()
        for read in active.transfer.reads:
            peer = active.engine.peers[read.source]
            if peer is None:
                raise RequestError(f"source {read.source} is not connected")
            handle = self._agent.read(
                peer,
                read.local,
                read.remote,
                local_memory=self._memory.kind,
                remote_memory=peer.geometry.regions[0].memory,
            )
            active.handles.append(handle)
        active.posted_at = time.monotonic()
        active.post_seconds = active.posted_at - started

    def _after_handshake(self, active: ActiveLoad, error: KvhmaError | None) -> None:
        active.handshakes += 1
        if error is None and active.handshakes > _MAX_HANDSHAKES:
            address = active.load.remote.address
            error = PeerLostError(f"{address} was lost after each of {_MAX_HANDSHAKES} handshakes")
        active.fail(error)
        self._queue.put(active)
