# SPDX-License-Identifier: Apache-2.0
"""How a process reaches other engines: whose turn it is, what a call costs, and how it ends."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.options.tickets.messages import AskedTicket, Follow, Progress, Unfollow
from kvhma.vllm.options.tickets.offers import answer_questions
from kvhma.vllm.peers import names, peers
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.wire import secrets as wire_secrets
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    Done,
    EngineInfo,
    Renew,
    SignedWorkerIdentity,
)
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.listening import HELLO, NONCE, hostile, listening
from support.waiting import HANG_SECONDS, until

OPEN, A = Secrets(), Secrets([b"a" * 32])
INFO = AskEngineInfo(PROTOCOL)
END = 5 * HANG_SECONDS


@pytest.fixture
def asking() -> Iterator[Peers]:
    with closing(Peers(5, OPEN, Counted())) as made:
        yield made


@pytest.fixture
def silent() -> Iterator[Address]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield Address(*listener.getsockname())


# --- how many calls wait ---------------------------------------------------------------------------------------


def test_long_calls_have_half_of_the_room(silent: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_WAITING", 8)
    long = Follow([AskedTicket(bytes(16), 0, 0, 0)], 30.0)
    with listening() as p, closing(Peers(END, OPEN, Counted())) as asking:
        for _ in range(20):
            asking.ask(silent, long, Progress)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"
        assert len(asking._active) == 4


@pytest.mark.parametrize("is_long", [False, True])
def test_calls_at_one_address_are_bounded(silent: Address, is_long: bool) -> None:
    question = Follow([AskedTicket(bytes(16), 0, 0, 0)], 30.0) if is_long else Renew([])
    with listening() as p, closing(Peers(END, OPEN, Counted())) as asking:
        if asking._limit <= 2 * peers.MAX_AT_ADDRESS:
            pytest.skip("the process may not open enough files")
        for _ in range(peers.MAX_AT_ADDRESS + 50):
            asking.ask(silent, question, Progress if is_long else Done)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p", "another address has room"
        assert len(asking._active) == peers.MAX_AT_ADDRESS


# --- calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secrets", [OPEN, A], ids=["without a secret", "with a secret"])
def test_an_answer_an_error_and_one_connection(secrets: Secrets) -> None:
    with listening(secrets=secrets) as p, closing(Peers(5, secrets, Counted())) as asking:
        for _ in range(3):
            assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"
        identity = asking.ask(p.at, AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity).result(END)
        assert identity.data == HELLO
        with pytest.raises(HandshakeError, match="tensor 7"):
            asking.ask(p.at, AskWorkerIdentity(0, 7, NONCE), SignedWorkerIdentity).result(END)
        with pytest.raises(HandshakeError, match="expected Done: Invalid value 'engine info'"):
            asking.ask(p.at, INFO, Done).result(END)
        assert len(asking.idle._idle[p.at]) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(OPEN, A), (A, OPEN), (A, Secrets([b"b" * 32]))])
def test_secrets_that_differ(ours: Secrets, theirs: Secrets) -> None:
    with listening(secrets=theirs) as p, closing(Peers(5, ours, Counted())) as asking:
        call = asking.ask(p.at, INFO, EngineInfo)
        with pytest.raises(HandshakeError, match="secret"):
            call.result(END)


def test_a_connection_that_p_has_closed_costs_no_answer(asking: Peers) -> None:
    with listening() as p:
        asking.ask(p.at, INFO, EngineInfo).result(END)
        (client,) = asking.idle._idle[p.at]
        client.idle = lambda: True  # P closes it at this moment  # type: ignore[method-assign]
        address = p.at
    with listening(at=address):
        assert asking.ask(address, INFO, EngineInfo).result(END).engine_id == "p"


def test_nobody_is_there(asking: Peers) -> None:
    with pytest.raises(HandshakeTimeoutError, match="no answer from"):
        asking.ask(Address("127.0.0.1", free_port()), INFO, EngineInfo).result(END)


def test_a_deadline_before_the_timeout(silent: Address) -> None:
    with closing(Peers(10 * END, OPEN, Counted())) as asking, pytest.raises(HandshakeTimeoutError):
        asking.ask(silent, INFO, EngineInfo, deadline=time.monotonic() + 0.1).result(END)


def test_names(asking: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name service delays no other call."""
    go_on = threading.Event()
    getaddrinfo = names.getaddrinfo

    def slowly(host: str, *more: Any, **options: Any) -> Any:
        if host == "slow":
            go_on.wait(END)
            host = "localhost"
        return getaddrinfo(host, *more, **options)

    monkeypatch.setattr(names, "getaddrinfo", slowly)
    with listening() as p:
        slow = asking.ask(Address("slow", p.at.port), INFO, EngineInfo)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"
        assert not slow.done()
        go_on.set()
        assert slow.result(END).engine_id == "p"
    with pytest.raises(HandshakeTimeoutError, match="no-such-host"):
        asking.ask(Address("no-such-host.invalid", 1), INFO, EngineInfo).result(END)


