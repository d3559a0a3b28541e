# SPDX-License-Identifier: Apache-2.0
"""D's conversations about tickets: a thread asks each ticket's P how far it is, so that no step waits for an answer.

new --> connecting --> asked: P answers when there is news --> asked again ... --> over
              ^                          |
              '------- a pause <---------' the connection has ended, or nobody was there
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvhma._kvhma import text_to_ids
from kvhma.errors import HandshakeError, RequestError
from kvhma.text import one_line
from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.calls import Calls
from kvhma.vllm.wire.client import Client
from kvhma.vllm.wire.messages import Done, Follow, Progress, Unfollow
from kvhma.vllm.wire.names import resolve
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.wire.tickets import Ticket

logger = logging.getLogger("vllm.kvhma")

MAX_FOLLOWED = 1024
"""Requests that are followed at a time."""

_MAX_WAIT_SECONDS = 5.0
"""Seconds after which P answers even if there is nothing new, so that one that is gone is noticed."""

_ANSWER_SECONDS = 2.0
"""For an answer to come after that, at least."""

_BLOCKS_PER_TOKEN = 4
_BLOCKS_MORE = 256
"""Blocks of all groups that are stored for each token, and beside them: a few groups may have blocks of one token."""

_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 3.0
"""Between attempts to reach P: twice as long after each that fails."""

_SILENCE_SECONDS = 20.0
"""How long P may not answer at all, beside the time of one answer, before the request is given up."""

_ANSWER_BYTES = 1 << 16
_BLOCK_BYTES = 24
"""Bytes that an answer may have: so many, and for each block that is stored as a text and again in the parameters."""

MAX_UNREAD_BYTES = 256 << 20
"""Of unfinished answers, over all conversations; the largest is cut off."""

_CHECK_SECONDS = 1.0
"""How often conversations are looked at that nothing was heard from."""

_BUSY_SECONDS = 0.01
"""Processor time without a pause, after which the thread pauses as long: P decides how often it has progress."""


@dataclass(eq=False)
class TicketFollower:
    """What is known of a ticket. Its lock guards all but what is only the thread's.

    Attributes:
        ticket: the ticket.
        max_tokens: tokens that D's request has: nothing is stored of a longer one.
        is_own: whether it is D's own listener that is asked.
        source: who computes the request; None before P has answered.
        groups: how many KV cache groups that engine has.
        total: tokens that P will hand over.
        prompt: digest of them.
        epoch: of what is settled.
        tokens: that are settled.
        tables: P's blocks of them from position 0 on, by index of P's group.
        params: P's ``kv_transfer_params``; None before.
        error: why there will be none; empty as long as there may be.
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
    params: dict[str, Any] | None = None
    error: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Of the thread:
    version: int = 0
    begun: float = field(default_factory=time.monotonic)
    answered: float = field(default_factory=time.monotonic)
    retry_at: float = 0.0
    failures: int = 0
    unread: int = 0
    """Bytes of an unfinished answer."""
    client: Client | None = None
    connecting: Future[Client] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be known."""
        return self.params is not None or bool(self.error)

    def on_progress(self, progress: Progress) -> None:
        """Take an answer.

        Raises:
            RequestError: it contradicts itself, or an earlier one; or P has forgotten the ticket.
        """
        if self.version and not progress.version:
            raise RequestError(f"{self.ticket.address} does not know the ticket any more: it has begun anew")
        if progress.version <= self.version:
            return
        if not progress.engine_id.isprintable():
            raise RequestError(f"{self.ticket.address} has no name that could be printed")
        source = Incarnation(
            self.ticket.address, progress.engine_id, int.from_bytes(progress.incarnation_id, "big"), *progress.ranks
        )
        if self.source is not None and (self.source, self.total, self.prompt) != (
            source,
            progress.total,
            progress.prompt,
        ):
            raise RequestError(
                f"the ticket is another request's now: of {progress.total} tokens, before of {self.total}"
            )
        blocks = [] if progress.params or progress.ended else self._read_blocks(progress)
        with self.lock:
            self.version, self.groups = progress.version, progress.groups
            self.total, self.prompt = progress.total, progress.prompt
            self.source = source  # last: without the lock, who sees it sees the others too
            self.error = one_line(progress.ended) if progress.ended else ""
            if progress.params:
                self.params = _parse_params(progress.params)
            elif not progress.ended:
                if progress.epoch != self.epoch:
                    self.epoch, self.tokens, self.tables = progress.epoch, 0, {}
                if progress.total <= self.max_tokens:
                    self._append(blocks)
                    self.tokens = min(progress.tokens, progress.total)

    def _read_blocks(self, progress: Progress) -> list[tuple[int, int, list[int]]]:
        """Return group, position and ids of the blocks that an answer names; none of a longer request than D's."""
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
                raise RequestError(f"group {group}: blocks from {first} on, known are {len(table)}")
            others = sum(map(len, self.tables.values())) - len(table)
            if others + first + len(ids) > self.max_blocks:
                raise RequestError(
                    f"of {self.max_tokens} tokens at most {self.max_blocks} blocks are stored, more are named"
                )
            table[first:] = ids

    @property
    def max_blocks(self) -> int:
        """How many blocks are stored of it at most."""
        return _BLOCKS_PER_TOKEN * self.max_tokens + _BLOCKS_MORE

    def handed_off_params(self) -> dict[str, Any] | None:
        """Return P's parameters as a proxy would hand them on, with the address at which P is known here."""
        address = self.ticket.address
        return None if self.params is None else self.params | {"remote_host": address.host, "remote_port": address.port}

    def next_question(self) -> Follow:
        """Return what is asked next."""
        return Follow(self.ticket.id, self.version, self.epoch, self.tokens, _MAX_WAIT_SECONDS)


