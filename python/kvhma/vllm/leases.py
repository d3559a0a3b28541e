# SPDX-License-Identifier: Apache-2.0
"""Who may read what for how long: the ledger of a prefill engine, and the courier of a decode engine.

P keeps a finished request's blocks until its reader lets go of them or its lease ends. Whether they are still held is
one fact in one place, the ledger; the workers are told to report a request as sent only when it is struck off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from kvhma.errors import HandshakeError
from kvhma.vllm.params import Address, Hold, new_nonce
from kvhma.vllm.side_channel import (
    MAX_HOLDS,
    Done,
    Leases,
    Question,
    Release,
    Renew,
    hold_form,
    open_client,
    read_answer,
)

logger = logging.getLogger("vllm.kvhma")


class Ledger:
    """Requests whose blocks are kept for a reader. Safe to use from several threads.

    Times are seconds of :func:`time.monotonic` in this process, which is P's clock.
    """

    def __init__(self, lease: float) -> None:
        """Start empty; `lease` is how long a sign of a reader lasts, in seconds."""
        self._lease = lease
        self._lock = threading.Lock()
        self._expires: dict[Hold, float] = {}
        self._released: list[Hold] = []

    def hold(self, request_id: str) -> tuple[Hold, float]:
        """Hold a request that has finished; return the hold and when its lease ends."""
        hold = Hold(request_id, new_nonce())
        expires = time.monotonic() + self._lease
        with self._lock:
            self._expires[hold] = expires
        return hold, expires

    def renew(self, holds: list[tuple[str, int]]) -> list[float | None]:
        """Extend leases; return when each ends now, None for a request that is not held."""
        expires = time.monotonic() + self._lease
        answer: list[float | None] = []
        with self._lock:
            for key in holds:
                hold = Hold(*key)
                # One that has run out is as good as struck off: the next step will do it.
                known = self._expires.get(hold)
                alive = known is not None and known > expires - self._lease
                if alive:
                    self._expires[hold] = expires
                answer.append(expires if alive else None)
        return answer

    def release(self, holds: list[tuple[str, int]]) -> None:
        """Let go of requests; those that are not held are passed over."""
        with self._lock:
            for key in holds:
                if self._expires.pop(hold := Hold(*key), None) is not None:
                    self._released.append(hold)

    def strike_off(self) -> tuple[list[str], list[str]]:
        """Return the requests that were let go and those whose lease ended since the last call, each once."""
        now = time.monotonic()
        with self._lock:
            released, self._released = [hold.request_id for hold in self._released], []
            late = [hold for hold, expires in self._expires.items() if expires <= now]
            for hold in late:
                del self._expires[hold]
        return released, [hold.request_id for hold in late]

    def __len__(self) -> int:
        return len(self._expires)


@dataclass(eq=False)
class _Peer:
    tracked: set[Hold] = field(default_factory=set)
    releases: deque[Hold] = field(default_factory=deque)
    socket: zmq.Socket[bytes] | None = None
    asked: list[Hold] | None = None
    asked_at: float = 0.0
    renewed_at: float = -1e9
    interval: float = 3600.0


class Courier:
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
        self._expires: dict[Hold, float] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kvhma-courier", daemon=True)
        self._thread.start()

    def track(self, address: Address, hold: Hold, *, every: float) -> None:
        """Renew a hold from now on, `every` so many seconds."""
        with self._lock:
            peer = self._peer(address)
            if peer is not None:
                peer.tracked.add(hold)
                peer.interval = min(peer.interval, every)
                peer.renewed_at = -1e9
        self._wake()

    def release(self, address: Address, hold: Hold) -> None:
        """Let go of a hold and stop to renew it."""
        with self._lock:
            peer = self._peer(address)
            if peer is not None:
                peer.tracked.discard(hold)
                peer.releases.append(hold)
            self._expires.pop(hold, None)
        self._wake()

    def expires(self, hold: Hold) -> float | None:
        """Return when the lease of a hold ends by P's clock, if P has said since it was tracked."""
        return self._expires.get(hold)

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
                if peer.asked is not None and peer.socket is not None:
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
                if peer.asked is not None and now - peer.asked_at > self._timeout:
                    self._hang_up(peer)
                if peer.asked is None:
                    self._speak(address, peer, now)

    def _speak(self, address: Address, peer: _Peer, now: float) -> None:
        question: Question
        if peer.releases:
            asked = [peer.releases.popleft() for _ in range(min(len(peer.releases), MAX_HOLDS))]
            question = Release([hold_form(hold.request_id, hold.generation) for hold in asked])
        elif peer.tracked and now - peer.renewed_at >= peer.interval:
            # More than fit one message take turns.
            asked = sorted(peer.tracked, key=lambda hold: self._expires.get(hold, 0.0))[:MAX_HOLDS]
            question = Renew([hold_form(hold.request_id, hold.generation) for hold in asked])
            peer.renewed_at = now
        elif peer.tracked:
            return
        else:
            peer.interval = 3600.0
            if now - peer.asked_at > 60:
                self._hang_up(peer)
                del self._peers[address]
            return
        try:
            if peer.socket is None:
                peer.socket = open_client(address)
            peer.socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        except (HandshakeError, zmq.ZMQError):
            self._hang_up(peer)
            peer.asked_at = now
            return
        peer.asked, peer.asked_at = asked, now

    def _hear(self, peer: _Peer) -> None:
        with self._lock:
            asked, peer.asked = peer.asked, None
            socket = peer.socket
            if socket is None or asked is None:
                return
            try:
                answer = read_answer(socket.recv(zmq.NOBLOCK))
            except (HandshakeError, zmq.ZMQError):
                self._hang_up(peer)
                return
            if isinstance(answer, Leases) and len(answer.expires) == len(asked):
                for hold, expires in zip(asked, answer.expires, strict=True):
                    if hold in peer.tracked and expires is not None:
                        self._expires[hold] = expires
            elif not isinstance(answer, Done):
                self._hang_up(peer)

    @staticmethod
    def _hang_up(peer: _Peer) -> None:
        peer.asked = None
        if peer.socket is not None:
            peer.socket.close()
            peer.socket = None
