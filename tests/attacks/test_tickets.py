# SPDX-License-Identifier: Apache-2.0
"""Tickets between engines that send false answers, flood, stall and vanish: their cost is bounded, others continue."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvhma.vllm.counters import Counters
from kvhma.vllm.options.tickets import ticket_followers
from kvhma.vllm.options.tickets.messages import AskedTicket, Follow, Progress, Settled
from kvhma.vllm.options.tickets.offers import MAX_TICKETS, TicketTable, answer_questions
from kvhma.vllm.options.tickets.ticket_follower import Ticket, TicketFollower
from kvhma.vllm.options.tickets.ticket_followers import MAX_FOLLOWED, TicketFollowers
from kvhma.vllm.peers import connections, peers
from kvhma.vllm.peers.peers import MAX_AT_ADDRESS, Call, Peers
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import frame
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import free_port
from support.listening import hostile
from support.waiting import HANG_SECONDS, until

NO_SECRET = Secrets(())
TOKENS = 1000


class Counted(Counters):
    """Counts refused connections only."""

    def __init__(self) -> None:
        self.refused = 0.0

    def count(self, name: str, number: float = 1, *, label: str = "") -> None:
        self.refused += number * (name == "side_channel_refused")


class NoLeases:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class P:
    """A P with its own table of tickets, or another service that answers questions about them."""

    def __init__(self, tickets: Any = None) -> None:
        self.tickets = TicketTable(10 * HANG_SECONDS) if tickets is None else tickets
        self.address = Address("127.0.0.1", free_port())
        self.source = Incarnation(self.address, "p", 7, 1, 1)
        self.counted = Counted()
        self.listener = Listener(
            self.address,
            LocalEngine("p", 7, {}),
            leases=NoLeases(),  # type: ignore[arg-type]
            secrets=NO_SECRET,
            counters=self.counted,
            handlers=answer_questions(self.tickets),
        )
        if tickets is None:
            self.tickets.on_progress = self.listener.notify_progress

    def open(self, ticket: bytes) -> bool:
        return bool(self.tickets.open_ticket(ticket, ticket.hex(), self.source, 2, TOKENS, "a" * 32))

    def close(self) -> None:
        self.listener.close()


class Liar:
    """Sends false answers: each is the next of a list, the last one for ever."""

    def __init__(self, *answers: Progress) -> None:
        self.answers = answers
        self.asked = 0

    def progress(self, question: AskedTicket) -> Progress | None:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]

    def cancel_ticket(self, ticket: bytes) -> None:
        """It does not care."""


def told(version: int, **more: Any) -> Progress:
    values = {"engine_id": "p", "groups": 2, "total": TOKENS, "prompt": "a" * 32, "epoch": 1} | more
    return Progress(version, **values)


@pytest.fixture
def d() -> Iterator[TicketFollowers]:
    with closing(Peers(0.5, NO_SECRET, Counted())) as made:
        yield TicketFollowers(made, 1.0)


@pytest.fixture
def honest(d: TicketFollowers) -> Iterator[Callable[[], None]]:
    """A follower of an honest P beside all that; called at the end, it must have gone on."""
    with closing(P()) as p:
        ticket = bytes(16)
        p.open(ticket)
        follower = d.follow_ticket(Ticket(ticket, p.address), TOKENS)

        def goes_on() -> None:
            p.tickets.settle_tokens(ticket, 96, {0: (16, list(range(6)))})
            until(lambda: follower.tokens == 96)
            assert not follower.error

        yield goes_on


def follow(d: TicketFollowers, address: Address, ticket: int = 1) -> TicketFollower:
    return d.follow_ticket(Ticket(ticket.to_bytes(16, "big"), address), TOKENS)


LIES = {
    "another engine": [told(1), told(2, engine_id="q")],
    "another prompt": [told(1), told(2, prompt="b" * 32)],
    "another length": [told(1), told(2, total=7)],
    "an invalid name": [told(1, engine_id="p\nINFO all is well")],
    "a gap": [told(1, tokens=64, blocks=[Settled(0, 3, "1")])],
    "more blocks than the prompt has tokens": [told(1, tokens=64, blocks=[Settled(0, 0, "0-99999")])],
    "more blocks in many groups": [told(1, tokens=64, blocks=[Settled(one, 0, "0-999") for one in range(256)])],
    "more blocks with time": [told(n + 1, tokens=64, blocks=[Settled(n, 0, "0-999")]) for n in range(200)],
    "invalid ids": [told(1, tokens=64, blocks=[Settled(0, 0, "7-")])],
    "ids of more than 31 bits": [told(1, tokens=64, blocks=[Settled(0, 0, "4294967296")])],
    "invalid parameters": [told(1, params=b"[" * 100_000)],
    "parameters of another kind": [told(1, params=b"7")],
    "it has forgotten the ticket": [told(3), Progress(0)],
    "an answer that is too long": [told(1, params=b" " * (4 << 20))],
}


@pytest.mark.parametrize("lie", LIES)
def test_p_that_lies_ends_one_request(lie: str, d: TicketFollowers, honest: Callable[[], None]) -> None:
    with closing(P(Liar(*LIES[lie]))) as p:
        follower = follow(d, p.address)
        until(lambda: follower.error)
        assert follower.error.isprintable()
        assert sum(map(len, follower.tables.values())) <= follower.max_blocks
        honest()


def test_p_that_goes_backward_or_claims_more_tokens_gives_no_more_than_it_has(d: TicketFollowers) -> None:
    answers = [told(1, tokens=64, blocks=[Settled(0, 0, "1-4")]), told(9, tokens=16), told(5, tokens=1 << 39)]
    with closing(P(Liar(*answers, told(10, tokens=1 << 39)))) as p:
        follower = follow(d, p.address)
        until(lambda: follower.version == 10)
        assert (follower.tokens, follower.tables) == (TOKENS, {0: [1, 2, 3, 4]}), "the worker finds no blocks"


def test_p_with_news_without_end_takes_half_of_a_core_at_most(
    d: TicketFollowers, honest: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of the thread takes 4 ms of the processor here; it pauses for as long."""
    readings, now, pauses = itertools.count(1), itertools.count(1), []
    clock = SimpleNamespace(
        monotonic=lambda: next(now) * 1e-6,
        thread_time=lambda: next(readings) * 0.004,  # read before and after each turn
        sleep=pauses.append,
    )
    monkeypatch.setattr(peers, "time", clock)

    class Endless(Liar):
        def progress(self, question: AskedTicket) -> Progress:
            return told(question.seen + 1, epoch=question.seen, tokens=999, blocks=[Settled(0, 0, "0-999")])

    with closing(P(Endless())) as p:
        many = [follow(d, p.address, ticket) for ticket in range(1, 9)]
        until(lambda: all(one.version > 100 for one in many))
        turns = next(readings) // 2
        assert sum(pauses) > 0.004 * turns - 2 * peers._BUSY_SECONDS
        honest()


