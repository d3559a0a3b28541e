# SPDX-License-Identifier: Apache-2.0
"""The connections of a listener, the loop that serves them, and their limits."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import resource
import selectors
import socket
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from kvhma.errors import ConnectionEnded
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.connection import Answering, Connection
from kvhma.vllm.peers.sockets import Waker
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.secrets import Secrets

MAX_CONNECTIONS = 4096
"""Beyond it, and beyond a quarter of the process's file descriptors, the listener closes the idlest connection."""

MAX_HANDSHAKES = 512
"""TLS handshakes at a time. Beyond it the listener closes one of the network with the most.

OpenSSL stores up to 220 KiB for a handshake of an unknown peer, and 36 KiB for an engine's connection."""

MAX_QUESTIONS_BYTES = 64 << 20
MAX_ANSWERS_BYTES = 256 << 20
"""Of incomplete questions, and of answers of which peers have not taken all yet, over all connections."""

_ACCEPTS = 64
"""Connections that are accepted in a row before open connections get their turn."""

_SWEEP_SECONDS = 1.0
"""How often the listener closes late connections, and how long it accepts nothing after an error."""

_UNKNOWN_PEERS_SECONDS = 0.01
"""CPU time for connections that were never answered. After that the listener accepts nothing for as long.

So unknown peers that connect without end get half of a core, and wait in the kernel. Without a secret any host gets
answers: after as much CPU time for questions the listener sleeps for as long."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Group(NamedTuple):
    """Connections that are equal when the listener has to close one.

    Attributes:
        answered: whether they have had an answer.
        network: where they come from.
    """

    answered: bool
    network: str


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
        self._groups: dict[_Group, OrderedDict[Connection, None]] = {}
        """Connections of each group, the longest without an answer first."""
        self._group_of: dict[Connection, _Group] = {}
        self._handshakes: dict[Connection, None] = {}
        """Connections in TLS's handshake, the oldest first."""
        self._waiting: dict[bytes, dict[Connection, None]] = {}
        """Connections whose question waits for progress of a ticket, by ticket."""
        self._waits_for: dict[Connection, tuple[bytes, ...]] = {}
        self._limit = max(1, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._questions = _Budget(MAX_QUESTIONS_BYTES)
        self._answers = _Budget(MAX_ANSWERS_BYTES)
        self._waker: Waker | None = None
        self._progressed: deque[bytes] = deque()
        self._accepting = False
        self._accept_at = self._swept = time.monotonic()
        self._spent_on_unknown_peers = 0.0
        """CPU seconds since the listener last accepted nothing."""
        self._busy = 0.0
        """CPU seconds for questions without a secret, less the time that the listener has waited since."""
        self._selector = selectors.DefaultSelector()
        self._accept_again()

    def register(self, waker: Waker, progressed: deque[bytes]) -> None:
        """Let a waker wake :meth:`serve`, which then answers questions about the tickets in `progressed`."""
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
        self._busy = max(0.0, self._busy - (time.monotonic() - now))
        for key, _ in events:
            group, started = self._group_of.get(key.data), time.thread_time()
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._waker:
                self._answer_waiting()
            elif group is not None:
                self._advance(key.data, key.data.advance)
            if key.fileobj is self._waker:
                continue
            spent = time.thread_time() - started
            if group is None or not group.answered:
                self._spent_on_unknown_peers += spent
            elif not self._secrets.enabled:
                self._busy += spent
            if self._busy > _UNKNOWN_PEERS_SECONDS:
                time.sleep(self._busy)
                self._busy = 0.0
        if self._accepting and self._spent_on_unknown_peers > _UNKNOWN_PEERS_SECONDS:
            self._rest(self._spent_on_unknown_peers)
        if time.monotonic() - self._swept >= _SWEEP_SECONDS:
            self._sweep()
        if not self._accepting and time.monotonic() >= self._accept_at:
            self._accept_again()

    def _rest(self, seconds: float) -> None:
        """Accept nothing for some seconds."""
        self._selector.unregister(self._listening)
        self._accepting = False
        self._accept_at = time.monotonic() + seconds
        self._spent_on_unknown_peers = 0.0

    def _answer_waiting(self) -> None:
        """Answer questions about tickets with progress."""
        assert self._waker is not None  # noqa: S101
        self._waker.drain()
        tickets = set()
        with contextlib.suppress(IndexError):
            while True:
                tickets.add(self._progressed.popleft())
        for ticket in tickets:
            for connection in list(self._waiting.get(ticket, ())):
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
        self._note_handshake(connection)
        if connection.answered != answered:
            self._leave_group(connection)
            self._enter_group(connection, answered=True)
        if connection.events != events:
            self._selector.modify(connection.fileno(), connection.events, connection)
        # Both budgets count before a connection closes: a closed connection stores nothing.
        for largest in {
            self._questions.note_stored(connection, connection.question_bytes),
            self._answers.note_stored(connection, connection.answer_bytes),
        }:
            if largest is not None:
                logger.warning(
                    "kvhma: closing the connection from %s, which sends too much or does not take its answers",
                    largest.host,
                )
                self._close_connection(largest, "room")

    def _note_handshake(self, connection: Connection) -> None:
        """Note whether a connection is in TLS's handshake, and close one if too many are."""
        if not connection.is_in_handshake:
            self._handshakes.pop(connection, None)
            return
        self._handshakes[connection] = None
        if len(self._handshakes) > MAX_HANDSHAKES:
            oldest, number = self._choose_handshake()
            logger.warning(
                "kvhma: %d TLS handshakes at a time; closing the oldest of %d from %s",
                len(self._handshakes),
                number,
                oldest.host,
            )
            self._close_connection(oldest, "room")

    def _choose_handshake(self) -> tuple[Connection, int]:
        """Return the handshake to close, and the number of handshakes from its network.

        It comes from networks with an answered connection or from the others, whichever have more handshakes. So
        unknown hosts, however many, close none of an engine's host, and that host closes none of theirs.
        """
        networks = Counter(self._group_of[begun].network for begun in self._handshakes)
        answered = {network for network in networks if _Group(True, network) in self._groups}
        of_answered = sum(networks[network] for network in answered) > len(self._handshakes) // 2
        chosen = (network for network in networks if (network in answered) is of_answered)
        largest = max(chosen, key=networks.__getitem__)
        oldest = next(begun for begun in self._handshakes if self._group_of[begun].network == largest)
        return oldest, networks[largest]

    def _note_waiting(self, connection: Connection, tickets: tuple[bytes, ...]) -> None:
        """Note the tickets whose progress a connection waits for; none if it does not wait."""
        before = self._waits_for.pop(connection, ())
        if tickets:
            self._waits_for[connection] = tickets
        if tickets == before:
            return
        for ticket in before:
            del self._waiting[ticket][connection]
            if not self._waiting[ticket]:
                del self._waiting[ticket]
        for ticket in tickets:
            self._waiting.setdefault(ticket, {})[connection] = None

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
        if len(self._group_of) >= self._limit:
            idlest, group_size = self._choose_idlest()
            logger.warning(
                "kvhma: %d connections to the side channel; closing the idlest of %d connections from %s",
                len(self._group_of),
                group_size,
                idlest.host,
            )
            self._close_connection(idlest, "room")
        self._selector.register(connection.fileno(), selectors.EVENT_READ, connection)
        self._enter_group(connection, answered=False)

    def _enter_group(self, connection: Connection, *, answered: bool) -> None:
        group = self._group_of[connection] = _Group(answered, _network(connection.host))
        self._groups.setdefault(group, OrderedDict())[connection] = None

    def _leave_group(self, connection: Connection) -> None:
        group = self._group_of.pop(connection)
        del self._groups[group][connection]
        if not self._groups[group]:
            del self._groups[group]

    def _choose_idlest(self) -> tuple[Connection, int]:
        """Return the connection to close, and the size of its group.

        It comes from the answered or from the unanswered connections, whichever are more. An unknown peer without the
        secret never gets an answer. So it takes nothing from engines, from however many hosts it connects.
        """
        answered = sum(len(connections) for group, connections in self._groups.items() if group.answered)
        of_answered = answered > len(self._group_of) // 2
        groups = (connections for group, connections in self._groups.items() if group.answered is of_answered)
        largest = max(groups, key=len)
        return next(iter(largest)), len(largest)

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
        return list(self._group_of)

    def _close_connection(self, connection: Connection, refused: str = "") -> None:
        if refused:
            self._counters.count("side_channel_refused", label=refused)
        self._note_waiting(connection, ())
        self._handshakes.pop(connection, None)
        self._leave_group(connection)
        self._questions.note_stored(connection, 0)
        self._answers.note_stored(connection, 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.fileno())
        connection.close()


class _Budget:
    """Bytes that all connections together may have stored."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: dict[Connection, int] = {}
        self._sum = 0

    def note_stored(self, connection: Connection, stored: int) -> Connection | None:
        """Note the bytes that a connection has stored; return the connection to close if all store too much."""
        if not stored and connection not in self._stored:
            return None
        self._sum += stored - self._stored.pop(connection, 0)
        if stored:
            self._stored[connection] = stored
        if self._sum <= self._limit:
            return None
        return max(self._stored, key=self._stored.__getitem__)


def _network(host: str) -> str:
    """Return the part of an address that its owner cannot choose: a host of IPv6 has a whole /64."""
    numeric = ipaddress.ip_address(host.partition("%")[0])
    if numeric.version == 4 or numeric.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((numeric, 64), strict=False))
