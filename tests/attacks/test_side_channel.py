# SPDX-License-Identifier: Apache-2.0
"""Any bytes to the listener, or to a client that asks it, cost little, and the next good question is answered.

"Before" in these tests is the side channel of protocol 2, which used ZeroMQ's sockets.
"""

import contextlib
import ctypes
import gc
import random
import resource
import socket
import struct
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.vllm import threads
from kvhma.vllm.peers import connection, connections, server
from kvhma.vllm.peers.client import Client, IdleClients
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.peers.sockets import Waker
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import (
    MAX_IDENTITY_BYTES,
    MAX_QUESTION_BYTES,
    PROTOCOL,
    QUESTIONS,
    AskEngineInfo,
    AskWorkerIdentity,
    Done,
    EngineInfo,
    Leases,
    LeaseState,
    Outcome,
    Refused,
    Release,
    Renew,
    SignedWorkerIdentity,
    frame,
    read_answer,
    read_question,
)
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.listening import (
    NONCE,
    AnyLease,
    answers,
    connect,
    descriptors,
    errors,
    framed,
    has_ended,
    hostile,
    is_answered,
    listening,
    problem,
    received,
    resident,
    said,
)
from support.waiting import HANG_SECONDS, until

NO_SECRETS, SECRET = Secrets(), Secrets([b"s" * 32])
CLAIM = ("a", b"12345678", b"87654321", NONCE)


@pytest.fixture
def listener():
    with listening() as found:
        yield found


@pytest.fixture
def address(listener):
    return listener.at


@pytest.fixture
def quick(monkeypatch):
    """Peers get a tenth of the time."""
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)
    for name in ("HANDSHAKE_SECONDS", "QUESTION_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(connection, name, 0.5)


@pytest.fixture(autouse=True)
def log_of_each_test(monkeypatch):
    """Reset the limit of log lines, so that no test suppresses another test's lines."""
    for sparing in peer_log.logger.filters:
        monkeypatch.setattr(sparing, "_kinds", {})


# --- good and bad questions ------------------------------------------------------------------------------------


def test_another_protocol(address):
    with (
        Client(address, 5, NO_SECRETS) as client,
        pytest.raises(HandshakeError, match=f"protocol is 7 on your side, {PROTOCOL} on this side"),
    ):
        client.ask(AskEngineInfo(7), EngineInfo)


@contextlib.contextmanager
def served_by_hand(secrets):
    """Connections whose turns a test takes, and clients that do not wait for them."""
    at = Address("127.0.0.1", free_port())
    with contextlib.ExitStack() as stack:
        served = connections.Connections(stack.enter_context(server._bind(at)), secrets, lambda data: Done(), Counted())
        stack.enter_context(contextlib.closing(served))

        def client():
            return stack.enter_context(contextlib.closing(Client(at, HANG_SECONDS, secrets, wait=False)))

        yield served, at, client, stack


def test_untrusted_peers_do_not_take_all_of_the_time(monkeypatch):
    """Before, a client that opened connections without end kept a core and Python's lock busy: 0.4 ms a handshake."""
    clock = SimpleNamespace(now=100.0, used=0.0)

    def thread_time():
        clock.used += 0.004  # so that all work for an untrusted client takes 4 ms
        return clock.used

    fake = SimpleNamespace(monotonic=lambda: clock.now, thread_time=thread_time, sleep=time.sleep)
    monkeypatch.setattr(connections, "time", fake)
    with served_by_hand(SECRET) as (served, at, engine, stack):

        def is_served(client):
            if not client.waiting:
                client.send(AskEngineInfo(PROTOCOL))
            for _ in range(100):
                served._swept = clock.now - 1  # the listener waits for nothing
                served.serve()
                if client.poll():
                    return client.receive(Done) == Done()
            return False

        met = engine()
        while not is_served(met):
            clock.now = served._accept_at
        for _ in range(8):
            stack.enter_context(connect(at)).sendall(b"\x16\x03\x01\x40\x00\x01")
        clock.now, before = served._accept_at, clock.used
        for _ in range(20):
            served._swept = clock.now - 1
            served.serve()
        assert not served._accepting
        # It accepts nothing for as long as it worked: half of the clock's calls end a measurement.
        assert served._accept_at - clock.now >= 0.012
        assert served._accept_at - clock.now <= clock.used - before
        late = engine()
        assert is_served(met)
        assert not is_served(late)
        clock.now = served._accept_at
        while not is_served(late):
            clock.now = served._accept_at


def test_questions_without_end_take_half_of_a_core_at_most(monkeypatch):
    """Without a secret every peer is unknown; engines with the secret may have all of the core."""
    clock = SimpleNamespace(used=0.0, slept=0.0)

    def thread_time():
        clock.used += 0.002  # each reading: 2 ms for each question
        return clock.used

    def sleep(seconds):
        clock.slept += seconds

    fake = SimpleNamespace(monotonic=lambda: 100.0, thread_time=thread_time, sleep=sleep)
    monkeypatch.setattr(connections, "time", fake)
    for secrets in (NO_SECRETS, SECRET):
        clock.slept, questions = 0.0, 0
        with served_by_hand(secrets) as (served, _, make, _):
            client = make()
            while questions < 100:
                if not client.waiting:
                    client.send(AskEngineInfo(PROTOCOL))
                served.serve()
                served._accept_at = 0.0
                if client.poll():
                    client.receive(Done)
                    questions += 1
        assert (clock.slept >= 0.9 * 100 * 0.002) is not secrets.enabled


def test_progress_of_tickets_is_not_the_time_of_untrusted_peers(monkeypatch):
    """Answers to followers kept new engines waiting: the listener counted them as work for unknown peers."""
    clock = SimpleNamespace(used=0.0)

    def thread_time():
        clock.used += 0.004
        return clock.used

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: 100.0, thread_time=thread_time))
    with served_by_hand(NO_SECRETS) as (served, _, _, stack):
        waker = Waker()
        stack.callback(waker.close)
        served.register(waker, deque())
        for _ in range(100):
            waker.wake()
            served.serve()
        assert served._accepting


