# SPDX-License-Identifier: Apache-2.0
"""What D and P say to each other about a load: whether P holds the blocks, for how long, and when D is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.loads.load_machine import Load, Loads
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.prompts.prompt import is_sample
from kvhma.vllm.recent import Recent
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import LeaseKey, PrefillParams

_RENEWALS = 6
"""Renewals during one lease: some of them may be lost."""

_MIN_RENEWAL_SECONDS = 0.5
"""Shortest time between renewals: an untrusted client may have written the lease's length."""

_KEYS_REMEMBERED = 4096
"""Requests at P that D remembers, to recognize one that it reads again."""


class LoadClaims:
    """Claims and releases what P holds for loads.

    Attributes:
        renewer: renews and releases leases.
    """

    def __init__(self, context: SchedulerContext, loads: Loads, makes_progress: Callable[[float], bool]) -> None:
        """Start without claims; `makes_progress` is that of :class:`LeaseRenewer`."""
        self._context = context
        self._loads = loads
        self.renewer = LeaseRenewer(context.peers, context.stats, makes_progress)
        self._shared: Recent[LeaseKey, bool] = Recent(_KEYS_REMEMBERED)
        """Whether a request at P has, or may have, more than one reader here."""

    def is_shared(self, load: Load, remote: PrefillParams) -> bool:
        """Return whether other requests have, or may get, the same parameters."""
        key = remote.lease_key
        shared = key in self._shared or is_sample(load.request_id) is not None
        self._shared.note(key, shared)
        return shared

    def take_handed_off(self, load: Load, command: ReadCommand) -> ReadCommand:
        """Note the parameters of a request that P has handed off after D began to read; return the rest to read."""
        load.remote, load.since = command.remote, time.monotonic()
        load.is_shared = self.is_shared(load, command.remote)
        return command._replace(outcome=self.outcome(command.remote))

    def is_held(self, load: Load) -> bool | None:
        """Return whether P still holds the blocks; None if P must reply first: it may have freed them long ago."""
        if load.remote is None:
            return True
        held = self.renewer.is_held(load.remote.address, load.remote.claim(load.reader))
        if held is None and time.monotonic() - load.since >= self._context.settings.handshake_timeout:
            # D's read will fail if P does not reply, and kv_load_failure_policy decides. A prefill computes instead.
            return not load.is_optional
        return held

    def claim_load(self, load: Load) -> None:
        """Have P hold the blocks of a load until it is released."""
        if load.remote is not None:
            claim = load.remote.claim(load.reader)
            every = max(_MIN_RENEWAL_SECONDS, load.remote.lease / _RENEWALS)
            self.renewer.track_claim(load.remote.address, claim, every=every)
            self._loads.claimed(load, claim)

    def release_load(self, load: Load, *, read: bool) -> None:
        """Notify P that a reader is done; if it has not `read`, another engine may get the same parameters."""
        if load.remote is not None:
            outcome = self._read_outcome(load.remote) if read else Outcome.UNREAD
            self.renewer.release_claim(load.remote.address, load.remote.claim(load.reader), outcome)

    def release_unnotified(self, load: Load) -> None:
        """Notify P that a load was read, unless a worker has asked P about it, and so has notified P."""
        asked_p = load.attempt is not None and not load.attempt.verified_by_board
        # A claimed load is released in any case: a renewal in flight may have claimed it again.
        if load.claim is not None or not (asked_p and self._worker_notifies(load.remote)):
            self.release_load(load, read=True)

    def outcome(self, remote: PrefillParams) -> Outcome | None:
        """Return the outcome that a worker reports to P after its read; None if the scheduler notifies P."""
        return self._read_outcome(remote) if self._worker_notifies(remote) else None

    def _worker_notifies(self, remote: PrefillParams | None) -> bool:
        """Return whether the worker itself notifies P after its read: it alone loads the request."""
        for must_hold in self._context.rooms.must_hold_until_reported if remote is not None else ():
            if must_hold(remote):
                return False
        return self._context.engine.workers == 1

    def _read_outcome(self, remote: PrefillParams) -> Outcome:
        # Each of these may still be a reader of the same blocks. If not, P holds them for two seconds longer.
        for load in self._loads.comparing.values():
            if load.remote is not None and load.remote.lease_key == remote.lease_key:
                return Outcome.READ_SHARED
        return Outcome.READ_SHARED if self._shared.get(remote.lease_key, False) else Outcome.READ
