# SPDX-License-Identifier: Apache-2.0
"""Loads that have failed or find no room: which requests let others go first, and which wait no longer."""

from __future__ import annotations

import time

from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.pending_load import PendingLoad

_RETRY_ROOM_SECONDS = 1.0
"""How long a load that failed waits for blocks to be tried again. VLLM keeps blocks free for it as if it were still
loading, so that the second try needs twice as many; where they never are free, it would wait for ever."""


class PutOffLoads:
    """Requests whose load has failed and that have had no blocks since."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without any."""
        self._context = context
        self._failed: dict[str, float | None] = {}
        """When each was put off; None before."""

    def note_failed(self, request_id: str) -> None:
        """Take note that a load has failed, and holds no blocks any more."""
        self._failed[request_id] = None

    def forget(self, request_id: str) -> None:
        """Take note that a request has blocks again, or has ended."""
        self._failed.pop(request_id, None)

    def lets_others_go(self, request_id: str, *, loads: bool) -> bool:
        """Return whether a request has to let others go first, since a load has failed; `loads` says if it is one.

        The one that has failed holds no blocks any more, but is queued among those that do, which go first. Put off
        once, it is queued behind them; in front of them it might wait for blocks that they never let go of, waiting for
        it. vLLM goes on to keep blocks free for it. Loads of higher priority, for which not enough are left then, would
        wait in front of it for ever; so they are put off when it has waited a while.
        """
        if not self._failed:
            return False
        now = time.monotonic()
        if request_id in self._failed:
            first = self._failed[request_id] is None
            if first:
                self._failed[request_id] = now
            return first
        oldest = min((since for since in self._failed.values() if since is not None), default=now)
        return loads and now - oldest > _RETRY_ROOM_SECONDS

    def is_starved(self, load: PendingLoad) -> bool:
        """Return whether a load has waited too long for blocks.

        For a second try that is a second; for a first one, a lease, while others have yet to read from here.
        """
        now = time.monotonic()
        if load.asked_since is None:
            load.asked_since = now
        waited = now - load.asked_since
        if load.tries:
            return waited > _RETRY_ROOM_SECONDS
        return len(self._context.leases) > 0 and waited > self._context.settings.kv_lease_duration