JUNK = [
    b"",
    b"\xc1",
    b"\x00",
    random.Random(7).randbytes(100),
    msgspec.msgpack.encode({"type": "worker identity"}),
    msgspec.msgpack.encode({"type": "worker identity", "pp_rank": -1, "tp_rank": 0, "nonce": NONCE}),
    msgspec.msgpack.encode({"type": "worker identity", "pp_rank": "0", "tp_rank": None, "nonce": NONCE}),
    msgspec.msgpack.encode({"type": "worker identity", "pp_rank": 2**60, "tp_rank": 0, "nonce": NONCE}),
    msgspec.msgpack.encode({"type": "worker identity", "pp_rank": 0, "tp_rank": 0, "nonce": NONCE[1:]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"12345678"]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"1234567", NONCE]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", 1, NONCE]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"12345678", NONCE + b"x"]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"12345678", NONCE]] * 5000}),
    msgspec.msgpack.encode({"type": "release", "claims": 7}),
    msgspec.msgpack.encode({"type": "refused", "engine_id": "x", "text": "y" * 100_000}),
    msgspec.msgpack.encode({"type": "engine info", "protocol": 1} | {str(i): i for i in range(1000)}),
    msgspec.msgpack.encode(["get_meta_msg", 0, 0]),
    b"\x91" * 100_000,
    b"\x81\xa4type" * 20_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xd9\xff" + b"\xff" * 255,
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:20]))
def test_junk_is_answered_with_a_problem(address, junk):
    with connect(address) as raw:
        raw.sendall(framed(junk))
        assert problem(said(raw))
        raw.sendall(frame(AskEngineInfo(PROTOCOL)))  # the connection is as good as before
        assert read_answer(said(raw), EngineInfo).engine_id == "p"


