# SPDX-License-Identifier: Apache-2.0
"""D's ticket followers: the thread of `Peers` asks each ticket's P for progress, so that no step waits for a reply.

    new --> asked: P replies when there is progress --> asked again ... --> over
              ^                   |
              '---- a pause <-----' no reply

Each ticket has a separate question, until there are more tickets than connections with their P: see `_Engine`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import Future
from functools import partial

from kvhma.errors import HandshakeError, RequestError
from kvhma.vllm.options.tickets.messages import MAX_TICKETS_ASKED, Progress, Unfollow
from kvhma.vllm.options.tickets.ticket_follower import Ticket, TicketFollower, TicketQuestion
from kvhma.vllm.peers.peers import MAX_AT_ADDRESS, Peers
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import Done
from kvhma.vllm.wire.params import Address

logger = logging.getLogger("vllm.kvhma")

MAX_FOLLOWED = 1024
"""Tickets that D follows at a time."""

_MAX_WAIT_SECONDS = 5.0
"""Seconds after which P replies even without progress, so that D notices if P is gone."""

_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 3.0
"""Pauses between attempts to reach P: each is twice as long as the one before."""

_SILENCE_SECONDS = 20.0
"""How long P may be silent, beside the time of one reply, before D stops retrying."""

_CHECK_SECONDS = 1.0
"""How often D checks whether the time of a ticket is over."""

MAX_UNREAD_BYTES = 256 << 20
"""Bound of the bytes of unfinished replies of all followers; beyond it the largest ends with an error."""


class _Engine:
    """A P, and the tickets that D follows there. Only the thread uses it.

    Attributes:
        followers: those whose turn is next come first.
        questions: those without a reply.
        replies: whether P has replied to the last question that ended.
        silent_since: when D asked what P has not replied to, after its last reply; None if P has replied.
        error: why P has not replied.
    """

    def __init__(self) -> None:
        self.followers: dict[TicketFollower, None] = {}
        self.questions: dict[TicketQuestion, None] = {}
        self.replies = False
        self.silent_since: float | None = None
        self.error = ""

    def next_questions(self, now: float) -> list[TicketQuestion]:
        """Return the questions to ask now: one about each ticket, or about several if there are too many tickets."""
        free = [
            follower
            for follower in self.followers
            if follower.question is None and not follower.is_over and follower.retry_at <= now
        ]
        room = MAX_AT_ADDRESS - len(self.questions)
        size = min(MAX_TICKETS_ASKED, -(-len(free) // max(1, room)))
        questions: list[TicketQuestion] = []
        while free and len(questions) < room:
            chosen: dict[bytes, TicketFollower] = {}
            left: list[TicketFollower] = []
            for follower in free:
                # Two followers may have the same ticket, and an answer is about one of them.
                if len(chosen) < size and follower.ticket.id not in chosen:
                    chosen[follower.ticket.id] = follower
                else:
                    left.append(follower)
            questions.append(TicketQuestion(chosen.values()))
            free = left
        return questions

    def note_end(self, question: TicketQuestion) -> None:
        """Note the end of a question: its tickets come last now."""
        del self.questions[question]
        for follower in question.followers:
            follower.question = None
            self.put_last(follower)

    def put_last(self, follower: TicketFollower) -> None:
        """Ask about all other tickets first."""
        if follower in self.followers:
            self.followers[follower] = self.followers.pop(follower)


class TicketFollowers:
    """Asks P about tickets. Safe to use from several threads.

    Attributes:
        progressed: set when a P has replied, or when its silence has become an error.
    """

    def __init__(self, peers: Peers, unknown_seconds: float) -> None:
        """Start without tickets.

        Args:
            peers: ask P; their thread runs all that is private here.
            unknown_seconds: how long P may not know a ticket: P's own request may arrive later than D's.
        """
        self._peers = peers
        self._unknown_seconds = unknown_seconds
        self._lock = threading.Lock()
        self._followers: dict[TicketFollower, None] = {}
        self.progressed = threading.Event()
        self._engines: dict[Address, _Engine] = {}
        """Of the thread."""

    def follow_ticket(self, ticket: Ticket, max_tokens: int, *, is_own: bool = False) -> TicketFollower:
        """Follow a ticket until it is over or :meth:`stop_follower` is called.

        Args:
            ticket: the ticket.
            max_tokens: tokens of D's request.
            is_own: whether the ticket's address is D's own.

        Raises:
            RequestError: D follows too many tickets already.
        """
        follower = TicketFollower(ticket, max_tokens, is_own)
        with self._lock:
            if len(self._followers) >= MAX_FOLLOWED:
                raise RequestError(f"D follows {MAX_FOLLOWED} tickets already, the most that it can")
            self._followers[follower] = None
        self._peers.run_task(self._advance)
        return follower

    def stop_follower(self, follower: TicketFollower, *, unwanted: bool) -> None:
        """Stop a follower; if the request is `unwanted` or late, cancel it at P, even if P has finished it."""
        with self._lock:
            if follower not in self._followers:
                return
            del self._followers[follower]
        if follower.is_late or (unwanted and not follower.error):
            self.cancel_ticket(follower.ticket)
        self._peers.run_task(self._advance)

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel a request at P. If P is not reached, its lease ends later."""
        self._peers.ask(ticket.address, Unfollow(ticket.id), Done).add_done_callback(_log_failure)

    # --- the thread ----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> float:
        """Ask about all tickets whose turn it is, and end followers whose time is over; return when to do so again."""
        with self._lock:
            wanted = {follower: None for follower in self._followers if not follower.is_over}
        for follower in wanted:
            engine = self._engines.setdefault(follower.ticket.address, _Engine())
            engine.followers.setdefault(follower)
            try:
                follower.check_time()
                # One P: D asks about a few of its tickets at a time while it does not reply.
                if engine.silent_since is not None and self._is_silent(max(engine.silent_since, follower.begun), now):
                    raise RequestError(engine.error)
            except RequestError as error:
                self._note_error(follower, error)
        for address, engine in list(self._engines.items()):
            for gone in [follower for follower in engine.followers if follower not in wanted]:
                del engine.followers[gone]
            for question in list(engine.questions):
                if engine.followers.keys().isdisjoint(question.followers):
                    self._peers.cancel(question.call)
            self._ask_about_tickets(address, engine)
            if not engine.followers:
                del self._engines[address]
        due = now + _CHECK_SECONDS if wanted else math.inf
        return min([due, *(follower.retry_at for follower in wanted if follower.retry_at > now)])

    def _ask_about_tickets(self, address: Address, engine: _Engine) -> None:
        for question in engine.next_questions(time.monotonic()):
            engine.questions[question] = None
            for follower in question.followers:
                follower.question = question
            # The first reply comes at once: then the engine is no unknown peer any more.
            message = question.message(_MAX_WAIT_SECONDS if engine.replies else 0.0)
            question.call = self._peers.ask(
                address, message, Progress, on_received=partial(self._note_received, question)
            )
            question.call.add_done_callback(partial(self._on_end, address, engine, question))

    def _on_end(self, address: Address, engine: _Engine, question: TicketQuestion, call: Future[Progress]) -> None:
        """Store a reply, or retry; and ask again."""
        engine.note_end(question)
        if call.cancelled():
            return
        try:
            self._on_reply(engine, question, call.result())
        except (HandshakeError, RequestError) as error:
            begun = min(question.call.begun, time.monotonic())  # D's own queue is no silence of P
            engine.replies = False
            engine.silent_since, engine.error = engine.silent_since or begun, str(error)
            for follower in question.followers:
                follower.silent_since = follower.silent_since or begun
                self._note_error(follower, error)
        except BaseException as error:  # it must not end the other followers
            peer_log.logger.exception("kvhma: following a ticket at %s failed", address)
            for follower in question.followers:
                self._note_error(follower, RequestError(f"internal error of this engine: {type(error).__name__}"))
            if not isinstance(error, Exception):
                raise
        self._ask_about_tickets(address, engine)
        now = time.monotonic()
        if retries := [follower.retry_at for follower in question.followers if follower.retry_at > now]:
            self._peers.run_task(self._advance, at=min(retries))

    def _on_reply(self, engine: _Engine, question: TicketQuestion, progress: Progress) -> None:
        """Store the progress of a ticket, and note which tickets P has none of.

        Raises:
            HandshakeError: it is of a ticket that D has not asked about.
        """
        # P looks at the tickets in order. It replies about the first with progress, or after all of them.
        found = [at for at, follower in enumerate(question.followers) if follower.ticket.id == progress.ticket]
        if not found:
            raise HandshakeError(f"{question.call.address} replies about another ticket")
        about, searched = question.followers[found[0]], question.followers[: found[0]]
        if progress.version <= about.version:
            searched = question.followers
        engine.replies, engine.silent_since = True, None
        now = time.monotonic()
        for follower in question.followers:
            follower.silent_since, follower.failures = None, 0
        engine.put_last(about)
        try:
            about.on_progress(progress)
        except RequestError as error:
            self._note_error(about, error)
        for follower in searched:
            if not follower.version and now - follower.begun > self._unknown_seconds:
                own = ", and is this engine itself: set P's advertised_host to an address that reaches P from this host"
                error_text = f"{question.call.address} does not know the ticket"
                follower.error = follower.error or error_text + (own if follower.is_own else "")
        self.progressed.set()

    def _note_received(self, question: TicketQuestion, count: int) -> None:
        """Note the bytes of an unfinished reply; end the largest if all have too many.

        Raises:
            RequestError: this reply is too long, or is the largest.
        """
        question.note_received(count)
        questions = [asked for engine in self._engines.values() for asked in engine.questions]
        if sum(asked.unread for asked in questions) <= MAX_UNREAD_BYTES:
            return
        largest = max(questions, key=lambda asked: asked.unread)
        error = RequestError(f"unfinished replies have more than {MAX_UNREAD_BYTES >> 20} MiB")
        if largest is question:
            raise error
        for follower in largest.followers:
            self._note_error(follower, error)
        self._peers.cancel(largest.call)

    def _is_silent(self, since: float | None, now: float) -> bool:
        return since is not None and now - since > _SILENCE_SECONDS + self._peers.timeout

    def _note_error(self, follower: TicketFollower, error: HandshakeError | RequestError) -> None:
        """Retry after a transient error for a while; a permanent error ends the follower."""
        now = time.monotonic()
        if isinstance(error, RequestError) or self._is_silent(follower.silent_since, now):
            follower.error = str(error)
            self.progressed.set()
        follower.retry_at = now + min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(follower.failures, 8))
        follower.failures += 1


def _log_failure(call: Future[Done]) -> None:
    if (error := call.exception()) is not None:
        logger.info("kvhma: a request could not be cancelled at P: %s", error)
