# SPDX-License-Identifier: Apache-2.0
"""Queued loads become active ones: their engine is found, their reads planned and posted."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvhma._kvhma import Read, Transfer
from kvhma.errors import KvhmaError, PeerLostError, RequestError
from kvhma.nixl import TransferHandle
from kvhma.permute import PermutedRead, permuted_reads
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Load
from kvhma.vllm.threads import SupervisedThread, short_turns
from kvhma.vllm.worker.active_load import ActiveLoad, ReadPart, errors_end, parts_of
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.polling import LoadPoller
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.worker.results import LoadResults

_MAX_HANDSHAKES = 3
"""Handshakes that a load waits for. An engine that was lost again after each of them will not serve it."""

_MAX_BATCH = 32
"""Loads that are started before they are handed over to the poller."""

_DEVICE_SECONDS = 5e-4
"""Pause between two looks at the device while it zeroes for loads, or at places while there are none to read into."""

_SHORT_BLOCKS = 1024
_SHORT_BYTES = 4 << 20
"""Of a load that the engine's thread plans and reads: a transport may copy the bytes within the post, in about 1 ms."""

_IDLE_BYTES = 32 << 20
"""The same in a step that computes nothing: only requests that arrive meanwhile wait, and no longer than for a load."""

_AT_ONCE_SECONDS = 2e-2
"""How long the engine's thread goes on to start loads of one step."""


