# SPDX-License-Identifier: Apache-2.0
"""A peer without the secret learns nothing and is not believed; peers with the secret keep working while it changes."""

import contextlib
import logging
import os
import re
import selectors
import socket
import ssl
import struct
import threading
import time
from itertools import chain, repeat
from types import SimpleNamespace
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhma.errors import HandshakeError, HandshakeTimeoutError, SettingsError
from kvhma.vllm.peers import connection, connections
from kvhma.vllm.peers.client import Client, IdleClients
from kvhma.vllm.wire import secrets as wire_secrets
from kvhma.vllm.wire.messages import (
    MAX_CLAIMS,
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    EngineInfo,
    Leases,
    Problem,
    Renew,
    SignedWorkerIdentity,
    frame,
)
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.listening import (
    HELLO,
    NONCE,
    answers,
    connect,
    errors,
    has_ended,
    hostile,
    is_answered,
    listening,
    pass_on,
    problem,
    said,
)
from support.rotation import MEETINGS, Clock, no_temporary_files, replace
from support.untrusted_peers import pem_of, untrusted_certificate, untrusted_context
from support.waiting import HANG_SECONDS, until

A, B, C = (Secrets([letter * 32]) for letter in (b"a", b"b", b"c"))
NONE = Secrets()


@pytest.fixture(scope="module")
def address():
    with listening(secrets=A) as found:
        yield found.at
        assert errors(found) == 0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 1.5)


def load(file):
    return Secrets.load(SimpleNamespace(secret_file=None if file is None else str(file)))


def learned(address, context):
    """The answer to an untrusted client that asks for a worker identity over TLS."""
    try:
        with connect(address) as raw, context.wrap_socket(raw) as wrapped:
            wrapped.sendall(frame(AskWorkerIdentity(0, 0, NONCE)))
            return said(wrapped)
    except OSError as error:
        return error


# --- untrusted clients -----------------------------------------------------------------------------------------


def test_an_untrusted_client_without_encryption_learns_nothing(address):
    with connect(address) as raw:
        raw.sendall(frame(AskWorkerIdentity(0, 0, NONCE)))
        assert "this engine has a secret" in problem(said(raw))
        assert has_ended(raw, 5)


def test_an_untrusted_client_without_a_certificate_learns_nothing(address):
    assert isinstance(learned(address, untrusted_context()), ssl.SSLError)


def test_an_untrusted_client_with_its_own_certificate_learns_nothing(address, tmp_path):
    assert isinstance(
        learned(address, untrusted_context(certificate=untrusted_certificate(tmp_path, "untrusted"))), ssl.SSLError
    )


def test_an_untrusted_client_with_our_name_and_another_key_learns_nothing(address, tmp_path):
    (credential,) = A._current.credentials
    name = credential.certificate.subject.rfc4514_string().removeprefix("CN=")
    assert isinstance(
        learned(address, untrusted_context(certificate=untrusted_certificate(tmp_path, name))), ssl.SSLError
    )


def test_a_certificate_that_was_seen_is_of_no_use_without_its_key(address, tmp_path):
    with connect(address) as raw, untrusted_context().wrap_socket(raw) as wrapped:
        seen = wrapped.getpeercert(True)
    assert A.accepts(seen)
    key = ec.generate_private_key(ec.SECP256R1())
    path = tmp_path / "seen.pem"
    path.write_bytes(pem_of(key) + ssl.DER_cert_to_PEM_cert(seen).encode())
    with pytest.raises(ssl.SSLError):
        untrusted_context(certificate=path)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
def test_an_older_tls(address, version):
    assert isinstance(learned(address, untrusted_context(version=version)), ssl.SSLError)


def seen_on_the_path(address, secrets):
    """All bytes of a question and its answer."""
    seen = bytearray()
    with hostile(lambda raw: pass_on(raw, address, seen)) as between, Client(between, 5, secrets) as client:
        assert client.ask(AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity).data == HELLO
        client.close()
    assert len(seen) > len(HELLO)
    return seen


def test_messages_are_encrypted(address):
    seen = seen_on_the_path(address, A)
    assert HELLO[:16] not in seen
    assert NONCE not in seen
    assert b"worker identity" not in seen


def test_messages_without_a_secret_are_not_encrypted():
    with listening() as found:
        seen = seen_on_the_path(found.at, NONE)
    assert HELLO in seen
    assert NONCE in seen