def test_mutations_of_good_questions(address):
    rng = random.Random(1)
    good = [
        msgspec.msgpack.encode(question)
        for question in (
            AskEngineInfo(PROTOCOL),
            AskWorkerIdentity(0, 0, NONCE),
            Renew([CLAIM]),
            Release([CLAIM], Outcome.READ),
        )
    ]
    with connect(address) as raw:
        for _ in range(2000):
            data = bytearray(rng.choice(good))
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            raw.sendall(framed(bytes(data[: rng.randint(1, len(data))])))
            assert said(raw)


@pytest.fixture(scope="module")
def fuzzed():
    """One listener for all examples."""
    with listening() as found:
        yield found


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 40))
def test_any_bytes_are_a_question_or_refused(fuzzed, questions, chunk):
    with connect(fuzzed.at) as raw:
        for question in questions:
            data = framed(question)
            for start in range(0, len(data), chunk):
                raw.sendall(data[start : start + chunk])
            found = msgspec.msgpack.decode(said(raw))
            try:
                read_question(question, QUESTIONS)
            except HandshakeError:
                assert found["type"] == "problem"
    answers(fuzzed.at)


@settings(max_examples=200)
@given(st.binary(max_size=2000))
def test_any_bytes_end_their_own_connection_at_most(fuzzed, data):
    with connect(fuzzed.at) as raw:
        raw.sendall(data)
    answers(fuzzed.at)
    assert errors(fuzzed) == 0


def test_a_question_before_the_last_one_was_answered_ends_the_connection(address):
    with connect(address) as raw:
        raw.sendall(frame(AskEngineInfo(PROTOCOL)) * 2)
        assert "one question at a time" in problem(said(raw))
        assert has_ended(raw, 5)


# --- S4: bytes of a question ----------------------------------------------------------------------------------


