# SPDX-License-Identifier: Apache-2.0
"""The side channel: how engines talk besides moving caches. One listener for each engine, in its scheduler's process.

Every message is one msgpack value, checked against its type and bounded when it is read. A listener answers whatever
it is sent, if only with :class:`Problem`; nothing that arrives can stop it.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from socket import AF_INET, AF_INET6, NI_NUMERICHOST, NI_NUMERICSERV, SOCK_STREAM, gaierror, getaddrinfo, getnameinfo
from typing import Annotated, Protocol, TypeVar

import msgspec
import zmq

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.nixl import MAX_HANDSHAKE_BYTES
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey

PROTOCOL = 2
"""Version of these messages."""

MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = MAX_HANDSHAKE_BYTES + 4096
MAX_CLAIMS = 4096
"""Requests in one message."""

_HEARTBEAT_MILLISECONDS = 2000
_MOST_LOOKUPS = 64

logger = logging.getLogger("vllm.kvhma")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
ClaimForm = tuple[Name, Nonce, Nonce]
"""A claim: request, generation, reader."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]


class AskEngineInfo(msgspec.Struct, tag="roster", frozen=True):
    """Who are you?"""

    protocol: int


class AskHello(msgspec.Struct, tag="hello", frozen=True):
    """What does this worker say of itself?"""

    pp_rank: Rank
    tp_rank: Rank


class Renew(msgspec.Struct, tag="renew", frozen=True):
    """We read, or are about to read, the blocks of these requests; do you hold them for us?"""

    claims: Annotated[list[ClaimForm], msgspec.Meta(max_length=MAX_CLAIMS)]


class Outcome(enum.Enum):
    """What became of a claim when its reader lets go of it."""

    READ = "read"
    """It was read, or its client wants no answer any more: this reader needs nothing, and nobody else is known."""

    READ_BY_SIBLING = "read by sibling"
    """The same, and others with the same parameters may be on their way."""

    UNREAD = "unread"
    """It could not be read here. Another engine may be given the same parameters."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """We do not want the blocks of these requests any more, and this is why."""

    claims: Annotated[list[ClaimForm], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcome: Outcome


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """We cannot read your caches, and this is why. Both logs should say it."""

    engine_id: Name
    text: Text


class EngineInfo(msgspec.Struct, tag="roster", frozen=True):
    """Who is listening here."""

    protocol: int
    engine_id: Name
    instance: Nonce
    ranks: Annotated[list[tuple[Rank, Rank]], msgspec.Meta(max_length=4096)]


class RankHello(msgspec.Struct, tag="hello", frozen=True):
    """A worker's message of :mod:`kvhma.nixl.handshake`."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDSHAKE_BYTES)]


class Leases(msgspec.Struct, tag="leases", frozen=True):
    """For each claim, when its lease ends by our clock; None if the blocks are not held for this reader."""

    clock: float
    expires: Annotated[list[float | None], msgspec.Meta(max_length=MAX_CLAIMS)]


class Done(msgspec.Struct, tag="done", frozen=True):
    """Understood."""


class Problem(msgspec.Struct, tag="problem", frozen=True):
    """Not understood, or not to be had."""

    text: Text


Question = AskEngineInfo | AskHello | Renew | Release | Refused
Answer = EngineInfo | RankHello | Leases | Done | Problem
AnswerT = TypeVar("AnswerT", EngineInfo, RankHello, Leases, Done)

_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def read_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        HandshakeError: it is none, or it is a problem; the text is the peer's then.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the answer is not one of protocol {PROTOCOL}: {error}") from error
    if isinstance(answer, Problem):
        raise HandshakeError(f"the peer says: {printable(answer.text)}")
    return answer


def printable(text: str) -> str:
    """Return a peer's text for our log: one line, bounded."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:2000])


class LeaseService(Protocol):
    """What a listener answers from. Called from its thread."""

    def renew(self, claims: list[LeaseClaim]) -> list[float | None]:
        """Extend leases; return when each ends now, None for one that is not held for this reader."""

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Take readers off requests."""


