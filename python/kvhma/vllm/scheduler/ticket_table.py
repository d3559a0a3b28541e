# SPDX-License-Identifier: Apache-2.0
"""Tickets at P: what others follow while it is computed. The scheduler tells, the listener's thread asks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvhma._kvhma import ids_to_text
from kvhma.vllm.wire.messages import Follow, Progress, Settled
from kvhma.vllm.wire.params import Incarnation, LeaseClaim

MAX_TICKETS = 4096
"""Requests that are followed at a time, and those that are over and can still be asked about."""


@dataclass
class _Ticket:
    """A request that may be followed.

    Attributes:
        request_id: P's name of it.
        source: who computes it.
        groups: how many groups that engine has.
        total: tokens that will be handed over.
        prompt: digest of them.
        version: grows with each change.
        epoch: of what is settled.
        tokens: that are settled.
        tables: blocks of the settled tokens, by the index of their group, and tokens of each.
        params: that were handed out for D, as JSON; empty before.
        ended: why nothing is handed over; empty as long as something may be.
        over_at: when it was over, on the monotonic clock; None before.
        is_cancelled: whether its follower does not need it any more.
        claim: by which the blocks are kept that were handed over; None before.
    """

    request_id: str
    source: Incarnation
    groups: int
    total: int
    prompt: str
    version: int = 1
    epoch: int = 1
    tokens: int = 0
    tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    params: bytes = b""
    ended: str = ""
    over_at: float | None = None
    is_cancelled: bool = False
    claim: LeaseClaim | None = None

    def progress(self, question: Follow) -> Progress:
        """Return how far it is, with the blocks that a follower has not heard of."""
        known = question.tokens if question.epoch == self.epoch else 0
        blocks = []
        for group, (size, table) in list(self.tables.items()):
            first = min(known // size, len(table))
            if first < len(table):
                blocks.append(Settled(group, first, ids_to_text(table[first:])))
        return Progress(
            version=self.version,
            engine_id=self.source.engine_id,
            incarnation_id=self.source.incarnation_id.to_bytes(8, "big"),
            ranks=(self.source.tp_size or 1, self.source.pp_size or 1),
            groups=self.groups,
            total=self.total,
            prompt=self.prompt,
            epoch=self.epoch,
            tokens=self.tokens,
            blocks=[] if self.params or self.ended else blocks,
            params=self.params,
            ended=self.ended,
        )


class TicketTable:
    """Requests that may be followed, by their tickets. Safe to use from several threads.

    A version is what a follower has seen; an epoch what P can still answer for::

        step          1        2        3  preempted          5        6   finished
        version  1    2        3        4  5                  6        7   8
        epoch    1    1        1        1  2                  2        2   2
        tokens   0   512     1024     1536 0                1024     1536  params
    """

    def __init__(self, keep_seconds: float) -> None:
        """Start empty; those that are over can be asked about for so many seconds."""
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        """Tickets of requests that are over, the oldest first."""
        self._cancelled_early: OrderedDict[bytes, None] = OrderedDict()
        """Tickets that followers do not need and that are not known here yet, the oldest first."""
        self.on_progress: Callable[[bytes], None] = lambda ticket: None
        self.on_cancelled: Callable[[LeaseClaim], None] = lambda claim: None
        """Called when a follower does not need what was handed over."""

    def open_ticket(
        self, ticket: bytes, request_id: str, source: Incarnation, groups: int, total: int, prompt: str
    ) -> bool:
        """Take a request; return whether it can be followed: not one whose ticket is used, nor one too many.

        Arguments as in :class:`_Ticket`.
        """
        with self._lock:
            self._evict_old()
            if ticket in self._tickets:
                return False
            if len(self._tickets) >= MAX_TICKETS:
                if not self._over:
                    return False
                self._evict_oldest()
            is_cancelled = self._cancelled_early.pop(ticket, False) is None
            self._tickets[ticket] = _Ticket(request_id, source, groups, total, prompt, is_cancelled=is_cancelled)
        self.on_progress(ticket)
        return True

    def settle_tokens(self, ticket: bytes, tokens: int, blocks: Mapping[int, tuple[int, list[int]]]) -> None:
        """Take note that more tokens are computed.

        Args:
            ticket: of the request.
            tokens: that are settled.
            blocks: that hold them and were not named in this epoch, by the index of their group, and tokens of each.
        """
        with self._lock:
            found = self._tickets[ticket]
            for group, (size, ids) in blocks.items():
                found.tables.setdefault(group, (size, []))[1].extend(ids)
            found.tokens = tokens
            found.version += 1
        self.on_progress(ticket)

    def begin_epoch(self, ticket: bytes) -> None:
        """Take note that what was settled may be overwritten from now on."""
        with self._lock:
            found = self._tickets[ticket]
            found.epoch += 1
            found.version += 1
            found.tokens, found.tables = 0, {}
        self.on_progress(ticket)

    def epoch(self, ticket: bytes) -> int:
        """Return the epoch of a request that is not over."""
        with self._lock:
            return self._tickets[ticket].epoch

    def end_ticket(self, ticket: bytes, params: bytes = b"", ended: str = "", claim: LeaseClaim | None = None) -> None:
        """Take note that a request is over: with the parameters for D and what they claim, or why there are none."""
        with self._lock:
            found = self._tickets[ticket]
            found.params, found.ended, found.tables, found.claim = params, ended, {}, claim
            found.version += 1
            found.over_at = time.monotonic()
            self._over[ticket] = None
        self.on_progress(ticket)

    def is_cancelled(self, ticket: bytes) -> bool:
        """Return whether the follower of a request that is not over does not need it any more."""
        with self._lock:
            return self._tickets[ticket].is_cancelled

    def end_all(self, why: str) -> list[bytes]:
        """End every request that is not over; return their tickets."""
        with self._lock:
            active = [ticket for ticket, found in self._tickets.items() if found.over_at is None]
        for ticket in active:
            self.end_ticket(ticket, ended=why)
        return active

    def progress(self, question: Follow) -> Progress | None:
        """Return how far a request is; None if there is nothing that was not seen, or it is not known yet.

        One that was seen and is not known any more, here or before a restart, has version 0.
        """
        with self._lock:
            found = self._tickets.get(question.ticket)
            if found is None:
                return Progress(0) if question.seen else None
            if found.version <= question.seen:
                return None
            copy = replace(found)
        return copy.progress(question)  # without the lock: the scheduler does not wait while the blocks are written

    def cancel_ticket(self, ticket: bytes) -> None:
        """Take note that a follower does not need a request any more, be it over or not."""
        with self._lock:
            found = self._tickets.get(ticket)
            claim = None if found is None else found.claim
            if found is None:  # D may have rejected it before it came here
                self._cancelled_early[ticket] = None
                if len(self._cancelled_early) > MAX_TICKETS:
                    self._cancelled_early.popitem(last=False)
            elif found.over_at is None:
                found.is_cancelled = True
        if claim is not None:
            self.on_cancelled(claim)

    def _evict_old(self) -> None:
        now = time.monotonic()
        while self._over:
            over_at = self._tickets[next(iter(self._over))].over_at
            if over_at is None or now - over_at < self._keep_seconds:
                return
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        ticket, _ = self._over.popitem(last=False)
        del self._tickets[ticket]

    def __len__(self) -> int:
        return len(self._tickets)