def sent_until_it_ends(raw, parts, pause=0.0):
    """The bytes that were sent before the other side ended the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for part in parts:
            raw.sendall(part)
            sent += len(part)
            time.sleep(pause)
    return sent


@pytest.mark.parametrize("length", [MAX_QUESTION_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_beyond_the_bound(listener, length):
    with connect(listener.at) as raw:
        raw.sendall(struct.pack("<I", length) + bytes(1000))
        assert f"{length} bytes" in problem(said(raw))
        assert has_ended(raw, 5)
    until(lambda: listener.counted.by_label("side_channel_refused") == {"message": 1})


def test_a_question_at_the_bound(address):
    with connect(address) as raw:
        raw.sendall(framed(bytes(MAX_QUESTION_BYTES)))
        assert "not a question" in problem(said(raw))


def test_the_client_refuses_a_question_that_is_too_long(address):
    claims = [("a" * 512, b"12345678", b"87654321", NONCE)] * 4096
    with Client(address, 5, NO_SECRETS) as client:
        with pytest.raises(HandshakeError, match=f"at most {MAX_QUESTION_BYTES}"):
            client.ask(Renew(claims), Leases)
        is_answered(client)


def test_a_question_byte_by_byte_has_an_end(address, quick):
    # Before, only the size of a question had a bound.
    with connect(address) as raw:
        began, question = time.monotonic(), framed(bytes(5000))
        assert sent_until_it_ends(raw, (bytes([byte]) for byte in question), pause=0.02) < len(question)
        assert time.monotonic() - began > 0.4


def test_unread_answers_are_bounded_and_end(monkeypatch, quick):
    hello = bytes(8 << 20)
    monkeypatch.setattr("support.listening.HELLO", hello)
    monkeypatch.setattr(connections, "MAX_UNFINISHED_BYTES", 32 << 20)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 3)
    with listening() as found, contextlib.ExitStack() as stack:
        before = resident()
        for _ in range(20):
            stack.enter_context(connect(found.at)).sendall(frame(AskWorkerIdentity(0, 0, NONCE)))
            answers(found.at)
        assert resident() - before < 100 << 20
        with Client(found.at, 5, NO_SECRETS) as client:  # who takes its answer gets it
            assert client.ask(AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity).data == hello
        until(lambda: found.counted.by_label("side_channel_refused").get("time"))


def test_an_answer_counts_until_all_of_it_is_taken(monkeypatch):
    monkeypatch.setattr("support.listening.HELLO", bytes(8 << 20))
    monkeypatch.setattr(connections, "MAX_UNFINISHED_BYTES", 32 << 20)
    with listening() as found, contextlib.ExitStack() as stack:
        found._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        for _ in range(20):
            raw = stack.enter_context(connect(found.at))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            raw.sendall(frame(AskWorkerIdentity(0, 0, NONCE)))
            assert received(raw, 7 << 20)
        # Three have room. The listener closes those that have taken nothing for the longest time.
        assert found.counted.by_label("side_channel_refused")["room"] == 17
        assert received(raw, 1 << 20), "the last one has all of its answer"


# --- S4: bytes of an answer -----------------------------------------------------------------------------------


def says(data):
    """Serve a connection: wait for a question, say this, and wait for more."""
    return lambda raw: (raw.recv(1000), raw.sendall(data), raw.recv(1000))


def ask_hello(address, timeout=1.0):
    with Client(address, timeout, NO_SECRETS) as client:
        return client.ask(AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity)


@pytest.mark.parametrize("length", [MAX_IDENTITY_BYTES + 1, 3000 << 20, (1 << 32) - 1])
def test_an_answer_that_is_too_long_is_refused_at_its_length(length):
    answer = says(struct.pack("<I", length))
    with hostile(answer) as address, pytest.raises(HandshakeError, match=f"it has {length} bytes, at most"):
        ask_hello(address, 30)


def test_only_a_worker_identity_may_be_that_long():
    with (
        hostile(says(struct.pack("<I", 2 << 20))) as address,
        Client(address, 5, NO_SECRETS) as client,
        pytest.raises(HandshakeError, match="it has 2097152 bytes, at most 1048576"),
    ):
        client.ask(Renew([CLAIM]), Leases)


def test_more_than_was_asked():
    with (
        hostile(says(frame(Done()) * 2)) as address,
        Client(address, 5, NO_SECRETS) as client,
        pytest.raises(HandshakeError, match="more"),
    ):
        client.ask(Release([CLAIM], Outcome.READ), Done)


def test_an_answer_without_a_question():
    def serve(raw):
        raw.sendall(frame(Done()))
        raw.recv(1000)

    with hostile(serve) as address, Client(address, 5, NO_SECRETS) as client:
        until(lambda: not client.idle())
        with pytest.raises(HandshakeError, match="bytes, at most 0 are expected"):
            client.ask(Release([CLAIM], Outcome.READ), Done)


def test_an_answer_byte_by_byte_has_an_end():
    def serve(raw):
        raw.recv(1000)
        for byte in framed(bytes(1000)):
            raw.sendall(bytes([byte]))
            time.sleep(0.02)

    with hostile(serve) as address, pytest.raises(HandshakeTimeoutError, match=r"no answer .* in 0.5 s"):
        ask_hello(address, 0.5)


def test_a_deadline_that_ends_before_the_time_for_an_answer():
    with (
        hostile(lambda raw: raw.recv(1000) and raw.recv(1000)) as address,
        Client(address, 10 * HANG_SECONDS, NO_SECRETS) as client,
        pytest.raises(HandshakeTimeoutError),
    ):
        client.ask(Renew([CLAIM]), Leases, deadline=time.monotonic() + 0.2)


def test_a_network_that_drops_everything():
    # An address from a range for documentation: no host answers, not even with a refusal.
    with pytest.raises(HandshakeTimeoutError):
        Client(Address("192.0.2.1", 5600), 0.3, NO_SECRETS)


@pytest.mark.parametrize(
    "data",
    [*JUNK, msgspec.msgpack.encode({"type": "leases", "states": ["held", "maybe"]})],
    ids=lambda junk: repr(junk[:20]),
)
def test_answers_are_not_trusted_either(data):
    with pytest.raises(HandshakeError, match="not one of protocol"):
        read_answer(data, Leases)


@settings(max_examples=100)
@given(st.binary(max_size=500))
def test_any_bytes_as_an_answer_are_one_error(data):
    with hostile(lambda raw: (raw.recv(1000), raw.sendall(data))) as address, pytest.raises(HandshakeError):
        ask_hello(address)


# --- pools ----------------------------------------------------------------------------------------------------


def test_a_pool_finds_that_a_connection_has_ended_before_it_is_used():
    with listening() as found:
        pool = IdleClients(NO_SECRETS, 4)
        clients = [Client(found.at, 5, NO_SECRETS) for _ in range(6)]
        for client in clients:
            is_answered(client)
            pool.release_client(found.at, client)
    before = descriptors()
    assert pool.take_client(found.at) is None
    assert descriptors() == before - 4


# --- S11: many, idle and vanished connections ----------------------------------------------------------------


@pytest.fixture
def turns(monkeypatch):
    """The times at which the test's listeners polled."""
    found = []
    serve = connections.Connections.serve
    monkeypatch.setattr(connections.Connections, "serve", lambda self: found.append(time.monotonic()) or serve(self))
    return found


