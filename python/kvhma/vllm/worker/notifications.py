# SPDX-License-Identifier: Apache-2.0
"""Drops notifications that peers send through NIXL. kvhma does not use them, and NIXL would store them all."""

from __future__ import annotations

import time

from kvhma.errors import KvhmaError
from kvhma.nixl import Agent
from kvhma.vllm.cache_device import CacheDevice
from kvhma.vllm.counters import Counters
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.peers import Peers

_INTERVAL_SECONDS = 1.0
_BUSY_SECONDS = 0.01
"""Pause between two reads, and after a read with many notifications."""

_MANY = 1024


class NotificationDrain:
    """Reads and drops notifications, in the thread of :class:`kvhma.vllm.wire.peers.Peers`."""

    def __init__(self, agent: Agent, device: CacheDevice, peers: Peers, counters: Counters) -> None:
        """Start to drop and count an agent's notifications."""
        self._agent = agent
        self._device = device
        self._counters = counters
        peers.run_task(self._run, at=time.monotonic() + _INTERVAL_SECONDS)

    def _run(self, now: float) -> float:
        self._device.choose()
        return now + (_BUSY_SECONDS if self._drain() > _MANY else _INTERVAL_SECONDS)

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