class Listener:
    """Answers other engines."""

    def __init__(
        self,
        address: Address,
        *,
        engine_id: str,
        instance: int,
        hellos: Mapping[tuple[int, int], bytes],
        desk: LeaseService,
    ) -> None:
        """Bind and start to answer.

        Raises:
            HandshakeError: the address cannot be bound; the text names it and the setting.
        """
        self._hellos = dict(hellos)
        self._engine_id = engine_id
        self._instance = instance.to_bytes(8, "big")
        self._desk = desk
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.RCVHWM, 64),
            (zmq.SNDHWM, 64),
            (zmq.IPV6, int(":" in address.host)),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(_endpoint(address))
        except zmq.ZMQError as error:
            self._socket.close()
            raise HandshakeError(
                f"cannot listen at {address}: {error}; set side_channel_host and side_channel_port"
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvhma-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket:
            while not self._stop.is_set():
                with contextlib.suppress(zmq.ZMQError):
                    if self._socket.poll(200):
                        self._serve(self._socket.recv_multipart(zmq.NOBLOCK))

    def _serve(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1]:
            return  # no request socket of ours sent this, so none waits for an answer
        try:
            answer = self._answer(_questions.decode(frames[2]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            answer = Problem(f"not a question of protocol {PROTOCOL}: {error}"[:500])
        except Exception:
            logger.exception("kvhma: cannot answer on the side channel")
            answer = Problem("an error on this side, see its log")
        # A peer that does not read loses its answers; the socket's high-water mark bounds what waits for it.
        self._socket.send_multipart([frames[0], b"", msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def _answer(self, question: Question) -> Answer:
        match question:
            case AskEngineInfo():
                if question.protocol != PROTOCOL:
                    return Problem(f"protocol is {question.protocol} on your side, {PROTOCOL} on this side")
                return EngineInfo(PROTOCOL, self._engine_id, self._instance, sorted(self._hellos))
            case AskHello():
                data = self._hellos.get((question.pp_rank, question.tp_rank))
                if data is None:
                    ranks = f"pipeline {question.pp_rank}, tensor {question.tp_rank}"
                    return Problem(f"no worker of rank {ranks}; there are {len(self._hellos)}")
                return RankHello(data)
            case Renew():
                return Leases(time.monotonic(), self._desk.renew([read_claim(form) for form in question.claims]))
            case Release():
                self._desk.release([read_claim(form) for form in question.claims], question.outcome)
                return Done()
            case Refused():
                logger.warning(
                    "kvhma: engine %s cannot read our caches: %s",
                    printable(question.engine_id),
                    printable(question.text),
                )
                return Done()


def read_claim(form: ClaimForm) -> LeaseClaim:
    """Return the claim of a message."""
    request_id, generation, reader = form
    return LeaseClaim(LeaseKey(request_id, int.from_bytes(generation, "big")), int.from_bytes(reader, "big"))


def write_claim(claim: LeaseClaim) -> ClaimForm:
    """Return a claim as messages carry it."""
    return claim.hold.request_id, claim.hold.generation.to_bytes(8, "big"), claim.reader.to_bytes(8, "big")


def _endpoint(address: Address) -> str:
    return f"tcp://[{address.host}]:{address.port}" if ":" in address.host else f"tcp://{address}"


def is_numeric(address: Address) -> bool:
    """Whether nobody has to be asked where it is."""
    host, _, scope = address.host.partition("%")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return re.fullmatch(r"[A-Za-z0-9_.-]*", scope, re.ASCII) is not None


_lookups: dict[Address, Future[Address]] = {}
_lookups_lock = threading.Lock()


def look_up(address: Address) -> Future[Address]:
    """Start to find the numeric form of an address, in a thread of its own: a name service takes the time it likes.

    ZMQ would look names up in the one thread that serves all sockets of the process, so it is given none. The result
    may be a HandshakeTimeoutError: the name is not known, or nobody says so.

    Raises:
        HandshakeTimeoutError: too many names are being looked up.
    """
    found: Future[Address] = Future()
    if is_numeric(address):
        found.set_result(address)
        return found
    with _lookups_lock:
        if address in _lookups:
            return _lookups[address]
        if len(_lookups) >= _MOST_LOOKUPS:
            raise HandshakeTimeoutError(f"{len(_lookups)} other names are being looked up")
        try:
            threading.Thread(target=_ask_names, args=(address, found), name="kvhma-look-up", daemon=True).start()
        except RuntimeError as error:
            raise HandshakeTimeoutError(f"remote_host {address.host!r} cannot be looked up: {error}") from error
        _lookups[address] = found
    return found


def _ask_names(address: Address, found: Future[Address]) -> None:
    try:
        # A listener at a name is bound to its first address of IPv4, if it has one.
        for family in (AF_INET, AF_INET6):
            with contextlib.suppress(gaierror):
                ((*_, place), *_) = getaddrinfo(address.host, address.port, family, SOCK_STREAM)
                found.set_result(Address(getnameinfo(place, NI_NUMERICHOST | NI_NUMERICSERV)[0], address.port))
                return
        raise OSError("the name is not known")
    except BaseException as error:
        found.set_exception(HandshakeTimeoutError(f"remote_host {printable(address.host)!r}: {error}"))
    finally:
        with _lookups_lock:
            _lookups.pop(address, None)


def resolve(address: Address, timeout: float) -> Address:
    """Return the numeric form of an address.

    Raises:
        HandshakeTimeoutError: the name is not known, or nobody says so in time.
    """
    try:
        return look_up(address).result(timeout)
    except TimeoutError as error:
        raise HandshakeTimeoutError(f"remote_host {address.host!r} was not looked up in {timeout} s") from error


def open_client(address: Address) -> zmq.Socket[bytes]:
    """Return a socket that asks the listener at a numeric address; connecting goes on in the background.

    Raises:
        HandshakeError: not a numeric address.
        HandshakeTimeoutError: no socket is to be had now.
    """
    if not is_numeric(address):
        raise HandshakeError(f"remote_host {printable(address.host)!r} is not numeric")
    socket: zmq.Socket[bytes] | None = None
    try:
        socket = zmq.Context.instance().socket(zmq.REQ)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_ANSWER_BYTES),
            # Connections are kept, and one that a network has forgotten must not be what the next question finds.
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MILLISECONDS),
            (zmq.IPV6, int(":" in address.host)),
        ):
            socket.setsockopt(option, value)
        socket.connect(_endpoint(address))
    except zmq.ZMQError as error:
        if socket is None:
            raise HandshakeTimeoutError(f"no socket for {address}: {error}") from error
        socket.close()
        raise HandshakeError(f"remote_host and remote_port {address}: {error}") from error
    return socket


class Client:
    """Asks one listener, a question at a time.

    Attributes:
        socket: readable once there is an answer.
        waiting: whether a question has no answer yet.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        """Start to connect to a numeric address. Raises HandshakeError if it is none."""
        self._address = address
        self._timeout = timeout
        self.socket = open_client(address)
        self.waiting = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def ask(self, question: Question, kind: type[AnswerT], *, deadline: float = math.inf) -> AnswerT:
        """Ask and wait for an answer of a kind, to the deadline on the monotonic clock at most.

        Raises:
            HandshakeError: the listener has a problem with it, or its answer is another one.
            HandshakeTimeoutError: no answer in time. The client cannot be used any more.
        """
        self.send(question)
        left = max(0.0, deadline - time.monotonic())
        return self.receive(kind, type(question).__name__, min(self._timeout, left))

    def send(self, question: Question) -> None:
        """Ask without waiting. One answer has to be received before the next question.

        Raises:
            HandshakeTimeoutError: the connection has ended for good. The client cannot be used any more.
        """
        self.waiting = True
        try:
            # After a frame that is none of ZMQ's there is no connection, nor will there be: it must not wait for one.
            self.socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise HandshakeTimeoutError(f"cannot ask {self._address}: {error}") from error

    def answered(self) -> bool:
        """Whether there is an answer to be received."""
        return bool(self.socket.poll(0))

    def receive(self, kind: type[AnswerT], asked: str, timeout: float) -> AnswerT:
        """Wait for an answer of a kind. Errors as for :meth:`ask`."""
        if not self.socket.poll(int(timeout * 1000)):
            raise HandshakeTimeoutError(f"no answer from {self._address} in {timeout:.3g} s")
        data = self.socket.recv()
        self.waiting = False
        answer = read_answer(data)
        if not isinstance(answer, kind):
            raise HandshakeError(f"{self._address} answers {asked} with {type(answer).__name__}")
        return answer


class ClientPool:
    """Clients of one listener that have a connection already: a new one takes ten times as long to answer."""

    _KEPT = 4

    def __init__(self, address: Address, timeout: float) -> None:
        """Start without any."""
        self._address = address
        self._timeout = timeout
        self._idle: list[Client] = []
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> Client:
        """Return a client that nobody else uses, until it is given back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Client(self._address, self._timeout)

    def send(self, question: Question) -> Client:
        """Ask without waiting; return the client that waits for the answer, to be given back.

        Raises:
            HandshakeError: not over a new connection either.
        """
        while True:
            with self._lock:
                fresh = not self._idle
            client = self.take()
            try:
                client.send(question)
            except HandshakeError:
                client.close()
                if fresh:
                    raise
            else:
                return client

    def give_back(self, client: Client) -> None:
        """Keep a client for the next question, unless it still waits for an answer."""
        with self._lock:
            if not client.waiting and not self._closed and len(self._idle) < self._KEPT:
                self._idle.append(client)
                return
        client.close()

    def close(self) -> None:
        """Hang up all."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
