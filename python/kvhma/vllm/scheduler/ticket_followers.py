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
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvhma._kvhma import text_to_ids
from kvhma.errors import HandshakeError, RequestError
from kvhma.text import one_line
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import (
    MAX_TICKETS_ASKED,
    AskedTicket,
    Done,
    Follow,
    Progress,
    Unfollow,
    read_params,
)
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.peers import Call, Peers
from kvhma.vllm.wire.room import MAX_AT_ADDRESS
from kvhma.vllm.wire.tickets import Ticket

logger = logging.getLogger("vllm.kvhma")

MAX_FOLLOWED = 1024
"""Tickets that D follows at a time."""

_MAX_WAIT_SECONDS = 5.0
"""Seconds after which P replies even without progress, so that D notices if P is gone."""

_BLOCKS_PER_TOKEN = 4
_BLOCKS_MORE = 256
"""Bound of the blocks that D stores of all groups: so many for each token, and so many more. A few groups may have
blocks of one token."""

_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 3.0
"""Pauses between attempts to reach P: each is twice as long as the one before."""

_SILENCE_SECONDS = 20.0
"""How long P may be silent, beside the time of one reply, before D stops retrying."""

_STALL_SECONDS = 3600.0
"""How long D holds blocks while P reports no more settled tokens than ever before. An honest P needs as long only if
the requests before this one in its queue do. A P that reports nothing before the hand-off has this time for the prompt.
"""

_LONGEST_SECONDS = 4 * 3600.0
"""How long D follows a ticket, even if P settles one token after the other. A request without blocks may wait in P's
queue. In this time P computes all requests that one D follows (`MAX_FOLLOWED`), if each takes 14 seconds."""

_CHECK_SECONDS = 1.0
"""How often D checks whether the time of a ticket is over."""

_ANSWER_BYTES = 1 << 16
_BLOCK_BYTES = 24
"""Bound of the bytes of a reply: so many, and so many for each block, which may be named in text and in parameters."""

MAX_UNREAD_BYTES = 256 << 20
"""Bound of the bytes of unfinished replies of all followers; beyond it the largest ends with an error."""


@dataclass(eq=False)
class TicketFollower:
    """What D knows of a ticket. The lock guards all attributes but those of the thread.

    Attributes:
        ticket: the ticket.
        max_tokens: tokens of D's request: D stores no blocks of a longer one.
        is_own: whether the ticket's address is D's own listener.
        source: the engine that computes the request; None before P's first reply.
        groups: number of KV cache groups of that engine.
        total: tokens that P will hand off.
        prompt: digest of these tokens.
        epoch: of the settled tokens.
        tokens: number of settled tokens.
        tables: P's blocks of them from position 0 on, by index of P's group.
        most_tokens: the most settled tokens of any epoch.
        stalled_since: when P last reported more than ever, since D has blocks for the request; None without blocks.
        params: P's ``kv_transfer_params``; None before the hand-off.
        error: why there is no hand-off; empty as long as there may be one.
        is_late: whether D has ended it, although P replies: P may still compute the prompt.
    """

    ticket: Ticket
    max_tokens: int
    is_own: bool = False
    source: Incarnation | None = None
    groups: int = 0
    total: int = 0
    prompt: str = ""
    epoch: int = 0
    tokens: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    most_tokens: int = 0
    stalled_since: float | None = None
    params: dict[str, Any] | None = None
    error: str = ""
    is_late: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Used by the thread only:
    version: int = 0
    begun: float = field(default_factory=time.monotonic)
    silent_since: float | None = None
    """When D asked what P has not replied to; None after a reply."""
    retry_at: float = 0.0
    failures: int = 0
    question: _TicketQuestion | None = None
    """The one without a reply."""

    @property
    def is_over(self) -> bool:
        """Whether no more progress will come."""
        return self.params is not None or bool(self.error)

    @property
    def unread(self) -> int:
        """Bytes of an unfinished reply to the question about this ticket, and others after it."""
        return self.question.unread if self.question is not None and self.question.followers[0] is self else 0

    def on_progress(self, progress: Progress) -> None:
        """Store the progress that a reply reports.

        Raises:
            RequestError: the reply contradicts itself, or an earlier one; or P no longer knows the ticket.
        """
        if self.version and not progress.version:
            raise RequestError(f"{self.ticket.address} no longer knows the ticket: P has restarted, or evicted it")
        if progress.version <= self.version:
            return
        if not progress.engine_id.isprintable():
            raise RequestError(f"the engine_id of {self.ticket.address} has characters that are not printable")
        source = Incarnation(
            self.ticket.address, progress.engine_id, int.from_bytes(progress.incarnation_id, "big"), *progress.ranks
        )
        if self.source is not None and (self.source, self.total, self.prompt) != (
            source,
            progress.total,
            progress.prompt,
        ):
            raise RequestError(f"the ticket now names another request, of {progress.total} tokens, before {self.total}")
        params = read_params(progress.params) if progress.params else None
        blocks = [] if params is not None or progress.ended else self._read_blocks(progress)
        with self.lock:
            self.version, self.groups = progress.version, progress.groups
            self.total, self.prompt = progress.total, progress.prompt
            self.source = source  # last: a reader without the lock that sees it sees the other values too
            self.error = one_line(progress.ended) if progress.ended else ""
            if params is not None:
                self.params = params
            elif not progress.ended:
                if progress.epoch != self.epoch:
                    self.epoch, self.tokens, self.tables = progress.epoch, 0, {}
                if progress.total <= self.max_tokens:
                    self._append(blocks)
                    self.tokens = min(progress.tokens, progress.total)
                if self.tokens > self.most_tokens:  # a new epoch alone is no progress
                    self.most_tokens = self.tokens
                    if self.stalled_since is not None:
                        self.stalled_since = time.monotonic()

    def on_blocks_allocated(self) -> None:
        """Note that D has blocks for the request from now on: P has to report progress."""
        with self.lock:
            self.stalled_since = time.monotonic()

    def check_time(self) -> None:
        """Raise an error if D must not wait any longer, even though P replies.

        Raises:
            RequestError: P has reported no progress while D holds blocks, or D has followed the ticket for too long.
        """
        now = time.monotonic()
        with self.lock:
            stalled = 0.0 if self.stalled_since is None else now - self.stalled_since
        if stalled > _STALL_SECONDS:
            why = f"computed no more of the prompt for {_STALL_SECONDS:.0f} s, while this engine holds blocks for it"
        elif now - self.begun > _LONGEST_SECONDS:
            why = f"not handed off the request within {_LONGEST_SECONDS:.0f} s"
        else:
            return
        self.is_late = True
        raise RequestError(f"{self.ticket.address} has {why}")

    def _read_blocks(self, progress: Progress) -> list[tuple[int, int, list[int]]]:
        """Return group, position and ids of the blocks in a reply; an empty list if P's request is longer than D's."""
        left = self.max_blocks if progress.total <= self.max_tokens else 0
        found = []
        for blocks in progress.blocks if left else ():
            found.append((blocks.group, blocks.first, text_to_ids(blocks.ids, left).tolist()))
            left -= len(found[-1][2])
        return found

    def _append(self, blocks: list[tuple[int, int, list[int]]]) -> None:
        for group, first, ids in blocks:
            table = self.tables.setdefault(group, [])
            if first > len(table):
                raise RequestError(f"group {group}: P reports blocks from {first} on, D knows only {len(table)}")
            others = sum(map(len, self.tables.values())) - len(table)
            if others + first + len(ids) > self.max_blocks:
                raise RequestError(
                    f"P reports more than {self.max_blocks} blocks, too many for {self.max_tokens} tokens"
                )
            table[first:] = ids

    @property
    def max_blocks(self) -> int:
        """Bound of the blocks that D stores of P's request."""
        return _BLOCKS_PER_TOKEN * self.max_tokens + _BLOCKS_MORE

    def handed_off_params(self) -> dict[str, Any] | None:
        """Return P's parameters as a proxy would pass them, with the address by which D reaches P; None before."""
        address = self.ticket.address
        return None if self.params is None else self.params | {"remote_host": address.host, "remote_port": address.port}


