# SPDX-License-Identifier: Apache-2.0
"""The connections of a listener, the loop that serves them, and their limits."""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from kvhma.errors import ConnectionEnded
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.connection import Answering, Connection
from kvhma.vllm.peers.sockets import Waker
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.secrets import Secrets

MAX_CONNECTIONS = 4096
"""Beyond it, and beyond a quarter of the process's file descriptors, the listener closes the idlest connection."""

MAX_HANDSHAKES = 512
"""Of these, connections whose peer has not shown the secret yet. Beyond it the listener closes the oldest of them.

OpenSSL stores up to 220 KiB for a handshake of an unknown peer, and 36 KiB for an engine's connection."""

MAX_UNFINISHED_BYTES = 256 << 20
"""Of incomplete questions, and of answers of which peers have not taken all yet, over all connections."""

_ACCEPTS = 64
"""Connections that are accepted in a row before open connections get their turn."""

_SWEEP_SECONDS = 1.0
"""How often the listener closes late connections, and how long it accepts nothing after an error."""

_UNKNOWN_PEERS_SECONDS = 0.01
"""CPU time for peers that have not shown the secret, after which the listener pauses as long: they get half of a core.

With a secret it accepts nothing meanwhile, and serves engines. Without a secret every peer is unknown, and it sleeps.
"""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """The connections of a listener, the loop that serves them, and their limits. It belongs to one thread."""

    def __init__(
        self,
        listening: socket.socket,
        secrets: Secrets,
        answer: Answering,
        counters: Counters,
    ) -> None:
        """Take the listening socket; see :class:`Connection` for `answer`."""
        self._listening = listening
        self._counters = counters
        self._secrets = secrets
        self._answer = answer
        limit = max(4, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._max_handshakes = min(MAX_HANDSHAKES, limit // 2) if secrets.enabled else 0
        self._max_open = limit - self._max_handshakes
        self._handshakes: dict[Connection, None] = {}
        """Connections whose peer has not shown the secret yet, the oldest first; none without a secret."""
        self._open: OrderedDict[Connection, None] = OrderedDict()
        """The other connections, the longest without an answer first."""
        self._waiting: dict[bytes, dict[Connection, None]] = {}
        """Connections whose question waits for progress, by topic."""
        self._waits_for: dict[Connection, tuple[bytes, ...]] = {}
        self._unfinished: dict[Connection, int] = {}
        """Bytes of its incomplete question or answer, by connection."""
        self._unfinished_bytes = 0
        self._waker: Waker | None = None
        self._progressed: deque[bytes] = deque()
        self._accepting = False
        self._accept_at = self._swept = time.monotonic()
        self._spent = 0.0
        """CPU seconds for unknown peers, less the time that the listener has waited since."""
        self._selector = selectors.DefaultSelector()
        self._accept_again()

    def register(self, waker: Waker, progressed: deque[bytes]) -> None:
        """Let a waker wake :meth:`serve`, which then answers questions that wait for the topics in `progressed`."""
        self._waker, self._progressed = waker, progressed
        self._selector.register(waker, selectors.EVENT_READ)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._all():
            self._close_connection(connection)
        self._selector.close()

    def serve(self) -> None:
        """Wait for events, for a moment at most, and serve them."""
        now = time.monotonic()
        until = self._swept + _SWEEP_SECONDS
        if not self._accepting:
            until = min(until, self._accept_at)
        events = self._selector.select(max(0.0, until - now))
        self._spent = max(0.0, self._spent - (time.monotonic() - now))
        for key, _ in events:
            if key.fileobj is self._waker:
                self._answer_waiting()
                continue
            is_engine = self._secrets.enabled and key.data in self._open
            started = time.thread_time()
            if key.fileobj is self._listening:
                self._accept()
            elif key.data in self._open or key.data in self._handshakes:  # it was not closed in this turn
                self._advance(key.data, key.data.advance)
            if not is_engine:
                self._note_spent(time.thread_time() - started)
        if time.monotonic() - self._swept >= _SWEEP_SECONDS:
            self._sweep()
        if not self._accepting and time.monotonic() >= self._accept_at:
            self._accept_again()

    def _note_spent(self, seconds: float) -> None:
        """Note CPU time for an unknown peer, and pause if it was much."""
        self._spent += seconds
        if self._spent <= _UNKNOWN_PEERS_SECONDS:
            return
        if self._secrets.enabled:
            self._rest(self._spent)
        else:
            time.sleep(self._spent)
        self._spent = 0.0

    def _rest(self, seconds: float) -> None:
        """Accept nothing for some seconds."""
        if self._accepting:
            self._selector.unregister(self._listening)
        self._accepting = False
        self._accept_at = max(self._accept_at, time.monotonic() + seconds)

    def _answer_waiting(self) -> None:
        """Answer questions whose topics have progressed."""
        assert self._waker is not None  # noqa: S101
        self._waker.drain()
        topics = set()
        with contextlib.suppress(IndexError):
            while True:
                topics.add(self._progressed.popleft())
        for topic in topics:
            for connection in list(self._waiting.get(topic, ())):
                if connection in self._waits_for:
                    self._advance(connection, connection.answer_waiting)

    def _advance(self, connection: Connection, what: Callable[[], None]) -> None:
        events, answered = connection.events, connection.answered
        try:
            what()
        except ConnectionEnded as ended:
            self._close_connection(connection, ended.refused)
            return
        except OSError:
            self._close_connection(connection)
            return
        except BaseException:  # it ends this connection and no other one
            logger.exception("kvhma: a connection of the side channel failed")
            self._close_connection(connection, "error")
            return
        self._note_waiting(connection, connection.waits_for)
        if connection.has_shown_secret and connection in self._handshakes:
            del self._handshakes[connection]
            self._add_open(connection)
        elif connection.answered != answered:
            self._open.move_to_end(connection)
        if connection.events != events:
            self._selector.modify(connection.fileno(), connection.events, connection)
        self._note_unfinished(connection, connection.unfinished_bytes)
        if self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            largest = max(self._unfinished, key=self._unfinished.__getitem__)
            logger.warning(
                "kvhma: closing the connection from %s, which sends too much or does not take its answers",
                largest.host,
            )
            self._close_connection(largest, "room")

    def _note_unfinished(self, connection: Connection, nbytes: int) -> None:
        """Note the bytes of a connection's incomplete question or answer."""
        self._unfinished_bytes += nbytes - self._unfinished.pop(connection, 0)
        if nbytes:
            self._unfinished[connection] = nbytes

    def _note_waiting(self, connection: Connection, topics: tuple[bytes, ...]) -> None:
        """Note the topics that a connection waits for; none if it does not wait."""
        before = self._waits_for.pop(connection, ())
        if topics:
            self._waits_for[connection] = topics
        if topics == before:
            return
        for topic in before:
            del self._waiting[topic][connection]
            if not self._waiting[topic]:
                del self._waiting[topic]
        for topic in topics:
            self._waiting.setdefault(topic, {})[connection] = None

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, (host, *_) = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # An immediate retry would fail again.
                    logger.warning("kvhma: no room for another connection: %s", error)
                    self._rest(_SWEEP_SECONDS)
                return
            try:
                self._add_connection(Connection(accepted, host, self._secrets, self._answer))
            except BaseException:  # it ends this connection and no other one
                logger.exception("kvhma: a connection to the side channel failed")
                accepted.close()

    def _add_connection(self, connection: Connection) -> None:
        self._selector.register(connection.fileno(), selectors.EVENT_READ, connection)
        if not self._secrets.enabled:
            self._add_open(connection)
            return
        self._handshakes[connection] = None
        if len(self._handshakes) > self._max_handshakes:
            oldest = next(iter(self._handshakes))
            logger.warning(
                "kvhma: %d TLS handshakes at a time; closing the oldest, from %s", self._max_handshakes, oldest.host
            )
            self._close_connection(oldest, "room")

    def _add_open(self, connection: Connection) -> None:
        self._open[connection] = None
        if len(self._open) > self._max_open:
            idlest = next(iter(self._open))
            logger.warning(
                "kvhma: %d connections to the side channel; closing the idlest, from %s", self._max_open, idlest.host
            )
            self._close_connection(idlest, "room")

    def _accept_again(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._accepting = True

    def _sweep(self) -> None:
        """Close the connections that are past their deadline, and look for new secrets."""
        self._secrets.refresh()
        self._swept = now = time.monotonic()
        for connection in list(self._waits_for):
            if connection.deadline < now:
                self._advance(connection, connection.answer_waiting)
        for connection in self._all():
            if connection.deadline < now:
                self._close_connection(connection, "time" if connection.waits_for_peer else "")

    def _all(self) -> list[Connection]:
        return [*self._handshakes, *self._open]

    def _close_connection(self, connection: Connection, refused: str = "") -> None:
        if refused:
            self._counters.count("side_channel_refused", label=refused)
        self._note_waiting(connection, ())
        self._handshakes.pop(connection, None)
        self._open.pop(connection, None)
        self._note_unfinished(connection, 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.fileno())
        connection.close()
