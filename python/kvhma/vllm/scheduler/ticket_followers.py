# SPDX-License-Identifier: Apache-2.0
"""D's ticket followers: a thread asks each ticket's P for progress, so that no step waits for a reply.

new --> connecting --> asked: P replies when there is progress --> asked again ... --> over
              ^                          |
              '------- a pause <---------' the connection has failed or ended
"""

from __future__ import annotations

import contextlib
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
from kvhma.vllm.wire.messages import Done, Follow, Progress, Unfollow, read_params
from kvhma.vllm.wire.names import resolve
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.wire.tickets import Ticket

logger = logging.getLogger("vllm.kvhma")

MAX_FOLLOWED = 1024
"""Tickets that D follows at a time."""

_MAX_WAIT_SECONDS = 5.0
"""Seconds after which P replies even without progress, so that D notices if P is gone."""

_ANSWER_SECONDS = 2.0
"""Least time for a reply to arrive after that."""

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

_ANSWER_BYTES = 1 << 16
_BLOCK_BYTES = 24
"""Bound of the bytes of a reply: so many, and so many for each block, which may be named in text and in parameters."""

MAX_UNREAD_BYTES = 256 << 20
"""Bound of the bytes of unfinished replies of all followers; beyond it the largest ends with an error."""

_CHECK_SECONDS = 1.0
"""How often the thread checks followers without a reply."""

_BUSY_SECONDS = 0.01
"""Processor time after which the thread pauses as long: P decides how often it reports progress."""


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
    answered: float = field(default_factory=time.monotonic)
    retry_at: float = 0.0
    failures: int = 0
    unread: int = 0
    """Bytes of an unfinished reply."""
    client: Client | None = None
    connecting: Future[Client] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more progress will come."""
        return self.params is not None or bool(self.error)

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

    def next_question(self) -> Follow:
        """Return the next question."""
        return Follow(self.ticket.id, self.version, self.epoch, self.tokens, _MAX_WAIT_SECONDS)


class TicketFollowers:
    """Asks P about tickets. Safe to use from several threads.

    Attributes:
        progressed: set when a P has replied, or when its silence has become an error.
    """

    def __init__(self, timeout: float, unknown_seconds: float, secrets: Secrets, counters: Counters) -> None:
        """Start without a thread: the first ticket starts it.

        Args:
            timeout: seconds to wait for a connection, and for a reply that is due.
            unknown_seconds: how long P may not know a ticket: P's own request may arrive later than D's.
            secrets: of this engine.
            counters: count restarts of the thread.
        """
        self._timeout = max(timeout, _ANSWER_SECONDS)
        self._unknown_seconds = unknown_seconds
        self._secrets = secrets
        self._counters = counters
        self._lock = threading.Lock()
        self._followers: list[TicketFollower] = []
        self._known: list[TicketFollower] = []
        """Those followers that the thread has seen."""
        self.progressed = threading.Event()
        self._calls = Calls(self._wake)
        self._thread: SupervisedThread | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        """A byte on them wakes the thread."""
        self._closing = False

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
            self._followers.append(follower)
            if self._thread is None:
                self._sockets = socket.socketpair()
                for end in self._sockets:
                    end.setblocking(False)
                self._thread = SupervisedThread("kvhma-follow", self._run, self._counters)
        self._wake()
        return follower

    def stop_follower(self, follower: TicketFollower, *, unwanted: bool) -> None:
        """Stop a follower; if the request is `unwanted` or late, cancel it at P, even if P has finished it."""
        with self._lock:
            if follower not in self._followers:
                return
            self._followers.remove(follower)
        # The thread may be using the client, so the thread closes it when it notices that the follower is gone.
        if follower.is_late or (unwanted and not follower.error):
            self.cancel_ticket(follower.ticket)
        self._wake()

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel a request at P. If D makes too many calls at a time, P is not notified, and its lease ends later."""
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
            logger.info("kvhma: a request could not be cancelled at %s: %s", ticket.address, error)

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
        """Connect, or read a reply, as far as that does not wait; end a follower whose time is over."""
        try:
            if follower.client is None:
                self._connect(follower)
            if follower.client is not None and follower.client.poll():
                self._receive(follower, follower.client)
            if not follower.is_over:
                follower.check_time()
        except (HandshakeError, RequestError) as error:
            self._note_error(follower, error)
        except Exception as error:  # it must not end the other followers
            peer_log.logger.exception("kvhma: following a ticket at %s failed", follower.ticket.address)
            self._note_error(follower, RequestError(f"internal error of this engine: {type(error).__name__}"))

    def _connect(self, follower: TicketFollower) -> None:
        """Connect in another thread, then ask."""
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
        """Store a reply, and ask again."""
        progress = client.receive(Progress)
        now = time.monotonic()
        follower.answered, follower.failures, follower.unread = now, 0, 0
        follower.on_progress(progress)
        if not follower.version and now - follower.begun > self._unknown_seconds:
            own = ", and is this engine itself: set P's advertised_host to an address that reaches P from this host"
            error = f"{follower.ticket.address} does not know the ticket"
            follower.error = error + (own if follower.is_own else "")
        self.progressed.set()
        if follower.is_over:
            return
        client.send(follower.next_question())

    def _dial(self, address: Address) -> Client:
        return Client(resolve(address, self._timeout), self._timeout, self._secrets)

    def _note_unread(self, follower: TicketFollower, count: int) -> None:
        """Note how many bytes of a reply have arrived; refuse a reply that is too long, or the largest of too many.

        Raises:
            RequestError: this reply is too long.
        """
        if count > _ANSWER_BYTES + _BLOCK_BYTES * follower.max_blocks:
            raise RequestError(f"{follower.ticket.address} sends a longer reply about a ticket than its request allows")
        follower.unread = count
        if sum(known.unread for known in self._known) > MAX_UNREAD_BYTES:
            largest = max(self._known, key=lambda known: known.unread)
            self._note_error(largest, RequestError(f"unfinished replies have more than {MAX_UNREAD_BYTES >> 20} MiB"))

    def _note_error(self, follower: TicketFollower, error: Exception) -> None:
        """Retry after a transient error for a while; a permanent error ends the follower."""
        _hang_up(follower)
        now = time.monotonic()
        if isinstance(error, RequestError) or now - follower.answered > _SILENCE_SECONDS + self._timeout:
            follower.error = str(error)
            self.progressed.set()
        follower.retry_at = now + min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(follower.failures, 8))
        follower.failures += 1

    def _wait(self, known: list[TicketFollower]) -> set[int]:
        """Wait for a reply, a wake-up or a short time; return the descriptors that can be read."""
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
