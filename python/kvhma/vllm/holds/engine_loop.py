# SPDX-License-Identifier: Apache-2.0
"""vLLM's loop in the scheduler's process: the engine sleeps while all it has to do is to hold blocks for readers.

    vLLM    step, step, ................................................................. step
    held    | request ends            read, released |
    ticks         .     .     .     .     .     .     x  wakes the loop, which frees the blocks and sleeps on

If vLLM itself delays the freeing of blocks for its connector, the scheduler and every worker step without a pause until
then. The connector holds blocks without that, see :mod:`kvhma.vllm.holds.held_blocks`. No request waits for the
blocks of ended leases: a new request makes the engine step, and each step frees them.

A sleeping engine frees them without a step. A step wakes the workers, which then spin for a second: on shared cores
they slow down the decode engine that has just read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.internals import calling_engine, wake_up
from kvhma.vllm.peers.peers import Peers

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

STEPS_UNDER_WAY = 2
"""Most steps that vLLM has in flight, with async scheduling and one stage; each further stage adds one. When it builds
the second step after some moment, all steps that were in flight at that moment have ended."""

_TICK_SECONDS = 0.5
"""A sleeping engine checks its leases this often, and frees the blocks of all that ended meanwhile."""

_STEP_SECONDS = 5.0
"""After so long a sleeping engine that holds or has freed blocks makes a step: a step reports the metrics."""


class EngineLoop:
    """Decides whether vLLM's loop may sleep, and wakes it when a step has something to do.

    vLLM's loop keeps stepping, as it would without this class, in two cases:

    * The loop is not found: an engine in the process of its front end has no loop.
    * vLLM shuts down. Then it waits until the engine holds no blocks.

    A pause waits for no blocks: if it clears the caches, vLLM has the connector free them, else they stay held.
    """

    def __init__(
        self, leases: LeaseTable, peers: Peers, free: Callable[[], bool], step_timeout: float, pp_size: int
    ) -> None:
        """Check leases in the thread of `peers` while the loop sleeps, and `free` what has ended in the loop's.

        A step that computes takes at most `step_timeout` seconds.
        """
        self._leases = leases
        self._peers = peers
        self._free = free
        self._engine: EngineCoreProc | None = None
        self._searched = False
        self._due = False
        """Whether a wake-up was sent and not handled yet."""
        self._is_reported = True
        """Whether no blocks were freed since the last step."""
        self._stepped_at = -math.inf
        self._step_timeout = step_timeout
        self._under_way = STEPS_UNDER_WAY + pp_size - 1
        self._computing = 0
        """How many of the next steps begin before all steps that compute have ended."""
        self._is_checking = False
        """Whether :meth:`_tick` will run."""

    def on_step(self, *, computes: bool) -> None:
        """Note that a step is made."""
        self._computing = self._under_way if computes else max(0, self._computing - 1)
        self._due, self._is_reported, self._stepped_at = False, True, time.monotonic()

    def makes_progress(self, seconds: float) -> bool:
        """Return whether a step began within these seconds, or a step that computes still runs. Takes no lock.

        A paused engine makes no steps. A step that computes may take long, for instance if it has to compile. A device
        or a rank that hangs looks the same, so there is a limit, which is vLLM's own.
        """
        return time.monotonic() - self._stepped_at <= (max(seconds, self._step_timeout) if self._computing else seconds)

    def must_step(self) -> bool:
        """Return whether vLLM must make a step now, though it computes nothing; free what has ended since a wake-up.

        Only vLLM's loop may call this, between two steps.
        """
        self._computing = 0
        if self._is_done():
            self._due = False
            return False
        if not self._searched:
            self._searched, self._engine = True, calling_engine()
        engine = self._engine
        if engine is None or not engine.is_running():
            return not self._leases.is_empty
        if self._due:
            self._due = False  # before the look: a lease that ends after it sends another wake-up
            self._is_reported &= not self._free()
            if self._is_step_due(time.monotonic()) and not engine.is_scheduler_paused():
                self._due = True  # also for the next call: vLLM asks again within the step
                return True
        if not self._is_checking:
            self._is_checking = self._peers.run_task(self._tick, at=time.monotonic() + _TICK_SECONDS)
        return False

    def _tick(self, now: float) -> float:
        self._is_checking = False  # before the look: if a lease is held after it, `must_step` runs this again
        if self._is_done():
            return math.inf
        self._is_checking = True
        if self._leases.has_ended() or self._is_step_due(now):
            self._wake_up()
        return now + _TICK_SECONDS

    def _is_done(self) -> bool:
        """Return whether the engine holds no blocks, and has reported that."""
        return self._leases.is_empty and self._is_reported

    def _is_step_due(self, now: float) -> bool:
        return now - self._stepped_at >= _STEP_SECONDS

    def _wake_up(self) -> None:
        """Make the loop ask :meth:`must_step` again. If it is in a step, it asks after that."""
        if self._engine is not None and not self._due:
            self._due = True
            wake_up(self._engine)
