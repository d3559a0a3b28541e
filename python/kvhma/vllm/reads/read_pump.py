# SPDX-License-Identifier: Apache-2.0
"""The pump drives reads from their order to their report, in one thread."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvhma.errors import KvhmaError, PeerLostError
from kvhma.vllm.device.memory import Memory
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.peers.prefill_engines import PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.active_read import ActiveRead, ReadState
from kvhma.vllm.reads.lease_checks import check_leases
from kvhma.vllm.reads.read_metrics import ReadMetrics
from kvhma.vllm.reads.read_steps import ReadSteps, errors_fail
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.threads import SupervisedThread, short_turns

_MAX_HANDSHAKES = 3
"""Most handshakes that a read waits for. An engine that was lost after each of them will not serve it."""

_START_SECONDS = 2e-3
_MIN_STARTS = 8
"""How long the pump starts reads before it polls those in flight, and how many it starts even if that takes longer."""

_POLL_SECONDS = 5e-4
"""Pause between two polls of transfers, places, the device and answers of prefill engines."""

_STARTING = (ReadState.QUEUED, ReadState.PLACING, ReadState.ZEROING, ReadState.POSTING)
_NOT_POSTED = (ReadState.QUEUED, ReadState.CONNECTING, ReadState.PLACING, ReadState.ZEROING)
_CAN_BE_DROPPED = (*_NOT_POSTED, ReadState.JUDGING)


class ReadPump:
    """Owns the thread that drives reads.

    One thread is enough: starting a read is mostly Python, so several threads would wait for each other and for vLLM's.
    A read that takes long to post does so in turns with the others.
    """

    def __init__(
        self,
        context: WorkerContext,
        memory: Memory,
        engines: PrefillEngines,
        results: LoadResults,
    ) -> None:
        """Start the thread."""
        self._timeout = context.settings.handshake_timeout
        self._engines = engines
        self._steps = ReadSteps(context, memory, engines, results)
        self._metrics = ReadMetrics(context, results.stats)
        self._arrived: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What other threads have the pump's thread do."""
        self._reads: list[ActiveRead] = []
        """The reads of the pump's thread, in the order of their orders; always the same list."""
        self._closing = False
        self._thread = SupervisedThread("kvhma-reads", memory.device.chosen(self._run), results.stats)

    # --- the engine's thread -------------------------------------------------------------------------------

    def start_reads(self, commands: Sequence[ReadCommand], after: torch.Event | None = None) -> None:
        """Drive reads from now on.

        Args:
            commands: of the scheduler.
            after: device work that has to end before the blocks are written to.
        """
        now = time.monotonic()
        self._arrived.put(partial(self._reads.extend, [ActiveRead(command, now, after) for command in commands]))

    def close(self) -> None:
        """Start no more reads, and let the thread end once all others are reported."""
        self._arrived.put(self._close)

    def join(self, timeout: float) -> None:
        """Wait until the thread ends."""
        self._thread.join(timeout)

    # --- the pump's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._reads or not self._closing:
            self._wait()
            self._drive_own()
            self._measure_reported()

    def _wait(self) -> None:
        """Pause until something may have happened to a read, and do what other threads have asked for."""
        states = {read.state for read in self._reads}
        try:
            if states <= {ReadState.CONNECTING}:
                self._arrived.get()()
            elif not states & {ReadState.QUEUED, ReadState.POSTING}:
                self._arrived.get(timeout=_POLL_SECONDS)()
            while True:
                self._arrived.get_nowait()()
        except queue.Empty:
            return

    def _drive_own(self) -> None:
        if self._closing:
            self._reads[:] = [read for read in self._reads if read.state not in _CAN_BE_DROPPED]
        # Starting a read takes Python's lock some ten times.
        starts = any(read.state in _STARTING for read in self._reads)
        with short_turns if starts else contextlib.nullcontext():
            for read in self._reads:  # before newer reads take the places
                if read.state is ReadState.PLACING:
                    self._steps.advance(read)
            began, started = time.monotonic(), 0
            queued = [read for read in self._reads if read.state is ReadState.QUEUED]
            for started, read in enumerate(queued, 1):
                self._connect(read)
                self._steps.advance(read)
                if started >= _MIN_STARTS and time.monotonic() - began > _START_SECONDS:
                    break
            self._drive(more_to_come=started < len(queued))

    def _drive(self, *, more_to_come: bool) -> None:
        """Take each read as far as it comes without waiting.

        Args:
            more_to_come: whether more reads will start in a moment, so that one question can cover them too.
        """
        for read in self._reads:
            self._steps.advance(read)
        checking = [read for read in self._reads if read.state is ReadState.CHECKING]
        if checking:
            check_leases(checking, self._timeout, more_to_come=more_to_come)
            for read in checking:
                self._steps.advance(read)

    def _connect(self, read: ActiveRead) -> None:
        """Acquire the engine of a read, or begin a handshake with it."""
        with errors_fail(read):
            read.engine = self._engines.acquire_engine(
                read.command.remote.incarnation,
                lambda error: self._arrived.put(partial(self._end_handshake, read, error)),
            )
            if read.engine is None:
                read.state = ReadState.CONNECTING

    def _end_handshake(self, read: ActiveRead, error: KvhmaError | None) -> None:
        if read.state is not ReadState.CONNECTING:  # it has failed meanwhile
            return
        read.handshakes += 1
        if error is None and read.handshakes > _MAX_HANDSHAKES:
            address = read.command.remote.address
            error = PeerLostError(f"{address} was lost after each of {_MAX_HANDSHAKES} handshakes")
        if error is not None:
            read.fail(error)
        else:
            read.state = ReadState.QUEUED

    def _measure_reported(self) -> None:
        for read in [read for read in self._reads if read.state is ReadState.REPORTED]:
            self._reads.remove(read)
            self._metrics.measure(read)

    def _close(self) -> None:
        self._closing = True
