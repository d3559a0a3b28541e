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

_PATIENCE = 5.0
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
"""Processor time without a pause, after which the thread pauses as long: P decides how often it has news."""


@dataclass(eq=False)
class Conversation:
    """What is known of a ticket. Its lock guards all but what is only the thread's.

    Attributes:
        ticket: the ticket.
        most: tokens that D's request has: nothing is stored of a longer one.
        own: whether it is D's own listener that is asked.
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
    most: int
    own: bool = False
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
    def over(self) -> bool:
        """Whether nothing more will be known."""
        return self.params is not None or bool(self.error)

    def take(self, news: Progress) -> None:
        """Take an answer.

        Raises:
            RequestError: it contradicts itself, or an earlier one; or P has forgotten the ticket.
        """
        if self.version and not news.version:
            raise RequestError(f"{self.ticket.address} does not know the ticket any more: it has begun anew")
        if news.version <= self.version:
            return
        if not news.engine_id.isprintable():
            raise RequestError(f"{self.ticket.address} has no name that could be printed")
        source = Incarnation(
            self.ticket.address, news.engine_id, int.from_bytes(news.incarnation_id, "big"), *news.ranks
        )
        if self.source is not None and (self.source, self.total, self.prompt) != (source, news.total, news.prompt):
            raise RequestError(f"the ticket is another request's now: of {news.total} tokens, before of {self.total}")
        blocks = [] if news.params or news.ended else self._read_blocks(news)
        with self.lock:
            self.version, self.groups = news.version, news.groups
            self.total, self.prompt = news.total, news.prompt
            self.source = source  # last: without the lock, who sees it sees the others too
            self.error = one_line(news.ended) if news.ended else ""
            if news.params:
                self.params = _params(news.params)
            elif not news.ended:
                if news.epoch != self.epoch:
                    self.epoch, self.tokens, self.tables = news.epoch, 0, {}
                if news.total <= self.most:
                    self._append(blocks)
                    self.tokens = min(news.tokens, news.total)

    def _read_blocks(self, news: Progress) -> list[tuple[int, int, list[int]]]:
        """Return group, position and ids of the blocks that an answer names; none of a longer request than D's."""
        left = self.most_blocks if news.total <= self.most else 0
        found = []
        for blocks in news.blocks if left else ():
            found.append((blocks.group, blocks.first, text_to_ids(blocks.ids, left).tolist()))
            left -= len(found[-1][2])
        return found

    def _append(self, blocks: list[tuple[int, int, list[int]]]) -> None:
        for group, first, ids in blocks:
            table = self.tables.setdefault(group, [])
            if first > len(table):
                raise RequestError(f"group {group}: blocks from {first} on, known are {len(table)}")
            others = sum(map(len, self.tables.values())) - len(table)
            if others + first + len(ids) > self.most_blocks:
                raise RequestError(
                    f"of {self.most} tokens at most {self.most_blocks} blocks are stored, more are named"
                )
            table[first:] = ids

    @property
    def most_blocks(self) -> int:
        """How many blocks are stored of it at most."""
        return _BLOCKS_PER_TOKEN * self.most + _BLOCKS_MORE

    def handed_over(self) -> dict[str, Any] | None:
        """Return P's parameters as a proxy would hand them on, with the address at which P is known here."""
        address = self.ticket.address
        return None if self.params is None else self.params | {"remote_host": address.host, "remote_port": address.port}

    def question(self) -> Follow:
        """Return what is asked next."""
        return Follow(self.ticket.id, self.version, self.epoch, self.tokens, _PATIENCE)


