# SPDX-License-Identifier: Apache-2.0
"""Shared state of an agent: the open NIXL agent, the peers, and the locks."""

from __future__ import annotations

import threading

from kvhma.errors import KvhmaError, PeerLostError, TransferError
from kvhma.nixl.library import NixlAgent, translate
from kvhma.nixl.peer import Peer


class Session:
    """An open NIXL agent and the peers it is connected to.

    There are two locks. `setup` is taken before a transfer's own lock, `lock` after it:

    * `setup` lets one thread at a time register memory, add a peer or remove a peer. It is held while NIXL connects or
    pins memory, never while a thread waits for a peer.
    * `lock` guards the tables of the agent. It is held while a transfer is made, so that its lists and its peer stay
    valid. It is never held during a post, a poll or a wait.

    Attributes:
        name: name of the agent.
        peers: the connected peers by name.
    """

    def __init__(self, name: str, nixl: NixlAgent) -> None:
        """Begin without peers."""
        self.name = name
        self.setup = threading.RLock()
        self.lock = threading.RLock()
        self.peers: dict[str, Peer] = {}
        self._nixl: NixlAgent | None = nixl
        self._closing = False

    def open(self) -> NixlAgent:
        """Return NIXL.

        Raises:
            TransferError: the agent is closed, or is closing.
        """
        if self._nixl is None or self._closing:
            raise TransferError(f"agent {self.name!r} is closed")
        return self._nixl

    def usable(self, peer: Peer | None) -> NixlAgent:
        """Return NIXL if the peer can be read; for None, if the agent is open.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: the agent is closed, or is closing.
        """
        with self.lock:
            nixl = self.open()
            if peer is not None and (peer.gone is not None or self.peers.get(peer.name) is not peer):
                raise PeerLostError(f"peer {peer.name!r}: {peer.gone or 'belongs to another agent'}; connect again")
            return nixl

    def failure(
        self, exc: Exception, what: str, peer: Peer | None, refused: type[KvhmaError] = TransferError
    ) -> KvhmaError:
        """Return kvhma's error for an exception of NIXL, see :func:`translate`; record if the peer is lost."""
        error = translate(exc, what, refused)
        if peer is not None:
            self.note_loss(peer, error)
        return error

    def note_loss(self, peer: Peer, error: KvhmaError | None) -> None:
        """Record why a peer can no longer be read, if an error means that it is lost."""
        if isinstance(error, PeerLostError):
            with self.lock:
                peer.gone = peer.gone or str(error)

    def begin_closing(self) -> None:
        """Refuse new work."""
        with self.lock:
            self._closing = True

    def forget(self, peer: Peer) -> NixlAgent | None:
        """Remove a peer; return NIXL, or None if the peer was removed already."""
        with self.lock:
            if self._nixl is None or self.peers.get(peer.name) is not peer:
                return None
            del self.peers[peer.name]
            return self._nixl

    def close(self) -> tuple[NixlAgent | None, list[Peer]]:
        """Remove NIXL and all peers; return both, or None and no peers if the agent was closed before."""
        with self.lock:
            nixl, self._nixl = self._nixl, None
            peers = list(self.peers.values())
            self.peers.clear()
            for peer in peers:
                peer.gone = peer.gone or "the agent was closed"
            return nixl, peers
