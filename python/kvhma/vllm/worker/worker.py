# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in a worker's process: it registers caches, and reads those of prefill engines.

    engine's thread                kvhma-load                     kvhma-poll
    start_loads --- ActiveLoad --> Loader --- [ActiveLoad] -----> LoadPoller
    collect <----------------------- LoadResults <--------------------'

The engine's thread only queues and collects. The loader shakes hands, plans and posts; the poller waits for the reads,
and for P to say that it held the blocks.
"""

from __future__ import annotations

from kvhma.errors import TransferError
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Failure, StepMetadata, WorkerReport
from kvhma.vllm.standstill import StandstillWatch
from kvhma.vllm.stats import TransferStats
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.loading import Loader
from kvhma.vllm.worker.notifications import NotificationDrain
from kvhma.vllm.worker.polling import LoadPoller
from kvhma.vllm.worker.preconnect import Preconnector
from kvhma.vllm.worker.prefill_engines import PrefillEngines
from kvhma.vllm.worker.results import LoadResults


class KvhmaWorker:
    """Reads what the scheduler orders, and reports each load exactly once."""

    def __init__(self, context: WorkerContext, memory: Memory) -> None:
        """Take over an agent with which the geometry's regions are registered, and start the threads."""
        settings, agent, geometry = context.settings, context.agent, context.geometry
        self._agent = agent
        self._stop_seconds = settings.handshake_timeout + 1
        self._results = LoadResults()
        stats = self._results.stats
        self._engines = PrefillEngines(context, stats)
        self._poller = LoadPoller(geometry, memory, self._engines, self._results, settings.handshake_timeout)
        self._loader = Loader(agent, memory, self._engines, self._poller, self._results)
        self._preconnector = Preconnector(settings, self._engines, stats)
        self._notifications = NotificationDrain(agent, stats)
        self._standstill = StandstillWatch(stats)
        self._new_loads = False

    def start_loads(self, metadata: StepMetadata) -> None:
        """Queue the loads of a step; returns at once."""
        self._new_loads = bool(metadata.loads)
        self._results.expect(metadata.loads, metadata.refusals)
        for request_id, text in metadata.refusals.items():
            self._results.fail(request_id, Failure("refused", text, passing=False))
        self._loader.add(metadata.loads)

    def collect(self, *, idle: bool) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended, each once, and what the scheduler has to know of them.

        Small loads end with the step that ordered them, or just after it. So that step waits for its loads, and so does
        an `idle` one, which has nothing to compute: the engine would only ask again. Other steps do not wait.
        """
        if self._new_loads or idle:
            self._new_loads = False
            self._results.wait()
        return self._results.take()

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call; None if nothing was."""
        return self._results.stats.take()

    def close(self, *, idle: bool = False) -> None:
        """Wait for what is in flight and stop; the caches may be freed afterwards.

        Args:
            idle: only if there is nothing that vLLM waits for.

        Raises:
            TransferError: reads did not end, and still write to the caches; or it is not `idle` and goes on.
        """
        if idle and (loads := self._results.unreported()):
            raise TransferError(f"the caches cannot be unregistered: {loads} loads have not been reported")
        self._loader.close()
        self._standstill.close()
        self._preconnector.close(self._stop_seconds)
        self._notifications.close(self._stop_seconds)
        self._loader.join(self._stop_seconds)
        self._poller.join(self._stop_seconds)
        self._engines.close()
        self._agent.close()