def test_changed_messages_are_refused(address):
    def change(raw):
        with connect(address) as onward:
            onward.settimeout(0.3)
            raw.settimeout(0.3)
            for _ in range(100):
                for one, other in ((raw, onward), (onward, raw)):
                    try:
                        data = bytearray(one.recv(1 << 16))
                    except TimeoutError:
                        continue
                    if not data:
                        return
                    if len(data) > 10_000:
                        data[5000] ^= 1
                    other.sendall(data)

    with (
        hostile(change) as between,
        Client(between, 3, A) as client,
        pytest.raises(HandshakeTimeoutError, match="no answer"),
    ):
        client.ask(AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity)


# --- two sides that do not agree name the reason ----------------------------------------------------------------


def asks(address, secrets):
    # A side that waits for the other instead of getting an error hangs.
    with Client(address, 10 * HANG_SECONDS, secrets) as client:
        client.ask(AskEngineInfo(PROTOCOL), EngineInfo)


def test_only_the_listener_has_a_secret(address):
    with pytest.raises(
        HandshakeError, match="this engine has a secret, and the question came without it: set secret_file"
    ):
        asks(address, NONE)


def test_only_the_client_has_a_secret(caplog):
    with (
        listening() as found,
        pytest.raises(HandshakeError, match="has no secret and this engine has one: set secret_file or KVHMA_SECRET"),
    ):
        asks(found.at, A)
    assert "refused 127.0.0.1: its questions are encrypted" in caplog.text


def test_secrets_that_differ(address, caplog):
    with pytest.raises(HandshakeError, match=r"the secrets of .* and of this engine differ"):
        asks(address, B)
    until(lambda: "which has another secret or none" in caplog.text)


def test_only_the_listener_does_not_accept_the_others_secret():
    # Half of a rotation: the client knows the new secret already, and uses the old one that was revoked.
    asking = Secrets([b"b" * 32, b"a" * 32])
    with listening(secrets=A) as found:
        for _ in range(20):
            with pytest.raises(HandshakeError, match=r"the secrets of .* differ"):
                asks(found.at, asking)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
def test_an_answer_may_begin_as_an_alert_of_tls_does(version):
    """The first bytes of a frame are its length. 789 bytes are 15 03 00 00, and an alert of TLS 1.2 is 15 03 03 00."""
    length = 0x0315 + (version << 16)

    def identity(size):
        return SignedWorkerIdentity(bytes(size), bytes(32), bytes(64))

    overhead = len(frame(identity(length))) - length - struct.calcsize("<I")
    answer = identity(length - overhead)
    assert frame(answer).startswith(bytes([0x15, 3, version]))

    def serve(raw):
        raw.recv(1000)
        for byte in frame(answer)[:10]:
            raw.sendall(bytes([byte]))
            time.sleep(0.01)
        raw.sendall(frame(answer)[10:])

    with hostile(serve) as address, Client(address, 10 * HANG_SECONDS, Secrets()) as client:
        assert client.ask(AskWorkerIdentity(0, 0, bytes(16)), SignedWorkerIdentity) == answer


def test_a_refusal_is_read_where_the_question_cannot_be_sent_any_more(monkeypatch):
    # The alert of TLS, and the reset after it, come after the client has looked whether it may ask.
    ended = threading.Event()

    def serve(raw):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wrapped = A.server_context().wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        with wrapped, contextlib.suppress(ssl.SSLError):
            wrapped.do_handshake()
        ended.set()

    with hostile(serve) as address, Client(address, 10 * HANG_SECONDS, Secrets([b"b" * 32, b"a" * 32])) as client:
        assert ended.wait(10 * HANG_SECONDS)
        monkeypatch.setattr(client, "idle", lambda: True)
        with pytest.raises(HandshakeError, match=r"the secrets of .* differ"):
            client.ask(AskEngineInfo(PROTOCOL), EngineInfo)


def test_a_listener_of_another_secret_learns_nothing():
    # The question names which blocks are read by which client: it is sent only to peers with the secret.
    heard = bytearray()

    def serve(raw):
        with B.server_context().wrap_socket(raw, server_side=True) as wrapped:
            heard.extend(wrapped.recv(1000))

    with hostile(serve) as address, pytest.raises(HandshakeError, match="differ"):
        asks(address, A)
    assert not heard


