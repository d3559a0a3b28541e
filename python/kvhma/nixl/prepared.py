# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors that NIXL keeps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from kvhma.errors import KvhmaError
from kvhma.nixl.library import NixlHandle
from kvhma.nixl.peer import Peer
from kvhma.nixl.session import Session


@dataclass(eq=False)
class PreparedList:
    """A list of descriptors that NIXL keeps, to be chosen from by id.

    Entry ``e`` of view ``v`` has the id ``e`` plus the counts of all views before ``v``::

        view     0 (count 3)   1 (count 2)   2 (count 4)
        entry    0   1   2     0   1         0   1   2   3
        id       0   1   2     3   4         5   6   7   8

    Attributes:
        peer: whose memory it is; None for the agent's own.
        count: ids go from 0 to ``count - 1``.
    """

    peer: Peer | None
    count: int
    _handle: NixlHandle | None = field(repr=False)
    _owner: PreparedLists = field(repr=False)

    def release(self) -> None:
        """Give it back to NIXL. Transfers made from it are not affected; a second call does nothing."""
        self._owner.release(self)


class PreparedLists:
    """The lists of one agent that were not released."""

    def __init__(self, session: Session) -> None:
        """Begin with none."""
        self._session = session
        self._lists: set[PreparedList] = set()

    def add(self, peer: Peer | None, count: int, handle: NixlHandle) -> PreparedList:
        """Take over what NIXL made; if the peer has gone meanwhile, give it back.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: the agent is closed.
        """
        with self._session.lock:
            try:
                self._session.usable(peer)
            except KvhmaError:
                handle.release()
                raise
            prepared = PreparedList(peer, count, handle, self)
            self._lists.add(prepared)
            return prepared

    def handle(self, prepared: PreparedList) -> NixlHandle | None:
        """Return NIXL's handle of a list; None if it was released or is of another agent."""
        return prepared._handle if prepared._owner is self else None

    def release(self, prepared: PreparedList) -> None:
        """Give one back to NIXL."""
        with self._session.lock:
            handle, prepared._handle = prepared._handle, None
            self._lists.discard(prepared)
            if handle is not None:
                with contextlib.suppress(Exception):  # NIXL tries again when the handle is collected
                    handle.release()

    def release_of(self, peer: Peer) -> None:
        """Give back those of a peer."""
        with self._session.lock:
            for prepared in [prepared for prepared in self._lists if prepared.peer is peer]:
                self.release(prepared)

    def release_all(self) -> None:
        """Give back every one."""
        with self._session.lock:
            for prepared in list(self._lists):
                self.release(prepared)
