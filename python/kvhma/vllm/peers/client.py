# SPDX-License-Identifier: Apache-2.0
"""How an engine asks the listener of another engine: one question at a time on a connection, several connections."""

from __future__ import annotations

import errno
import math
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.text import one_line
from kvhma.vllm.peers.sockets import keep_alive
from kvhma.vllm.wire.messages import (
    HEADER_BYTES,
    MAX_QUESTION_BYTES,
    AnswerT,
    Question,
    frame,
    frame_length,
    read_answer,
)
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets

_CHUNK = 256 << 10
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)
_TLS_ALERT = re.compile(rb"\x15\x03[\x00-\x04]\x00\x02")
"""An alert of TLS: its type, a version, and two bytes of content. The first four bytes of a frame may be the same, but
its fifth begins a map of MessagePack, which is 0x80 or more."""


class Client:
    """Asks one listener, one question at a time. It belongs to one thread at a time.

    Attributes:
        waiting: whether a question has no answer yet.
        context: the TLS context of the connection; None without a secret.
        deadline: for the answer, or for the connection, on the monotonic clock.
        on_received: called with the bytes received so far of an answer, whenever there are more. :meth:`poll` and
            :meth:`ask` then raise what this raises.
    """

    def __init__(self, address: Address, timeout: float, secrets: Secrets, *, wait: bool = True) -> None:
        """Connect to a numeric address.

        Args:
            address: of the listener.
            timeout: seconds to wait for the connection, and for each whole answer.
            secrets: of this engine. If it has a secret, the listener needs the same.
            wait: whether to wait for the connection. Without waiting, :meth:`poll` connects, and its errors are those
                of the first question.

        Raises:
            HandshakeError: the address is not numeric, only one side has a secret, or the secrets differ.
            HandshakeTimeoutError: no listener is there, or it does not answer in time.
        """
        self._address = address
        self._timeout = timeout
        self.waiting = False
        self.on_received: Callable[[int], None] | None = None
        self.context = secrets.client_context()
        self.deadline = time.monotonic() + timeout
        self._answer_seconds = timeout
        self._last_deadline = math.inf
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._limit = 0
        self._error: HandshakeError | None = None
        # Not bound to this client: a reference cycle would hold its bytes after its end.
        self._opening: Callable[[Client], None] | None = Client._connect
        """What is left to do before questions can be sent; None if the connection is open."""
        self._wants = select.POLLOUT
        """What it waits for while it opens."""
        self._place, self._socket = self._make_socket()
        try:
            while not self.poll() and wait and self._opening is not None:
                _ready(self._socket, self._wants, self.deadline - time.monotonic())
            if wait and self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor that has one of `events` when :meth:`poll` may make progress."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """Events of :mod:`select` that :meth:`poll` waits for."""
        if self._opening is not None:
            return self._wants
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    @property
    def received(self) -> int:
        """Bytes of an incomplete answer."""
        return len(self._received)

    def ask(self, question: Question, kind: type[AnswerT], *, deadline: float = math.inf) -> AnswerT:
        """Ask and wait for an answer of a kind, at most until the deadline on the monotonic clock.

        Raises:
            HandshakeError: the listener refuses the question, or its answer is of another kind.
            HandshakeTimeoutError: no answer in time. The client cannot be used any more.
        """
        self.send(question, deadline=deadline)
        return self.receive(kind)

    def send(self, question: Question, *, deadline: float = math.inf) -> None:
        """Ask without waiting. Receive the answer before the next question, at most until the deadline.

        Raises:
            HandshakeError: the question is too long.
            HandshakeTimeoutError: the connection has ended. The client cannot be used any more.
        """
        data = frame(question)
        if len(data) - HEADER_BYTES > MAX_QUESTION_BYTES:
            raise HandshakeError(f"a question has {len(data)} bytes, at most {MAX_QUESTION_BYTES} can be asked")
        if self._error is None and (self.waiting or (self._opening is None and not self.idle())):
            self._attempt(self._read)  # nothing was asked, so what comes says why the connection has ended
            self._error = self._error or HandshakeTimeoutError(f"{self._address} was asked and has not answered yet")
        if self._error is not None:
            raise self._error.with_traceback(None)
        self.waiting = True
        self._unsent = memoryview(data)
        self._limit = question.max_answer_bytes
        self._answer_seconds = question.answer_seconds(self._timeout)
        self._last_deadline = deadline
        self.deadline = min(self.deadline, deadline)
        if self._opening is None:
            self._begin_answer()
            self._attempt(self._flush)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def idle(self) -> bool:
        """Return whether the next question can be asked: no answer is missing, and the connection is open."""
        if self.waiting or self._error is not None:
            return False
        # Without a question only the end of the connection can come.
        return not _ready(self._socket, select.POLLIN, 0)

    def poll(self) -> bool:
        """Return whether a whole answer or an error is here, so that :meth:`receive` would not wait. Never waits."""
        if self._opening is not None and self._error is None:
            self._attempt(self._open)
        if self._opening is None and self.waiting and self._error is None and not self._complete():
            self._attempt(self._flush)
            self._attempt(self._read)
        if self._error is None and not self._complete() and time.monotonic() >= self.deadline:
            self._error = HandshakeTimeoutError(f"no answer from {self._address} in {self._timeout:.3g} s")
        return self._error is not None or self._complete()

    def receive(self, kind: type[AnswerT]) -> AnswerT:
        """Wait for an answer of a kind. Errors as for :meth:`ask`."""
        while not self.poll():
            _ready(self._socket, self.events, self.deadline - time.monotonic())
        if self._error is not None:
            raise self._error.with_traceback(None)
        data, self._received = self._received, bytearray()
        self.waiting = False
        return read_answer(memoryview(data)[HEADER_BYTES:], kind)

    def _complete(self) -> bool:
        received = self._received
        return len(received) >= HEADER_BYTES and len(received) == HEADER_BYTES + frame_length(received)

    # --- bytes ---------------------------------------------------------------------------------------------

    def _attempt(self, what: Callable[[], None]) -> None:
        """Send or read without waiting; an error becomes the answer."""
        try:
            what()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except HandshakeError as error:
            self._error = self._error or error
        except OSError as error:
            self._error = self._error or self._failure(error)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            # The connection has ended. What the listener said before says why: a refusal, or an alert of TLS.
            self._unsent = memoryview(b"")
            self._attempt(self._read)
            if not self._complete():
                raise

    def _read(self) -> None:
        while not self._complete():
            data = self._socket.recv(_CHUNK)
            if not data:
                raise HandshakeTimeoutError(f"no answer from {self._address}: it has ended the connection")
            self._received += data
            self._check_received()
            if self.on_received is not None:
                self.on_received(len(self._received))

    def _check_received(self) -> None:
        """Refuse bytes that do not begin an answer, before more are stored."""
        if self.context is None and _TLS_ALERT.match(self._received):
            raise HandshakeError(
                f"{self._address} has a secret and this engine has none: set secret_file or KVHMA_SECRET here too"
            )
        if len(self._received) < HEADER_BYTES:
            return
        length = frame_length(self._received)
        if length > self._limit:
            raise HandshakeError(
                f"the answer of {self._address} is not one of this protocol: it has {length} bytes, "
                f"at most {self._limit} are expected"
            )
        if len(self._received) > HEADER_BYTES + length:
            raise HandshakeError(f"{self._address} says more than it was asked")

    # --- connecting ----------------------------------------------------------------------------------------

    def _make_socket(self) -> tuple[Any, socket.socket | ssl.SSLSocket]:
        """Return the address for the system, and a socket that never waits."""
        if not self._address.is_numeric:
            raise HandshakeError(f"remote_host {one_line(self._address.host)!r} is not numeric")
        try:
            ((family, kind, _, _, place), *_) = socket.getaddrinfo(
                self._address.host, self._address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            made = socket.socket(family, kind)
        except OSError as error:
            raise self._failure(error) from error
        made.setblocking(False)
        return place, made

    def _open(self) -> None:
        """Connect, and do the handshake, as far as that does not wait."""
        while self._opening is not None:
            self._opening(self)

    def _connect(self) -> None:
        error = self._socket.connect_ex(self._place)
        if error in _UNDER_WAY:
            raise BlockingIOError
        if error not in (0, errno.EISCONN):
            raise OSError(error, os.strerror(error))
        keep_alive(self._socket)
        if self.context is None:
            self._note_open()
        else:
            self._socket = self.context.wrap_socket(self._socket, do_handshake_on_connect=False)
            self._opening = Client._shake_hands

    def _shake_hands(self) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)  # noqa: S101
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._wants = select.POLLIN
            raise
        except ssl.SSLWantWriteError:
            self._wants = select.POLLOUT
            raise
        self._note_open()

    def _note_open(self) -> None:
        self._opening = None
        if self.waiting:
            self._begin_answer()

    def _begin_answer(self) -> None:
        """Begin the time for an answer."""
        self.deadline = min(time.monotonic() + self._answer_seconds, self._last_deadline)

    def _failure(self, error: OSError) -> HandshakeError:
        """Return the error to raise for an error of the connection."""
        reason = getattr(error, "reason", None) or ""
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return HandshakeError(
                f"the secrets of {self._address} and of this engine differ: one does not accept what the other one uses"
            )
        if isinstance(error, ssl.SSLError) and self._opening is not None and not isinstance(error, ssl.SSLEOFError):
            return HandshakeError(
                f"{self._address} has no secret and this engine has one: set secret_file or KVHMA_SECRET there too "
                f"({reason})"
            )
        return HandshakeTimeoutError(f"no answer from {self._address}: {error}")


class IdleClients:
    """Connected clients without a question, by address. A new connection takes several times as long to answer."""

    def __init__(self, secrets: Secrets, max_at_address: int) -> None:
        """Start without clients; keep at most so many of one address."""
        self._secrets = secrets
        self._max_at_address = max_at_address
        self._idle: dict[Address, dict[Client, float]] = {}
        """When each client was released."""
        self._closed = False
        self._lock = threading.Lock()

    def take_client(self, address: Address) -> Client | None:
        """Return a client for one thread, until :meth:`release_client`; None if no client is idle. Never waits."""
        while True:
            with self._lock:
                if not (clients := self._idle.get(address)):
                    return None
                client, _ = clients.popitem()
            if client.context is self._secrets.client_context() and client.idle():
                return client
            client.close()

    def release_client(self, address: Address, client: Client) -> None:
        """Keep a client, unless it still waits for an answer."""
        with self._lock:
            clients = self._idle.setdefault(address, {})
            if client.idle() and not self._closed and len(clients) < self._max_at_address:
                clients[client] = time.monotonic()
                return
        client.close()

    def close_clients(self, address: Address) -> None:
        """Close the clients of an address."""
        with self._lock:
            clients = self._idle.pop(address, {})
        for client in clients:
            client.close()

    def close_unused(self, since: float, limit: int) -> None:
        """Close the clients that were released before a time, and the oldest of the others if there are too many."""
        with self._lock:
            released = sorted(at for clients in self._idle.values() for at in clients.values())
            since = max([since, *released[-limit - 1 : -limit]])
            unused = [
                (address, client)
                for address, clients in self._idle.items()
                for client, at in clients.items()
                if at <= since
            ]
            for address, client in unused:
                del self._idle[address][client]
            self._idle = {address: clients for address, clients in self._idle.items() if clients}
        for _, client in unused:
            client.close()

    def close(self) -> None:
        """Close all clients, and keep no more."""
        self._closed = True
        self.close_unused(math.inf, 1)


def _ready(of: socket.socket, events: int, seconds: float) -> bool:
    """Wait until a socket is ready or has failed; return whether it is."""
    poller = select.poll()
    poller.register(of, events)
    return bool(poller.poll(max(0, math.ceil(seconds * 1000))))
