# SPDX-License-Identifier: Apache-2.0
"""Who may read what for how long: the ledger of a prefill engine, and the courier of a decode engine.

P keeps a finished request's blocks until they have been read and no reader of them is left, or until its lease ends.
Whether they are still held is one fact in one place, the ledger; the workers are told to report a request as sent only
when it is struck off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from kvhma.errors import HandshakeError, LeaseEndedError, LeaseUnknownError
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey, new_nonce
from kvhma.vllm.wire.side_channel import (
    MAX_CLAIMS,
    ClaimForm,
    Client,
    ClientPool,
    Leases,
    Outcome,
    Question,
    Release,
    Renew,
    look_up,
    open_client,
    printable,
    read_answer,
    write_claim,
)

logger = logging.getLogger("vllm.kvhma")


MAX_READERS = 64
"""Readers that a request may have at a time; samples of one prompt are some ten."""

SIBLING_SECONDS = 2.0
"""How long blocks that one of several siblings has read are kept for those that have not claimed them yet."""

_NOBODY_SAYS = "nobody says whether the blocks were held while they were read"


@dataclass(slots=True)
class _Held:
    """A request that is kept.

    Attributes:
        expires: when its lease ends.
        readers: who has claimed it and not released it yet, and until when that counts without another sign of it.
        read: whether anybody is done with it.
        siblings_until: until when it is kept for readers that have not claimed it yet, once it has been read.
    """

    expires: float
    readers: dict[int, float] = field(default_factory=dict)
    read: bool = False
    siblings_until: float = 0.0


class LeaseTable:
    """Requests whose blocks are kept for their readers. Safe to use from several threads.

    Times are seconds of :func:`time.monotonic` in this process, which is P's clock.
    """

    def __init__(self, lease: float) -> None:
        """Start empty; `lease` is how long a sign of a reader lasts, in seconds."""
        self._lease = lease
        self._lock = threading.Lock()
        self._held: dict[LeaseKey, _Held] = {}
        self._released: list[str] = []
        self._expired: list[str] = []

    def hold(self, request_id: str) -> LeaseKey:
        """Hold a request that has finished."""
        hold = LeaseKey(request_id, new_nonce())
        with self._lock:
            self._held[hold] = _Held(time.monotonic() + self._lease)
        return hold

    def renew(self, claims: list[LeaseClaim]) -> list[float | None]:
        """Extend leases; return when each ends now, None for one that is not held (or has too many readers)."""
        now = time.monotonic()
        answer: list[float | None] = []
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.hold)
                # One that has run out is as good as struck off: the next step will do it.
                if held is None or held.expires <= now or not self._admit(held, claim.reader, now):
                    answer.append(None)
                    continue
                held.readers[claim.reader] = held.expires = now + self._lease
                answer.append(held.expires)
        return answer

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Take readers off requests; those that are not held are passed over.

        Blocks go back once somebody has read them and no reader is left. Blocks that nobody could read stay for their
        lease, so that another engine can be given the same parameters.
        """
        now = time.monotonic()
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.hold)
                if held is None:
                    continue
                held.readers.pop(claim.reader, None)
                if outcome is not Outcome.UNREAD:
                    held.read = True
                if outcome is Outcome.READ_BY_SIBLING:
                    held.siblings_until = now + SIBLING_SECONDS
                if held.read:
                    held.expires = min(held.expires, max(now, held.siblings_until, *held.readers.values()))
                if held.expires <= now:
                    self._end(claim.hold)

    @staticmethod
    def _admit(held: _Held, reader: int, now: float) -> bool:
        if reader not in held.readers and len(held.readers) >= MAX_READERS:
            held.readers = {one: until for one, until in held.readers.items() if until > now}
        return reader in held.readers or len(held.readers) < MAX_READERS

    def _end(self, hold: LeaseKey) -> None:
        held = self._held.pop(hold)
        (self._released if held.read else self._expired).append(hold.request_id)

    def drain_ended(self) -> tuple[list[str], list[str]]:
        """Return the requests that were read and those whose lease ended unread since the last call, each once."""
        now = time.monotonic()
        with self._lock:
            for hold in [hold for hold, held in self._held.items() if held.expires <= now]:
                self._end(hold)
            released, self._released = self._released, []
            expired, self._expired = self._expired, []
        return released, expired

    def __len__(self) -> int:
        return len(self._held)


