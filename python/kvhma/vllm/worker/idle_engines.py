# SPDX-License-Identifier: Apache-2.0
"""Lets go of prefill engines that nothing is read from any more: connection, plan, and memory that is mapped."""

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
"""After how long it is asked whether an engine is still there, without the setting ``engine_ttl``."""

_MIN_INTERVAL_SECONDS = 0.05
_MAX_INTERVAL_SECONDS = 60.0


class IdleEngineWatch:
    """Looks for such engines in a thread of its own.

    With ``engine_ttl`` each goes that was not used for so long, but for those of ``prefill_engines`` that still answer.
    Without it all that answer are kept: NIXL does not close the connection to an agent that lives when that is removed,
    so each new one would be one more. ``max_peers`` bounds them. Where the agent has ended, nothing of it is left.
    """

    def __init__(self, context: WorkerContext, engines: PrefillEngines, counters: Counters) -> None:
        """Start the thread, unless the setting says that engines are kept."""
        self._engines = engines
        self._counters = counters
        setting = context.settings.engine_ttl
        self._keep_living = setting is None
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
            for engine in self._engines.unused(since):
                if self._closed.is_set():
                    return
                self._let_go(engine, since)

    def _let_go(self, engine: PrefillEngine, since: float) -> None:
        # The operator's engines are connected to again and again: each time would leave a connection.
        if (self._keep_living or engine.address in self._operators) and self._lives(engine):
            engine.used_at = time.monotonic()  # asked again after as long
            return
        if self._engines.drop(engine, since):
            self._counters.count("idle_engines")
            logger.info(
                "kvhma: nothing was read from %s for %.0f s: its connection, plan and mapped memory are let go",
                engine.address,
                self._seconds,
            )

    def _lives(self, engine: PrefillEngine) -> bool:
        """Return whether the same incarnation of an engine answers."""
        try:
            client = engine.clients.take()
        except HandshakeError:
            return False
        try:
            info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        except HandshakeError:
            return False
        finally:
            engine.clients.release(client)
        return int.from_bytes(info.incarnation_id, "big") == engine.incarnation_id
