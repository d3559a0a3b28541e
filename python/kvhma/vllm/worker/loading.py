# SPDX-License-Identifier: Apache-2.0
"""The loader finds the engine of each queued load, plans its reads and posts them."""

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
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.threads import SupervisedThread, short_turns
from kvhma.vllm.worker.active_load import ActiveLoad, ReadPart, errors_end, parts_of
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.polling import LoadPoller
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.worker.results import LoadResults

_MAX_HANDSHAKES = 3
"""Most handshakes that a load waits for. An engine that was lost after each of them will not serve it."""

_MAX_BATCH = 32
"""Most loads that are started before the poller gets them."""

_DEVICE_SECONDS = 5e-4
"""Pause between two checks whether the device has zeroed, or whether there are places to read into."""

_SHORT_BLOCKS = 1024
_SHORT_BYTES = 4 << 20
"""Limits of a load that the engine's thread plans and reads. A transport may copy the bytes within the post: 1 ms."""

_IDLE_BYTES = 32 << 20
"""The limit in a step that computes nothing: only new requests wait, and no longer than for a load."""

_AT_ONCE_SECONDS = 2e-2
"""How long the engine's thread may start loads of one step."""


class Loader:
    """Starts loads in its own thread or in the engine's. The poller gets the loads that do not end at once.

    One thread is enough: starting a load is mostly Python, so several threads would wait for each other and for vLLM's.
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
        """Start the thread, which takes loads from `queued`; the poller puts loads there too."""
        self._agent = context.agent
        self._geometry = context.geometry
        pages = [(layer.group, layer.page.nbytes) for layer in context.geometry.layers]
        self._block_bytes = [
            sum(nbytes for of_group, nbytes in pages if of_group == index) * group.ratio
            for index, group in enumerate(context.geometry.groups)
        ]
        """Bytes of a block, by group."""
        self._permute_bytes = context.settings.permute_bytes
        self._memory = memory
        self._engines = engines
        self._poller = poller
        self._counters = results.stats
        self._queue = queued
        self._closed = threading.Event()
        self._batch: deque[ActiveLoad] = deque()
        """Loads to start next."""
        self._zeroing: deque[ActiveLoad] = deque()
        """Loads to post once the device has zeroed what they do not cover."""
        self._without_room: deque[ActiveLoad] = deque()
        """Loads to start once other loads have released places to read into."""
        self._starting: ActiveLoad | None = None
        self._started: list[ActiveLoad] = []
        """Started loads that the poller does not have yet."""
        self._thread = SupervisedThread(
            "kvhma-load", memory.device.chosen(self._run), results.stats, recover=self._end_starting
        )

    def start_or_queue(
        self,
        loads: Sequence[ReadCommand],
        after: torch.Event | None = None,
        *,
        at_once: bool = False,
        idle: bool = False,
    ) -> set[str]:
        """Start short loads here and queue the others; return the requests whose started loads have not ended.

        Args:
            loads: that were ordered.
            after: device work that has to end before the blocks are written to.
            at_once: whether the calling thread starts short loads itself, for 20 ms at most. They end earlier than in
                the loader's thread: no thread has to wake up, and none shares the core.
            idle: whether the calling thread computes nothing in this step. Then longer loads count as short.
        """
        now = time.monotonic()
        limit = _IDLE_BYTES if idle else _SHORT_BYTES
        # Polling a read may copy for all reads in flight, so only short loads may be in flight.
        at_once = at_once and not self._agent.is_reading
        started: list[ActiveLoad] = []
        others: list[ActiveLoad] = []
        for load in loads:
            active = ActiveLoad(load, now, after)
            may_start = at_once and self._is_short(load, limit) and time.monotonic() - now < _AT_ONCE_SECONDS
            (started if may_start and self._start_at_once(active) else others).append(active)
        not_ended = started
        if started:
            with errors_end(*started):
                not_ended = self._poller.stay_with(started, lambda: True)
            self._poller.add_loads(not_ended)
        for active in others:
            self._queue.put(active)
        return {active.load.request_id for active in not_ended if not active.load.piece}

    def _is_short(self, load: ReadCommand, limit: int) -> bool:
        """Return whether a load fills few blocks, of at most `limit` bytes. This does not need its plan."""
        blocks = nbytes = 0
        for span, block_bytes in zip(load.spans, self._block_bytes, strict=True):
            blocks += len(span.ids)
            nbytes += len(span.ids) * block_bytes
        return blocks <= _SHORT_BLOCKS and nbytes <= limit

    def _start_at_once(self, active: ActiveLoad) -> bool:
        """Start a load in the calling thread; return whether the loader's thread has nothing left to do for it."""
        with errors_end(active):
            # Not acquire_engine: a handshake would queue the load for the loader, and two threads would own it.
            active.engine = self._engines.acquire_known_engine(active.load.remote.incarnation)
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
        """Stop starting loads; the poller finishes the started loads."""
        self._closed.set()
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread ends."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self._batch and not self._started:
                self._take_batch()
            with short_turns:  # each load takes Python's lock some ten times
                self._start_batch()
        self._poller.finish_loads()

    def _end_starting(self, error: BaseException) -> None:
        """After an error in this class, fail only the load that was being started."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.fail(error)
            self._started.append(starting)

    def _take_batch(self) -> None:
        """Wait for a load, and take it with the loads queued after it. It takes nothing once the loader is closed.

        While loads wait for the device, or for places, it only waits for a moment.
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
        self._poller.add_loads(self._poller.stay_with(self._started, lambda: not self._zeroing and self._queue.empty()))
        self._started = []

    def _post_zeroed(self) -> None:
        """Post the reads of loads whose blocks the device does not write to any more."""
        for active in [load for load in self._zeroing if load.is_device_done()]:
            self._starting = active
            self._zeroing.remove(active)
            with errors_end(active):
                self._post(active)
            self._started.append(active)
            self._starting = None

    def _plan(self, active: ActiveLoad) -> None:
        """Plan a load and begin to zero what it does not cover. If it needs a handshake, queue it again after that.

        Without places to read into, the load stays without a transfer. A load that has lost a part keeps its plan.
        """
        if active.error is not None or active.is_planned:
            return
        load = active.load
        if active.engine is None:
            active.engine = self._engines.acquire_engine(
                load.remote.incarnation, partial(self._after_handshake, active)
            )
        if active.engine is None:
            return
        if active.places is None:
            active.places = self._memory.take_places(load.spans)
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
        """Return the reads, and the ranges to reorder afterwards; None if the setting is off."""
        if not self._permute_bytes:
            return transfer.reads, None
        remote = [None if peer is None else peer.geometry for peer in engine.peers]
        reads = permuted_reads(transfer, self._geometry, remote, self._permute_bytes)
        permutes = [read.permutes for read in reads]
        return reads, np.concatenate(permutes) if permutes else None

    def _post(self, active: ActiveLoad) -> None:
        """Post the parts of a planned load that were not read yet."""
        if active.transfer is None or active.engine is None or active.error is not None:
            return
        started = time.monotonic()
        if not self._memory.device.is_host:
            self._counters.record(zero_seconds=started - active.planned_at)
            self._counters.count("delayed_posts", active.waits_for_device)
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