class Loader:
    """Starts loads in a thread of its own, or in the engine's. What does not end at once is handed over to the poller.

    One thread is enough: most of starting a load is Python, so several would wait for each other, and for vLLM's.
    """

    def __init__(
        self,
        context: WorkerContext,
        memory: Memory,
        engines: PrefillEngines,
        poller: LoadPoller,
        results: LoadResults,
        queued: queue.SimpleQueue[ActiveLoad | None],
    ) -> None:
        """Start the thread; `queued` are the loads that it takes, which may be the poller's too."""
        self._agent = context.agent
        self._geometry = context.geometry
        pages = [(layer.group, layer.page.nbytes) for layer in context.geometry.layers]
        self._block_bytes = [
            sum(nbytes for of, nbytes in pages if of == index) * group.ratio
            for index, group in enumerate(context.geometry.groups)
        ]
        """Of a block, by group."""
        self._permute_bytes = context.settings.permute_bytes
        self._memory = memory
        self._engines = engines
        self._poller = poller
        self._counters = results.stats
        self._queue = queued
        self._closed = threading.Event()
        self._batch: deque[ActiveLoad] = deque()
        """Loads that are started next."""
        self._zeroing: deque[ActiveLoad] = deque()
        """Loads that are posted once the device has zeroed what they do not cover."""
        self._without_room: deque[ActiveLoad] = deque()
        """Loads that are started once others have left places to read into."""
        self._starting: ActiveLoad | None = None
        self._started: list[ActiveLoad] = []
        """Loads that were not handed over yet."""
        self._thread = SupervisedThread(
            "kvhma-load", memory.device.chosen(self._run), results.stats, recover=self._end_starting
        )

    def add(
        self, loads: Sequence[Load], after: torch.Event | None = None, *, at_once: bool = False, idle: bool = False
    ) -> set[str]:
        """Take loads; return the requests of those that the calling thread has started and that have not ended.

        Args:
            loads: that were ordered.
            after: what the device has to have done before anything is written to their blocks.
            at_once: whether the calling thread starts the short ones itself, for 20 ms at most. Nothing has to be woken
                for them and nothing shares their core, so they end earlier than in the loader's thread.
            idle: whether that thread computes nothing in this step, so that longer ones are short.
        """
        now = time.monotonic()
        most = _IDLE_BYTES if idle else _SHORT_BYTES
        # Who polls a read may copy for all that are in flight, so there must be none but the short ones.
        at_once = at_once and not self._agent.is_reading
        started: list[ActiveLoad] = []
        others: list[ActiveLoad] = []
        for load in loads:
            active = ActiveLoad(load, now, after)
            may_start = at_once and self._is_short(load, most) and time.monotonic() - now < _AT_ONCE_SECONDS
            (started if may_start and self._start_at_once(active) else others).append(active)
        left = started
        if started:
            with errors_end(*started):
                left = self._poller.stay_with(started, lambda: True)
            self._poller.add(left)
        for active in others:
            self._queue.put(active)
        return {active.load.request_id for active in left if not active.load.piece}

    def _is_short(self, load: Load, most: int) -> bool:
        """Return whether the blocks that a load fills are few, of `most` bytes together. It is not planned for that."""
        blocks = nbytes = 0
        for span, block_bytes in zip(load.spans, self._block_bytes, strict=True):
            blocks += len(span.ids)
            nbytes += len(span.ids) * block_bytes
        return blocks <= _SHORT_BLOCKS and nbytes <= most

    def _start_at_once(self, active: ActiveLoad) -> bool:
        """Start a load in the calling thread; return whether nothing is left for the loader's to do."""
        with errors_end(active):
            # A handshake would give the load to the loader, and two threads would have it.
            active.engine = self._engines.acquire_known(active.load.remote.incarnation)
            if active.engine is None:
                return False
            self._plan(active)
        if active.error is None:
            if active.transfer is None or active.launched is not None:
                return False  # the loader's thread waits for room, or for the device
            with errors_end(active):
                self._post(active)
        return True

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
            with short_turns:  # each load takes Python's lock some ten times
                self._start_batch()
        self._poller.finish()

    def _end_starting(self, error: BaseException) -> None:
        """After an error of this class itself, the load that was in its hands fails; nobody else's does."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.fail(error)
            self._started.append(starting)

    def _take_batch(self) -> None:
        """Wait for a load and take it with those that are queued after it; none once it is closed.

        While loads wait for the device, or for room, it is not waited for long.
        """
        self._batch.extend(self._without_room)
        self._without_room.clear()
        try:
            active = self._queue.get(timeout=_DEVICE_SECONDS if self._zeroing or self._batch else None)
        except queue.Empty:
            return
        while active is not None:
            self._batch.append(active)
            if len(self._batch) == _MAX_BATCH or self._queue.empty():
                return
            active = self._queue.get()  # does not wait: no other thread takes from it

    def _start_batch(self) -> None:
        while self._batch and not self._closed.is_set():
            active = self._starting = self._batch.popleft()
            with errors_end(active):
                self._plan(active)
            if active.is_planned or active.error is not None:
                self._zeroing.append(active)
            elif active.engine is not None:
                self._without_room.append(active)
            self._starting = None
            self._post_zeroed()
            # Earlier loads may have ended by now: some transports copy inside the post.
            self._started = self._poller.advance(self._started, more_to_come=bool(self._batch))
        self._post_zeroed()
        self._poller.add(self._poller.stay_with(self._started, lambda: not self._zeroing and self._queue.empty()))
        self._started = []

    def _post_zeroed(self) -> None:
        """Post the reads of loads into whose blocks the device writes nothing any more."""
        for active in [one for one in self._zeroing if one.is_device_done()]:
            self._starting = active
            self._zeroing.remove(active)
            with errors_end(active):
                self._post(active)
            self._started.append(active)
            self._starting = None

    def _plan(self, active: ActiveLoad) -> None:
        """Plan a load and begin to zero what it does not cover; or queue it again after a handshake.

        Without room for it, it is left without a transfer. One that was planned and has lost a part keeps its plan.
        """
        if active.error is not None or active.is_planned:
            return
        load = active.load
        if active.engine is None:
            active.engine = self._engines.acquire(load.remote.incarnation, partial(self._after_handshake, active))
        if active.engine is None:
            return
        if active.places is None:
            active.places = self._memory.take(load.spans)
        if active.places is None:
            return
        transfer = active.engine.plan.transfer(load.num_tokens, list(active.places), list(load.remote.spans))
        reads, permutes = self._reads(active.engine, transfer)
        if active.transfer is not None:
            active.check_same(parts_of(reads, transfer.bytes))
            return
        active.transfer, active.parts, active.permutes = transfer, parts_of(reads, transfer.bytes), permutes
        active.planned_at = time.monotonic()
        active.launched = self._memory.zero(active.transfer.zero, active.after)
        active.waits_for_device = not active.is_device_done()

    def _reads(
        self, engine: PrefillEngine, transfer: Transfer
    ) -> tuple[Sequence[Read | PermutedRead], NDArray[np.uint64] | None]:
        """Return what is read, and what has to be put into order afterwards; None if nothing ever has."""
        if not self._permute_bytes:
            return transfer.reads, None
        remote = [None if peer is None else peer.geometry for peer in engine.peers]
        reads = permuted_reads(transfer, self._geometry, remote, self._permute_bytes)
        permutes = [read.permutes for read in reads]
        return reads, np.concatenate(permutes) if permutes else None

    def _post(self, active: ActiveLoad) -> None:
        """Post what a load that was planned has not read yet."""
        if active.transfer is None or active.engine is None or active.error is not None:
            return
        started = time.monotonic()
        if not self._memory.device.is_host:
            self._counters.record(zero_seconds=started - active.planned_at)
            self._counters.count("waiting_posts", active.waits_for_device)
        for part in active.parts:
            if part.handle is None and active.error is None:
                with active.losing(part):
                    part.handle = self._read(active.engine, part)
        active.posted_at = time.monotonic()
        active.post_seconds = active.posted_at - started

    def _read(self, engine: PrefillEngine, part: ReadPart) -> TransferHandle:
        peer = engine.peers[part.source]
        if peer is None:
            raise RequestError(f"source {part.source} is not connected")
        return self._agent.read(
            peer,
            part.local,
            part.remote,
            local_memory=self._memory.kind,
            remote_memory=peer.geometry.regions[0].memory,
        )

    def _after_handshake(self, active: ActiveLoad, error: KvhmaError | None) -> None:
        active.handshakes += 1
        if error is None and active.handshakes > _MAX_HANDSHAKES:
            address = active.load.remote.address
            error = PeerLostError(f"{address} was lost after each of {_MAX_HANDSHAKES} handshakes")
        active.fail(error)
        self._queue.put(active)
