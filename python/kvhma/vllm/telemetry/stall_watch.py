# SPDX-License-Identifier: Apache-2.0
"""Notices when the machine or this process has stalled. Nothing depends on it; it explains later errors in the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread

logger = logging.getLogger("vllm.kvhma")

_INTERVAL_SECONDS = 1.0
_NOTABLE_SECONDS = 2.0
"""The shortest stall that is logged. Threads wait for each other for shorter times."""


class Clocks(NamedTuple):
    """The clocks of this machine at one moment, in seconds.

    Attributes:
        monotonic: stops while the machine is suspended.
        boottime: continues while the machine is suspended.
        realtime: continues too. After a virtual machine was stopped from outside, this clock is corrected.
    """

    monotonic: float
    boottime: float
    realtime: float


def read_clocks() -> Clocks:
    """Read the clocks."""
    return Clocks(*map(time.clock_gettime, (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME, time.CLOCK_REALTIME)))


def find_stall(before: Clocks, after: Clocks, slept: float) -> tuple[float, str] | None:
    """Return how long nothing ran while a thread slept, and which sign shows it; None for short times.

    Args:
        before: the clocks when the thread went to sleep.
        after: the clocks when it woke up.
        slept: how many seconds it wanted to sleep.
    """
    monotonic = after.monotonic - before.monotonic
    signs = {
        "the machine was suspended": after.boottime - before.boottime - monotonic,
        "its threads did not run": monotonic - slept,
        "its clock was set, or it was stopped from outside": after.realtime - before.realtime - monotonic,
    }
    sign = max(signs, key=signs.__getitem__)
    return (signs[sign], sign) if signs[sign] >= _NOTABLE_SECONDS else None


class StallWatch:
    """A thread that compares the clocks once a second."""

    def __init__(self, counters: Counters) -> None:
        """Start the thread; it counts each stall."""
        self._counters = counters
        self._closed = threading.Event()
        self._thread = SupervisedThread("kvhma-stall-watch", self._run, counters)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join(_INTERVAL_SECONDS)

    def _run(self) -> None:
        before = read_clocks()
        while not self._closed.wait(_INTERVAL_SECONDS):
            after = read_clocks()
            found = find_stall(before, after, _INTERVAL_SECONDS)
            if found is not None:
                logger.warning("kvhma: process stalled for %.1f s: %s", *found)
                self._counters.count("stalls")
            before = after