class _RenewCall:
    """One question to P for some claims, shared by their leases: do you hold these for us, and how long?"""

    def __init__(self, lines: ClientPool, claims: Sequence[LeaseClaim]) -> None:
        self.asked = time.monotonic()
        self._lines = lines
        self._users = len(claims)
        self._claims = len(claims)
        self._answer: Leases | None = None
        self._error: LeaseUnknownError | None = None
        self._client: Client | None = lines.send(Renew([write_claim(claim) for claim in claims]))

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        return None if self._client is None else self._client.socket

    def answer(self) -> Leases | None:
        """Return the answer, None if it is not here yet; raise LeaseUnknownError if it is none."""
        if self._client is not None and self._client.answered():
            try:
                self._answer = self._read(self._client)
            except HandshakeError as error:
                self._error = LeaseUnknownError(f"{_NOBODY_SAYS}: {error}")
            self._hang_up()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answer

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._hang_up()

    def _read(self, client: Client) -> Leases:
        answer = client.receive(Leases, "Renew", 0)
        if len(answer.expires) != self._claims:
            raise HandshakeError(f"{self._claims} claims, {len(answer.expires)} answers")
        return answer

    def _hang_up(self) -> None:
        if self._client is not None:
            self._lines.give_back(self._client)
            self._client = None


