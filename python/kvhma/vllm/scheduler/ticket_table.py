# SPDX-License-Identifier: Apache-2.0
"""Tickets at P: requests that decode engines follow. The scheduler publishes progress, the listener reads it."""

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
"""Bound of the tickets, including those of requests that are over and can still be asked about."""


@dataclass
class _Ticket:
    """A request that may be followed.

    Attributes:
        request_id: of P's request.
        source: the engine that computes it.
        groups: number of KV cache groups of that engine.
        total: tokens that P will hand off.
        prompt: digest of these tokens.
        version: grows with each change.
        epoch: of the settled tokens.
        tokens: number of settled tokens.
        tables: tokens of a block, and blocks of the settled tokens, by index of the group.
        params: parameters for D, as JSON; empty before the hand-off.
        ended: why there is no hand-off; empty as long as there may be one.
        over_at: when the request ended, on the monotonic clock; None before.
        is_cancelled: whether its follower no longer needs it.
        claim: of the handed-off blocks; None before the hand-off.
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
        """Return the progress, with the blocks that the follower does not know yet."""
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

    The version grows with each change, so P knows which changes a follower has seen. The epoch grows when settled
    blocks may be overwritten, so D knows which of its pieces are still valid::

        step    |      1        2        3  preempted          5        6   finished
        version | 1    2        3        4  5                  6        7   8
        epoch   | 1    1        1        1  2                  2        2   2
        tokens  | 0   512     1024     1536 0                1024     1536  params
    """

    def __init__(self, keep_seconds: float) -> None:
        """Start empty; followers can ask about a request for `keep_seconds` after its end."""
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        """Tickets of requests that have ended, the oldest first."""
        self._cancelled_early: OrderedDict[bytes, None] = OrderedDict()
        """Tickets that followers have cancelled before P's request came, the oldest first."""
        self.on_progress: Callable[[bytes], None] = lambda ticket: None
        self.on_cancelled: Callable[[LeaseClaim], None] = lambda claim: None
        """Called when a follower cancels a request after its hand-off."""

    def open_ticket(
        self, ticket: bytes, request_id: str, source: Incarnation, groups: int, total: int, prompt: str
    ) -> bool:
        """Add a request; return whether it can be followed: not if its ticket is in use, or if there are too many.

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
        """Publish that more tokens are settled.

        Args:
            ticket: of the request.
            tokens: number of settled tokens.
            blocks: tokens of a block, and the new blocks of this epoch, by index of the group.
        """
        with self._lock:
            found = self._tickets[ticket]
            for group, (size, ids) in blocks.items():
                found.tables.setdefault(group, (size, []))[1].extend(ids)
            found.tokens = tokens
            found.version += 1
        self.on_progress(ticket)

    def begin_epoch(self, ticket: bytes) -> None:
        """Publish that the settled blocks may be overwritten from now on."""
        with self._lock:
            found = self._tickets[ticket]
            found.epoch += 1
            found.version += 1
            found.tokens, found.tables = 0, {}
        self.on_progress(ticket)

    def epoch(self, ticket: bytes) -> int:
        """Return the epoch of a request that has not ended."""
        with self._lock:
            return self._tickets[ticket].epoch

    def end_ticket(self, ticket: bytes, params: bytes = b"", ended: str = "", claim: LeaseClaim | None = None) -> None:
        """Publish that a request has ended: with the parameters for D and their claim, or why there is no hand-off."""
        with self._lock:
            found = self._tickets[ticket]
            found.params, found.ended, found.tables, found.claim = params, ended, {}, claim
            found.version += 1
            found.over_at = time.monotonic()
            self._over[ticket] = None
        self.on_progress(ticket)

    def is_cancelled(self, ticket: bytes) -> bool:
        """Return whether the follower of a request that has not ended has cancelled it."""
        with self._lock:
            return self._tickets[ticket].is_cancelled

    def end_all(self, why: str) -> list[bytes]:
        """End every request that has not ended; return their tickets."""
        with self._lock:
            active = [ticket for ticket, found in self._tickets.items() if found.over_at is None]
        for ticket in active:
            self.end_ticket(ticket, ended=why)
        return active

    def progress(self, question: Follow) -> Progress | None:
        """Return the progress of a request; None if the follower has seen all of it, or P does not know the ticket yet.

        If the follower has seen progress of a ticket that P no longer knows, the version is 0.
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
        """Note that a follower no longer needs a request, before or after its end."""
        with self._lock:
            found = self._tickets.get(ticket)
            claim = None if found is None else found.claim
            if found is None:  # D's vLLM may reject the request before P's request comes
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