def rests(turns):
    """Check that a listener polls a few times a second, not some thousand times."""
    turns.clear()
    began = time.monotonic()
    time.sleep(2)
    assert len(turns) <= 10 * (1 + time.monotonic() - began)


@pytest.fixture
def many_files():
    """This process may open as many files as it can; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_10000_connections_cost_a_bounded_number(many_files):
    # Before, the process' descriptors were the only bound, and the engine had no descriptor left.
    bound = min(connections.MAX_CONNECTIONS, many_files // 4)
    many = min(10_000, many_files - bound - 200)
    with contextlib.ExitStack() as stack, listening() as found:
        before, memory = descriptors(), resident()
        for _ in range(many):
            stack.enter_context(connect(found.at, "127.0.0.2"))
        answers(found.at)
        assert descriptors() - before - many <= bound + 1  # it accepts one, then closes another
        assert resident() - memory < 64 << 20


@pytest.mark.parametrize("number", [1, 8], ids=["held", "more than it holds"])
def test_a_silent_crowd_of_500_addresses_takes_nothing_from_engines_with_the_secret(many_files, number):
    with listening(secrets=SECRET) as found, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(found.at, 5, SECRET)) for _ in range(20)]
        for client in clients:
            is_answered(client)
        for index in range(500 * number):
            raw = stack.enter_context(connect(found.at, f"127.0.{index % 2 + 1}.{index % 500 // 2 + 1}"))
            if number > 1:
                raw.sendall(b"\x16\x03\x01\x40\x00\x01")  # a handshake that it does not continue
        answers(found.at, SECRET)
        for client in clients:
            is_answered(client)
        closed = max(0, 500 * number - min(connections.MAX_HANDSHAKES, many_files // 8))
        assert found.counted.by_label("side_channel_refused").get("room", 0) >= closed
        assert (closed == 0) is (number == 1) or many_files < 8 * 500


def test_no_more_than_a_quarter_of_the_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    with listening() as found, contextlib.ExitStack() as stack:
        before = descriptors()
        for _ in range(30):
            stack.enter_context(connect(found.at))
            answers(found.at)
        assert descriptors() - before - 30 <= 10


def test_connections_that_say_nothing_are_closed(monkeypatch, quick):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.3)
    with listening() as found, connect(found.at) as silent, connect(found.at) as once:
        once.sendall(frame(AskEngineInfo(PROTOCOL)))
        assert said(once)
        assert has_ended(silent, 3)
        assert has_ended(once, 3)


def test_out_of_descriptors_the_listener_waits(turns, listener):
    # Before, it retried at once, and used a whole core.
    address = listener.at
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Client(address, 5, NO_SECRETS) as client, socket.socket() as raw, socket.socket() as unused:
        is_answered(client)
        raw.settimeout(5)
        next_fd = unused.detach()
        socket.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, hard))
        try:
            raw.connect((address.host, address.port))
            rests(turns)
            is_answered(client)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        raw.sendall(frame(AskEngineInfo(PROTOCOL)))
        assert read_answer(said(raw), EngineInfo).engine_id == "p"


def test_the_log_has_few_lines_about_untrusted_messages(address, caplog, monkeypatch):
    # Before, this wrote 13 MB of log a second.
    monkeypatch.setattr(peer_log, "_SECONDS", 1e9)
    with Client(address, 5, NO_SECRETS) as client:
        for number in range(2000):
            client.ask(Refused(f"engine-{number}", "no " * 1000), Done)
    assert len(caplog.records) == 10
    monkeypatch.setattr(peer_log, "_SECONDS", 1e-9)
    with Client(address, 5, NO_SECRETS) as client:
        client.ask(Refused("last", "no"), Done)
    assert (
        caplog.records[-1].getMessage()
        == "kvhma: engine last cannot read the caches of this engine: no (and 1990 like it)"
    )


def test_kinds_of_lines_do_not_crowd_each_other_out(caplog):
    for number in range(100):
        peer_log.logger.warning("kvhma: one of %d", number)
    peer_log.logger.warning("kvhma: another of %d", 7)
    assert len(caplog.records) == 11
    for number in range(5000):
        peer_log.logger.debug(f"a text that is not constant {number}")
    assert all(len(sparing._kinds) <= 1024 for sparing in peer_log.logger.filters)


def test_a_restart_can_bind_at_once():
    # Connections that the listener ends first keep its port in the system's memory for a minute.
    with listening() as found, connect(found.at) as raw:
        raw.sendall(frame(AskEngineInfo(PROTOCOL)))
        assert said(raw)
        found.close()
        assert has_ended(raw, 5)
        raw.close()
        with listening(at=found.at):
            answers(found.at)


def test_a_port_that_is_taken(address):
    with pytest.raises(HandshakeError, match=r"cannot listen at.*side_channel_port"):
        Listener(address, LocalEngine("q", 1, {}), leases=AnyLease(), secrets=NO_SECRETS, counters=Counted())


# --- S8: exceptions --------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As a panic in Rust comes to Python."""