@contextmanager
def _server(say: bytes) -> Iterator[Address]:
    """The address of a server that sends the same bytes to every client; the connections stay open."""
    with ExitStack() as kept:

        def serve(raw: socket.socket) -> None:
            kept.enter_context(raw.dup())
            raw.recv(4096)
            raw.sendall(say)

        with hostile(serve, 1000) as address:
            yield address


def test_unfinished_answers_have_a_bound(
    d: TicketFollowers, honest: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_followers, "MAX_UNREAD_BYTES", 100_000)
    with _server(struct.pack("<I", 1 << 20) + b" " * 30_000) as address:
        many = [follow(d, address, ticket) for ticket in range(1, 11)]
        until(lambda: sum(bool(one.error) for one in many) >= 7)
        unanswered = {one.question for one in many if one.question is not None}
        assert sum(question.unread for question in unanswered) <= 100_000
        honest()


def test_answers_that_never_come_end(d: TicketFollowers, honest: Callable[[], None], monkeypatch: Any) -> None:
    monkeypatch.setattr(ticket_followers, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(ticket_followers, "_MAX_WAIT_SECONDS", 0.2)
    with ExitStack() as stack:
        followed = []
        for ticket, say in enumerate((b"", b"\0", frame(told(1))[:-1], b"GET / HTTP/1.1\r\n\r\n"), 1):
            address = stack.enter_context(_server(say))
            followed.append(follow(d, address, ticket))
        until(lambda: all(one.error for one in followed))
    honest()


def test_connections_that_close_at_once_are_tried_less_and_less(
    d: TicketFollowers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialed = []
    monkeypatch.setattr(ticket_followers, "_PAUSE_SECONDS", 0.05)
    with hostile(lambda raw: dialed.append(time.monotonic()), 1000) as address:
        follow(d, address)
        until(lambda: len(dialed) >= 5)
    pauses = [after - before for before, after in pairwise(dialed)]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4), strict=False)), pauses