def test_a_listener_that_does_not_encrypt_learns_nothing():
    heard = bytearray()

    def serve(raw):
        heard.extend(raw.recv(10_000))
        raw.sendall(frame(EngineInfo(3, "p", bytes(8), [])))

    with hostile(serve) as address, pytest.raises(HandshakeError, match="has no secret"):
        asks(address, A)
    assert b"engine info" not in heard


def test_a_handshake_byte_by_byte_has_an_end():
    def serve(raw):
        raw.recv(10_000)
        for byte in chain(b"\x16\x03\x03\x20\x00\x02\x00\x1f\xfc", repeat(0)):
            raw.sendall(bytes([byte]))
            time.sleep(0.02)

    with hostile(serve) as address, pytest.raises(HandshakeError):
        Client(address, 0.4, A)


# --- the cost of untrusted clients for a listener with a secret ---------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"], ids=str)
def test_handshakes_that_do_not_go_on_are_ended(quick, data):
    with listening(secrets=A) as found, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connect(found.at)) for _ in range(100)]
        for raw in raws:
            raw.sendall(data)
        answers(found.at, A)
        assert all(has_ended(raw, 10) for raw in raws)


def test_handshakes_at_a_time_are_bounded(monkeypatch):
    """A handshake takes ten times the memory of an engine's connection."""
    monkeypatch.setattr(connections, "MAX_HANDSHAKES", 8)
    with listening(secrets=A) as found, Client(found.at, 5, A) as engine, contextlib.ExitStack() as stack:
        is_answered(engine)
        raws = []
        for _ in range(30):
            raws.append(stack.enter_context(connect(found.at)))
            begin_handshake(raws[-1])
            answers(found.at, A)
        assert found.counted.by_label("side_channel_refused")["room"] == 30 - 7  # one was of each engine that asked
        assert [has_ended(raw, 0.001) for raw in raws] == [True] * (30 - 7) + [False] * 7
        is_answered(engine)


def test_a_connection_counts_as_a_handshake_until_the_secret_is_shown(monkeypatch):
    """A peer without TLS, or with the first part of it, has no place among engines."""
    monkeypatch.setattr(connections, "MAX_HANDSHAKES", 3)
    with listening(secrets=A) as found, Client(found.at, 5, A) as engine, contextlib.ExitStack() as stack:
        is_answered(engine)
        raws = []
        for data in (b"\x16\x03\x01\x02\x00\x01", b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"\x16\x03"):
            raws.append(stack.enter_context(connect(found.at)))
            raws[-1].sendall(data)
        assert all(has_ended(raw, 2) for raw in raws[:2])
        assert not any(has_ended(raw, 0.001) for raw in raws[2:])
        is_answered(engine)


def begin_handshake(raw):
    """Send what a handshake begins with, and wait for the listener's part."""
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        A.client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    raw.sendall(outgoing.read())
    assert raw.recv(1, socket.MSG_PEEK)


@settings(max_examples=150)
@given(st.binary(max_size=1500), st.booleans())
def test_any_bytes_end_their_own_connection_at_most(address, data, as_record):
    with connect(address) as raw:
        raw.sendall((b"\x16\x03\x01\x04\x00\x01" if as_record else b"") + data)
    answers(address, A)


def test_a_good_handshake_byte_by_byte_is_finished(address):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = A.client_context().wrap_bio(incoming, outgoing)
    with connect(address) as raw:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                send_bytes(raw, outgoing)
                incoming.write(raw.recv(1 << 16))
        tls.write(frame(AskEngineInfo(PROTOCOL)))
        send_bytes(raw, outgoing)
        incoming.write(raw.recv(1 << 16))
        assert b"engine info" in tls.read(1000)


def send_bytes(raw, outgoing):
    for byte in outgoing.read():
        raw.sendall(bytes([byte]))
        time.sleep(0.0005)


def test_a_reset_before_the_handshake_ends_only_its_connection():
    # Python closes the socket of a peer that is gone, where it would begin TLS. Its number is the next connection's.
    with socket.create_server(("127.0.0.1", 0)) as listening_at, socket.socket() as later:
        listening_at.setblocking(False)
        served = connections.Connections(listening_at, A, lambda data: None, Counted())
        with contextlib.closing(served), socket.create_connection(listening_at.getsockname()) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.sendall(b"\x16\x03\x01\x40\x00\x01")
            raw.close()
            for _ in range(3):
                served.serve()
            later.connect(listening_at.getsockname())
            later.sendall(b"\x16\x03\x01")
            for _ in range(3):
                served.serve()
            later.setblocking(False)
            with pytest.raises(BlockingIOError):  # it is open, and is asked for more
                later.recv(1)


