# SPDX-License-Identifier: Apache-2.0
"""Connects to the engines of the setting ``prefill_engines`` before their first request."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from kvhma.errors import KvhmaError
from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire.params import Address
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.prefill_engines import PrefillEngines
from kvhma.vllm.worker.results import failure_of

logger = logging.getLogger("vllm.kvhma")

_INTERVAL_SECONDS = 2.0
_REFUSED_SECONDS = 60.0
"""How often D asks whether an engine was restarted, and how long it leaves an engine alone that it cannot read."""


class Preconnector:
    """Connects to each engine of the setting, and reconnects after each restart of the engine, in a separate thread."""

    def __init__(self, context: WorkerContext, engines: PrefillEngines, counters: Counters) -> None:
        """Start without a thread."""
        self._addresses = context.settings.prefill_engines
        self._device = context.device
        self._engines = engines
        self._counters = counters
        self._closed = threading.Event()
        self._refused_until: dict[Address, float] = {}
        self._thread: SupervisedThread | None = None

    def start(self) -> None:
        """Start the thread, once, if there are engines to connect to.

        Call it after the engine has captured its graphs. A connection begins with a read of device memory, and work of
        another thread on the device can end a capture.
        """
        if self._addresses and self._thread is None:
            work = self._device.chosen(self._run)
            self._thread = SupervisedThread("kvhma-preconnect", work, self._counters)

    def close(self, timeout: float) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            for address in self._addresses:
                if self._closed.is_set():
                    return
                if self._refused_until.get(address, 0.0) <= time.monotonic():
                    self._connect(address)
            if self._closed.wait(_INTERVAL_SECONDS):
                return

    def _connect(self, address: Address) -> None:
        try:
            self._engines.preconnect(address, partial(self._after_handshake, address))
        except KvhmaError as error:
            logger.debug("kvhma: %s of prefill_engines: %s", address, error)

    def _after_handshake(self, address: Address, error: KvhmaError | None) -> None:
        if error is None:
            return
        if not failure_of(error).transient:
            self._refused_until[address] = time.monotonic() + _REFUSED_SECONDS
        logger.warning("kvhma: %s of prefill_engines: %s", address, error)
