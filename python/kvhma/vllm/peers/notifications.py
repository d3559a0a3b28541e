# SPDX-License-Identifier: Apache-2.0
"""Drops notifications that peers send through NIXL. kvhma does not use them, and NIXL would store them all."""

from __future__ import annotations

import threading

from kvhma.errors import KvhmaError
from kvhma.nixl import Agent
from kvhma.vllm.counters import Counters
from kvhma.vllm.device.cache_device import CacheDevice
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire import peer_log

_INTERVAL_SECONDS = 1.0
_BUSY_SECONDS = 0.01
"""Pause between two reads, and after a read with many notifications."""

_MANY = 1024


class NotificationDrain:
    """Reads and drops notifications in a separate thread, which may wait for NIXL's lock."""

    def __init__(self, agent: Agent, device: CacheDevice, counters: Counters) -> None:
        """Start to drop and count an agent's notifications."""
        self._agent = agent
        self._counters = counters
        self._closed = threading.Event()
        self._thread = SupervisedThread("kvhma-notifications", device.chosen(self._run), counters)

    def close(self, timeout: float) -> None:
        """Stop the thread."""
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
            peer_log.logger.warning("kvhma: dropped %d notifications of NIXL, which kvhma never sends", number)
            self._counters.count("dropped_notifications", number)
        return number