def test_an_answer_that_was_waited_for_may_be_longer_than_the_buffer():
    problem, heard = Problem("x" * (4 << 20)), []
    with socket.create_server(("127.0.0.1", 0)) as listening_at, connect(Address(*listening_at.getsockname())) as raw:
        accepted, _ = listening_at.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        later = connection.Later((), 10 * HANG_SECONDS, lambda seconds: problem)
        waiting = connection.Connection(accepted, "127.0.0.1", A, lambda data: later)

        def ask():
            with A.client_context().wrap_socket(raw) as wrapped:
                wrapped.sendall(frame(AskEngineInfo(PROTOCOL)))
                while len(b"".join(heard)) < len(frame(problem)):
                    heard.append(wrapped.recv(1 << 20))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: waiting.advance() or waiting._later is not None)
        waiting.answer_waiting()
        assert waiting.events == selectors.EVENT_WRITE
        until(lambda: waiting.advance() or waiting.unfinished_bytes == 0)
        asking.join(10 * HANG_SECONDS)
        waiting.close()
    assert b"".join(heard) == frame(problem)


def test_large_questions_and_answers(address):
    claims = [
        ("\U0001f600" * 512, bytes(8), bytes(8), bytes(16))
    ] * MAX_CLAIMS  # four bytes each: longer ones are not read
    with Client(address, 10, A) as client:
        for _ in range(3):
            assert len(client.ask(Renew(claims), Leases).states) == MAX_CLAIMS
            assert client.ask(AskWorkerIdentity(0, 0, NONCE), SignedWorkerIdentity).data == HELLO


# --- rotation ---------------------------------------------------------------------------------------------------


def write(file, *secrets):
    """Replace a file as a whole, as a secrets manager does."""
    new = file.with_suffix(".new")
    new.write_bytes(b"\n".join(secrets) + b"\n")
    new.replace(file)


def test_rotation_while_engines_ask_loses_no_question(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.02)
    old, new = b"o" * 32, b"n" * 32
    files = [tmp_path / "p", tmp_path / "d"]
    for file in files:
        write(file, old)
    of_p, of_d = (load(file) for file in files)
    retried, asked, wrong, stop = [], [], [], threading.Event()

    def ask(pool):
        while not stop.is_set():
            for attempt in (1, 2):
                try:
                    client = pool.take_client(found.at) or Client(found.at, 5, of_d)
                    try:
                        is_answered(client)
                    finally:
                        pool.release_client(found.at, client)
                except HandshakeTimeoutError as error:
                    (retried if attempt == 1 else wrong).append(error)
                except BaseException as error:
                    wrong.append(error)
                    return
                else:
                    asked.append(attempt)
                    break

    with listening(secrets=of_p) as found:
        pools = [IdleClients(of_d, 4) for _ in range(4)]
        threads = [threading.Thread(target=ask, args=(pool,)) for pool in pools]
        for thread in threads:
            thread.start()
        # Both accept the new one, then both use it, then both revoke the old one; each step at one side first.
        for lines in ((old, new), (new, old), (new,)):
            for file, secrets in zip(files, (of_p, of_d), strict=True):
                before, answered = secrets.client_context(), len(asked)
                write(file, *lines)
                until(lambda secrets=secrets, before=before: secrets.client_context() is not before)
                until(lambda answered=answered: wrong or len(asked) > answered + 50)
        stop.set()
        for thread in threads:
            thread.join()
        for pool in pools:
            pool.close()
        assert not wrong
        assert len(retried) <= 3 * len(pools)
        with pytest.raises(HandshakeError, match="differ"):
            asks(found.at, Secrets([old]))
        answers(found.at, Secrets([new]))


def test_connections_with_a_revoked_secret_are_not_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.02)
    file = tmp_path / "secrets"
    write(file, b"a" * 32, b"b" * 32)
    with listening(secrets=load(file)) as found, Client(found.at, 5, Secrets([b"b" * 32, b"a" * 32])) as client:
        is_answered(client)
        write(file, b"a" * 32)
        time.sleep(0.1)
        with pytest.raises(HandshakeTimeoutError, match="ended the connection"):
            is_answered(client)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("name", MEETINGS)
