# SPDX-License-Identifier: Apache-2.0
"""Requests whose load has failed: which of them yield to requests that hold blocks, and how long they wait."""

from __future__ import annotations

import time

from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.loads.load_machine import Load, LoadState

_RETRY_SECONDS = 1.0
"""How long a failed load waits for blocks before it stops retrying. vLLM reserves blocks for it as if it were still
loading, so the retry needs twice as many. If they never become free, it would wait for ever."""


class FailedLoads:
    """Requests whose load has failed, until vLLM gives them blocks again.

    Attributes:
        yielded_at: when each of them has yielded; None before.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self.yielded_at: dict[str, float | None] = {}

    def must_yield_to_running(self, request_id: str, *, is_load: bool) -> bool:
        """Return whether a request must wait for a step because a load has failed; `is_load`: whether it is a load.

        vLLM puts a failed load back in front of requests that hold blocks. There it would wait for blocks that they
        release only after it. So it yields once, and vLLM queues it after them. vLLM still reserves blocks for it.
        Loads of higher priority, which lack these blocks, would wait in front of it for ever. So they yield too, once
        the failed load has waited for a second.
        """
        now = time.monotonic()
        if request_id in self.yielded_at:
            is_first = self.yielded_at[request_id] is None
            if is_first:
                self.yielded_at[request_id] = now
            return is_first
        oldest = min((since for since in self.yielded_at.values() if since is not None), default=now)
        return is_load and now - oldest > _RETRY_SECONDS

    def waited_too_long_for_blocks(self, load: Load) -> bool:
        """Return whether a load has waited too long for blocks.

        A retry may wait for a second. A first read may wait for one lease, if this engine holds blocks for readers;
        otherwise it may wait for ever.
        """
        now = time.monotonic()
        if load.waits_since is None:
            load.waits_since = now
        waited = now - load.waits_since
        if load.state is LoadState.RETRYING:
            return waited > _RETRY_SECONDS
        return bool(self._context.leases.held) and waited > self._context.settings.kv_lease_duration
