# SPDX-License-Identifier: Apache-2.0
"""One connection of a listener: bytes to questions, answers to bytes, within limits. It never waits.

    opening --- six bytes tell whether it is TLS --- handshake --- receiving <---> answering
                                                                      |             |
                                                                      '-> waiting --'

It handles one question at a time: it reads nothing else until the peer has taken the answer. A question whose answer
is not known yet waits.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator

from kvhma.errors import ConnectionEnded
from kvhma.vllm.peers.sockets import keep_alive
from kvhma.vllm.wire.messages import (
    HEADER_BYTES,
    MAX_QUESTION_BYTES,
    PROTOCOL,
    Answer,
    Later,
    Problem,
    frame,
    frame_length,
)
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.secrets import Secrets

HANDSHAKE_SECONDS = 5.0
"""For TLS, from the accepted connection to the end of TLS's handshake."""

QUESTION_SECONDS = 5.0
"""For a question, from its first byte on."""

ANSWER_SECONDS = 30.0
"""For taking an answer. A worker identity may have megabytes."""

IDLE_SECONDS = 120.0

_FIRST_CHUNK = 4 << 10
_CHUNK = 64 << 10
_OPENING_BYTES = 6

_ONLY_HERE = "this engine has a secret, and the question came without it: set secret_file or KVHMA_SECRET there too"
_ONLY_THERE = "this engine has no secret: set secret_file or KVHMA_SECRET here too"


Answering = Callable[[memoryview], "Answer | Later"]
"""Takes the bytes of a question. Must not raise."""


