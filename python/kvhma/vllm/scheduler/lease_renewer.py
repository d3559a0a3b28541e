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

_PROMPT_SECONDS = 1.0
"""An engine is prompt if the last conversation with it took no longer."""

_CLOSE_SECONDS = 1.0
"""How long the end of the engine waits for conversations."""

_STRANGERS_SHARE = 3 / 4
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

    def track(self, claim: LeaseClaim, every: float, now: float) -> None:
        """Renew a claim at once, and from then on."""
        if claim not in self.claims:
            self.claims[claim] = None
            self.fresh.append(claim)
        self.every = min(self.every, every)
        self.renew_at = min(self.renew_at, now + self.every)

    def release(self, claim: LeaseClaim, outcome: Outcome) -> None:
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

    def note(self, claims: Sequence[LeaseClaim], states: Sequence[LeaseState]) -> None:
        """Take what P says of claims."""
        for claim, state in zip(claims, states, strict=True):
            if claim in self.claims:
                self.claims[claim] = state


class LeaseRenewer:
    """Renews and releases the claims of a decode engine.

    Each conversation is held by one thread at a time, from the first question to the last answer; threads begin when
    there is something to say, and take the next conversation that is due::

        track, release --> _Session of P1 ---.            .--> thread: renew, release, wait for P1
                           _Session of P2 ----+- due -> _next --> thread: ...
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
        self._max_strangers = int(self._max_threads * _STRANGERS_SHARE)
        self._changed = threading.Condition()
        self._sessions: dict[Address, _Session] = {}
        self._prompt: OrderedDict[Address, None] = OrderedDict()
        """Engines that were prompt when they were last asked."""
        self._threads: list[SupervisedThread] = []
        self._running = 0
        self._idle = 0
        """Threads that wait until a conversation is due."""
        self._closing = False

    def track(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim from now on, `every` so many seconds."""
        with self._changed:
            self._session(address).track(claim, every, time.monotonic())
            self._wake()

    def held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P held what is tracked when it was last asked; None as long as it has not answered."""
        with self._changed:
            session = self._sessions.get(address)
            state = None if session is None else session.claims.get(claim)
        return None if state is None else state is LeaseState.HELD

    def release(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Tell P that a claim is not needed any more, and why; stop to renew it."""
        with self._changed:
            self._session(address).release(claim, outcome)
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
        strangers = (one for one in self._sessions.values() if not one.busy and one.address not in self._prompt)
        given_up = min(strangers, key=lambda one: bool(one.claims), default=None)
        if given_up is not None:
            del self._sessions[given_up.address]
            _disconnect(given_up)
            if number := len(given_up.claims) + len(given_up.releases):
                self._counters.count("abandoned_leases", number)
                peer_log.logger.warning(
                    "kvhma: %d leases at %s are neither renewed nor released any more: it has not answered yet, and "
                    "there are leases at %d other engines",
                    number,
                    given_up.address,
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
        while (session := self._next()) is not None:
            try:
                self._talk(session)
            finally:
                with self._changed:
                    session.busy = False
                    closing = self._closing
                if closing:
                    _disconnect(session)

    def _next(self) -> _Session | None:
        """Wait for a conversation that is due, and return it; None for the thread's end."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                session = self._choose(now)
                if session is not None:
                    session.busy = True
                    if any(not other.busy for other in self._sessions.values()):
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

    def _choose(self, now: float) -> _Session | None:
        """Return what is due: prompt engines first, then those that were never tried, then those that failed."""
        strangers = sum(one.busy and one.address not in self._prompt for one in self._sessions.values())
        due = [
            one
            for one in self._sessions.values()
            if not one.busy and one.due_at <= now and (one.address in self._prompt or strangers < self._max_strangers)
        ]
        return min(due, key=lambda one: (one.address not in self._prompt, one.due_at), default=None)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next conversation is due, at most those that a thread is kept for nothing."""
        due = [one.due_at for one in self._sessions.values() if not one.busy and one.due_at > now]
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
        unsaid = list(releases)
        try:
            for some in _chunks(claims):
                self._renew(session, some)
            for outcome, released in groupby(releases, key=lambda release: release.outcome):
                for others in _chunks(list(released)):
                    self._ask(session, Release([write_claim(one.claim) for one in others], outcome), Done)
                    del unsaid[: len(others)]
        except HandshakeError as error:
            _disconnect(session)
            self._note_end(session, begun, error, unsaid)
        else:
            self._note_end(session, begun, None)

    def _renew(self, session: _Session, claims: list[LeaseClaim]) -> None:
        answer = self._ask(session, Renew([write_claim(claim) for claim in claims]), Leases)
        if len(answer.states) != len(claims):
            raise HandshakeError(f"{len(claims)} claims, {len(answer.states)} answers")
        with self._changed:
            session.note(claims, answer.states)

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
        self, session: _Session, begun: float, error: HandshakeError | None, unsaid: Sequence[_Released] = ()
    ) -> None:
        """Take note of how a conversation went, and what is `unsaid`: late engines wait behind prompt ones."""
        now = time.monotonic()
        with self._changed:
            session.used_at = now
            was_prompt = session.address in self._prompt
            self._prompt.pop(session.address, None)
            if error is None and now - begun <= _PROMPT_SECONDS:
                self._prompt[session.address] = None
                if len(self._prompt) > _MAX_KNOWN:
                    self._prompt.popitem(last=False)
            if error is not None:
                session.retry_at = now + (min(self._timeout, session.every) if was_prompt else self._timeout)
                session.renew_at = 0.0 if session.claims else math.inf
                session.releases[:0] = [one._replace(again=True) for one in unsaid if not one.again]
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
