# SPDX-License-Identifier: Apache-2.0
"""D's side of the leases: threads renew and release claims, so that the engine's steps never wait for P."""

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
"""How long an idle connection, and an idle thread, stays."""

_RESPONSIVE_SECONDS = 1.0
"""An engine is responsive if the last exchange with it took no longer."""

_CLOSE_SECONDS = 1.0
"""How long :meth:`LeaseRenewer.close` waits for exchanges in progress."""

_UNKNOWN_PEER_SHARE = 3 / 4
"""Share of the threads that may wait at a time for unknown peers: engines that are not known to be responsive."""

_MAX_KNOWN = 4096
"""At most so many engines are remembered as responsive."""

_MAX_SESSIONS = 1024
"""Bound of the sessions; beyond it a new session replaces the oldest one with an unknown peer.

With more sessions the choice would take longer, under a lock for which the engine's steps wait.
"""

AnswerT = TypeVar("AnswerT", Leases, Done)
ItemT = TypeVar("ItemT")


class _Released(NamedTuple):
    """A claim that D no longer needs.

    Attributes:
        claim: the claim.
        outcome: why D releases it.
        again: whether D has sent it before, and P has not replied. D does not send it a third time: the lease ends.
    """

    claim: LeaseClaim
    outcome: Outcome
    again: bool = False