def test_a_name_that_is_not_looked_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(names, "getaddrinfo", lambda *_, **__: go_on.wait(END))
    with closing(Peers(0.2, OPEN, Counted())) as asking:
        with pytest.raises(HandshakeTimeoutError, match=r"slow:1 was not looked up in 0\.2 s"):
            asking.ask(Address("slow", 1), INFO, EngineInfo).result(END)
        go_on.set()


def test_received_bytes_are_shown_and_may_be_refused(asking: Peers) -> None:
    def refuses(count: int) -> None:
        seen.append(count)
        if count > 1000:
            raise ValueError("too many")

    seen: list[int] = []
    with listening() as p:
        call = asking.ask(p.at, AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity, on_received=refuses)
        with pytest.raises(ValueError, match="too many"):
            call.result(END)
        assert seen
        assert not asking.idle._idle.get(p.at), "the rest of the answer would be taken for the next one"
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"


def test_a_cancelled_call_gives_its_room_back(asking: Peers, silent: Address) -> None:
    calls = [asking.ask(silent, INFO, EngineInfo) for _ in range(2 * peers.MAX_AT_ADDRESS)]
    until(lambda: len(asking._active) == peers.MAX_AT_ADDRESS)
    active = list(asking._active)
    for call in active:
        asking.cancel(call)
    until(lambda: set(calls) == {*active, *asking._active})
    for call in calls:
        asking.cancel(call)
    until(lambda: not asking._active)
    assert not asking._queued
    assert not asking._active_at
    assert all(call.cancelled() for call in calls)


def test_calls_that_wait_are_bounded(silent: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Peers(END, OPEN, Counted())) as asking:  # no call times out while others are made
        monkeypatch.setattr(peers, "_MAX_QUEUED", 100)
        calls = [asking.ask(silent, INFO, EngineInfo) for _ in range(peers.MAX_AT_ADDRESS + 200)]
        # Not the last one: the thread may have refused enough before it came.
        refused = until(lambda: [call for call in calls if call.done()])
        with pytest.raises(HandshakeTimeoutError, match="too many questions wait"):
            refused[0].result()
        for call in calls:
            asking.cancel(call)
        until(lambda: not asking._queued)
        with listening() as p:
            assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ssl leaves its socket to the collector
def test_a_connection_that_is_reset_while_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_ex = socket.socket.connect_ex
    waits: dict[int, int] = {}

    def slowly(self: socket.socket, place: Any) -> int:
        result = connect_ex(self, place)
        waits[id(self)] = waits.get(id(self), 0) + 1
        if result == 0 and waits[id(self)] < 3:
            return errno.EINPROGRESS  # as over a network: the thread waits for the connection
        if waits[id(self)] == 3:
            time.sleep(0.02)  # the peer resets it now
        return result

    def resets(raw: socket.socket) -> None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()

    with closing(Peers(3, A, Counted())) as asking, hostile(resets, connections=4) as address:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "connect_ex", slowly)
            for _ in range(4):
                with pytest.raises(HandshakeTimeoutError):
                    asking.ask(address, INFO, EngineInfo).result(END)
        with listening(secrets=A) as p:
            assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"
        assert len(asking._selector.get_map()) == 1, "the wake-up"


def test_secrets_that_cannot_be_read_anew_fail_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.0)
    file = tmp_path / "secrets"
    file.write_bytes(b"a" * 32)
    with (
        listening(secrets=A) as p,
        closing(Peers(5, Secrets.load(Settings(secret_file=str(file))), Counted())) as asking,
    ):
        asking.ask(p.at, INFO, EngineInfo).result(END)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        file.write_bytes(b"b" * 32 + b"\n" + b"a" * 32)
        monkeypatch.setattr(wire_secrets, "_derive", full)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"


def test_a_panic_in_a_callback_at_the_end(silent: Address) -> None:
    class Panic(BaseException):
        """As PyO3 raises one: not an Exception."""

    def panics(_: Any) -> None:
        raise Panic

    asking = Peers(10 * END, OPEN, Counted())
    first, second = asking.ask(silent, INFO, EngineInfo), asking.ask(silent, INFO, EngineInfo)
    until(lambda: len(asking._active) == 2)
    first.add_done_callback(panics)
    asking.close()
    with pytest.raises(HandshakeTimeoutError, match="this engine stops"):
        second.result(END)


def test_the_end_fails_what_has_no_answer(silent: Address) -> None:
    asking = Peers(10 * END, OPEN, Counted())
    calls = [asking.ask(silent, INFO, EngineInfo) for _ in range(10)]
    until(lambda: asking._active)
    asking.close()
    for call in calls:
        with pytest.raises(HandshakeTimeoutError, match="this engine stops"):
            call.result(END)
    with pytest.raises(HandshakeTimeoutError, match="this engine stops"):
        asking.ask(silent, INFO, EngineInfo).result(END)


