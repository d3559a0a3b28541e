# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors that NIXL keeps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Memory
from kvhma.lowlevel import expand_views
from kvhma.nixl.arrays import check_rows, count_entries
from kvhma.nixl.library import LOCAL_SIDE, NixlHandle
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
        """Release it. Transfers made from it are not affected; a second call does nothing."""
        self._owner.release(self)


class PreparedLists:
    """The lists of one agent that were not released."""

    def __init__(self, session: Session) -> None:
        """Begin with none."""
        self._session = session
        self._lists: set[PreparedList] = set()

    def prepare(self, peer: Peer | None, views: NDArray[np.uint64], memory: Memory, *, strided: bool) -> PreparedList:
        """Let NIXL keep a list of views.

        Args:
            peer: whose memory it is; None for the agent's own.
            views: C-contiguous uint64 of shape (n, 5), rows ``(addr, len, device, stride, count)``, n at least 1.
            memory: kind of the memory.
            strided: whether NIXL takes the rows as they are; False: one row per entry.

        Raises:
            PeerLostError: the peer is gone.
            RequestError: another form, or outside what is registered.
            AddressOverflowError: a view ends after 2**64.
        """
        what = "local views" if peer is None else f"views of {peer.name!r}"
        check_rows(views, what, columns=5)
        if not len(views):
            raise RequestError(f"{what}: no rows")
        nixl = self._session.usable(peer)
        name = LOCAL_SIDE if peer is None else peer.name
        rows = views if strided else expand_views(views)
        try:
            handle = nixl.prep_xfer_dlist(name, rows, memory)
        except Exception as exc:
            failed = f"cannot prepare {what} within registered {memory}"
            raise self._session.failure(exc, failed, peer, RequestError) from exc
        return self._add(peer, count_entries(views), handle)

    def _add(self, peer: Peer | None, count: int, handle: NixlHandle) -> PreparedList:
        # If the peer was lost while NIXL prepared the list, nothing else would release it.
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
        """Release one."""
        with self._session.lock:
            handle, prepared._handle = prepared._handle, None
            self._lists.discard(prepared)
            if handle is not None:
                with contextlib.suppress(Exception):  # NIXL tries again when the handle is collected
                    handle.release()

    def release_of(self, peer: Peer) -> None:
        """Release those of a peer."""
        with self._session.lock:
            for prepared in [prepared for prepared in self._lists if prepared.peer is peer]:
                self.release(prepared)

    def release_all(self) -> None:
        """Release all."""
        with self._session.lock:
            for prepared in list(self._lists):
                self.release(prepared)
