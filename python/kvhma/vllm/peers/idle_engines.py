# SPDX-License-Identifier: Apache-2.0
"""Evicts prefill engines that are not read from any more: connection, plan and mapped memory."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from functools import partial

from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo

logger = logging.getLogger("vllm.kvhma")

_GONE_SECONDS = 3600.0
"""Without the setting ``engine_ttl``: idle time after which an engine is asked whether it is still there."""

_MIN_INTERVAL_SECONDS = 0.05
_MAX_INTERVAL_SECONDS = 60.0


class IdleEngineWatch:
    """Looks for idle engines, in the thread of :class:`kvhma.vllm.peers.peers.Peers`.

    With ``engine_ttl`` it evicts each engine that was idle for so long, except engines of ``prefill_engines`` that
    answer. Without the setting it evicts only engines that do not answer. The reason: when a living agent is removed,
    NIXL leaves its connection open, and each new connection adds to these. ``max_peers`` bounds their number.
    """

    def __init__(self, context: WorkerContext, engines: PrefillEngines, counters: Counters) -> None:
        """Start to look for idle engines, unless the setting says never to evict."""
        self._engines = engines
        self._peers = engines.side_channel
        self._counters = counters
        setting = context.settings.engine_ttl
        self._spare_living = setting is None
        self._operators = frozenset(context.settings.prefill_engines)
        self._seconds = _GONE_SECONDS if setting is None else setting
        self._interval = min(max(self._seconds / 4, _MIN_INTERVAL_SECONDS), _MAX_INTERVAL_SECONDS)
        self._asked: set[PrefillEngine] = set()
        """Engines that have not answered yet."""
        if self._seconds > 0:
            self._peers.run_task(self._look, at=time.monotonic() + self._interval)

    def _look(self, now: float) -> float:
        since = now - self._seconds
        for engine in self._engines.unused_engines(since):
            # D reconnects to the operator's engines again and again; each eviction would leave a connection open.
            if not (self._spare_living or engine.address in self._operators):
                self._evict(engine, since)
            elif engine not in self._asked:
                self._asked.add(engine)
                call = self._peers.ask(engine.numeric, AskEngineInfo(PROTOCOL), EngineInfo)
                call.add_done_callback(partial(self._evict_if_gone, engine, since))
        return now + self._interval

    def _evict_if_gone(self, engine: PrefillEngine, since: float, call: Future[EngineInfo]) -> None:
        """Evict an engine that does not answer, or was restarted."""
        self._asked.discard(engine)
        if call.exception() is None and int.from_bytes(call.result().incarnation_id, "big") == engine.incarnation_id:
            engine.used_at = time.monotonic()  # so it is asked again after the same time
        else:
            self._evict(engine, since)

    def _evict(self, engine: PrefillEngine, since: float) -> None:
        if self._engines.evict_engine(engine, since):
            self._counters.count("idle_engines")
            logger.info(
                "kvhma: evicting %s, idle for %.0f s: its connection, plan and mapped memory",
                engine.address,
                self._seconds,
            )