class _TicketQuestion:
    """A question to P about some tickets. Only the thread uses it.

    Attributes:
        followers: of the tickets, in the order of the question.
        call: the question; set at once.
        unread: bytes of an unfinished reply.
    """

    def __init__(self, followers: Iterable[TicketFollower]) -> None:
        self.followers = tuple(followers)
        self.call: Call[Progress]
        self.unread = 0

    def message(self, max_wait: float) -> Follow:
        """Return the message; P replies after `max_wait` seconds in any case."""
        first, *more = self.followers
        return Follow(
            first.ticket.id,
            first.version,
            first.epoch,
            first.tokens,
            max_wait,
            [AskedTicket(asked.ticket.id, asked.version, asked.epoch, asked.tokens) for asked in more],
        )

    def note_received(self, count: int) -> None:
        """Note the bytes of the reply so far.

        Raises:
            RequestError: it is too long for any of the tickets.
        """
        self.unread = count
        if count > _ANSWER_BYTES + _BLOCK_BYTES * max(follower.max_blocks for follower in self.followers):
            address = self.call.address
            raise RequestError(f"{address} sends a longer reply about a ticket than its request allows")


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
        self.questions: dict[_TicketQuestion, None] = {}
        self.replies = False
        self.silent_since: float | None = None
        self.error = ""

    def next_questions(self, now: float) -> list[_TicketQuestion]:
        """Return the questions to ask now: one about each ticket, or about several if there are too many tickets."""
        free = [
            follower
            for follower in self.followers
            if follower.question is None and not follower.is_over and follower.retry_at <= now
        ]
        room = MAX_AT_ADDRESS - len(self.questions)
        size = min(MAX_TICKETS_ASKED, -(-len(free) // max(1, room)))
        questions: list[_TicketQuestion] = []
        while free and len(questions) < room:
            chosen: dict[bytes, TicketFollower] = {}
            left: list[TicketFollower] = []
            for follower in free:
                # Two followers may have the same ticket, and an answer is about one of them.
                if len(chosen) < size and follower.ticket.id not in chosen:
                    chosen[follower.ticket.id] = follower
                else:
                    left.append(follower)
            questions.append(_TicketQuestion(chosen.values()))
            free = left
        return questions

    def note_end(self, question: _TicketQuestion) -> None:
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

    def _on_end(self, address: Address, engine: _Engine, question: _TicketQuestion, call: Future[Progress]) -> None:
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

    def _on_reply(self, engine: _Engine, question: _TicketQuestion, progress: Progress) -> None:
        """Store the progress of a ticket, and note which tickets P has none of.

        Raises:
            HandshakeError: it is of a ticket that D has not asked about.
        """
        # P looks at the tickets in order. It replies about the first with progress, or after all of them.
        about, searched = question.followers[0], question.followers[:1]
        if progress.ticket:
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

    def _note_received(self, question: _TicketQuestion, count: int) -> None:
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
