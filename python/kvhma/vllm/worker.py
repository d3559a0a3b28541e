# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in a worker's process: it registers caches, and reads caches of prefill engines.

    engine's thread                 kvhma-reads
    start_loads --- ActiveRead ---> ReadPump
    collect <------ LoadResults <------'

The engine's thread orders and collects. The pump does handshakes, plans, posts, waits for the transfers, and for P's
confirmation that it held the blocks, as `ReadSteps` says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvhma.errors import TransferError
from kvhma.vllm.config.rooms import find_rooms
from kvhma.vllm.device.memory import Memory
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.options.doors import Rooms, WorkerDoor
from kvhma.vllm.peers.idle_engines import IdleEngineWatch
from kvhma.vllm.peers.notifications import NotificationDrain
from kvhma.vllm.peers.preconnect import Preconnector
from kvhma.vllm.peers.prefill_engines import PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.read_pump import ReadPump
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.telemetry.stall_watch import StallWatch
from kvhma.vllm.telemetry.stats import TransferStats


class KvhmaWorker:
    """Does the loads that the scheduler orders, and reports each load exactly once."""

    def __init__(self, context: WorkerContext, memory: Memory) -> None:
        """Own an agent that has the geometry's regions registered, and start the threads.

        Raises:
            KvhmaError: an option cannot work with these caches.
        """
        settings, agent = context.settings, context.agent
        self._agent = agent
        self._board = context.board
        self._stop_seconds = settings.handshake_timeout + 1
        self._results = LoadResults(settings.case_folder)
        stats = self._results.stats
        self._rooms = Rooms(
            WorkerDoor, [room(context, memory, self._results) for room in find_rooms("worker", context.options)]
        )
        context = replace(context, rooms=self._rooms)
        self._engines = PrefillEngines(context, stats)
        self._device = context.device
        self._may_wait = context.may_wait
        self._pump = ReadPump(context, memory, self._engines, self._results)
        self._preconnector = Preconnector(context, self._engines)
        self._notifications = NotificationDrain(agent, context.device, stats)
        self._idle_engines = IdleEngineWatch(context, self._engines, stats)
        self._stall_watch = StallWatch(stats)
        self._was_idle = False
        self._mark: torch.Event | None = None

    def be_ready(self) -> None:
        """Note that the engine is ready: its memory is allocated, its graphs are captured. It may be called again."""
        self._preconnector.start()

    def begin_step(self, metadata: StepMetadata) -> None:
        """Mark the device work before a step. Loads of the step wait for this work, but not for the step.

        The thread that launches the step calls this before the launch.
        """
        self.be_ready()
        self._mark = self._device.mark() if metadata.loads else None

    def start_loads(self, metadata: StepMetadata) -> None:
        """Queue the loads of a step."""
        for on_step in self._rooms.on_step:
            on_step(metadata)
        if not (metadata.loads or metadata.refusals or metadata.cancelled):  # most steps
            return
        self._results.expect(metadata.loads, [*metadata.refusals, *metadata.cancelled])
        for request_id in metadata.cancelled:
            self._results.succeed_load(request_id, {})
        for request_id, failure in metadata.refusals.items():
            self._results.fail_load(request_id, failure)
        if metadata.loads:
            after, self._mark = self._mark or self._device.mark(), None
            self._pump.start_reads(metadata.loads, after)

    def on_step_launched(self, metadata: StepMetadata) -> None:
        """Let options use what a step computes."""
        for on_step_launched in self._rooms.on_step_launched:
            on_step_launched(metadata)

    def collect(self, *, idle: bool) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended, each once, and the report for the scheduler.

        An `idle` step, which computes nothing, waits a little for loads. Otherwise the engine would only ask again.

        * With data parallelism no step waits, because engines that are not idle would wait for this engine.
        * With pipeline stages no step waits, because the next batch is on its way.
        * A step waits for pieces only if the step before was idle too. With asynchronous scheduling the results of a
          busy step may come after this step, and a piece alone lets no request continue.
        """
        was_idle, self._was_idle = self._was_idle, idle
        if self._may_wait and idle:
            self._results.wait(for_pieces=was_idle)
        ended, report = self._results.take_results()
        for add_to_report in self._rooms.add_to_report:
            add_to_report(report)
        return ended, report

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call; None if nothing was. Loads of this step are counted later."""
        return self._results.stats.take()

    def close(self, *, idle: bool = False) -> None:
        """Wait for reads in flight, and stop. Afterwards the caches may be freed.

        Args:
            idle: whether to refuse if vLLM still waits for loads.

        Raises:
            TransferError: reads did not end, and still write to the caches. With `idle`: loads are unreported or reads
                are in flight, and the worker continues.
        """
        if idle and (loads := self._results.unreported()):
            raise TransferError(f"the caches cannot be unregistered: {loads} loads have not been reported")
        if idle and (reads := self._agent.in_flight()):  # of lease boards, which no load waits for
            raise TransferError(f"the caches cannot be unregistered: {reads} reads have not ended")
        self._pump.close()
        self._stall_watch.close()
        self._notifications.close(self._stop_seconds)
        self._pump.join(self._stop_seconds)
        for close in self._rooms.close:
            close(self._stop_seconds)
        self._engines.close()
        self._agent.close()
        if self._board is not None:
            self._board.close()