@pytest.mark.parametrize("raised", [Panic, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError])
def test_any_exception_ends_one_question(raised, caplog):
    # Before, an error that is not an Exception ended the thread, and no question was answered any more.
    leases = AnyLease()
    with listening(leases=leases) as found, Client(found.at, 5, NO_SECRETS) as client:
        leases.error = raised("on purpose")
        with pytest.raises(HandshakeError, match="an error on this side, see its log"):
            client.ask(Renew([CLAIM]), Leases)
        assert errors(found) == 1
        assert "on purpose" in caplog.text
        leases.error = None
        assert client.ask(Renew([CLAIM]), Leases).states == [LeaseState.HELD]


def test_a_connection_that_cannot_be_served_ends_alone(listener, monkeypatch, caplog):
    with Client(listener.at, 5, NO_SECRETS) as other, monkeypatch.context() as patched:
        is_answered(other)

        def fail(*_):
            raise Panic

        with connect(listener.at) as raw:
            raw.sendall(b"\x01")
            time.sleep(0.2)
            patched.setattr(connection, "frame_length", fail)
            raw.sendall(b"\0\0\0\0")
            assert has_ended(raw, 5)
        patched.undo()
        is_answered(other)
    assert errors(listener) == 1


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, Panic])
def test_a_loop_that_dies_starts_again(listener, raised, caplog, monkeypatch):
    # Pytest keeps what is logged, with the frames of an error, and they hold what was open.
    monkeypatch.setattr(threads.logger, "error", lambda message, *values, **_: threads.logger.warning(message, *values))
    # As a signal or a debugger would: an exception at any point of the thread.
    *_, thread = (one for one in threading.enumerate() if one.name == "kvhma-listener")  # the youngest
    # One that comes while the thread still sends the last answer ends only that connection.
    while "thread kvhma-listener crashed" not in caplog.text:
        died = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(raised))
        assert died == 1
        before = errors(listener)
        with connect(listener.at) as raw:
            raw.sendall(b"x")
            until(lambda before=before: errors(listener) > before)
        answers(listener.at)
    # One raised after an accept or before a close leaves the socket to the collector, who warns: here, not later.
    gc.collect()
