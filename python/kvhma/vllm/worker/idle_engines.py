# SPDX-License-Identifier: Apache-2.0
"""Evicts prefill engines that are not read from any more: connection, plan and mapped memory."""

from __future__ import annotations

import logging
import threading
import time

from kvhma.errors import HandshakeError
from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines

logger = logging.getLogger("vllm.kvhma")

_GONE_SECONDS = 3600.0
"""Without the setting ``engine_ttl``: idle time after which an engine is asked whether it is still there."""

_MIN_INTERVAL_SECONDS = 0.05
_MAX_INTERVAL_SECONDS = 60.0


class IdleEngineWatch:
    """Looks for idle engines in a separate thread.

    With ``engine_ttl`` it evicts each engine that was idle for so long, except engines of ``prefill_engines`` that
    answer. Without the setting it evicts only engines that do not answer. The reason: when a living agent is removed,
    NIXL leaves its connection open, and each new connection adds to these. ``max_peers`` bounds their number.
    """

    def __init__(self, context: WorkerContext, engines: PrefillEngines, counters: Counters) -> None:
        """Start the thread, unless the setting says never to evict."""
        self._engines = engines
        self._counters = counters
        setting = context.settings.engine_ttl
        self._spare_living = setting is None
        self._operators = frozenset(context.settings.prefill_engines)
        self._seconds = _GONE_SECONDS if setting is None else setting
        self._closed = threading.Event()
        self._thread: SupervisedThread | None = None
        if self._seconds > 0:
            self._thread = SupervisedThread("kvhma-idle-engines", context.device.chosen(self._run), counters)

    def close(self, timeout: float) -> None:
        """Stop."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closed.wait(min(max(self._seconds / 4, _MIN_INTERVAL_SECONDS), _MAX_INTERVAL_SECONDS)):
            since = time.monotonic() - self._seconds
            for engine in self._engines.unused_engines(since):
                if self._closed.is_set():
                    return
                self._evict_if_gone(engine, since)

    def _evict_if_gone(self, engine: PrefillEngine, since: float) -> None:
        # D reconnects to the operator's engines again and again; each eviction would leave a connection open.
        if (self._spare_living or engine.address in self._operators) and self._is_alive(engine):
            engine.used_at = time.monotonic()  # so it is asked again after the same time
            return
        if self._engines.evict_engine(engine, since):
            self._counters.count("idle_engines")
            logger.info(
                "kvhma: evicting %s, idle for %.0f s: its connection, plan and mapped memory",
                engine.address,
                self._seconds,
            )

    def _is_alive(self, engine: PrefillEngine) -> bool:
        """Return whether an engine answers and was not restarted."""
        try:
            client = engine.clients.take_client()
        except HandshakeError:
            return False
        try:
            info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        except HandshakeError:
            return False
        finally:
            engine.clients.release_client(client)
        return int.from_bytes(info.incarnation_id, "big") == engine.incarnation_id
