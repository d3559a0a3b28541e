# SPDX-License-Identifier: Apache-2.0
"""Drops what others send through NIXL: nothing here waits for it, and NIXL would keep all of it."""

from __future__ import annotations

import threading

from kvhma.errors import KvhmaError
from kvhma.nixl import Agent
from kvhma.vllm.cache_device import CacheDevice
from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire import peer_log

_INTERVAL_SECONDS = 1.0
_BUSY_SECONDS = 0.01
"""How long to wait for the next ones, and how long if there were many."""

_MANY = 1024


class NotificationDrain:
    """Reads and drops notifications in a thread of its own, which may wait for NIXL's lock."""

    def __init__(self, agent: Agent, device: CacheDevice, counters: Counters) -> None:
        """Start to drop an agent's notifications; those that no kvhma sends are counted."""
        self._agent = agent
        self._counters = counters
        self._closed = threading.Event()
        self._thread = SupervisedThread("kvhma-notifications", device.chosen(self._run), counters)

    def close(self, timeout: float) -> None:
        """Stop."""
        self._closed.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        pause = _INTERVAL_SECONDS
        while not self._closed.wait(pause):
            number = self._drain()
            pause = _BUSY_SECONDS if number > _MANY else _INTERVAL_SECONDS

    def _drain(self) -> int:
        try:
            number = len(self._agent.notifications())
        except KvhmaError as error:
            peer_log.logger.warning("kvhma: %s", error)
            return 0
        if number:
            peer_log.logger.warning("kvhma: %d notifications of NIXL that no kvhma sends were dropped", number)
            self._counters.count("dropped_notifications", number)
        return number
