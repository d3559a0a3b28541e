# SPDX-License-Identifier: Apache-2.0
"""D's side of the leases: the thread of `Peers` renews and releases claims, so that the engine's steps never wait.

It renews only while the engine makes progress: a paused engine holds P's blocks for one lease more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

from kvhma.errors import HandshakeError
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.peers import Call, Peers
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import MAX_CLAIMS, Done, Leases, LeaseState, Outcome, Release, Renew, write_claim
from kvhma.vllm.wire.params import Address, LeaseClaim

_KEPT_SECONDS = 60.0
"""How long a session without claims stays."""

_CLOSE_SECONDS = 1.0
"""How long :meth:`LeaseRenewer.close` waits for replies."""

_MAX_SESSIONS = 1024
"""Bound of the sessions; beyond it a new session replaces the oldest one whose last message failed, if there is one.

With more sessions the choice would take longer, under a lock for which the engine's steps wait.
"""


class _Released(NamedTuple):
    """A claim that D no longer needs.

    Attributes:
        claim: the claim.
        outcome: why D releases it.
        again: whether D has asked P before, and P has not replied. D does not ask a third time: the lease ends.
    """

    claim: LeaseClaim
    outcome: Outcome
    again: bool = False


@dataclass(frozen=True)
class _Message:
    """What D sends in one message: claims to renew, or claims to release for one reason."""

    renewed: tuple[LeaseClaim, ...] = ()
    released: tuple[_Released, ...] = ()

    def question(self) -> tuple[Renew | Release, type[Leases] | type[Done]]:
        """Return the question, and the kind of its answer."""
        if self.renewed:
            return Renew([write_claim(claim) for claim in self.renewed]), Leases
        return Release([write_claim(release.claim) for release in self.released], self.released[0].outcome), Done


class _Session:
    """The session with one prefill engine: one message at a time. The renewer's lock guards it.

    Attributes:
        address: where the engine's scheduler listens.
        claims: claims to renew, and the state that P last reported of each; None before its first reply.
        fresh: claims to renew at once.
        releases: claims to release.
        every: seconds between renewals.
        renew_at: when all claims are renewed next, on the monotonic clock; so are the other times.
        retry_at: D sends nothing before this time, since the last attempt failed.
        used_at: when there was last something to send.
        message: without a reply; None if D waits for none.
        call: the question with this message; None before D has asked it.
        has_replied: whether P has replied to the last message.
        failed: whether the last attempt failed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.claims: dict[LeaseClaim, LeaseState | None] = {}
        self.fresh: dict[LeaseClaim, None] = {}
        self.releases: list[_Released] = []
        self.every = self.renew_at = math.inf
        self.retry_at = self.used_at = 0.0
        self.message: _Message | None = None
        self.call: Call[Any] | None = None
        self.has_replied = False
        self.failed = False

    @property
    def due_at(self) -> float:
        """When there is next something to send, or the session is to be closed."""
        if self.message is not None:
            return math.inf
        if not self.claims and not self.releases:
            return self.used_at + _KEPT_SECONDS
        return max(self.retry_at, 0.0 if self.fresh or self.releases else self.renew_at)

    @property
    def has_releases(self) -> bool:
        """Whether a release has no reply yet."""
        return bool(self.releases or (self.message is not None and self.message.released))

    def track_claim(self, claim: LeaseClaim, every: float, now: float) -> None:
        """Renew a claim at once, and regularly from then on."""
        if claim not in self.claims:
            self.claims[claim] = None
            self.fresh[claim] = None
        self.every = min(self.every, every)
        self.renew_at = min(self.renew_at, now + self.every)

    def release_claim(self, claim: LeaseClaim, outcome: Outcome) -> None:
        """Release a claim, and stop renewing it."""
        self.claims.pop(claim, None)
        self.fresh.pop(claim, None)
        self.releases.append(_Released(claim, outcome))
        if not self.claims:
            self.every = self.renew_at = math.inf

    def take_message(self, now: float, makes_progress: Callable[[float], bool]) -> _Message | None:
        """Return the next message, which has no reply from now on; None if there is nothing to send."""
        if self.renew_at <= now:
            if makes_progress(self.every):
                self.fresh = dict.fromkeys(self.claims)
            self.renew_at = now + self.every
        if self.fresh:
            renewed = tuple(islice(self.fresh, MAX_CLAIMS))
            for claim in renewed:
                del self.fresh[claim]
            self.message = _Message(renewed=renewed)
        elif self.releases:
            outcome = self.releases[0].outcome
            released = tuple(takewhile(lambda release: release.outcome is outcome, self.releases[:MAX_CLAIMS]))
            del self.releases[: len(released)]
            self.message = _Message(released=released)
        return self.message

    def note_reply(self, message: _Message, reply: Leases | Done) -> None:
        """Note the states that P reports of claims.

        Raises:
            HandshakeError: P reports of more or fewer claims.
        """
        states = reply.states if isinstance(reply, Leases) else []
        if len(states) != len(message.renewed):
            raise HandshakeError(f"P sent {len(states)} lease states for {len(message.renewed)} claims")
        self.has_replied, self.failed = True, False
        for claim, state in zip(message.renewed, states, strict=True):
            if claim in self.claims:
                self.claims[claim] = state

    def note_failure(self, message: _Message, now: float, pause: float) -> None:
        """Send a message again after a pause, or sooner if P has replied to the last one."""
        self.retry_at = now + (min(pause, self.every) if self.has_replied else pause)
        self.has_replied, self.failed = False, True
        self.renew_at = 0.0 if self.claims else math.inf
        self.releases[:0] = [release._replace(again=True) for release in message.released if not release.again]


