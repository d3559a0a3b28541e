# SPDX-License-Identifier: Apache-2.0
"""A listener stores at most what docs/security-bounds.md says, in a flood of every kind; and a flood reaches that."""

import contextlib
import ctypes
import os
import resource
import ssl
import struct
from pathlib import Path

import msgspec
import pytest

from kvhma.vllm.options.tickets.messages import MAX_TICKETS_ASKED, AskedTicket, Follow, Unfollow
from kvhma.vllm.wire import messages
from kvhma.vllm.wire.messages import (
    MAX_CLAIMS,
    MAX_QUESTION_BYTES,
    MAX_TEXT,
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    EngineInfo,
    Finish,
    Outcome,
    Refused,
    Release,
    Renew,
    frame,
    frame_length,
    read_answer,
)
from support import listener_memory
from support.listener_memory import KIB, MIB, TICKET, Limits, page_rows
from support.listening import NONCE, answers, connect, framed
from support.untrusted_peers import untrusted_certificate, untrusted_context
from support.waiting import HANG_SECONDS, until

SMALL = Limits(connections=256, handshakes=32, unfinished=20 * MIB, reply=4 * MIB, tickets=512)
"""Bounds that a test reaches in a second."""

PAGE = Path(__file__).parents[2] / "docs" / "security-bounds.md"
NEAR = 0.6
"""Share of the model that a flood must reach."""


