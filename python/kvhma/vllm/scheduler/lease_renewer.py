# SPDX-License-Identifier: Apache-2.0
"""D's side of the leases: a thread that renews and releases claims, so that the engine's steps never wait for P."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import random
import threading
import time
from collections import deque
from concurrent.futures import Future

from kvhma.errors import HandshakeError
from kvhma.vllm.wire.client import Client, wait_any
from kvhma.vllm.wire.messages import MAX_CLAIMS, Done, Outcome, Release, Renew, WireClaim, write_claim
from kvhma.vllm.wire.names import look_up
from kvhma.vllm.wire.params import Address, LeaseClaim

logger = logging.getLogger("vllm.kvhma")

_NO_RENEWALS = 3600.0
"""Seconds between renewals of a session that has nothing to renew."""

_KEPT_SECONDS = 60.0
"""How long a connection that is not used is kept."""

_MAX_WAIT_SECONDS = 1.0


class _State(enum.Enum):
    IDLE = enum.auto()
    """There is no question without an answer."""

    RESOLVING = enum.auto()
    """The engine's name is being looked up."""

    WAITING = enum.auto()
    """A question has no answer yet."""


class _Session:
    """The conversation with one prefill engine, a question at a time. The lock of its renewer guards it.

    Attributes:
        tracked: claims to renew, and whether P held them when it was last asked; None until it has answered.
        interval: seconds between renewals.
        client: the connection, None if there is none.
        state: what is under way.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.tracked: dict[LeaseClaim, bool | None] = {}
        self.interval = _NO_RENEWALS
        self.client: Client | None = None
        self.state = _State.IDLE
        self._address = address
        self._timeout = timeout
        self._releases: deque[tuple[LeaseClaim, Outcome]] = deque()
        self._renewing: list[LeaseClaim] | None = None
        """Claims of the last question, None if that was a release."""
        self._lookup: Future[Address] | None = None
        self._connect_after: float | None = None
        """When to try again, after an attempt to connect has failed."""
        self._asked_at: float | None = None
        self._renewed_at: float | None = None

    def track(self, claim: LeaseClaim, every: float) -> None:
        """Renew a claim from now on, `every` so many seconds."""
        self.tracked.setdefault(claim)
        self.interval = min(self.interval, every)
        self._renewed_at = None

    def release(self, claim: LeaseClaim, outcome: Outcome) -> None:
        """Tell P that a claim is not needed any more."""
        self.tracked.pop(claim, None)
        self._releases.append((claim, outcome))
        if not self.tracked:
            self.interval = _NO_RENEWALS

    def advance(self, now: float) -> None:
        """Take what has arrived by `now`, and say what is to be said next. Never waits."""
        if self.state is _State.WAITING:
            self._receive(now)
        elif self.state is _State.RESOLVING:
            self._connect(now)
        if self.state is _State.IDLE and (self._renewal_is_due(now) or self._releases):
            if self.client is None:
                self._resolve(now)
            if self.client is not None:
                self._ask(self.client, now)

    def ended(self, now: float) -> bool:
        """Return whether there is nothing to say, and has not been for a while."""
        if self.state is not _State.IDLE or self.tracked or self._releases:
            return False
        return self._asked_at is None or now - self._asked_at > _KEPT_SECONDS

    def disconnect(self) -> None:
        """Close the connection; the next question looks the name up again, which may stand for another host by then."""
        if self.client is not None:
            self.client.close()
        self.client = None
        self.state = _State.IDLE

    def _renewal_is_due(self, now: float) -> bool:
        return bool(self.tracked) and (self._renewed_at is None or now - self._renewed_at >= self.interval)

    def _resolve(self, now: float) -> None:
        if self._connect_after is not None and now < self._connect_after:
            return
        try:
            self._lookup = look_up(self._address)
        except HandshakeError as error:
            self._not_connected(error, now)
            return
        self.state = _State.RESOLVING
        self._connect(now)  # a numeric address is known already

    def _connect(self, now: float) -> None:
        if self._lookup is None or not self._lookup.done():
            return
        self.state = _State.IDLE
        try:
            self.client = Client(self._lookup.result(), self._timeout)
            self._connect_after = None
        except HandshakeError as error:
            self._not_connected(error, now)

    def _not_connected(self, error: HandshakeError, now: float) -> None:
        logger.debug("kvhma: leases of %s are not renewed: %s", self._address, error)
        self._releases.clear()  # P's leases end without them
        self._connect_after = now + self._timeout

    def _ask(self, client: Client, now: float) -> None:
        # Renewals and releases take turns if there is always one of both.
        if self._renewal_is_due(now) and not (self._releases and self._renewing is not None):
            # Of more than fit one message each time others are chosen by chance; a lease outlasts several of them.
            self._renewing = random.sample(list(self.tracked), min(len(self.tracked), MAX_CLAIMS))
            self._renewed_at = now
            question: Renew | Release = Renew([write_claim(claim) for claim in self._renewing])
        else:
            self._renewing = None
            question = self._next_release()
        self._asked_at = now
        try:
            client.send(question)
            self.state = _State.WAITING
        except HandshakeError:
            self.disconnect()

    def _next_release(self) -> Release:
        """Take the oldest claims with one outcome."""
        outcome = self._releases[0][1]
        claims: list[WireClaim] = []
        while self._releases and self._releases[0][1] is outcome and len(claims) < MAX_CLAIMS:
            claims.append(write_claim(self._releases.popleft()[0]))
        return Release(claims, outcome)

    def _receive(self, now: float) -> None:
        if self.client is None or not self.client.answered():
            if self._asked_at is None or now - self._asked_at > self._timeout:
                self.disconnect()
            return
        self.state = _State.IDLE
        try:
            if self._renewing is None:
                self.client.receive(Done, "Release", 0)
                return
            answer = self.client.receive_leases(len(self._renewing))
        except HandshakeError as error:
            logger.debug("kvhma: leases of %s: %s", self._address, error)
            self.disconnect()
            return
        for claim, expires in zip(self._renewing, answer.expires, strict=True):
            if claim in self.tracked:
                self.tracked[claim] = expires is not None


class LeaseRenewer:
    """Renews and releases the claims of a decode engine in a thread of its own.

    A prefill engine that does not answer costs nothing but its leases, which end without renewals.
    """

    def __init__(self, *, timeout: float, max_peers: int) -> None:
        """Start.

        Args:
            timeout: seconds to wait for an answer.
            max_peers: engines to talk to at a time; claims at more are not renewed.
        """
        self._timeout = timeout
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._sessions: dict[Address, _Session] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kvhma-lease-renewer", daemon=True)
        self._thread.start()

    def track(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim from now on, `every` so many seconds."""
        with self._lock:
            session = self._session(address)
            if session is not None:
                session.track(claim, every)
        self._wake()

    def held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P held what is tracked when it was last asked; None as long as it has not answered."""
        with self._lock:
            session = self._sessions.get(address)
            return None if session is None else session.tracked.get(claim)

    def release(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Tell P that a claim is not needed any more, and why; stop to renew it."""
        with self._lock:
            session = self._session(address)
            if session is not None:
                session.release(claim, outcome)
        self._wake()

    def close(self) -> None:
        """Stop; what was not sent is left to the leases, which end."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _session(self, address: Address) -> _Session | None:
        session = self._sessions.get(address)
        if session is None and len(self._sessions) < self._max_peers:
            session = self._sessions[address] = _Session(address, self._timeout)
        return session

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        while not self._closing:
            try:
                self._wait()
                self._advance_all()
            except Exception:
                logger.exception("kvhma: the renewer of leases met an error of the connector's own, and goes on")
                time.sleep(1)
        for session in self._sessions.values():
            session.disconnect()

    def _wait(self) -> None:
        """Wait until there may be something to do for a session."""
        with self._lock:
            sessions = list(self._sessions.values())
            clients = [one.client for one in sessions if one.state is _State.WAITING and one.client is not None]
            interval = min((session.interval for session in sessions), default=_NO_RENEWALS)
        if wait_any(clients, self._wake_read, min(_MAX_WAIT_SECONDS, interval / 4)):
            os.read(self._wake_read, 4096)

    def _advance_all(self) -> None:
        now = time.monotonic()
        with self._lock:
            for address, session in list(self._sessions.items()):
                session.advance(now)
                if session.ended(now):
                    del self._sessions[address]
                    session.disconnect()
