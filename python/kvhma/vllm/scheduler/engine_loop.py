# SPDX-License-Identifier: Apache-2.0
"""vLLM's loop in the scheduler's process: it rests while all that an engine has to do is to keep blocks for others.

    vLLM    step, step, .................................. step, ......................... step
    kept    | request ends            read, released |        |
    ticks         .     .     .     .     .     .     x  wakes the loop up, which frees the blocks

A request whose blocks vLLM itself keeps for its connector makes it step without a pause, in the scheduler and in every
worker, until they are free. Blocks that the connector keeps do not, see :mod:`kvhma.vllm.scheduler.held_blocks`. What
has ended meanwhile is nobody's to miss: a new request makes a step of its own.
"""

from __future__ import annotations

import inspect
import threading
import time
from typing import TYPE_CHECKING

from kvhma.vllm.counters import Counters
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.threads import SupervisedThread

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

STEPS_UNDER_WAY = 2
"""That vLLM has at most, with asynchronous scheduling: when it builds the second one after some moment, all that were
under way then have ended."""

_TICK_SECONDS = 0.5
"""Between two looks at the leases of an engine that rests, so that it makes one step for all that ended meanwhile."""

_STEP_SECONDS = 5.0
"""After so long it makes a step in any case: with it go the numbers for metrics."""

_USED = ("input_queue", "is_running", "is_scheduler_paused")
"""What is used of vLLM's loop."""


class EngineLoop:
    """Says if vLLM's loop may rest, and wakes it up when a step has something to do.

    It steps on, as it would without this, where it is not found (an engine in the process of its front end has none),
    and while it is paused or shut down: vLLM waits then until nothing is kept any more.
    """

    def __init__(self, leases: LeaseTable, counters: Counters) -> None:
        """Start with a loop that does not rest; the first one that does starts a thread."""
        self._leases = leases
        self._counters = counters
        self._engine: EngineCoreProc | None = None
        self._searched = False
        self._due = False
        """Whether a step was asked for and has not been made."""
        self._stepped_at = 0.0
        self._is_sleeping = threading.Event()
        self._closed = threading.Event()
        self._thread: SupervisedThread | None = None

    def close(self) -> None:
        """Wake nobody up any more."""
        self._closed.set()
        self._is_sleeping.set()
        if self._thread is not None:
            self._thread.join()

    def on_step(self) -> None:
        """Take note that a step is made."""
        self._due, self._stepped_at = False, time.monotonic()

    def must_step(self) -> bool:
        """Return whether the next step is to be made now, though nothing is computed. To be called by vLLM's loop."""
        if self._leases.is_empty:
            self._due = False
            return False
        if not self._searched:
            self._searched, self._engine = True, _calling_engine()
        engine = self._engine
        if self._due or engine is None or not engine.is_running() or engine.is_scheduler_paused():
            return True
        if self._thread is None:
            self._thread = SupervisedThread("kvhma-leases", self._tick, self._counters)
        self._is_sleeping.set()
        return False

    def _tick(self) -> None:
        while not self._closed.is_set():
            if self._leases.is_empty:  # else this has begun again
                self._is_sleeping.wait()
            self._is_sleeping.clear()
            while not self._leases.is_empty and not self._closed.wait(_TICK_SECONDS):
                if self._leases.has_ended() or time.monotonic() - self._stepped_at >= _STEP_SECONDS:
                    self._wake_up()

    def _wake_up(self) -> None:
        """Have the loop look again if it may rest. It may be in a step, which does the same."""
        from vllm.v1.engine import EngineCoreRequestType

        if self._engine is not None and not self._due:
            self._due = True
            self._engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _calling_engine() -> EngineCoreProc | None:
    """Return the engine whose loop has called; None if there is none, or one that is not known.

    vLLM does not tell its connectors. It wakes up a loop that waits for requests through the queue that they come by.
    """
    from vllm.v1.engine.core import EngineCoreProc

    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCoreProc):
            return owner if all(hasattr(owner, name) for name in _USED) else None
        frame = frame.f_back
    return None