def process(limits, **more):
    """A listener in a separate process. The C library of this machine has to count what that process allocates."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs mallinfo2 of the C library: glibc 2.33 or later")
    return listener_memory.process(limits, **more)


class Peer:
    """A connection to a listener: encrypted if the listener has a secret."""

    def __init__(self, of, *, context=None):
        self.raw = connect(of.at)
        self.raw.settimeout(HANG_SECONDS)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = context or of.secrets.client_context()
        self.tls = None if context is None else context.wrap_bio(self.incoming, self.outgoing)

    def received(self):
        data = self.raw.recv(1 << 20)
        if not data:
            raise ConnectionError("the listener has ended the connection")
        return data

    def begin(self):
        """Send the first message of a handshake, and return it."""
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        hello = self.outgoing.read()
        self.raw.sendall(hello)
        return self

    def finish(self):
        """Finish the handshake; return the bytes to send for it."""
        while True:
            self.incoming.write(self.received())
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                return self.outgoing.read()

    def open(self):
        if self.tls is not None:
            self.raw.sendall(self.begin().finish())
        return self

    def sealed(self, data):
        """The bytes to send for some data."""
        if self.tls is None:
            return data
        for start in range(0, len(data), 1 << 20):
            self.tls.write(data[start : start + (1 << 20)])
        return self.outgoing.read()

    def send(self, data):
        self.raw.sendall(self.sealed(data))
        return self

    def read(self, nbytes):
        """So many bytes of replies."""
        found = b""
        while len(found) < nbytes:
            try:
                found += self.received() if self.tls is None else self.tls.read(1 << 20)
            except ssl.SSLWantReadError:
                self.incoming.write(self.received())
        return found

    def ask(self, question):
        """The reply to a question, without its frame."""
        self.send(frame(question))
        header = self.read(4)
        return (header + self.read(frame_length(header) + 4 - len(header)))[4:]

    def close(self):
        self.raw.close()


def names(number):
    """The longest claims that fit one question."""
    return [("\U0001f600" * 512, os.urandom(8), os.urandom(8), NONCE) for _ in range(number)]


def follow():
    """A question about as many tickets as it may have, all unknown; it has 100 KiB in a field without a meaning."""
    tickets = [AskedTicket(os.urandom(16), 0, 2**60, 2**39) for _ in range(MAX_TICKETS_ASKED)]
    asked = msgspec.to_builtins(Follow(tickets, 60.0), builtin_types=(bytes,))
    return framed(msgspec.msgpack.encode(asked | {"junk": bytes(100 * KIB)}))


QUESTIONS = {
    AskEngineInfo: lambda: AskEngineInfo(PROTOCOL),
    AskWorkerIdentity: lambda: AskWorkerIdentity(0, 0, NONCE),
    Renew: lambda: Renew(names(MAX_CLAIMS), os.urandom(32), NONCE, contents=True),
    Release: lambda: Release(names(MAX_CLAIMS), Outcome.UNREAD),
    Finish: lambda: Finish(names(MAX_CLAIMS), [Outcome.READ] * MAX_CLAIMS, os.urandom(32), NONCE),
    Follow: lambda: Follow([AskedTicket(TICKET, 0, 0, 0)], 60.0),
    Unfollow: lambda: Unfollow(os.urandom(16)),
    Refused: lambda: Refused("x" * 512, "\U0001f600" * MAX_TEXT),
}
"""A question of each type that makes the listener do or store the most."""

LARGE = framed(bytes(MAX_QUESTION_BYTES))
TOO_LONG = struct.pack("<I", MAX_QUESTION_BYTES + 1)


def long_certificate(folder):
    """The context of a peer without the secret, whose certificate is as long as OpenSSL takes it."""
    return untrusted_context(certificate=untrusted_certificate(folder, "untrusted", padding=99_000))


def long_hello(peer):
    """Nearly all of a first message of 128 KiB, in records of 16 KiB."""
    message = b"\x01" + (131_000).to_bytes(3, "big") + b"\x03\x03" + bytes(130_000)
    records = [message[start : start + 16_000] for start in range(0, 130_000, 16_000)]
    peer.raw.sendall(b"".join(b"\x16\x03\x01" + struct.pack(">H", len(one)) + one for one in records)[:-3000])


def in_part(peer, data):
    """Send nearly all of a record."""
    peer.raw.sendall(peer.sealed(data)[:-1])


HANDSHAKES = {
    "its first bytes": lambda peer: peer.raw.sendall(b"\x16\x03\x01\x40\x00\x01"),
    "half of a record": lambda peer: peer.raw.sendall(b"\x16\x03\x01\x40\x00\x01" + bytes(16_000)),
    "a first message": Peer.begin,
    "a long first message": long_hello,
    "a long certificate": lambda peer: peer.raw.sendall(peer.begin().finish()[:-400]),
}
"""What a peer without the secret sends before it stops."""


class Flood:
    """Peers of one process, and what its memory grew by since the flood began."""

    def __init__(self, found, stack):
        until(lambda: found.state()["connections"] == 0)
        self.found, self._stack = found, stack
        self.before = found.state("forget the peak")

    def peers(self, number, *, context=None, opened=True):
        made = []
        for _ in range(number):
            peer = Peer(self.found, context=context)
            self._stack.callback(peer.close)
            made.append(peer.open() if opened else peer)
        return made

    @property
    def allocated(self):
        return self.found.state()["allocated"] - self.before["allocated"]

    @property
    def peak(self):
        """Of memory that the process has from the system."""
        return self.found.state()["peak"] - self.before["resident"]

    def wait(self, **wanted):
        """Wait until the process has so many of something."""
        until(lambda: (state := self.found.state()) and all(state[name] >= most for name, most in wanted.items()))

    def reaches(self, most, grown=None):
        """Check that it stores at most so much, and come to a part of that."""
        until(lambda: (self.allocated if grown is None else grown) >= NEAR * most)
        assert (self.allocated if grown is None else grown) <= most


@pytest.fixture(scope="module")
def encrypted():
    with process(SMALL, identity=2 * MIB, follows=SMALL.reply) as found:
        yield found
        answers(found.at, found.secrets)


@pytest.fixture
def flood(encrypted):
    with contextlib.ExitStack() as stack:
        yield Flood(encrypted, stack)


PLACES = {place.what: place for place in SMALL.places()}


def of(*whats):
    """The bytes of one of each of these places."""
    return sum(PLACES[what].each for what in whats)


@pytest.mark.parametrize("kind", HANDSHAKES)
def test_handshakes_that_do_not_end(flood, kind, tmp_path):
    context = long_certificate(tmp_path) if "certificate" in kind else None
    for _ in range(2 * SMALL.handshakes):
        (peer,) = flood.peers(1, opened=False, context=context)
        HANDSHAKES[kind](peer)
    flood.wait(handshakes=SMALL.handshakes)
    most = SMALL.handshakes * of("a connection", "TLS in its handshake")
    if kind == "a long first message":
        flood.reaches(most)
    assert flood.allocated <= most


def test_an_open_connection_and_a_question_that_waits(flood):
    peers = flood.peers(200)
    flood.wait(connections=200)
    until(lambda: flood.found.state()["handshakes"] == 0)
    opened = flood.allocated
    for peer in peers:
        peer.send(follow())
    flood.wait(waiting=200)
    waiting = flood.allocated - opened
    flood.reaches(200 * of("a question that waits for progress"), waiting)
    for peer in peers:
        in_part(peer, bytes(16 * KIB))
    flood.reaches(200 * of("a connection", "TLS of an open connection") + waiting)


def test_questions_that_are_not_finished(flood):
    for peer in flood.peers(30):
        peer.send(LARGE[:-1])
    flood.wait(unfinished=SMALL.unfinished - 2 * MIB)
    flood.reaches(SMALL.unfinished + 30 * of("a connection", "TLS of an open connection"))


def test_replies_that_are_not_taken(flood):
    for peer in flood.peers(20):
        peer.send(frame(AskWorkerIdentity(0, 0, NONCE)))
    flood.wait(unfinished=SMALL.unfinished - 3 * MIB)
    flood.reaches(SMALL.unfinished + 20 * of("a connection", "TLS of an open connection"))


def test_the_flood_has_every_type_of_question():
    assert set(QUESTIONS) == {*messages.QUESTIONS, Follow, Unfollow}
    assert all(len(frame(make())) <= MAX_QUESTION_BYTES for make in QUESTIONS.values())


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_question_and_its_reply(kind):
    with process(SMALL, identity=SMALL.reply, follows=SMALL.reply) as found, contextlib.ExitStack() as stack:
        flood = Flood(found, stack)
        (peer,) = flood.peers(1)
        peer.ask(QUESTIONS[kind]())
        connected = of("a connection", "TLS of an open connection")
        asked, replied = of("the question that is answered"), PLACES["its reply: block ids, text, message, frame"].bytes
        assert flood.peak <= connected + asked + replied
        if kind is Finish:
            assert NEAR * asked <= flood.peak <= connected + asked
        if kind is Follow:
            assert NEAR * replied <= flood.peak


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_has_the_model():
    section = PAGE.read_text(encoding="utf-8").partition("## A listener's memory")[2].partition("\n## ")[0]
    _, _, *rows = (line for line in section.splitlines() if line.startswith("|"))
    assert rows == page_rows()
    unknown = [place.bytes for place in Limits().places() if place.who == "any host"]
    assert f"at most {sum(unknown) // MIB} MiB" in " ".join(section.split())


# --- all of it ---------------------------------------------------------------------------------------------------


def fill(flood, limits):
    """Have as much stored as there is room for, and no more."""
    secret = flood.found.secrets.enabled
    opened = limits.connections - (limits.handshakes if secret else 0)
    (asking,) = flood.peers(1)
    for _ in range(limits.tickets):
        asking.ask(Unfollow(os.urandom(16)))
    for _ in range(PLACES["a key for proofs"].number):
        asking.ask(Renew([], os.urandom(32)))
    unfinished, untaken = limits.unfinished // 5 // (9 * MIB // 8), 6  # a fifth of the bytes for the questions
    for peer in flood.peers(unfinished):
        peer.send(LARGE[:-1])
    for peer in flood.peers(untaken):
        peer.send(frame(AskWorkerIdentity(0, 0, NONCE)))
    waiting = opened - unfinished - untaken - 1
    peers = flood.peers(waiting)
    for peer in peers:
        peer.send(follow())
    flood.wait(waiting=waiting, unfinished=limits.unfinished * 3 // 4)
    if secret:
        for peer in peers:
            in_part(peer, bytes(16 * KIB))
        for peer in flood.peers(limits.handshakes, opened=False):
            long_hello(peer)
        flood.wait(handshakes=limits.handshakes)
    assert not flood.found.state()["refused"]
    asking.send(frame(QUESTIONS[Follow]()))  # there is no room for its reply, which is made all the same
    until(lambda: flood.found.state()["refused"] == {"room": 1})


def overflow(flood, number, certificate):
    """Ask for more than there is room for, in every way; the listener may refuse any of it."""
    replies = [frame(make()) for make in QUESTIONS.values() for _ in range(number)]  # which no peer takes
    for data in [*replies, *[LARGE[:-1], follow(), b"\xff" * 1000, TOO_LONG, LARGE[:3], b""] * number]:
        with contextlib.suppress(OSError):
            flood.peers(1)[0].send(data)
    for kind, begin in HANDSHAKES.items() if flood.found.secrets.enabled else ():
        context = certificate if "certificate" in kind else None
        for peer in flood.peers(2 * number, opened=False, context=context):
            with contextlib.suppress(OSError):
                begin(peer)
    flood.peers(2 * number, opened=False)  # which say nothing
    (slow,) = flood.peers(1)
    with contextlib.suppress(OSError):
        for index in range(200):
            slow.send(LARGE[index : index + 1])


FULL = pytest.param(Limits(), marks=pytest.mark.long, id="as it is")


@pytest.mark.parametrize("limits", [pytest.param(SMALL, id="small"), FULL])
@pytest.mark.parametrize("secret", [True, False], ids=["with a secret", "without a secret"])
def test_a_flood_of_everything_reaches_what_the_page_says_and_no_more(limits, secret, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * limits.connections:
        pytest.skip("the process may not open enough files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    identity = limits.unfinished // 8
    try:
        with (
            process(limits, secret=secret, identity=identity - KIB, follows=limits.reply) as found,
            contextlib.ExitStack() as stack,
        ):
            flood, most = Flood(found, stack), limits.most(secret=secret)
            fill(flood, limits)
            assert NEAR * most <= flood.peak <= most
            overflow(flood, 24, long_certificate(tmp_path))
            (honest,) = flood.peers(1)
            assert read_answer(honest.ask(QUESTIONS[AskEngineInfo]()), EngineInfo).engine_id == "p"
            assert flood.peak <= most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