class _Session:
    """The session with one prefill engine. The renewer's lock guards it, except for the client.

    Attributes:
        address: where the engine's scheduler listens.
        claims: claims to renew, and the state that P last reported of each; None before its first reply.
        fresh: claims that were never renewed.
        releases: claims to release.
        every: seconds between renewals.
        renew_at: when all claims are renewed next, on the monotonic clock; so are the other times.
        retry_at: D sends nothing before this time, since the last attempt failed.
        used_at: when there was last something to send.
        busy: whether a thread uses the session; only that thread uses the client.
        client: the connection; None if D is not connected.
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
        """When there is next something to send, or the session is to be closed."""
        if not self.claims and not self.releases:
            return self.used_at + _KEPT_SECONDS
        return max(self.retry_at, 0.0 if self.fresh or self.releases else self.renew_at)

    def track_claim(self, claim: LeaseClaim, every: float, now: float) -> None:
        """Renew a claim at once, and regularly from then on."""
        if claim not in self.claims:
            self.claims[claim] = None
            self.fresh.append(claim)
        self.every = min(self.every, every)
        self.renew_at = min(self.renew_at, now + self.every)

    def release_claim(self, claim: LeaseClaim, outcome: Outcome) -> None:
        """Release a claim, and stop renewing it."""
        self.claims.pop(claim, None)
        self.releases.append(_Released(claim, outcome))
        if not self.claims:
            self.every = self.renew_at = math.inf

    def take_work(self, now: float) -> tuple[list[LeaseClaim], list[_Released]]:
        """Return the claims to renew now, and those to release."""
        claims = [claim for claim in self.fresh if claim in self.claims]
        releases = self.releases
        self.fresh, self.releases = [], []
        if self.renew_at <= now:
            claims = list(self.claims)
            self.renew_at = now + self.every
        return claims, releases

    def note_states(self, claims: Sequence[LeaseClaim], states: Sequence[LeaseState]) -> None:
        """Note the states that P reports of claims."""
        for claim, state in zip(claims, states, strict=True):
            if claim in self.claims:
                self.claims[claim] = state


class LeaseRenewer:
    """Renews and releases the claims of a decode engine.

    One thread at a time uses a session, from the first question to the last reply. Threads start when there is
    something to send, and take the next session that is due::

        track_claim,   --> _Session of P1 ---.                    .--> thread: renew, release, wait for P1
        release_claim      _Session of P2 ----+- _next_session ---+--> thread: ...
                           _Session of P3 ---'    (responsive engines first)

    There are at most `max_peers` threads. If there are more engines, they take turns. Unknown peers, which never
    replied or were slow, cannot use all threads. So even if a client's parameters name many of them, D renews the
    leases at responsive engines in time.
    """

    def __init__(self, *, timeout: float, max_peers: int, secrets: Secrets, counters: Counters) -> None:
        """Start without threads.

        Args:
            timeout: seconds to wait for a reply.
            max_peers: the most threads, and so engines that D asks at a time.
            secrets: of this engine.
            counters: count restarts of threads.
        """
        self._counters = counters
        self._timeout = timeout
        self._secrets = secrets
        self._max_threads = max(2, max_peers)
        self._max_unknown_peers = int(self._max_threads * _UNKNOWN_PEER_SHARE)
        self._changed = threading.Condition()
        self._sessions: dict[Address, _Session] = {}
        self._responsive: OrderedDict[Address, None] = OrderedDict()
        """Engines whose last exchange was fast enough, the oldest first."""
        self._threads: list[SupervisedThread] = []
        self._running = 0
        self._idle = 0
        """Threads that wait until a session is due."""
        self._closing = False

    def track_claim(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim at once, and then `every` so many seconds."""
        with self._changed:
            self._session(address).track_claim(claim, every, time.monotonic())
            self._wake()

    def is_held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P reported the claim as held in its last reply; None before its first reply."""
        with self._changed:
            session = self._sessions.get(address)
            state = None if session is None else session.claims.get(claim)
        return None if state is None else state is LeaseState.HELD

    def release_claim(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Notify P that D no longer needs a claim, and why; stop renewing it."""
        with self._changed:
            self._session(address).release_claim(claim, outcome)
            self._wake()

    def close(self) -> None:
        """Stop the threads. Claims whose release was not sent end with their leases."""
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
        """Evict a session if there are too many, if possible one without claims to renew; the lock is held."""
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
                self._counters.count("abandoned_leases", number)
                peer_log.logger.warning(
                    "kvhma: D stops renewing and releasing %d leases at %s: it has not replied in time, and there are "
                    "leases at %d other engines",
                    number,
                    evicted.address,
                    len(self._sessions),
                )

    def _wake(self) -> None:
        """Wake or start a thread that looks for a due session; the lock is held."""
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
        """Wait for a session that is due, and return it; None if the thread must end."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                session = self._choose_session(now)
                if session is not None:
                    session.busy = True
                    if any(not session.busy for session in self._sessions.values()):
                        self._wake()  # another thread must wait for the other sessions
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
        """Return a due session: responsive engines first, then those never tried, then those that failed."""
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
        """Return the seconds until the next session is due, at most those after which an idle thread ends."""
        due = [session.due_at for session in self._sessions.values() if not session.busy and session.due_at > now]
        return min(min(due, default=math.inf) - now, _KEPT_SECONDS)

    # --- one session, in its thread ------------------------------------------------------------------------

    def _talk(self, session: _Session) -> None:
        """Send renewals and releases, and wait for the replies."""
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
            raise HandshakeError(f"P sent {len(answer.states)} lease states for {len(claims)} claims")
        with self._changed:
            session.note_states(claims, answer.states)

    def _ask(self, session: _Session, question: Renew | Release, kind: type[AnswerT]) -> AnswerT:
        """Ask over the connection, or over a new one if P has closed it, as P does with idle connections."""
        if session.client is not None and session.client.context is not self._secrets.client_context():
            _disconnect(session)  # the peer may have authenticated with a secret that was revoked since
        if session.client is not None:
            begun = time.monotonic()
            try:
                return session.client.ask(question, kind)
            except HandshakeError:
                _disconnect(session)
                if time.monotonic() - begun >= self._timeout:
                    raise
        # The name may resolve to another host by now.
        session.client = Client(resolve(session.address, self._timeout), self._timeout, self._secrets)
        return session.client.ask(question, kind)

    def _note_end(
        self, session: _Session, begun: float, error: HandshakeError | None, unsent: Sequence[_Released] = ()
    ) -> None:
        """Note how an exchange went, and which releases are `unsent`; the peer becomes responsive or unknown."""
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
            peer_log.logger.warning("kvhma: cannot renew leases at %s, retrying: %s", session.address, error)


def _disconnect(session: _Session) -> None:
    if session.client is not None:
        session.client.close()
    session.client = None


def _chunks(items: list[ItemT]) -> Iterator[list[ItemT]]:
    """Yield parts that fit in one message each."""
    for first in range(0, len(items), MAX_CLAIMS):
        yield items[first : first + MAX_CLAIMS]
