# SPDX-License-Identifier: Apache-2.0
"""Offers of P: requests with a ticket, which decode engines follow. The scheduler publishes, the listener reads.

An offer is one request from the call in which vLLM adds it until no follower can ask about it any more. It ends once,
with a hand-off or without: the request may be aborted, a follower may cancel it, and P may reset its caches. The blocks
of a hand-off belong to its lease, which has its own end: see :class:`kvhma.vllm.holds.lease_table.LeaseTable`.
"""

from __future__ import annotations

import copy
import enum
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from kvhma._kvhma import ids_to_text
from kvhma.vllm.options.tickets.messages import (
    NO_PARAMS,
    AskedTicket,
    Follow,
    Progress,
    Settled,
    Unfollow,
    write_params,
)
from kvhma.vllm.recent import Recent
from kvhma.vllm.wire.messages import Done, Handler, Later, Question
from kvhma.vllm.wire.params import Incarnation, LeaseClaim

MAX_TICKETS = 4096
"""Bound of the offers, including those of requests that are over and can still be asked about."""

_CANCELLED = "its follower has cancelled it"


class OfferState(enum.Enum):
    """What followers can have of a request."""

    COMPUTING = "P computes the prompt: the blocks of settled tokens"
    HELD = "P has handed it off: the parameters of all blocks"
    ENDED = "nothing: there is no hand-off, or it is too late"


@dataclass(eq=False)
class Offer:
    """A request that may be followed. The table's lock guards all attributes but those of the scheduler's thread.

    Attributes:
        ticket: its ticket.
        request_id: of P's request.
        source: the engine that computes it.
        groups: number of KV cache groups of that engine.
        total: tokens that P will hand off.
        prompt: digest of these tokens.
        state: what followers can have; it never goes back.
        version: grows with each change that followers see.
        epoch: of the settled tokens.
        tokens: number of settled tokens, in whole blocks.
        blocks: tokens of a block, and ids of the blocks of these tokens, by index of the group.
        params: parameters for D; empty unless HELD.
        claim: of the blocks of the hand-off; None unless HELD.
        ended: why there is no hand-off; empty unless ENDED.
        steps: number of each step in flight, and how many tokens are computed after it.
        begun: whether it was scheduled since it was added or preempted.
    """

    ticket: bytes
    request_id: str
    source: Incarnation
    groups: int
    total: int
    prompt: str
    state: OfferState = OfferState.COMPUTING
    version: int = 1
    epoch: int = 1
    tokens: int = 0
    blocks: Mapping[int, tuple[int, list[int]]] = field(default_factory=dict)
    params: msgspec.Raw = field(default_factory=lambda: NO_PARAMS)
    claim: LeaseClaim | None = None
    ended: str = ""
    # Used by the scheduler's thread only:
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    begun: bool = False

    def end(self, why: str) -> None:
        """Leave followers nothing to read."""
        self.state, self.ended = OfferState.ENDED, why
        self.params, self.claim, self.blocks = NO_PARAMS, None, {}

    def progress(self, question: AskedTicket) -> Progress:
        """Return the progress, with the blocks that the follower does not know yet."""
        known = question.tokens if question.epoch == self.epoch else 0
        blocks = []
        for group, (size, ids) in self.blocks.items():
            first = min(known // size, len(ids))
            if first < len(ids):
                blocks.append(Settled(group, first, ids_to_text(ids[first:])))
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
            blocks=blocks,
            params=self.params,
            ended=self.ended,
        )


