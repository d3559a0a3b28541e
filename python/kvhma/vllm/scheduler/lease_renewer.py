# SPDX-License-Identifier: Apache-2.0
"""D's side of the leases: threads that renew and release claims, so that the engine's steps never wait for P."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from kvhma.errors import HandshakeError
from kvhma.vllm.counters import Counters
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.client import Client
from kvhma.vllm.wire.messages import MAX_CLAIMS, Done, Leases, LeaseState, Outcome, Release, Renew, write_claim
from kvhma.vllm.wire.names import resolve
from kvhma.vllm.wire.params import Address, LeaseClaim
from kvhma.vllm.wire.secrets import Secrets

_KEPT_SECONDS = 60.0
"""How long a connection, and a thread, is kept that has nothing to do."""

_RESPONSIVE_SECONDS = 1.0
"""An engine is prompt if the last conversation with it took no longer."""

_CLOSE_SECONDS = 1.0
"""How long the end of the engine waits for conversations."""

_UNKNOWN_PEER_SHARE = 3 / 4
"""Share of the threads that may wait at a time for engines that are not known to be prompt."""

_MAX_KNOWN = 4096
"""Engines that are remembered to be prompt."""

_MAX_SESSIONS = 1024
"""Conversations; beyond it the oldest one with an engine that is not known to be prompt is given up for a new one.

To choose among more would take longer, with a lock for which the engine's steps wait.
"""

AnswerT = TypeVar("AnswerT", Leases, Done)
ItemT = TypeVar("ItemT")


class _Released(NamedTuple):
    """A claim that is not needed any more.

    Attributes:
        claim: it.
        outcome: why.
        again: whether P was told before, and has not answered. Later it is not told again: its lease ends without that.
    """

    claim: LeaseClaim
    outcome: Outcome
    again: bool = False


class _Session:
    """The conversation with one prefill engine. The lock of its renewer guards it, but for the client.

    Attributes:
        address: where its scheduler listens.
        claims: claims to renew, and what P said of each when it was last asked; None until it has answered.
        fresh: those of them that were never renewed.
        releases: what is to be released.
        every: seconds between renewals.
        renew_at: when all are renewed next, on the monotonic clock; so are the other times.
        retry_at: before it nothing is said, since the last attempt failed.
        used_at: when there was last something to say.
        busy: whether a thread holds the conversation; the client belongs to that.
        client: the connection, None if there is none.
        failed: whether the last attempt failed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.claims: dict[LeaseClaim, LeaseState | None] = {}
        self.fresh: list[LeaseClaim] = []
        self.releases: list[_Released] = []
        self.every = self.renew_at = math.inf
        self.retry_at = self.used_at = 0.0
        self.busy = False
        self.client: Client | None = None
        self.failed = False

    @property
    def due_at(self) -> float:
        """When there is next something to say, or to be closed."""
        if not self.claims and not self.releases:
            return self.used_at + _KEPT_SECONDS
        return max(self.retry_at, 0.0 if self.fresh or self.releases else self.renew_at)

    def track_claim(self, claim: LeaseClaim, every: float, now: float) -> None:
        """Renew a claim at once, and from then on."""
        if claim not in self.claims:
            self.claims[claim] = None
            self.fresh.append(claim)
        self.every = min(self.every, every)
        self.renew_at = min(self.renew_at, now + self.every)

    def release_claim(self, claim: LeaseClaim, outcome: Outcome) -> None:
        """Release a claim, and renew it no more."""
        self.claims.pop(claim, None)
        self.releases.append(_Released(claim, outcome))
        if not self.claims:
            self.every = self.renew_at = math.inf

    def take_work(self, now: float) -> tuple[list[LeaseClaim], list[_Released]]:
        """Return the claims to renew and those to release by now."""
        claims = [claim for claim in self.fresh if claim in self.claims]
        releases = self.releases
        self.fresh, self.releases = [], []
        if self.renew_at <= now:
            claims = list(self.claims)
            self.renew_at = now + self.every
        return claims, releases

    def note_states(self, claims: Sequence[LeaseClaim], states: Sequence[LeaseState]) -> None:
        """Take what P says of claims."""
        for claim, state in zip(claims, states, strict=True):
            if claim in self.claims:
                self.claims[claim] = state


