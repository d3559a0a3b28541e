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

    def __init__(self, session: Session, *, strided: bool) -> None:
        """Begin with none; `strided` is whether NIXL takes views as they are, else one row goes to it per entry."""
        self._session = session
        self._strided = strided
        self._lists: set[PreparedList] = set()

    def prepare(self, peer: Peer | None, views: NDArray[np.uint64], memory: Memory) -> PreparedList:
        """Let NIXL keep views of a peer's memory, or for None of the agent's own, as :meth:`Agent.prepare` says."""
        what = "local views" if peer is None else f"views of {peer.name!r}"
        check_rows(views, what, columns=5)
        if not len(views):
            raise RequestError(f"{what}: no rows")
        nixl = self._session.usable(peer)
        name = LOCAL_SIDE if peer is None else peer.name
        rows = views if self._strided else expand_views(views)
        try:
            handle = nixl.prep_xfer_dlist(name, rows, memory)
        except Exception as exc:
            failed = f"cannot prepare {what} within registered {memory}"
            raise self._session.failure(exc, failed, peer, RequestError) from exc
        # If the peer was lost while NIXL prepared the list, nothing else would release it.
        with self._session.lock:
            try:
                self._session.usable(peer)
            except KvhmaError:
                handle.release()
                raise
            prepared = PreparedList(peer, count_entries(views), handle, self)
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

    def release_all(self, peer: Peer | None = None) -> None:
        """Release those of one peer's memory, or all."""
        with self._session.lock:
            for prepared in list(self._lists):
                if peer is None or prepared.peer is peer:
                    self.release(prepared)
