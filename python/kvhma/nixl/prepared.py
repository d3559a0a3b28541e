# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors, and reads, that NIXL holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import check_rows
from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Memory
from kvhma.lowlevel import expand_views
from kvhma.nixl.library import LOCAL_SIDE, NixlAgent, NixlHandle
from kvhma.nixl.peer import Peer
from kvhma.nixl.session import Session
from kvhma.nixl.transfer import InFlight, Piece, TransferHandle


@dataclass(eq=False)
class PreparedList:
    """A list of descriptors that NIXL holds; reads select entries by id.

    Entry ``e`` of view ``v`` has the id ``e`` plus the counts of all views before ``v``::

        view     0 (count 3)   1 (count 2)   2 (count 4)
        entry    0   1   2     0   1         0   1   2   3
        id       0   1   2     3   4         5   6   7   8

    Attributes:
        peer: the owner of the memory; None for this agent.
        count: ids go from 0 to ``count - 1``.
    """

    peer: Peer | None
    count: int
    _handle: NixlHandle | None = field(repr=False)
    _owner: Preparations = field(repr=False)

    def release(self) -> None:
        """Release the list. Transfers made from it are not affected; a second call has no effect."""
        self._owner.release(self)


@dataclass(eq=False)
class PreparedRead:
    """A read of a peer's memory that NIXL holds; posting it again costs a fraction of a new read.

    Attributes:
        peer: the owner of the memory that is read.
        count: number of its descriptors.
    """

    peer: Peer
    count: int
    _handle: NixlHandle | None = field(repr=False)
    _owner: Preparations = field(repr=False)
    _in_flight: InFlight = field(repr=False)
    _last: TransferHandle | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def post(self) -> TransferHandle:
        """Post the read again.

        Returns:
            The read in flight: poll it, or wait for it.

        Raises:
            RequestError: the last post has not ended, or the read was released. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        with self._lock:
            if self._last is not None and not self._last.finished:
                raise RequestError("a prepared read was posted again before it had ended")
            self._last = self._in_flight.start(self.peer, self.count, [Piece(lambda _: self._kept_handle())], kept=True)
            return self._last

    def _kept_handle(self) -> NixlHandle:
        if self._handle is None:
            raise RequestError("a prepared read was released")
        return self._handle

    def release(self) -> None:
        """Release the read; if it is in flight, it is released with its peer. A second call has no effect."""
        with self._lock:
            if self._last is None or self._last.finished:
                self._owner.release(self)


class Preparations:
    """The prepared lists and reads of one agent that are not released."""

    def __init__(self, session: Session, *, strided: bool) -> None:
        """Begin without lists; `strided` is whether NIXL gets views as they are, else one row per entry."""
        self._session = session
        self._strided = strided
        self._lists: set[PreparedList | PreparedRead] = set()

    def prepare(self, peer: Peer | None, views: NDArray[np.uint64], memory: Memory) -> PreparedList:
        """Let NIXL hold views of a peer's memory, or for None of the agent's own, see :meth:`Agent.prepare`."""
        what = "local views" if peer is None else f"views of {peer.name!r}"
        count = check_rows(what, views, 5)
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
            prepared = PreparedList(peer, count, handle, self)
            self._lists.add(prepared)
            try:
                self._session.usable(peer)
            except KvhmaError:
                self.release(prepared)
                raise
            return prepared

    def prepare_read(
        self, peer: Peer, count: int, make: Callable[[NixlAgent], NixlHandle], in_flight: InFlight
    ) -> PreparedRead:
        """Let NIXL hold a read, see :meth:`Agent.prepare_read`."""
        with self._session.lock:
            handle = in_flight.handle_of(self._session.usable(peer), peer, count, make)
            prepared = PreparedRead(peer, count, handle, self, in_flight)
            self._lists.add(prepared)
            return prepared

    def handle(self, prepared: PreparedList) -> NixlHandle | None:
        """Return NIXL's handle of a list; None if it was released or belongs to another agent."""
        return prepared._handle if prepared._owner is self else None

    def release(self, prepared: PreparedList | PreparedRead) -> None:
        """Release one."""
        with self._session.lock:
            handle, prepared._handle = prepared._handle, None
            self._lists.discard(prepared)
            if handle is not None:
                with contextlib.suppress(Exception):  # NIXL tries again when the handle is collected
                    handle.release()

    def release_all(self, peer: Peer | None = None) -> None:
        """Release the lists and reads of one peer's memory, or all."""
        with self._session.lock:
            for prepared in list(self._lists):
                if peer is None or prepared.peer is peer:
                    self.release(prepared)
