# SPDX-License-Identifier: Apache-2.0
"""vLLM's loop in the scheduler's process: the engine sleeps while all it has to do is to hold blocks for readers.

    vLLM    step, step, .................................. step, ......................... step
    held    | request ends            read, released |        |
    ticks         .     .     .     .     .     .     x  wakes the loop, which frees the blocks

If vLLM itself delays the freeing of blocks for its connector, the scheduler and every worker step without a pause until
then. The connector holds blocks without that, see :mod:`kvhma.vllm.holds.held_blocks`. No request waits for the
blocks of ended leases: a new request makes the engine step, and each step frees them.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.internals import calling_engine, wake_up
from kvhma.vllm.peers.peers import Peers

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

STEPS_UNDER_WAY = 2
"""Most steps that vLLM has in flight, with async scheduling: when it builds the second step after some moment, all
steps that were in flight at that moment have ended."""

_TICK_SECONDS = 0.5
"""A sleeping engine checks its leases this often, so that it makes one step for all that ended meanwhile."""

_STEP_SECONDS = 5.0
"""After so long a sleeping engine makes a step in any case: a step reports the metrics."""


class EngineLoop:
    """Decides whether vLLM's loop may sleep, and wakes it when a step has something to do.

    vLLM's loop keeps stepping, as it would without this class, in two cases:

    * The loop is not found: an engine in the process of its front end has no loop.
    * vLLM pauses or shuts down. Then it waits until the engine holds no blocks.
    """

    def __init__(self, leases: LeaseTable, peers: Peers) -> None:
        """Check leases in the thread of `peers` while the loop sleeps."""
        self._leases = leases
        self._peers = peers
        self._engine: EngineCoreProc | None = None
        self._searched = False
        self._due = False
        """Whether a wake-up was sent and no step was made since."""
        self._stepped_at = 0.0
        self._is_checking = False
        """Whether :meth:`_tick` will run."""

    def on_step(self) -> None:
        """Note that a step is made."""
        self._due, self._stepped_at = False, time.monotonic()

    def must_step(self) -> bool:
        """Return whether vLLM must make a step now, though it computes nothing. Only vLLM's loop may call this."""
        if self._leases.is_empty:
            self._due = False
            return False
        if not self._searched:
            self._searched, self._engine = True, calling_engine()
        engine = self._engine
        if self._due or engine is None or not engine.is_running() or engine.is_scheduler_paused():
            return True
        if not self._is_checking:
            self._is_checking = self._peers.run_task(self._tick, at=time.monotonic() + _TICK_SECONDS)
        return False

    def _tick(self, now: float) -> float:
        self._is_checking = False  # before the look: if a lease is held after it, `must_step` runs this again
        if self._leases.is_empty:
            return math.inf
        self._is_checking = True
        if self._leases.has_ended() or now - self._stepped_at >= _STEP_SECONDS:
            self._wake_up()
        return now + _TICK_SECONDS

    def _wake_up(self) -> None:
        """Make the loop ask :meth:`must_step` again. If it is in a step, it asks after that."""
        if self._engine is not None and not self._due:
            self._due = True
            wake_up(self._engine)