class LeaseRenewer:
    """Renews and releases the claims of a decode engine.

    Each session sends one message at a time, so D renews and releases in order::

        track_claim,   --> _Session of P1 --> _Message --> Peers.ask --> reply
        release_claim      _Session of P2 --> ...
    """

    def __init__(self, peers: Peers, counters: Counters, makes_progress: Callable[[float], bool]) -> None:
        """Start without sessions.

        Args:
            peers: ask P. Their thread sends messages and takes replies.
            counters: count the leases that D abandons.
            makes_progress: returns whether the engine has made progress within some seconds; if not, no claim is
                renewed.
        """
        self._makes_progress = makes_progress
        self._peers = peers
        self._counters = counters
        self._changed = threading.Condition()
        self._sessions: dict[Address, _Session] = {}

    def track_claim(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim at once, and then `every` so many seconds."""
        with self._changed:
            evicted = self._make_room(address)
            self._session(address).track_claim(claim, every, time.monotonic())
        self._end_session(evicted)
        self._peers.run_task(self._advance)

    def is_held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P reported the claim as held in its last reply; None before its first reply."""
        with self._changed:
            session = self._sessions.get(address)
            state = None if session is None else session.claims.get(claim)
        return None if state is None else state is LeaseState.HELD

    def release_claim(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Notify P that D no longer needs a claim, and why; stop renewing it."""
        with self._changed:
            evicted = self._make_room(address)
            self._session(address).release_claim(claim, outcome)
        self._end_session(evicted)
        self._peers.run_task(self._advance)

    def close(self) -> None:
        """Wait a moment until all releases have replies. Claims whose release was not sent end with their leases."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(session.has_releases for session in self._sessions.values()), _CLOSE_SECONDS
            )

    def _session(self, address: Address) -> _Session:
        session = self._sessions.setdefault(address, _Session(address))
        session.used_at = time.monotonic()
        return session

    def _make_room(self, address: Address) -> _Session | None:
        """Evict a session if there are too many, if possible one without claims to renew; the lock is held."""
        if address in self._sessions or len(self._sessions) < _MAX_SESSIONS:
            return None
        unknown = (session for session in self._sessions.values() if not session.has_replied)
        evicted = min(unknown, key=lambda session: bool(session.claims), default=None)
        if evicted is not None:
            del self._sessions[evicted.address]
        return evicted

    def _end_session(self, evicted: _Session | None) -> None:
        """Stop an evicted session; the lock is not held."""
        if evicted is None:
            return
        if evicted.call is not None:
            self._peers.cancel(evicted.call)
        message = evicted.message or _Message()
        number = len(evicted.claims) + len(evicted.releases) + len(message.released)
        if number:
            self._counters.count("abandoned_leases", number)
            peer_log.logger.warning(
                "kvhma: D stops renewing and releasing %d leases at %s: it has not replied in time, and there are "
                "leases at %d other engines",
                number,
                evicted.address,
                len(self._sessions) - 1,
            )

    # --- the thread ----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> float:
        """Send each session's message that is due; return when the next one is."""
        with self._changed:
            due = [session for session in self._sessions.values() if session.due_at <= now]
        for session in due:
            self._send(session)
        with self._changed:
            return min((session.due_at for session in self._sessions.values()), default=math.inf)

    def _send(self, session: _Session) -> None:
        """Send the next message, or end a session that has nothing to do."""
        with self._changed:
            if self._sessions.get(session.address) is not session or session.due_at > time.monotonic():
                return
            message = session.take_message(time.monotonic(), self._makes_progress)
            if message is None:
                if not session.claims:
                    del self._sessions[session.address]
                return
        question, kind = message.question()
        session.call = self._peers.ask(session.address, question, kind)
        session.call.add_done_callback(partial(self._on_end, session, message))

    def _on_end(self, session: _Session, message: _Message, call: Future[Leases | Done]) -> None:
        """Note a reply, or an error; send the next message."""
        error = None if call.cancelled() else call.exception()
        with self._changed:
            session.message = session.call = None
            session.used_at = now = time.monotonic()
            if error is None and not call.cancelled():
                try:
                    session.note_reply(message, call.result())
                except HandshakeError as wrong:
                    error = wrong
            first_failure = error is not None and not session.failed
            if error is not None:
                session.note_failure(message, now, self._peers.timeout)
            self._changed.notify_all()
        if first_failure:
            peer_log.logger.warning("kvhma: cannot renew leases at %s, retrying: %s", session.address, error)
        self._send(session)
        self._peers.run_task(self._advance, at=session.due_at)
