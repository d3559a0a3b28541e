# SPDX-License-Identifier: Apache-2.0
"""Connects to the engines of the setting ``prefill_engines`` before their first request."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from functools import partial

from kvhma.errors import KvhmaError
from kvhma.vllm.failures import failure_of
from kvhma.vllm.peers.prefill_engines import PrefillEngines
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.wire.params import Address

logger = logging.getLogger("vllm.kvhma")

_INTERVAL_SECONDS = 2.0
_REFUSED_SECONDS = 60.0
"""How often D asks whether an engine was restarted, and how long it leaves an engine alone that it cannot read."""


class Preconnector:
    """Connects to each engine of the setting, and reconnects after each restart of the engine."""

    def __init__(self, context: WorkerContext, engines: PrefillEngines) -> None:
        """Connect to nothing yet."""
        self._addresses = context.settings.prefill_engines
        self._engines = engines
        self._refused_until: dict[Address, float] = {}
        self._asked: set[Address] = set()
        """Engines that have not answered yet."""
        self._has_started = False

    def start(self) -> None:
        """Begin to connect, once, if there are engines to connect to.

        Call it after the engine has captured its graphs. A connection begins with a read of device memory, and work of
        another thread on the device can end a capture.
        """
        if self._addresses and not self._has_started:
            self._has_started = True
            self._engines.side_channel.run_task(self._ask)

    def _ask(self, now: float) -> float:
        for address in self._addresses:
            if address not in self._asked and self._refused_until.get(address, 0.0) <= now:
                self._asked.add(address)
                call = self._engines.side_channel.ask(address, AskEngineInfo(PROTOCOL), EngineInfo, anew=True)
                call.add_done_callback(partial(self._on_answer, address))
        return now + _INTERVAL_SECONDS

    def _on_answer(self, address: Address, call: Future[EngineInfo]) -> None:
        self._asked.discard(address)
        try:
            self._engines.preconnect(address, call.result(), partial(self._after_handshake, address))
        except KvhmaError as error:
            logger.debug("kvhma: %s of prefill_engines: %s", address, error)

    def _after_handshake(self, address: Address, error: KvhmaError | None) -> None:
        if error is None:
            return
        if not failure_of(error).transient:
            self._refused_until[address] = time.monotonic() + _REFUSED_SECONDS
        logger.warning("kvhma: %s of prefill_engines: %s", address, error)