class TicketTable:
    """Offers, by their tickets. Safe to use from several threads.

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
        self._offers: dict[bytes, Offer] = {}
        self._over: OrderedDict[bytes, float] = OrderedDict()
        """Tickets of requests that are over, and when they ended, on the monotonic clock; the oldest first."""
        self._cancelled_early: Recent[bytes, None] = Recent(MAX_TICKETS)
        """Tickets that followers have cancelled before P's request came, the oldest first."""
        self.on_progress: Callable[[bytes], None] = lambda ticket: None
        self.on_cancelled: Callable[[LeaseClaim], None] = lambda claim: None
        """Called when a follower has cancelled a request that P holds."""

    def open_ticket(
        self, ticket: bytes, request_id: str, source: Incarnation, groups: int, total: int, prompt: str
    ) -> bool:
        """Add a request; return whether it can be followed: not if its ticket is in use, or if there are too many.

        Arguments as in :class:`Offer`.
        """
        with self._lock:
            self._evict_old()
            if ticket in self._offers:
                return False
            if len(self._offers) >= MAX_TICKETS:
                if not self._over:
                    return False
                self._evict_oldest()
            offer = self._offers[ticket] = Offer(ticket, request_id, source, groups, total, prompt)
            if self._cancelled_early.pop(ticket, False) is None:
                offer.end(_CANCELLED)
        self.on_progress(ticket)
        return True

    def offer(self, ticket: bytes) -> Offer:
        """Return the offer of a ticket whose request is not over."""
        with self._lock:
            return self._offers[ticket]

    def settle_tokens(self, ticket: bytes, tokens: int, blocks: Mapping[int, tuple[int, list[int]]]) -> None:
        """Publish that more tokens are settled.

        Args:
            ticket: of the request.
            tokens: number of settled tokens.
            blocks: tokens of a block, and ids of all blocks of the settled tokens, by index of the group.
        """

        def settle(offer: Offer) -> None:
            offer.tokens, offer.blocks = tokens, blocks

        self._publish(ticket, settle)

    def begin_epoch(self, ticket: bytes) -> None:
        """Publish that the settled blocks may be overwritten from now on."""

        def begin(offer: Offer) -> None:
            offer.epoch += 1
            offer.tokens, offer.blocks = 0, {}

        self._publish(ticket, begin)

    def hand_off(self, ticket: bytes, params: Mapping[str, Any], claim: LeaseClaim) -> None:
        """Publish the parameters of a request that has ended; the `claim` is that of its blocks."""
        try:
            written = write_params(params)
        except UnicodeEncodeError as error:
            self.end_ticket(ticket, f"P's parameters cannot be sent: {error.reason}")
            return

        def hold(offer: Offer) -> None:
            offer.state, offer.params, offer.claim, offer.blocks = OfferState.HELD, written, claim, {}

        if not self._publish(ticket, hold, is_over=True):
            self.on_cancelled(claim)

    def end_ticket(self, ticket: bytes, ended: str) -> None:
        """Publish that a request has ended, and why there is no hand-off."""
        self._publish(ticket, lambda offer: offer.end(ended), is_over=True)

    def end_all(self, why: str) -> None:
        """End all offers: the caches are reset."""
        with self._lock:
            tickets = list(self._offers)
        for ticket in tickets:
            self._publish(ticket, lambda offer: offer.end(why), is_over=True)

    def cancel_ticket(self, ticket: bytes) -> None:
        """Note that a follower no longer needs a request, before or after its end."""
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None:  # D's vLLM may reject the request before P's request comes
                self._cancelled_early.note(ticket, None)
                return
            # Other followers, for example of samples of the prompt, may still read what P holds.
            claim, is_computing = offer.claim, offer.state is OfferState.COMPUTING
            if is_computing:
                offer.end(_CANCELLED)
                offer.version += 1
        if is_computing:
            self.on_progress(ticket)
        if claim is not None:
            self.on_cancelled(claim)

    def _publish(self, ticket: bytes, change: Callable[[Offer], None], *, is_over: bool = False) -> bool:
        """Change an offer under a new version, and reply to followers that wait; return False if it has ended before.

        Args:
            ticket: of the offer, which may have ended by another thread, and may be forgotten since.
            change: makes the change.
            is_over: whether the request is over: followers can ask about it for `keep_seconds` more.
        """
        with self._lock:
            offer = self._offers.get(ticket)
            is_open = offer is not None and offer.state is not OfferState.ENDED
            if offer is not None and is_open:
                change(offer)
                offer.version += 1
            if offer is not None and is_over:
                self._over.setdefault(ticket, time.monotonic())
        if is_open:
            self.on_progress(ticket)
        return is_open

    def progress(self, question: AskedTicket) -> Progress | None:
        """Return the progress of a request; None if the follower has seen all of it, or P does not know the ticket yet.

        If the follower has seen progress of a ticket that P no longer knows, the version is 0.
        """
        with self._lock:
            offer = self._offers.get(question.ticket)
            if offer is None:
                return Progress(0) if question.seen else None
            if offer.version <= question.seen:
                return None
            found = copy.copy(offer)
        return found.progress(question)  # without the lock: the scheduler does not wait while the blocks are written

    def _evict_old(self) -> None:
        now = time.monotonic()
        while self._over and now - next(iter(self._over.values())) >= self._keep_seconds:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        ticket, _ = self._over.popitem(last=False)
        del self._offers[ticket]

    def __len__(self) -> int:
        return len(self._offers)


def answer_questions(tickets: TicketTable) -> dict[type[Question], Handler]:
    """Return how a listener answers questions about tickets."""

    def follow(question: Follow, waited: float) -> Progress | Later:
        """Return the progress of the first ticket that has any, or how much longer the question may wait for it."""
        for asked in question.tickets:
            if (found := tickets.progress(asked)) is not None:
                return msgspec.structs.replace(found, ticket=asked.ticket)
        if waited < question.max_wait_seconds:
            topics = tuple({asked.ticket: None for asked in question.tickets})
            return Later(topics, question.max_wait_seconds - waited, partial(follow, question))
        return Progress(question.tickets[0].seen, ticket=question.tickets[0].ticket)

    def unfollow(question: Unfollow, waited: float) -> Done:
        tickets.cancel_ticket(question.ticket)
        return Done()

    return {Follow: follow, Unfollow: unfollow}