def test_addresses_where_nobody_is_take_a_few_connections(
    d: TicketFollowers, honest: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are followed at an address that takes no connection, and their ends."""
    now: Counter[Address] = Counter()
    most: Counter[Address] = Counter()
    start, release = Peers._start, Peers._release

    def starts(self: Peers, call: Call[Any]) -> None:
        now[call.address] += 1
        most[call.address] = max(most[call.address], now[call.address])
        start(self, call)

    def ends(self: Peers, call: Call[Any]) -> None:
        now[call.address] -= 1
        release(self, call)

    monkeypatch.setattr(Peers, "_start", starts)
    monkeypatch.setattr(Peers, "_release", ends)
    with closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address(*full.getsockname())
        kept = [socket.socket() for _ in range(3)]
        for one in kept:
            one.setblocking(False)
            one.connect_ex(address)
        for ticket in range(1, 301):
            follower = follow(d, address, ticket)
            if ticket % 3:
                d.stop_follower(follower, unwanted=True)
        until(lambda: most[address])
        honest()
        assert most[address] <= 2 * MAX_AT_ADDRESS, "to follow, and to cancel"
        assert not [thread for thread in threading.enumerate() if thread.name == "kvhma-call"]
        for one in kept:
            one.close()


def test_more_tickets_than_p_has_connections_share_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 256)
    numbers, add = [], connections.Connections._add_connection

    def adds(self: Any, connection: Any) -> None:
        add(self, connection)
        numbers.append(len(self._open))

    monkeypatch.setattr(connections.Connections, "_add_connection", adds)
    tickets = [number.to_bytes(16, "big") for number in range(1, MAX_FOLLOWED + 1)]
    # A busy P may be late with its replies, and with the second half of its requests: D waits for both.
    with closing(Peers(10 * HANG_SECONDS, NO_SECRET, Counted())) as asking, closing(P()) as p:
        d = TicketFollowers(asking, 10 * HANG_SECONDS)
        for ticket in tickets[::2]:
            p.open(ticket)
        followers = [d.follow_ticket(Ticket(ticket, p.address), TOKENS) for ticket in tickets]
        until(lambda: all(follower.source for follower in followers[::2]))
        for ticket in tickets[1::2]:  # P's requests may arrive later than D's
            p.open(ticket)
        for ticket in reversed(tickets):
            p.tickets.settle_tokens(ticket, 96, {0: (16, list(range(6)))})
        until(lambda: all(follower.tokens == 96 for follower in followers))
        for ticket in tickets:
            p.tickets.end_ticket(ticket, ended=f"over {ticket[-1]}")
        until(lambda: all(follower.is_over for follower in followers))
        assert [follower.error for follower in followers] == [f"over {ticket[-1]}" for ticket in tickets]
        assert max(numbers) <= MAX_AT_ADDRESS
        assert not p.counted.refused


def test_a_ticket_that_p_has_not_looked_for_is_not_unknown(d: TicketFollowers, monkeypatch: pytest.MonkeyPatch) -> None:
    """P looks at the tickets of a question in order, and replies about the first that has progress."""
    monkeypatch.setattr(ticket_followers, "MAX_AT_ADDRESS", 1)
    impatient = TicketFollowers(d._peers, unknown_seconds=-1.0)
    with closing(P()) as p:
        tickets = [number.to_bytes(16, "big") for number in range(1, 33)]
        for ticket in tickets:
            p.open(ticket)
        followers = [impatient.follow_ticket(Ticket(ticket, p.address), TOKENS) for ticket in tickets]
        until(lambda: all(follower.source or follower.error for follower in followers))
        assert not any(follower.error for follower in followers)


def test_several_followers_of_each_ticket(d: TicketFollowers) -> None:
    """Samples of one prompt."""
    tickets = [number.to_bytes(16, "big") for number in range(1, 101)]
    with closing(P()) as p:
        for ticket in tickets:
            p.open(ticket)
        followers = [d.follow_ticket(Ticket(ticket, p.address), TOKENS) for ticket in tickets for _ in range(3)]
        until(lambda: all(follower.source for follower in followers))
        for ticket in tickets:
            p.tickets.settle_tokens(ticket, 96, {0: (16, list(range(6)))})
        until(lambda: all(follower.tokens == 96 for follower in followers))


def test_p_that_is_silent_ends_all_its_tickets_at_the_same_time(
    d: TicketFollowers, honest: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_followers, "_SILENCE_SECONDS", 2.0)
    asked: list[Address] = []
    start = Peers._start

    def starts(self: Peers, call: Call[Any]) -> None:
        asked.append(call.address)
        start(self, call)

    monkeypatch.setattr(Peers, "_start", starts)
    with _server(b"") as address:
        many = [follow(d, address, ticket) for ticket in range(1, 301)]
        until(lambda: all(follower.error for follower in many))
        assert asked.count(address) < 150, "it was not asked about most of them"
    honest()


def test_an_answer_about_a_ticket_that_was_not_asked_about_changes_nothing(
    d: TicketFollowers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [told(1, ticket=b"x" * 16)]
    with closing(P()) as p:
        progress = p.listener._handlers[Follow]

        def wrong(question: Follow, waited: float) -> Any:
            return answers.pop() if answers else progress(question, waited)

        monkeypatch.setitem(p.listener._handlers, Follow, wrong)
        follower = follow(d, p.address)
        until(lambda: follower.failures == 1)
        assert follower.source is None


def test_p_does_not_know_one_of_many_tickets(d: TicketFollowers, monkeypatch: pytest.MonkeyPatch) -> None:
    """D follows the others, also those that P has not looked for yet when it answered about another one."""
    monkeypatch.setattr(ticket_followers, "MAX_AT_ADDRESS", 1)
    with closing(P()) as p:
        known = [number.to_bytes(16, "big") for number in range(2, 9)]
        for ticket in known:
            p.open(ticket)
        followers = [d.follow_ticket(Ticket(ticket, p.address), TOKENS) for ticket in known]
        lost = follow(d, p.address)
        until(lambda: lost.error)
        assert "does not know the ticket" in lost.error
        assert not any(follower.error for follower in followers)
        assert all(follower.source for follower in followers)


# --- at P


def test_waiting_questions_cost_nothing_while_others_progress() -> None:
    with closing(P()) as p:
        asked = []
        ask = p.tickets.progress
        p.tickets.progress = lambda question: asked.append(question.ticket) or ask(question)
        many = [socket.create_connection(p.address) for _ in range(200)]
        for index, one in enumerate(many, 1):
            one.sendall(frame(Follow([AskedTicket(index.to_bytes(16, "big"), 0, 0, 0)], 60.0)))
        until(lambda: len(asked) == 200)
        asked.clear()
        p.open(bytes(16))
        for tokens in range(1, 50):
            p.tickets.settle_tokens(bytes(16), tokens, {})
        p.open((7).to_bytes(16, "big"))
        assert many[6].recv(4)
        assert set(asked) == {(7).to_bytes(16, "big")}
        for one in many:
            one.close()
        until(lambda: not p.listener._progressed)


def test_a_million_tickets_are_a_few() -> None:
    table = TicketTable(30.0)
    source = Incarnation(Address("a", 1), "p", 7, 1, 1)
    opened = [
        table.open_ticket(ticket.to_bytes(16, "big"), "r", source, 1, 10, "") for ticket in range(MAX_TICKETS + 1000)
    ]
    assert (sum(opened), len(table)) == (MAX_TICKETS, MAX_TICKETS)
    for ticket in range(MAX_TICKETS):
        table.end_ticket(ticket.to_bytes(16, "big"), ended="over")
    for ticket in range(1_000_000, 1_010_000):
        assert table.open_ticket(ticket.to_bytes(16, "big"), "r", source, 1, 10, "")
        table.end_ticket(ticket.to_bytes(16, "big"), ended="over")
    assert len(table) == MAX_TICKETS
