# SPDX-License-Identifier: Apache-2.0
"""Offers of P: requests with a ticket, which decode engines follow. The scheduler publishes, the listener reads.

An offer is one request from the call in which vLLM adds it until no follower can ask about it any more. `TABLE` has
all states and all that changes them: a state and an event give the next state and the effects. `TicketTable` finds
offers by their tickets, gives them events and carries out the effects. The usual way is::

    COMPUTING -- settled, settled, handed off --> HELD -- forgotten --> ENDED

A request may also end without a hand-off, a follower may cancel it, and P may reset its caches. The blocks of a
hand-off belong to its lease, which has its own end: see :class:`kvhma.vllm.holds.lease_table.LeaseTable`.
"""

from __future__ import annotations

import copy
import enum
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvhma._kvhma import ids_to_text
from kvhma.vllm.recent import Recent
from kvhma.vllm.wire.messages import NO_PARAMS, AskedTicket, Progress, Settled, write_params
from kvhma.vllm.wire.params import Incarnation, LeaseClaim

MAX_TICKETS = 4096
"""Bound of the offers, including those of requests that are over and can still be asked about."""

_CANCELLED = "its follower has cancelled it"


class OfferState(enum.Enum):
    """What followers can have of a request."""

    __hash__ = object.__hash__  # `TABLE` is asked at each move: Enum's own would hash the name, in Python

    COMPUTING = "P computes the prompt: the blocks of settled tokens"
    HELD = "P has handed it off: the parameters of all blocks"
    ENDED = "nothing: there is no hand-off, or it is too late"


class OfferEvent(enum.Enum):
    """What happens to an offer."""

    __hash__ = object.__hash__  # `TABLE` is asked at each move: Enum's own would hash the name, in Python

    SETTLED = "more tokens are settled"
    OVERWRITTEN = "P may overwrite settled blocks from now on"
    HANDED_OFF = "the request has ended, and P holds its blocks under a lease"
    NOT_HELD = "the request has ended, and P does not hold its blocks"
    CANCELLED = "a follower no longer needs it"
    RESET = "P has reset its caches"
    FORGOTTEN = "followers had `kv_lease_duration` after the request, or there are too many offers"


class OfferEffect(enum.Enum):
    """What is done about an event."""

    PUBLISH = "store what is new under a new version, and reply to followers that wait"
    KEEP_FOR_A_WHILE = "the request is over: followers can ask for `kv_lease_duration` more"
    RELEASE = "notify the lease table that the follower does not read the blocks"


_S, _E, _F = OfferState, OfferEvent, OfferEffect