class LeaseRenewer:
    """Renews and releases the claims of a decode engine.

    Each conversation is held by one thread at a time, from the first question to the last answer; threads begin when
    there is something to say, and take the next conversation that is due::

        track, release --> _Session of P1 ---.            .--> thread: renew, release, wait for P1
                           _Session of P2 ----+- due -> _next_session --> thread: ...
                           _Session of P3 ---'            (prompt ones first)

    There are at most `max_peers` threads. More engines than that are served in turns. Engines that never answered, or
    were slow, cannot have all of them: however many such a stranger's parameters name, others are renewed in time.
    """

    def __init__(self, *, timeout: float, max_peers: int, secrets: Secrets, counters: Counters) -> None:
        """Start without threads.

        Args:
            timeout: seconds to wait for an answer.
            max_peers: engines to talk to at a time.
            secrets: of this engine.
            counters: count threads that begin again.
        """
        self._counters = counters
        self._timeout = timeout
        self._secrets = secrets
        self._max_threads = max(2, max_peers)
        self._max_unknown_peers = int(self._max_threads * _UNKNOWN_PEER_SHARE)
        self._changed = threading.Condition()
        self._sessions: dict[Address, _Session] = {}
        self._responsive: OrderedDict[Address, None] = OrderedDict()
        """Engines that were prompt when they were last asked."""
        self._threads: list[SupervisedThread] = []
        self._running = 0
        self._idle = 0
        """Threads that wait until a conversation is due."""
        self._closing = False

    def track_claim(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim from now on, `every` so many seconds."""
        with self._changed:
            self._session(address).track_claim(claim, every, time.monotonic())
            self._wake()

    def is_held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P held what is tracked when it was last asked; None as long as it has not answered."""
        with self._changed:
            session = self._sessions.get(address)
            state = None if session is None else session.claims.get(claim)
        return None if state is None else state is LeaseState.HELD

    def release_claim(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Tell P that a claim is not needed any more, and why; stop to renew it."""
        with self._changed:
            self._session(address).release_claim(claim, outcome)
            self._wake()

    def close(self) -> None:
        """Stop; what was not sent is left to the leases, which end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._threads)
            idle = [session for session in self._sessions.values() if not session.busy]
        for session in idle:
            _disconnect(session)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --- threads -------------------------------------------------------------------------------------------

    def _session(self, address: Address) -> _Session:
        session = self._sessions.get(address)
        if session is None:
            self._make_room()
            session = self._sessions[address] = _Session(address)
        session.used_at = time.monotonic()
        return session

    def _make_room(self) -> None:
        """Give a conversation up if there are too many, one that has nothing to renew if possible; lock held."""
        if len(self._sessions) < max(_MAX_SESSIONS, 4 * self._max_threads):
            return
        unknown = (
            session
            for session in self._sessions.values()
            if not session.busy and session.address not in self._responsive
        )
        evicted = min(unknown, key=lambda session: bool(session.claims), default=None)
        if evicted is not None:
            del self._sessions[evicted.address]
            _disconnect(evicted)
            if number := len(evicted.claims) + len(evicted.releases):
                self._counters.count("forgotten_leases", number)
                peer_log.logger.warning(
                    "kvhma: %d leases at %s are neither renewed nor released any more: it has not answered yet, and "
                    "there are leases at %d other engines",
                    number,
                    evicted.address,
                    len(self._sessions),
                )

    def _wake(self) -> None:
        """Have a thread look for what is due; the lock is held."""
        self._changed.notify()
        if not self._idle and self._running < self._max_threads and not self._closing:
            self._running += 1
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(SupervisedThread("kvhma-lease-renewer", self._run, self._counters))

    def _run(self) -> None:
        while (session := self._next_session()) is not None:
            try:
                self._talk(session)
            finally:
                with self._changed:
                    session.busy = False
                    closing = self._closing
                if closing:
                    _disconnect(session)

    def _next_session(self) -> _Session | None:
        """Wait for a conversation that is due, and return it; None for the thread's end."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                session = self._choose_session(now)
                if session is not None:
                    session.busy = True
                    if any(not session.busy for session in self._sessions.values()):
                        self._wake()  # somebody has to wait for the others
                    return session
                if now - idle_since > _KEPT_SECONDS and (self._idle or not self._sessions):
                    break
                self._idle += 1
                try:
                    self._changed.wait(self._pause(now))
                finally:
                    self._idle -= 1
            self._running -= 1
        return None

    def _choose_session(self, now: float) -> _Session | None:
        """Return what is due: prompt engines first, then those that were never tried, then those that failed."""
        unknown = sum(session.busy and session.address not in self._responsive for session in self._sessions.values())
        due = [
            session
            for session in self._sessions.values()
            if not session.busy
            and session.due_at <= now
            and (session.address in self._responsive or unknown < self._max_unknown_peers)
        ]
        return min(due, key=lambda session: (session.address not in self._responsive, session.due_at), default=None)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next conversation is due, at most those that a thread is kept for nothing."""
        due = [session.due_at for session in self._sessions.values() if not session.busy and session.due_at > now]
        return min(min(due, default=math.inf) - now, _KEPT_SECONDS)

    # --- one conversation, in its thread -------------------------------------------------------------------

    def _talk(self, session: _Session) -> None:
        """Say what is to be said, and wait for the answers."""
        begun = time.monotonic()
        with self._changed:
            claims, releases = session.take_work(begun)
            ended = not (releases or session.claims)
            if ended:
                del self._sessions[session.address]
        if ended:
            _disconnect(session)
            return
        unsent = list(releases)
        try:
            for chunk in _chunks(claims):
                self._renew_claims(session, chunk)
            for outcome, released in groupby(releases, key=lambda release: release.outcome):
                for part in _chunks(list(released)):
                    self._ask(session, Release([write_claim(release.claim) for release in part], outcome), Done)
                    del unsent[: len(part)]
        except HandshakeError as error:
            _disconnect(session)
            self._note_end(session, begun, error, unsent)
        else:
            self._note_end(session, begun, None)

    def _renew_claims(self, session: _Session, claims: list[LeaseClaim]) -> None:
        answer = self._ask(session, Renew([write_claim(claim) for claim in claims]), Leases)
        if len(answer.states) != len(claims):
            raise HandshakeError(f"{len(claims)} claims, {len(answer.states)} answers")
        with self._changed:
            session.note_states(claims, answer.states)

    def _ask(self, session: _Session, question: Renew | Release, kind: type[AnswerT]) -> AnswerT:
        """Ask over the connection, or over a new one if P has ended that, as it does with those that are not used."""
        if session.client is not None and session.client.context is not self._secrets.client_context():
            _disconnect(session)  # whoever is there may have shown a secret that was taken back since
        if session.client is not None:
            begun = time.monotonic()
            try:
                return session.client.ask(question, kind)
            except HandshakeError:
                _disconnect(session)
                if time.monotonic() - begun >= self._timeout:
                    raise
        # A name may stand for another host by now.
        session.client = Client(resolve(session.address, self._timeout), self._timeout, self._secrets)
        return session.client.ask(question, kind)

    def _note_end(
        self, session: _Session, begun: float, error: HandshakeError | None, unsent: Sequence[_Released] = ()
    ) -> None:
        """Take note of how a conversation went, and what is `unsent`: late engines wait behind prompt ones."""
        now = time.monotonic()
        with self._changed:
            session.used_at = now
            was_responsive = session.address in self._responsive
            self._responsive.pop(session.address, None)
            if error is None and now - begun <= _RESPONSIVE_SECONDS:
                self._responsive[session.address] = None
                if len(self._responsive) > _MAX_KNOWN:
                    self._responsive.popitem(last=False)
            if error is not None:
                session.retry_at = now + (min(self._timeout, session.every) if was_responsive else self._timeout)
                session.renew_at = 0.0 if session.claims else math.inf
                session.releases[:0] = [release._replace(again=True) for release in unsent if not release.again]
            first_failure = error is not None and not session.failed
            session.failed = error is not None
        if first_failure:
            peer_log.logger.warning("kvhma: leases at %s are not renewed: %s", session.address, error)


def _disconnect(session: _Session) -> None:
    if session.client is not None:
        session.client.close()
    session.client = None


def _chunks(items: list[ItemT]) -> Iterator[list[ItemT]]:
    """Return claims in messages that are not too long."""
    for first in range(0, len(items), MAX_CLAIMS):
        yield items[first : first + MAX_CLAIMS]
