# SPDX-License-Identifier: Apache-2.0
"""What D knows of a ticket: P's progress, checked and bounded, and when D stops waiting; and a question to P."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvhma._kvhma import text_to_ids
from kvhma.errors import RequestError
from kvhma.text import one_line
from kvhma.vllm.options.tickets.messages import AskedTicket, Follow, Progress, read_params
from kvhma.vllm.peers.peers import Call
from kvhma.vllm.wire.params import Address, Incarnation

_BLOCKS_PER_TOKEN = 4
_BLOCKS_MORE = 256
"""Bound of the blocks that D stores of all groups: so many for each token, and so many more. A few groups may have
blocks of one token."""

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


class Ticket(NamedTuple):
    """A request that a proxy has sent to P and to D at once.

    Attributes:
        id: random, 16 bytes. A peer that knows it may follow the request.
        address: P's scheduler.
    """

    id: bytes
    address: Address


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
    question: TicketQuestion | None = None
    """The one without a reply."""

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


class TicketQuestion:
    """A question to P about some tickets. Only the thread uses it.

    Attributes:
        followers: of the tickets, in the order of the question.
        call: the question; set at once.
        unread: bytes of an unfinished reply.
    """

    def __init__(self, followers: Iterable[TicketFollower]) -> None:
        """Ask about the tickets of these followers."""
        self.followers = tuple(followers)
        self.call: Call[Progress]
        self.unread = 0

    def message(self, max_wait: float) -> Follow:
        """Return the message; P replies after `max_wait` seconds in any case."""
        tickets = [AskedTicket(each.ticket.id, each.version, each.epoch, each.tokens) for each in self.followers]
        return Follow(tickets, max_wait)

    def note_received(self, count: int) -> None:
        """Note the bytes of the reply so far.

        Raises:
            RequestError: it is too long for any of the tickets.
        """
        self.unread = count
        if count > _ANSWER_BYTES + _BLOCK_BYTES * max(follower.max_blocks for follower in self.followers):
            address = self.call.address
            raise RequestError(f"{address} sends a longer reply about a ticket than its request allows")