TABLE: Mapping[tuple[OfferState, OfferEvent], tuple[OfferState, tuple[OfferEffect, ...]]] = {
    (_S.COMPUTING, _E.SETTLED): (_S.COMPUTING, (_F.PUBLISH,)),
    (_S.COMPUTING, _E.OVERWRITTEN): (_S.COMPUTING, (_F.PUBLISH,)),
    (_S.COMPUTING, _E.HANDED_OFF): (_S.HELD, (_F.PUBLISH, _F.KEEP_FOR_A_WHILE)),
    (_S.COMPUTING, _E.NOT_HELD): (_S.ENDED, (_F.PUBLISH, _F.KEEP_FOR_A_WHILE)),
    (_S.COMPUTING, _E.CANCELLED): (_S.ENDED, (_F.PUBLISH,)),
    (_S.COMPUTING, _E.RESET): (_S.ENDED, (_F.PUBLISH, _F.KEEP_FOR_A_WHILE)),
    # Other followers, for example of samples of the prompt, may still read it.
    (_S.HELD, _E.CANCELLED): (_S.HELD, (_F.RELEASE,)),
    (_S.HELD, _E.RESET): (_S.ENDED, (_F.PUBLISH,)),
    (_S.HELD, _E.FORGOTTEN): (_S.ENDED, ()),
    # A follower has cancelled it, and P still computes the request.
    (_S.ENDED, _E.SETTLED): (_S.ENDED, ()),
    (_S.ENDED, _E.OVERWRITTEN): (_S.ENDED, ()),
    (_S.ENDED, _E.HANDED_OFF): (_S.ENDED, (_F.KEEP_FOR_A_WHILE, _F.RELEASE)),
    (_S.ENDED, _E.NOT_HELD): (_S.ENDED, (_F.KEEP_FOR_A_WHILE,)),
    (_S.ENDED, _E.CANCELLED): (_S.ENDED, ()),
    (_S.ENDED, _E.RESET): (_S.ENDED, (_F.KEEP_FOR_A_WHILE,)),
    (_S.ENDED, _E.FORGOTTEN): (_S.ENDED, ()),
}
"""The next state, and what is done, for each event that a state can meet."""


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
        state: see `TABLE`; only :meth:`apply` changes it.
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

    def apply(self, event: OfferEvent) -> tuple[OfferEffect, ...]:
        """Move on, and return what has to be done about it.

        Raises:
            KeyError: the table has no such event in this state, which is an error of the caller's.
        """
        self.state, effects = TABLE[self.state, event]
        return effects

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
                offer.apply(OfferEvent.CANCELLED)
                offer.ended = _CANCELLED
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

        self._move(self.offer(ticket), OfferEvent.SETTLED, settle)

    def begin_epoch(self, ticket: bytes) -> None:
        """Publish that the settled blocks may be overwritten from now on."""

        def begin(offer: Offer) -> None:
            offer.epoch += 1
            offer.tokens, offer.blocks = 0, {}

        self._move(self.offer(ticket), OfferEvent.OVERWRITTEN, begin)

    def hand_off(self, ticket: bytes, params: Mapping[str, Any], claim: LeaseClaim) -> None:
        """Publish the parameters of a request that has ended; the `claim` is that of its blocks."""
        try:
            written = write_params(params)
        except UnicodeEncodeError as error:
            self.end_ticket(ticket, f"P's parameters cannot be sent: {error.reason}")
            return

        def hold(offer: Offer) -> None:
            offer.params, offer.claim, offer.blocks = written, claim, {}

        self._move(self.offer(ticket), OfferEvent.HANDED_OFF, hold, claim)

    def end_ticket(self, ticket: bytes, ended: str) -> None:
        """Publish that a request has ended, and why there is no hand-off."""
        self._end(self.offer(ticket), OfferEvent.NOT_HELD, ended)

    def end_all(self, why: str) -> None:
        """End all offers: the caches are reset."""
        with self._lock:
            offers = list(self._offers.values())
        for offer in offers:
            self._end(offer, OfferEvent.RESET, why)

    def cancel_ticket(self, ticket: bytes) -> None:
        """Note that a follower no longer needs a request, before or after its end."""
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None:  # D's vLLM may reject the request before P's request comes
                self._cancelled_early.note(ticket, None)
                return
        self._end(offer, OfferEvent.CANCELLED, _CANCELLED)

    def _end(self, offer: Offer, event: OfferEvent, why: str) -> None:
        def end(offer: Offer) -> None:
            offer.params, offer.claim, offer.blocks, offer.ended = NO_PARAMS, None, {}, why

        self._move(offer, event, end)

    def _move(
        self, offer: Offer, event: OfferEvent, store: Callable[[Offer], None], claim: LeaseClaim | None = None
    ) -> None:
        """Give an offer an event; `store` what the event brings, if it is published."""
        with self._lock:
            effects = offer.apply(event)
            if OfferEffect.PUBLISH in effects:
                store(offer)
                offer.version += 1
            if OfferEffect.KEEP_FOR_A_WHILE in effects:
                self._over.setdefault(offer.ticket, time.monotonic())
            claim = claim or offer.claim
        if OfferEffect.PUBLISH in effects:
            self.on_progress(offer.ticket)
        if OfferEffect.RELEASE in effects and claim is not None:
            self.on_cancelled(claim)

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
        self._offers.pop(ticket).apply(OfferEvent.FORGOTTEN)

    def __len__(self) -> int:
        return len(self._offers)