class Connection:
    """One connection. All of it belongs to the listener's thread.

    Attributes:
        host: the peer's numeric address.
        events: of :mod:`selectors`, that it waits for.
        answered: number of answered questions.
        deadline: when the listener closes it if nothing comes, on the monotonic clock. While a question waits: when it
            has to be answered.
    """

    def __init__(self, accepted: socket.socket, host: str, secrets: Secrets, answer: Answering) -> None:
        """Take an accepted connection; call `answer` for each question."""
        self.socket = accepted
        self._descriptor = accepted.fileno()
        self.host = host
        self.events = selectors.EVENT_READ
        self.answered = 0
        self._secrets = secrets
        self._answer = answer
        # Not bound to this connection: a reference cycle would hold its bytes after its end.
        self._advance: Callable[[Connection], None] = Connection._open
        self._received = bytearray()
        self._frame = memoryview(b"")
        self._sent = 0
        """The answer that is sent, and how many of its bytes were."""
        self._refused = ""
        self._later: Later | None = None
        """How the waiting question is answered; None while no question waits."""
        self._asked_at = 0.0
        """When the last question came."""
        self._certificate: bytes | None = None
        self.deadline = time.monotonic() + (HANDSHAKE_SECONDS if secrets.enabled else IDLE_SECONDS)
        accepted.setblocking(False)
        keep_alive(accepted)

    @property
    def has_shown_secret(self) -> bool:
        """Whether TLS's handshake is over: the peer has a secret of this engine."""
        return self._certificate is not None

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of memory for an incomplete question, or for an answer until the peer has taken all of it.

        Of a question that waits, only its topics are stored.
        """
        return self._received.__alloc__() + len(self._frame)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The topics that its question waits for; none while no question waits."""
        return () if self._later is None else self._later.topics

    @property
    def waits_for_peer(self) -> bool:
        """Whether the peer has begun to connect, to ask or to take an answer, and is not done."""
        return self._later is None and (self._advance is not Connection._receive or bool(self._received))

    def fileno(self) -> int:
        """Return the file descriptor, also after the end: Python itself closes the socket of a peer that is gone."""
        return self._descriptor

    def close(self) -> None:
        """Disconnect, and free what is stored for the peer: the listener's turn still refers to this connection."""
        self._received, self._frame, self._later = bytearray(), memoryview(b""), None
        with contextlib.suppress(OSError):
            self.socket.close()

    def advance(self) -> None:
        """Do what can be done now.

        Raises:
            ConnectionEnded: the listener is to close it.
            OSError: it has ended.
        """
        with self._noting_events():
            self._advance(self)

    @contextlib.contextmanager
    def _noting_events(self) -> Iterator[None]:
        """Note what TLS waits for."""
        try:
            yield
        except (BlockingIOError, ssl.SSLWantReadError):
            self.events = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            self.events = selectors.EVENT_WRITE

    def _open(self) -> None:
        """Look at the first bytes: both sides need a secret, or neither has one."""
        first = self.socket.recv(_OPENING_BYTES, socket.MSG_PEEK)
        if not first:
            raise ConnectionEnded
        # TLS begins with a handshake record. In a question, byte 4 is part of the length, at most 0x10; byte 5 begins a
        # map and byte 6 a text.
        whole = len(first) == _OPENING_BYTES
        tls = b"\x16\x03".startswith(first[:2]) and (not whole or first[5] == 1)
        context = self._secrets.server_context()
        if context is None:
            if tls and whole:
                self._refuse("secret", "its questions are encrypted", _ONLY_THERE)
            else:
                self._advance = Connection._receive
                self._receive()
            return
        if not tls:
            self._refuse("secret", "its questions are not encrypted", _ONLY_HERE)
            return
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self._advance = Connection._shake_hands
        self._shake_hands()

    def _shake_hands(self) -> None:
        assert isinstance(self.socket, ssl.SSLSocket)  # noqa: S101
        try:
            self.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLEOFError as error:
            raise ConnectionEnded from error
        except ssl.SSLError as error:
            logger.warning("kvhma: refused %s, which has another secret or none: %s", self.host, error.reason)
            raise ConnectionEnded("secret") from error
        self._certificate = self.socket.getpeercert(True)
        self.deadline = time.monotonic() + IDLE_SECONDS
        self._advance = Connection._receive
        self._receive()

    def _receive(self) -> None:
        """Read one question, or the part of it that is here, and answer it."""
        received = self._received
        while True:
            data = self.socket.recv(_CHUNK if received else _FIRST_CHUNK)
            if not data:
                raise ConnectionEnded
            if not received:
                self.deadline = time.monotonic() + QUESTION_SECONDS
            received += data
            if len(received) < HEADER_BYTES:
                continue
            length = frame_length(received)
            if length > MAX_QUESTION_BYTES:
                found = f"a question has {length} bytes, at most {MAX_QUESTION_BYTES} can be asked"
                self._refuse("message", found, f"not a question of protocol {PROTOCOL}: {found}")
                return
            if len(received) > HEADER_BYTES + length or (len(received) == HEADER_BYTES + length and self._pending()):
                self._refuse("message", "it asks before it was answered", "one question at a time")
                return
            if len(received) == HEADER_BYTES + length:
                break
        if self._certificate is not None and not self._secrets.accepts(self._certificate):
            raise ConnectionEnded("secret")  # its secret was removed meanwhile
        self._received = bytearray()
        self._asked_at = time.monotonic()
        self._take_answer(self._answer(memoryview(received)[HEADER_BYTES:]))

    def answer_waiting(self) -> None:
        """Answer the waiting question if its answer is known by now; raises as :meth:`advance`."""
        if self._later is not None:
            with self._noting_events():
                self._take_answer(self._later.ask_again(time.monotonic() - self._asked_at))

    def _take_answer(self, answer: Answer | Later) -> None:
        if not isinstance(answer, Later):
            self._later = None
            self._send(answer)
            return
        self._later = answer
        self._advance = Connection._wait
        self.events = selectors.EVENT_READ
        self.deadline = time.monotonic() + answer.seconds

    def _wait(self) -> None:
        """Something came while a question waits: the end of the connection, or another question."""
        if not self.socket.recv(1):
            raise ConnectionEnded
        self._later = None
        self._refuse("message", "it asks before it was answered", "one question at a time")

    def _pending(self) -> bool:
        """Return whether TLS has buffered more than was read, which the file descriptor does not show."""
        return isinstance(self.socket, ssl.SSLSocket) and bool(self.socket.pending())

    def _refuse(self, reason: str, log: str, text: str) -> None:
        logger.warning("kvhma: refused %s: %s", self.host, log)
        self._received = bytearray()
        self._refused = reason
        self._send(Problem(text))

    def _send(self, answer: Answer) -> None:
        self._frame, self._sent = memoryview(frame(answer)), 0
        self._advance = Connection._flush
        self.deadline = time.monotonic() + ANSWER_SECONDS
        self._flush()

    def _flush(self) -> None:
        self.events = selectors.EVENT_WRITE
        while self._sent < len(self._frame):
            try:
                self._sent += self.socket.send(self._frame[self._sent :])
            except BlockingIOError:
                return
        self.deadline = time.monotonic() + IDLE_SECONDS
        self._frame = memoryview(b"")
        self.answered += 1
        if self._refused:
            # Closing with unread bytes would reset the connection before the peer reads the answer.
            with contextlib.suppress(OSError):
                self.socket.recv(_CHUNK)
            raise ConnectionEnded(self._refused)
        self.events = selectors.EVENT_READ
        self._advance = Connection._receive