class Conversations:
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
        self._conversations: list[Conversation] = []
        self._known: list[Conversation] = []
        """Those of them that the thread has seen."""
        self.news = threading.Event()
        self._calls = Calls(self._wake)
        self._thread: SupervisedThread | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        """By which the thread is woken up."""
        self._closing = False

    def follow(self, ticket: Ticket, most: int, *, own: bool = False) -> Conversation:
        """Ask about a ticket from now on, until it is over or :meth:`stop` is called.

        Args:
            ticket: the ticket.
            most: tokens of D's request.
            own: whether the ticket's address is D's own.

        Raises:
            RequestError: too many are followed.
        """
        conversation = Conversation(ticket, most, own)
        with self._lock:
            if len(self._conversations) >= MAX_FOLLOWED:
                raise RequestError(f"{MAX_FOLLOWED} requests are followed already")
            self._conversations.append(conversation)
            if self._thread is None:
                self._sockets = socket.socketpair()
                for one in self._sockets:
                    one.setblocking(False)
                self._thread = SupervisedThread("kvhma-follow", self._run, self._counters)
        self._wake()
        return conversation

    def stop(self, conversation: Conversation, *, unwanted: bool) -> None:
        """Do not ask any more; if the request is not wanted, P is told that, also if it has finished it."""
        with self._lock:
            if conversation not in self._conversations:
                return
            self._conversations.remove(conversation)
        # The thread may be using the client; it closes it when it finds the conversation gone.
        if unwanted and not conversation.error:
            self.give_up(conversation.ticket)
        self._wake()

    def give_up(self, ticket: Ticket) -> None:
        """Tell P that a request is not wanted. If too many are told at a time, P finds out when its lease ends."""
        self._calls.start(ticket.address, lambda: self._unfollow(ticket))

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(1.0)
        for one in self._sockets or ():
            one.close()

    def _wake(self) -> None:
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # full: it wakes up anyway
                self._sockets[1].send(b"!")

    def _unfollow(self, ticket: Ticket) -> None:
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
                going = [one for one in self._conversations if not one.over]
            for gone in set(self._known).difference(going):
                _hang_up(gone)
            self._known = going
            for conversation in going:
                client = conversation.client
                if check or client is None or client.fileno() in ready:
                    self._advance(conversation)
            busy += time.thread_time() - cpu
            if busy > _BUSY_SECONDS:
                time.sleep(busy)
                busy = 0.0
            waits = time.monotonic()
            ready = self._wait(going)
            busy = max(0.0, busy - (time.monotonic() - waits))
        for conversation in self._known:
            _hang_up(conversation)

    def _advance(self, conversation: Conversation) -> None:
        """Do what can be done now."""
        try:
            if conversation.client is None:
                self._connect(conversation)
            if conversation.client is not None and conversation.client.poll():
                self._receive(conversation, conversation.client)
        except (HandshakeError, RequestError) as error:
            self._note(conversation, error)
        except Exception as error:  # the others' go on
            peer_log.logger.exception("kvhma: a ticket at %s cannot be followed", conversation.ticket.address)
            self._note(conversation, RequestError(f"an error of this engine: {type(error).__name__}"))

    def _connect(self, conversation: Conversation) -> None:
        """Connect in another thread, and ask once that is done."""
        if conversation.connecting is None:
            address = conversation.ticket.address
            if time.monotonic() >= conversation.retry_at:
                conversation.connecting = self._calls.start(address, lambda: self._dial(address))
        elif conversation.connecting.done():
            connecting, conversation.connecting = conversation.connecting, None
            client = conversation.client = connecting.result()
            client.on_received = lambda count: self._note_unread(conversation, count)
            client.send(conversation.question())

    def _receive(self, conversation: Conversation, client: Client) -> None:
        """Take an answer, and ask again."""
        news = client.receive(Progress)
        now = time.monotonic()
        conversation.answered, conversation.failures, conversation.unread = now, 0, 0
        conversation.take(news)
        if not conversation.version and now - conversation.begun > self._unknown_seconds:
            own = ", and is this engine itself: set advertised_host of P to where this host reaches it"
            error = f"{conversation.ticket.address} does not know its ticket"
            conversation.error = error + (own if conversation.own else "")
        self.news.set()
        if conversation.over:
            return
        client.send(conversation.question())

    def _dial(self, address: Address) -> Client:
        return Client(resolve(address, self._timeout), self._timeout, self._secrets)

    def _note_unread(self, conversation: Conversation, count: int) -> None:
        """Take note that so many bytes of an answer are here; refuse more than it can have, or than there is room for.

        Raises:
            RequestError: it is too long.
        """
        if count > _ANSWER_BYTES + _BLOCK_BYTES * conversation.most_blocks:
            raise RequestError(f"{conversation.ticket.address} says more of a ticket than its request can have")
        conversation.unread = count
        if sum(one.unread for one in self._known) > MAX_UNREAD_BYTES:
            largest = max(self._known, key=lambda one: one.unread)
            self._note(largest, RequestError(f"unfinished answers have more than {MAX_UNREAD_BYTES >> 20} MiB"))

    def _note(self, conversation: Conversation, error: Exception) -> None:
        """Try again what may pass, for a while."""
        _hang_up(conversation)
        now = time.monotonic()
        if isinstance(error, RequestError) or now - conversation.answered > _SILENCE_SECONDS + self._timeout:
            conversation.error = str(error)
            self.news.set()
        conversation.retry_at = now + min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(conversation.failures, 8))
        conversation.failures += 1

    def _wait(self, known: list[Conversation]) -> set[int]:
        """Wait until something can be done, but not for long; return whose connections have something to read."""
        assert self._sockets is not None  # noqa: S101
        waits = select.poll()
        waits.register(self._sockets[0], select.POLLIN)
        soon = False
        for conversation in known:
            if conversation.client is not None:
                waits.register(conversation.client.fileno(), select.POLLIN)
            else:
                soon = True
        ready = {found for found, _ in waits.poll(100 if soon else 1000)}
        with contextlib.suppress(BlockingIOError):
            self._sockets[0].recv(4096)
        return ready


def _hang_up(conversation: Conversation) -> None:
    client, conversation.client = conversation.client, None
    conversation.unread = 0
    connecting, conversation.connecting = conversation.connecting, None
    if client is not None:
        client.close()
    if connecting is not None:
        connecting.add_done_callback(_close_result)


def _close_result(connecting: Future[Client]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


def _params(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"P's parameters are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"P's parameters are a {type(found).__name__}")
    return found
