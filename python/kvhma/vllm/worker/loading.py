# SPDX-License-Identifier: Apache-2.0
"""Queued loads become active ones: their engine is found, their blocks claimed, their reads planned and posted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvhma.errors import KvhmaError, PeerLostError, RequestError
from kvhma.nixl import Agent
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Load
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.params import LeaseClaim
from kvhma.vllm.worker.lease import Lease, claim_all
from kvhma.vllm.worker.polling import ActiveLoad, LoadPoller
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.worker.results import LoadResults, failure_of

_MAX_HANDSHAKES = 3
"""Handshakes that a load waits for. An engine that was lost again after each of them will not serve it."""

_MAX_BATCH = 32
"""Loads that are claimed together."""


@dataclass(eq=False)
class QueuedLoad:
    """A load that the scheduler ordered.

    Attributes:
        load: what to read.
        queued_at: when it was ordered.
        handshakes: how many it has waited for.
    """

    load: Load
    queued_at: float
    handshakes: int = 0


class _ClaimedLoad(NamedTuple):
    queued: QueuedLoad
    engine: PrefillEngine
    lease: Lease


class Loader:
    """Starts loads in a thread of its own, and hands them over to the poller.

    One thread is enough: most of starting a load is Python, so several would wait for each other, and for vLLM's.
    """

    def __init__(
        self,
        settings: Settings,
        agent: Agent,
        memory: Memory,
        engines: PrefillEngines,
        poller: LoadPoller,
        results: LoadResults,
    ) -> None:
        """Start the thread."""
        self._settings = settings
        self._agent = agent
        self._memory = memory
        self._engines = engines
        self._poller = poller
        self._results = results
        self._queue: queue.SimpleQueue[QueuedLoad | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhma-load", daemon=True)
        self._thread.start()

    def add(self, loads: Sequence[Load]) -> None:
        """Queue loads."""
        now = time.monotonic()
        for load in loads:
            self._queue.put(QueuedLoad(load, now))

    def close(self) -> None:
        """Start nothing any more; the poller finishes what was started."""
        self._closed.set()
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._start(self._next_batch())
        self._poller.finish()

    def _next_batch(self) -> list[QueuedLoad]:
        """Wait for a load and return it with those that are queued after it; none once it is closed."""
        batch: list[QueuedLoad] = []
        queued = self._queue.get()
        while queued is not None:
            batch.append(queued)
            if len(batch) == _MAX_BATCH or self._queue.empty():
                return batch
            queued = self._queue.get()  # does not wait: no other thread takes from it
        return []

    def _start(self, batch: Sequence[QueuedLoad]) -> None:
        claimed: list[_ClaimedLoad] = []
        for engine, loads in self._by_engine(batch):
            claimed += self._claim(engine, loads)
        active: list[ActiveLoad] = []
        for one in claimed:
            started = self._plan(one)
            if started is not None:
                self._post(started)
                active.append(started)
            # Earlier loads may have ended by now: some transports copy inside the post, and P answers meanwhile.
            active = self._poller.advance(active)
        # All at once, and after the last poll here: loads that were claimed together share P's answer.
        if active:
            self._poller.add(active)

    def _by_engine(self, batch: Sequence[QueuedLoad]) -> list[tuple[PrefillEngine, list[QueuedLoad]]]:
        """Return the loads by engine. Those whose engine is not known yet are queued again after its handshake."""
        found: dict[int, tuple[PrefillEngine, list[QueuedLoad]]] = {}
        for queued in batch:
            try:
                engine = self._engines.acquire(queued.load.remote.incarnation, partial(self._after_handshake, queued))
            except Exception as error:
                self._results.fail(queued.load.request_id, failure_of(error))
                continue
            if engine is not None:
                found.setdefault(id(engine), (engine, []))[1].append(queued)
        return list(found.values())

    def _after_handshake(self, queued: QueuedLoad, error: KvhmaError | None) -> None:
        queued.handshakes += 1
        if error is None and queued.handshakes > _MAX_HANDSHAKES:
            error = PeerLostError(f"{queued.load.remote.address} was lost after each of {_MAX_HANDSHAKES} handshakes")
        if error is None:
            self._queue.put(queued)
        else:
            self._results.fail(queued.load.request_id, failure_of(error))

    def _claim(self, engine: PrefillEngine, loads: Sequence[QueuedLoad]) -> list[_ClaimedLoad]:
        """Claim what some loads read from one engine. It answers while they are planned and posted."""
        try:
            leases = claim_all(
                engine.clients,
                [LeaseClaim(queued.load.remote.lease_key, queued.load.reader) for queued in loads],
                timeout=self._settings.handshake_timeout,
                margin=self._settings.clock_margin,
            )
        except Exception as error:
            for queued in loads:
                self._engines.release(engine)
                self._results.fail(queued.load.request_id, failure_of(error))
            return []
        return [_ClaimedLoad(queued, engine, lease) for queued, lease in zip(loads, leases, strict=True)]

    def _plan(self, claimed: _ClaimedLoad) -> ActiveLoad | None:
        """Plan a load and zero what it does not cover; None if that fails."""
        queued, engine, lease = claimed
        load = queued.load
        try:
            transfer = engine.plan.transfer(load.num_tokens, list(load.spans), list(load.remote.spans))
            self._memory.zero(transfer.zero)
        except Exception as error:
            lease.close()
            self._engines.release(engine)
            self._results.fail(load.request_id, failure_of(error))
            return None
        return ActiveLoad(load, queued.queued_at, engine, lease, transfer)

    def _post(self, active: ActiveLoad) -> None:
        """Post the reads of a load. An error waits for the reads that were posted before it: they still write."""
        started = time.monotonic()
        try:
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
        except Exception as error:
            active.error = error
        active.posted_at = time.monotonic()
        active.post_seconds = active.posted_at - started