class TicketFollowers:
    """Asks about tickets. Safe to use from several threads.

    Attributes:
        news: set when P has answered about a ticket, or is found not to.
    """

    def __init__(self, timeout: float, unknown_seconds: float, secrets: Secrets, counters: Counters) -> None:
        """Start without a thread: it begins with the first ticket.

        Args:
            timeout: seconds to wait for a connection, and for an answer that is due.
            unknown_seconds: how long P may not know a ticket: its own request comes another way, and may come later.
            secrets: of this engine.
            counters: count if the thread begins again.
        """
        self._timeout = max(timeout, _ANSWER_SECONDS)
        self._unknown_seconds = unknown_seconds
        self._secrets = secrets
        self._counters = counters
        self._lock = threading.Lock()
        self._followers: list[TicketFollower] = []
        self._known: list[TicketFollower] = []
        """Those of them that the thread has seen."""
        self.progressed = threading.Event()
        self._calls = Calls(self._wake)
        self._thread: SupervisedThread | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        """By which the thread is woken up."""
        self._closing = False

    def follow_ticket(self, ticket: Ticket, max_tokens: int, *, is_own: bool = False) -> TicketFollower:
        """Ask about a ticket from now on, until it is over or :meth:`stop_follower` is called.

        Args:
            ticket: the ticket.
            max_tokens: tokens of D's request.
            is_own: whether the ticket's address is D's own.

        Raises:
            RequestError: too many are followed.
        """
        follower = TicketFollower(ticket, max_tokens, is_own)
        with self._lock:
            if len(self._followers) >= MAX_FOLLOWED:
                raise RequestError(f"{MAX_FOLLOWED} requests are followed already")
            self._followers.append(follower)
            if self._thread is None:
                self._sockets = socket.socketpair()
                for end in self._sockets:
                    end.setblocking(False)
                self._thread = SupervisedThread("kvhma-follow", self._run, self._counters)
        self._wake()
        return follower

    def stop_follower(self, follower: TicketFollower, *, unwanted: bool) -> None:
        """Do not ask any more; if the request is not wanted, P is told that, also if it has finished it."""
        with self._lock:
            if follower not in self._followers:
                return
            self._followers.remove(follower)
        # The thread may be using the client; it closes it when it finds the follower gone.
        if unwanted and not follower.error:
            self.cancel_ticket(follower.ticket)
        self._wake()

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Tell P that a request is not wanted. If too many are told at a time, P finds out when its lease ends."""
        self._calls.start(ticket.address, lambda: self._send_cancel(ticket))

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(1.0)
        for end in self._sockets or ():
            end.close()

    def _wake(self) -> None:
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # full: it wakes up anyway
                self._sockets[1].send(b"!")

    def _send_cancel(self, ticket: Ticket) -> None:
        try:
            with Client(resolve(ticket.address, self._timeout), self._timeout, self._secrets) as client:
                client.ask(Unfollow(ticket.id), Done)
        except HandshakeError as error:
            logger.info("kvhma: %s was not told that a request is not needed: %s", ticket.address, error)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        ready: set[int] = set()
        checked = busy = 0.0
        while not self._closing:
            began, cpu = time.monotonic(), time.thread_time()
            if check := began - checked > _CHECK_SECONDS:
                checked = began
            with self._lock:
                active = [follower for follower in self._followers if not follower.is_over]
            for gone in set(self._known).difference(active):
                _hang_up(gone)
            self._known = active
            for follower in active:
                client = follower.client
                if check or client is None or client.fileno() in ready:
                    self._advance(follower)
            busy += time.thread_time() - cpu
            if busy > _BUSY_SECONDS:
                time.sleep(busy)
                busy = 0.0
            waits = time.monotonic()
            ready = self._wait(active)
            busy = max(0.0, busy - (time.monotonic() - waits))
        for follower in self._known:
            _hang_up(follower)

    def _advance(self, follower: TicketFollower) -> None:
        """Do what can be done now."""
        try:
            if follower.client is None:
                self._connect(follower)
            if follower.client is not None and follower.client.poll():
                self._receive(follower, follower.client)
        except (HandshakeError, RequestError) as error:
            self._note_error(follower, error)
        except Exception as error:  # the others' go on
            peer_log.logger.exception("kvhma: a ticket at %s cannot be followed", follower.ticket.address)
            self._note_error(follower, RequestError(f"an error of this engine: {type(error).__name__}"))

    def _connect(self, follower: TicketFollower) -> None:
        """Connect in another thread, and ask once that is done."""
        if follower.connecting is None:
            address = follower.ticket.address
            if time.monotonic() >= follower.retry_at:
                follower.connecting = self._calls.start(address, lambda: self._dial(address))
        elif follower.connecting.done():
            connecting, follower.connecting = follower.connecting, None
            client = follower.client = connecting.result()
            client.on_received = lambda count: self._note_unread(follower, count)
            client.send(follower.next_question())

    def _receive(self, follower: TicketFollower, client: Client) -> None:
        """Take an answer, and ask again."""
        progress = client.receive(Progress)
        now = time.monotonic()
        follower.answered, follower.failures, follower.unread = now, 0, 0
        follower.on_progress(progress)
        if not follower.version and now - follower.begun > self._unknown_seconds:
            own = ", and is this engine itself: set advertised_host of P to where this host reaches it"
            error = f"{follower.ticket.address} does not know its ticket"
            follower.error = error + (own if follower.is_own else "")
        self.progressed.set()
        if follower.is_over:
            return
        client.send(follower.next_question())

    def _dial(self, address: Address) -> Client:
        return Client(resolve(address, self._timeout), self._timeout, self._secrets)

    def _note_unread(self, follower: TicketFollower, count: int) -> None:
        """Take note that so many bytes of an answer are here; refuse more than it can have, or than there is room for.

        Raises:
            RequestError: it is too long.
        """
        if count > _ANSWER_BYTES + _BLOCK_BYTES * follower.max_blocks:
            raise RequestError(f"{follower.ticket.address} says more of a ticket than its request can have")
        follower.unread = count
        if sum(known.unread for known in self._known) > MAX_UNREAD_BYTES:
            largest = max(self._known, key=lambda known: known.unread)
            self._note_error(largest, RequestError(f"unfinished answers have more than {MAX_UNREAD_BYTES >> 20} MiB"))

    def _note_error(self, follower: TicketFollower, error: Exception) -> None:
        """Try again what may pass, for a while."""
        _hang_up(follower)
        now = time.monotonic()
        if isinstance(error, RequestError) or now - follower.answered > _SILENCE_SECONDS + self._timeout:
            follower.error = str(error)
            self.progressed.set()
        follower.retry_at = now + min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(follower.failures, 8))
        follower.failures += 1

    def _wait(self, known: list[TicketFollower]) -> set[int]:
        """Wait until something can be done, but not for long; return whose connections have something to read."""
        assert self._sockets is not None  # noqa: S101
        waits = select.poll()
        waits.register(self._sockets[0], select.POLLIN)
        soon = False
        for follower in known:
            if follower.client is not None:
                waits.register(follower.client.fileno(), select.POLLIN)
            else:
                soon = True
        ready = {found for found, _ in waits.poll(100 if soon else 1000)}
        with contextlib.suppress(BlockingIOError):
            self._sockets[0].recv(4096)
        return ready


def _hang_up(follower: TicketFollower) -> None:
    client, follower.client = follower.client, None
    follower.unread = 0
    connecting, follower.connecting = follower.connecting, None
    if client is not None:
        client.close()
    if connecting is not None:
        connecting.add_done_callback(_close_result)


def _close_result(connecting: Future[Client]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


def _parse_params(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"P's parameters are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"P's parameters are a {type(found).__name__}")
    return found
