# SPDX-License-Identifier: Apache-2.0
"""How an engine asks the listener of another one: a question at a time over a connection, several connections."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import zmq

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.text import one_line
from kvhma.vllm.wire.messages import MAX_ANSWER_BYTES, Done, EngineInfo, Leases, Question, RankHello, read_answer
from kvhma.vllm.wire.names import endpoint, is_numeric
from kvhma.vllm.wire.params import Address

_HEARTBEAT_MILLISECONDS = 2000

AnswerT = TypeVar("AnswerT", EngineInfo, RankHello, Leases, Done)


def open_client(address: Address) -> zmq.Socket[bytes]:
    """Return a socket that asks the listener at a numeric address; connecting goes on in the background.

    Raises:
        HandshakeError: not a numeric address.
        HandshakeTimeoutError: no socket can be opened now.
    """
    if not is_numeric(address):
        raise HandshakeError(f"remote_host {one_line(address.host)!r} is not numeric")
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
        socket.connect(endpoint(address))
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
        """Start to connect to a numeric address. Raises HandshakeError for another one."""
        self._address = address
        self._timeout = timeout
        self.socket = open_client(address)
        self.waiting = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
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
            # A connection over which something else than ZMQ came is not opened again: do not wait for it.
            self.socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise HandshakeTimeoutError(f"cannot ask {self._address}: {error}") from error

    def answered(self) -> bool:
        """Return whether there is an answer to be received."""
        return bool(self.socket.poll(0))

    def receive(self, kind: type[AnswerT], asked: str, timeout: float) -> AnswerT:
        """Wait for an answer of a kind. Errors as for :meth:`ask`."""
        if not self.socket.poll(int(timeout * 1000)):
            raise HandshakeTimeoutError(f"no answer from {self._address} in {timeout:.3g} s")
        try:
            data = self.socket.recv(zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise HandshakeTimeoutError(f"no answer from {self._address}: {error}") from error
        self.waiting = False
        answer = read_answer(data)
        if not isinstance(answer, kind):
            raise HandshakeError(f"{self._address} answers {asked} with {type(answer).__name__}")
        return answer

    def receive_leases(self, claims: int) -> Leases:
        """Return the answer to a question that renews this many claims, which is here. Errors as for :meth:`ask`."""
        answer = self.receive(Leases, "Renew", 0)
        if len(answer.expires) != claims:
            raise HandshakeError(f"{claims} claims, {len(answer.expires)} answers")
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
        """Return a client that is not used elsewhere until it is given back."""
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

    def release(self, client: Client) -> None:
        """Keep a client for the next question, unless it still waits for an answer."""
        with self._lock:
            if not client.waiting and not self._closed and len(self._idle) < self._KEPT:
                self._idle.append(client)
                return
        client.close()

    def close(self) -> None:
        """Disconnect all."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


def wait_any(clients: Iterable[Client], wakeup: int, timeout: float) -> bool:
    """Wait until a client has an answer or a file descriptor is readable, `timeout` seconds at most.

    Returns:
        Whether the file descriptor is readable.
    """
    poller = zmq.Poller()
    poller.register(wakeup, zmq.POLLIN)
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
    return any(ready == wakeup for ready, _ in poller.poll(int(timeout * 1000)))