def test_a_callback_that_fails_and_a_task_that_fails(asking: Peers) -> None:
    def fails(_: Any) -> None:
        raise ValueError("a mistake")

    with listening() as p:
        asking.ask(p.at, INFO, EngineInfo).add_done_callback(fails)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"
        asking.run_task(fails)
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"


def test_a_task_that_always_fails_keeps_no_other_from_running(asking: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_RETRY_SECONDS", 0.05)
    runs: list[float] = []

    def fails(now: float) -> float:
        if not runs or now < runs[-1] + 0.05:
            return runs[-1] + 0.05 if runs else now  # when the other one is due: in the same turn, and before it
        raise ValueError("a mistake")

    def works(now: float) -> float:
        runs.append(now)
        return now + 0.05

    asking.run_task(fails)
    asking.run_task(works)
    until(lambda: len(runs) > 5)


def test_no_thread_can_be_started(asking: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        call = asking.ask(Address("127.0.0.1", 1), INFO, EngineInfo)
        assert not asking.run_task(lambda now: now + 1)
    with pytest.raises(HandshakeTimeoutError, match="no thread could be started"):
        call.result(END)
    with listening() as p:
        assert asking.ask(p.at, INFO, EngineInfo).result(END).engine_id == "p"


def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_WAITING", 4)
    with ExitStack() as stack:
        found = [stack.enter_context(listening()) for _ in range(8)]
        asking = stack.enter_context(closing(Peers(5, OPEN, Counted())))
        for p in found:
            asking.ask(p.at, INFO, EngineInfo).result(END)
        until(lambda: sum(map(len, asking.idle._idle.values())) <= 4)
        assert found[-1].at in asking.idle._idle, "those that were used last stay"


# --- several tickets in one question -------------------------------------------------------------------------


class Tickets:
    """P's table: versions by ticket."""

    def __init__(self) -> None:
        self.versions: dict[bytes, int] = {}
        self.asked: list[bytes] = []

    def progress(self, question: Any) -> Progress | None:
        self.asked.append(question.ticket)
        version = self.versions.get(question.ticket, 0)
        return Progress(version) if version > question.seen else None

    def cancel_ticket(self, ticket: bytes) -> None:
        """It does not care."""


def test_a_question_about_several_tickets_waits_for_the_first_that_progresses(asking: Peers) -> None:
    first, second, third = (bytes([number] * 16) for number in (1, 2, 3))

    def question(seen: int, max_wait: float) -> Follow:
        return Follow([AskedTicket(ticket, seen, 0, 0) for ticket in (first, second, third, second)], max_wait)

    tickets = Tickets()
    with listening(handlers=answer_questions(tickets)) as p:
        assert asking.ask(p.at, question(0, 0.0), Progress).result(END) == Progress(0, ticket=first)
        tickets.asked.clear()
        call = asking.ask(p.at, question(0, 60.0), Progress)
        until(lambda: tickets.asked == [first, second, third, second])
        tickets.versions[third] = 7
        p.notify_progress(third)
        assert call.result(30.0) == Progress(7, ticket=third), "before the question's time is over"
        tickets.versions[second] = 3
        assert asking.ask(p.at, question(0, 60.0), Progress).result(END) == Progress(3, ticket=second)
        assert asking.ask(p.at, Unfollow(first), Done).result(END) == Done()


def test_a_question_of_an_option_that_p_does_not_have_is_refused(asking: Peers) -> None:
    with (
        listening() as p,
        pytest.raises(HandshakeError, match="not a question of protocol 5: Invalid value 'unfollow'"),
    ):
        asking.ask(p.at, Unfollow(bytes(16)), Done).result(END)


def test_a_question_about_too_many_tickets_is_refused(asking: Peers) -> None:
    tickets = [AskedTicket(bytes(16), 0, 0, 0)] * 17
    with listening(handlers=answer_questions(Tickets())) as p, pytest.raises(HandshakeError, match="tickets"):
        asking.ask(p.at, Follow(tickets, 0.0), Progress).result(END)


def test_only_the_thread_ends_calls_if_it_is_late_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CLOSE_SECONDS", 0.0)
    is_late, may_end, ended_in = threading.Event(), threading.Event(), []

    def late(now: float) -> float:
        is_late.set()
        may_end.wait()
        return now + 100.0

    with closing(Peers(5, OPEN, Counted())) as asking:
        asking.run_task(late)
        is_late.wait()
        call = asking.ask(Address("127.0.0.1", 1), INFO, EngineInfo)
        call.add_done_callback(lambda _: ended_in.append(threading.current_thread().name))
        asking.close()
        assert not call.done()
        may_end.set()
        with pytest.raises(HandshakeTimeoutError):
            call.result(HANG_SECONDS)
        until(lambda: ended_in == ["kvhma-peers"])