class Lease:
    """The lease under which one load reads. P is asked when the read begins, and has answered when it ends.

    Leases of one :func:`claim_all` share its question and belong to one thread at a time.

    Attributes:
        fences: questions that had to be asked after the read.
    """

    def __init__(
        self, lines: ClientPool, claim: LeaseClaim, inquiry: _RenewCall, index: int, timeout: float, margin: float
    ) -> None:
        """Take over the place of a claim in an inquiry; :func:`claim_all` calls it."""
        self._lines = lines
        self._claim = claim
        self._inquiry = inquiry
        self._index = index
        self._timeout = timeout
        self._margin = margin
        self.fences = 0

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable once P has answered; None if it has."""
        return self._inquiry.socket

    def close(self) -> None:
        """Wait for no answer any more."""
        self._inquiry.leave()

    def covers(self, ended: float) -> bool | None:
        """Whether the blocks were held until the read ended at `ended`, by our clock; None if it is not known yet.

        An answer that came in time costs nothing. One that says the end was near is followed by a second question:
        asked after the read, it needs no clock.

        Raises:
            LeaseEndedError: they were not.
            LeaseUnknownError: nobody says so in time.
        """
        asked = self._inquiry.asked
        answer = self._inquiry.answer()
        if answer is None:
            if time.monotonic() - max(asked, ended) > self._timeout:
                raise LeaseUnknownError(f"{_NOBODY_SAYS}: no answer in {self._timeout} s")
            return None
        expires = answer.expires[self._index]
        if expires is None:
            name = printable(self._claim.hold.request_id)
            raise LeaseEndedError(
                f"P does not hold {name!r} any more: its lease has ended, or it was read and nobody claimed it"
            )
        # Their clock was read after we asked, and the two may drift apart by 0.1 %.
        latest = answer.clock + (ended - asked) * 1.001
        if asked >= ended or latest + self._margin < expires:
            return True
        self.fences += 1
        second = _RenewCall(self._lines, [self._claim])
        self._inquiry.leave()
        self._inquiry, self._index = second, 0
        return None


def claim_all(lines: ClientPool, claims: Sequence[LeaseClaim], *, timeout: float, margin: float) -> list[Lease]:
    """Claim requests of one P with one question, without waiting for the answer.

    Args:
        lines: to P's scheduler.
        claims: what is read, and by whom; at most `MAX_CLAIMS`.
        timeout: seconds to wait for an answer once a read has ended.
        margin: seconds by which a read has to end before its lease does.

    Raises:
        HandshakeError: P cannot be asked.
    """
    inquiry = _RenewCall(lines, claims)
    return [Lease(lines, claim, inquiry, index, timeout, margin) for index, claim in enumerate(claims)]


@dataclass(eq=False)
class _Peer:
    tracked: dict[LeaseClaim, bool | None] = field(default_factory=dict)
    """Claims to renew, and whether P held them when it was last asked; None until it has answered."""
    asked: list[LeaseClaim] = field(default_factory=list)
    releases: deque[tuple[LeaseClaim, Outcome]] = field(default_factory=deque)
    numeric: Address | None = None
    looking: Future[Address] | None = None
    looked_up: float = -1e9
    socket: zmq.Socket[bytes] | None = None
    waiting: bool = False
    asked_at: float = 0.0
    renewed: bool = False
    renewed_at: float = -1e9
    interval: float = 3600.0


class LeaseRenewer:
    """Renews and releases the holds of a decode engine in a thread of its own, so that its steps never wait.

    A prefill engine that does not answer costs nothing but its leases: what it does not hear it will let go in time.
    """

    def __init__(self, *, timeout: float, max_peers: int) -> None:
        """Start.

        Args:
            timeout: seconds to wait for an answer.
            max_peers: engines to talk to at a time; holds at more are not renewed.
        """
        self._timeout = timeout
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._peers: dict[Address, _Peer] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kvhma-courier", daemon=True)
        self._thread.start()

    def track(self, address: Address, claim: LeaseClaim, *, every: float) -> None:
        """Renew a claim from now on, `every` so many seconds."""
        with self._lock:
            peer = self._peer(address)
            if peer is not None:
                peer.tracked.setdefault(claim)
                peer.interval = min(peer.interval, every)
                peer.renewed_at = -1e9
        self._wake()

    def held(self, address: Address, claim: LeaseClaim) -> bool | None:
        """Return whether P held what is tracked when it was last asked; None as long as it has not answered."""
        with self._lock:
            peer = self._peers.get(address)
            return None if peer is None else peer.tracked.get(claim)

    def release(self, address: Address, claim: LeaseClaim, outcome: Outcome) -> None:
        """Say what became of a claim and stop to renew it."""
        with self._lock:
            peer = self._peer(address)
            if peer is not None:
                peer.tracked.pop(claim, None)
                peer.releases.append((claim, outcome))
        self._wake()

    def close(self) -> None:
        """Stop; what has not been sent is left to the leases."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _peer(self, address: Address) -> _Peer | None:
        peer = self._peers.get(address)
        if peer is None and len(self._peers) < self._max_peers:
            peer = self._peers[address] = _Peer()
        return peer

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                logger.exception("kvhma: the courier of leases stumbled and goes on")
                time.sleep(1)
        for peer in self._peers.values():
            if peer.socket is not None:
                peer.socket.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        waiting: dict[zmq.Socket[bytes], tuple[Address, _Peer]] = {}
        with self._lock:
            shortest = min((peer.interval for peer in self._peers.values()), default=1.0)
            for address, peer in self._peers.items():
                if peer.waiting and peer.socket is not None:
                    waiting[peer.socket] = (address, peer)
                    poller.register(peer.socket, zmq.POLLIN)
        for socket, _ in poller.poll(int(min(1.0, shortest / 4) * 1000)):
            if socket == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                self._hear(waiting[socket][1])
        now = time.monotonic()
        with self._lock:
            for address, peer in list(self._peers.items()):
                if peer.waiting and now - peer.asked_at > self._timeout:
                    self._hang_up(peer)
                if not peer.waiting:
                    self._speak(address, peer, now)

    def _speak(self, address: Address, peer: _Peer, now: float) -> None:
        due = peer.tracked and now - peer.renewed_at >= peer.interval
        if not due and not peer.releases:
            if not peer.tracked:
                peer.interval = 3600.0
                if now - peer.asked_at > 60:
                    self._hang_up(peer)
                    del self._peers[address]
            return
        numeric = self._numeric(address, peer, now)
        if numeric is None:
            return
        question: Question
        # Both may be wanted all the time, and neither may keep the other from being said.
        if due and not (peer.releases and peer.renewed):
            # More than fit one message take turns by chance; a lease outlasts several of them.
            peer.asked = random.sample(list(peer.tracked), min(len(peer.tracked), MAX_CLAIMS))
            question = Renew([write_claim(claim) for claim in peer.asked])
            peer.renewed_at = now
        else:
            question = self._next_release(peer.releases)
        peer.asked_at = now
        peer.renewed = isinstance(question, Renew)
        try:
            if peer.socket is None:
                peer.socket = open_client(numeric)
            peer.socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        except (HandshakeError, zmq.ZMQError):
            self._hang_up(peer)
            return
        peer.waiting = True

    @staticmethod
    def _next_release(releases: deque[tuple[LeaseClaim, Outcome]]) -> Release:
        """Take the oldest claims with one outcome."""
        outcome = releases[0][1]
        claims: list[ClaimForm] = []
        while releases and releases[0][1] is outcome and len(claims) < MAX_CLAIMS:
            claims.append(write_claim(releases.popleft()[0]))
        return Release(claims, outcome)

    def _hear(self, peer: _Peer) -> None:
        with self._lock:
            peer.waiting = False
            if peer.socket is None:
                return
            try:
                answer = read_answer(peer.socket.recv(zmq.NOBLOCK))
            except (HandshakeError, zmq.ZMQError):
                self._hang_up(peer)
                return
            if isinstance(answer, Leases) and len(answer.expires) == len(peer.asked):
                for claim, expires in zip(peer.asked, answer.expires, strict=True):
                    if claim in peer.tracked:
                        peer.tracked[claim] = expires is not None

    def _numeric(self, address: Address, peer: _Peer, now: float) -> Address | None:
        """Return where a peer is, None if that is still being looked up."""
        try:
            if peer.numeric is None and peer.looking is None and now - peer.looked_up > self._timeout:
                peer.looking, peer.looked_up = look_up(address), now
            if peer.looking is not None and peer.looking.done():
                looking, peer.looking = peer.looking, None
                peer.numeric = looking.result()
        except HandshakeError as error:
            logger.debug("kvhma: %s", error)
            peer.releases.clear()
        return peer.numeric

    @staticmethod
    def _hang_up(peer: _Peer) -> None:
        peer.waiting = False
        peer.numeric, peer.looked_up = None, -1e9  # a name may stand for another host by the next time
        if peer.socket is not None:
            peer.socket.close()
            peer.socket = None