def test_if_a_rotation_fails_the_old_secrets_stay_and_one_line_says_why(name, tmp_path, caplog, clock):
    meeting, reason = MEETINGS[name]
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    signed, server, client = found.sign(b"x"), found.server_context(), found.client_context()
    with meeting(file):
        for _ in range(3):
            clock.pass_by()
            assert found.sign(b"x") == signed
            assert found.verify(b"x", signed)
            assert found.server_context() is server
            assert found.client_context() is client
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (line,) = caplog.text.splitlines()
    assert re.search(f"secret_file '{re.escape(str(file))}'.*({reason}).*; the secrets stay as they were", line)
    # The next good content is used, and another failure makes another line.
    replace(file, b"a" * 32)
    clock.pass_by()
    assert found.sign(b"x") == signed
    replace(file)
    clock.pass_by()
    assert found.sign(b"x") == signed
    assert len(caplog.records) == 2
    replace(file, b"b" * 32, b"a" * 32)
    clock.pass_by()
    assert found.sign(b"x") == B.sign(b"x")
    assert found.verify(b"x", signed)


@pytest.mark.parametrize("name", MEETINGS)
def test_at_the_start_the_same_is_an_error_of_the_setting(name, tmp_path):
    meeting, reason = MEETINGS[name]
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    with meeting(file), pytest.raises(SettingsError, match=f"secret_file .*({reason})"):
        load(file)


def test_an_environment_whose_keys_cannot_be_made(monkeypatch):
    monkeypatch.setenv("KVHMA_SECRET", "never seen before by any other test")
    monkeypatch.setattr(wire_secrets.hashlib, "scrypt", mock.Mock(side_effect=MemoryError))
    with pytest.raises(SettingsError, match="KVHMA_SECRET cannot be used: MemoryError"):
        load(None)


def test_a_rotation_needs_no_temporary_file(tmp_path, clock):
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    with no_temporary_files():
        found = load(file)
        replace(file, b"b" * 32, b"a" * 32)
        clock.pass_by()
        assert found.sign(b"x") == B.sign(b"x")


def test_a_file_that_changed_just_now_may_be_half_written(tmp_path, clock, caplog):
    # `cat new old > secret` writes the new line first. Without the old one, engines that still use it would be refused.
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    file.write_bytes(b"b" * 32 + b"\n")
    os.utime(file, (0, 0))  # the time that a writer may choose says nothing
    clock.read_time(file, 0.5)
    assert found.sign(b"x") == A.sign(b"x")
    assert not caplog.records
    file.write_bytes(b"b" * 32 + b"\n" + b"a" * 32 + b"\n")
    clock.read_time(file, 1.5)
    assert found.sign(b"x") == B.sign(b"x")
    assert found.verify(b"x", A.sign(b"x"))


def test_a_file_from_the_future_may_be_half_written(tmp_path, clock, caplog):
    # The clock of a file server may be ahead of the engine's.
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    for half in (b"", b"b" * 20):
        file.write_bytes(half)
        clock.read_time(file, -0.05)
        assert found.sign(b"x") == A.sign(b"x")
    assert not caplog.records


def test_a_file_that_is_touched_all_the_time_is_taken(tmp_path, clock):
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    replace(file, b"b" * 32, b"a" * 32)
    for signed in (A, B):
        file.touch()
        clock.read_time(file, 0.5)
        assert found.sign(b"x") == signed.sign(b"x")


def test_a_step_does_not_wait_for_new_keys(tmp_path, clock, monkeypatch):
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    begun, may_end, derive = threading.Event(), threading.Event(), wire_secrets._derive

    def slow(*secrets):
        begun.set()
        assert may_end.wait(HANG_SECONDS)
        return derive(*secrets)

    monkeypatch.setattr(wire_secrets, "_derive", slow)
    replace(file, b"b" * 32, b"a" * 32)
    clock.pass_by()
    listener = threading.Thread(target=found.refresh)
    listener.start()
    assert begun.wait(HANG_SECONDS)
    assert found.sign(b"x") == A.sign(b"x")
    assert not found.verify(b"x", B.sign(b"x"))
    may_end.set()
    listener.join()
    assert found.sign(b"x") == B.sign(b"x")


def test_a_listener_without_connections_reads_its_file(tmp_path, monkeypatch):
    # An engine's step signs with what the listener's thread has read.
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.02)
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.02)
    file = tmp_path / "secret"
    write(file, b"a" * 32)
    found = load(file)
    read, readers = wire_secrets._read_file, set()

    def watched(*given):
        readers.add(threading.current_thread())
        return read(*given)

    monkeypatch.setattr(wire_secrets, "_read_file", watched)
    with listening(secrets=found):
        write(file, b"b" * 32)
        until(lambda: readers - {threading.current_thread()})  # this thread does not sign meanwhile
        until(lambda: found.sign(b"x") == B.sign(b"x"))


def test_a_secret_may_have_any_bytes(tmp_path, clock):
    file = tmp_path / "secret"
    replace(file, b"a" * 32)
    found = load(file)
    replace(file, b"\xff\x00\x80" * 8)
    clock.pass_by()
    assert found.sign(b"x") == Secrets([b"\xff\x00\x80" * 8]).sign(b"x")


# --- reading them ----------------------------------------------------------------------------------------------


def test_where_secrets_come_from(tmp_path, monkeypatch):
    monkeypatch.delenv("KVHMA_SECRET", raising=False)
    assert not load(None).enabled
    assert load(None).server_context() is load(None).client_context() is None
    monkeypatch.setenv("KVHMA_SECRET", "b" * 32)
    assert load(None).sign(b"x") == B.sign(b"x")
    write(tmp_path / "file", b"a" * 32)
    assert load(tmp_path / "file").sign(b"x") == A.sign(b"x")  # the file wins
    (tmp_path / "odd").write_bytes(b"\r\n  " + b"a" * 32 + b"\r\n\r\n" + b"b" * 32)
    assert load(tmp_path / "odd").sign(b"x") == A.sign(b"x")
    assert load(tmp_path / "odd").verify(b"x", B.sign(b"x"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"", "has 0 secrets, expected 1..16"),
        (b"\n\n", "has 0 secrets"),
        (b"top-secret-word", "secret 1 has 15 bytes, expected 16 or more"),
        (b"a" * 32 + b"\ntop-secret-word", "secret 2 has 15 bytes"),
        (b"a" * 100_000, "has more than 65536 bytes"),
        (b"a" * 32 + b"\n" + b"\n".join(b"%032d" % number for number in range(16)), "has 17 secrets"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, reason):
    file = tmp_path / "secrets"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=reason) as raised:
        load(file)
    assert "top-secret" not in str(raised.value)


def test_secrets_stand_in_no_text_and_no_log(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.0)
    file = tmp_path / "secrets"
    write(file, b"top-secret-and-long-enough")
    found = load(file)
    with listening(secrets=found) as at, pytest.raises(HandshakeError) as raised:
        asks(at.at, A)
    write(file, b"another-top-secret-that-is-long")
    time.sleep(0.01)
    found.sign(b"x")
    keys = [credential.sign_key for credential in found._current.credentials]
    assert not any(repr(key) in repr(found._current) for key in keys)
    texts = [repr(found), str(raised.value), caplog.text, *map(str, os.environ.items())]
    assert "secrets read from" in caplog.text
    assert not any("top-secret" in text for text in texts)


# --- signatures ------------------------------------------------------------------------------------------------


def test_a_digest_is_made_and_known_with_a_secret_only():
    both = Secrets([b"a" * 32, b"b" * 32])
    for secrets in (NONE, A, B, both):
        digest = secrets.sign(b"data")
        assert len(digest) == 16
        assert secrets.verify(b"data", digest)
        assert not secrets.verify(b"date", digest)
        assert not secrets.verify(b"data", digest[:-1])
        assert not secrets.verify(b"data", b"")
    assert both.sign(b"data") == A.sign(b"data")
    assert both.verify(b"data", B.sign(b"data"))
    assert not A.verify(b"data", both.sign(b"data")[::-1])
    assert not A.verify(b"data", B.sign(b"data"))
    assert not A.verify(b"data", NONE.sign(b"data"))
    assert not both.verify(b"data", C.sign(b"data"))


def test_every_engine_derives_the_same():
    # A secret is all that two engines have in common: what is derived from it depends on neither time nor chance.
    again = Secrets([b"a" * 32])
    assert again._current.accepted == A._current.accepted
    assert again.sign(b"x") == A.sign(b"x")
    (credential,) = again._current.credentials
    time.sleep(1.1)
    (later,) = Secrets([b"a" * 32])._current.credentials
    assert later.der == credential.der
