# SPDX-License-Identifier: Apache-2.0
"""Transfers, from their post until their memory may be reused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvhma.errors import KvhmaError, PeerLostError, RequestError, TransferError
from kvhma.nixl.library import NixlAgent, NixlHandle, translate
from kvhma.nixl.peer import Peer
from kvhma.nixl.session import Session
from kvhma.nixl.window import ReadWindow

_LONGEST_SLEEP = 1e-3
_DRAIN_SLEEP = 5e-4
_ASK_SECONDS = 2e-3
"""Longest pause between questions while pieces wait for room: a question stops NIXL's thread, which receives them."""


class Telemetry(NamedTuple):
    """NIXL's measurements of a finished transfer.

    Attributes:
        descriptors: descriptors that the transport got, after NIXL merged neighbours.
        nbytes: bytes moved.
        start_us: when it was posted, on the machine's steady clock, in microseconds.
        post_us: microseconds inside the post. A transport that copies inline does the whole transfer there.
        transfer_us: microseconds from the post until the poll that found it done.
    """

    descriptors: int
    nbytes: int
    start_us: int = 0
    post_us: int = 0
    transfer_us: int = 0


class Piece(NamedTuple):
    """A part of a transfer that is posted at once.

    Attributes:
        make: makes NIXL's handle, or returns an existing one.
        nbytes: bytes that it takes of the peer's window; 0 without one.
    """

    make: Callable[[NixlAgent], NixlHandle]
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class MadePiece:
    """A piece that NIXL has a handle of; when it was posted, on the monotonic clock."""

    handle: NixlHandle
    nbytes: int
    posted_at: float = 0.0


@dataclass(eq=False, repr=False, slots=True)
class TransferHandle:
    """A read of a peer's memory in flight, returned by :meth:`Agent.read` and :meth:`Agent.read_ids`.

    :class:`kvhma.Transfer` lists the bytes of a request; this is NIXL's transfer of the part from one source. Poll it
    until it ends, because NIXL makes progress, and notifies the peer, inside the poll. Until it ends, neither free nor
    reuse the destination. It cannot be stopped early, because NIXL lets a released transfer continue; :meth:`abort`
    only leaves the polling to :meth:`Agent.poll`.

    Any thread may poll.

    Attributes:
        peer: the owner of the memory that is read.
        telemetry: NIXL's measurements once the transfer is done. None before, after a failure, and if NIXL's
            environment disables it.
        aborted: whether :meth:`abort` was called in time.
        finished: whether it ended, successful or not; nothing writes to its destination any more.
    """

    peer: Peer
    _owner: InFlight
    _nixl: NixlAgent
    _unposted: deque[MadePiece]
    _kept: bool = False
    """Whether NIXL's handle belongs to a :class:`kvhma.nixl.PreparedRead`, which posts it again."""
    _window: ReadWindow | None = None
    _notif: bytes = b""
    """Sent once all pieces are done. NIXL sends that of a transfer of one piece itself."""
    telemetry: Telemetry | None = field(default=None, init=False)
    aborted: bool = field(default=False, init=False)
    finished: bool = field(default=False, init=False)
    _posted: deque[MadePiece] = field(default_factory=deque, init=False)
    _measured: list[Telemetry | None] = field(default_factory=list, init=False)
    _error: KvhmaError | None = field(default=None, init=False)
    _ask_at: float = field(default=0.0, init=False)
    _piece_seconds: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL lost the transfer. It has ended, as after PeerLostError.
        """
        with self._lock:
            self._step()
        return "done" if self._has_succeeded() else "running"

    def wait(self, timeout: float) -> bool:
        """Poll for at most `timeout` seconds; return whether it is done, False if it is still running.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL lost the transfer.
        """
        deadline = time.monotonic() + timeout
        sleep = 0.0
        while self.poll() == "running":
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(sleep, left))
            sleep = min(sleep * 2 + 1e-5, _LONGEST_SLEEP)
            if self._unposted:  # the caller may poll the reads that have the room only after this one
                for running in self._owner.running(self.peer):
                    running.drive()
        return True

    def abort(self) -> bool:
        """Stop waiting for the outcome.

        The transfer continues, and its destination stays in use until :meth:`Agent.poll` returns this object.

        Returns:
            Whether it is still in flight. If False, it has ended, and :meth:`Agent.poll` will not return it.
        """
        with self._lock:
            if not self.finished:
                self.aborted = True
            return not self.finished

    def post(self) -> None:
        """Post the transfer, as far as there is room; the agent does this once.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        with self._lock:
            self._step()
        self._has_succeeded()

    def _has_succeeded(self) -> bool:
        """Return whether it is done; raise its error if it has ended with one."""
        if self.finished and self._error is not None:
            raise self._error
        return self.finished

    def drive(self) -> bool:
        """Make progress unless another thread does; return whether the transfer has ended."""
        if self._lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._lock.release()
        return self.finished

    def _step(self) -> None:
        """Ask for the state of what is posted, and post what there is room for."""
        if self._unposted and self._posted:
            if (now := time.monotonic()) < self._ask_at:
                return
            self._ask_at = now + min(_ASK_SECONDS, self._piece_seconds / 2)
        # The peer serves them in order, and each question takes the transport's lock.
        while self._posted and self._advance(self._posted[0], self._nixl.check_xfer_state, "lost"):
            pass
        while self._unposted and self._error is None and self._may_post(self._unposted[0].nbytes):
            piece = self._unposted.popleft()
            piece.posted_at = time.monotonic()
            self._posted.append(piece)
            self._advance(piece, self._nixl.transfer, "cannot start")
        if self._window is not None and (self._error is not None or not self._unposted):
            self._window.leave(self)
        if not self.finished and not self._posted and (self._error is not None or not self._unposted):
            self._end()

    def _may_post(self, nbytes: int) -> bool:
        if self._window is None:
            return True
        if not self._window.take_room(self, nbytes):
            return False
        try:
            self._owner.check_usable(self.peer)
        except KvhmaError as error:
            self._window.return_room(nbytes, 0.0)
            self._error = error
            return False
        return True

    def _advance(self, piece: MadePiece, call: Callable[[NixlHandle], str], failed: str) -> bool:
        """Post a piece, or ask for its state; return whether it has ended."""
        try:
            status = call(piece.handle)
        except Exception as exc:
            # The agent never removes a peer with a transfer. So "not found" means that NIXL removed the peer itself, as
            # newer versions do when a transfer finds it disconnected. Then the endpoint has failed, and all its
            # transfers with it.
            gone = type(exc).__name__ == "nixlNotFoundError"
            what = f"transfer from {self.peer.name!r} {failed}"
            self._error = self._error or translate(exc, what, PeerLostError if gone else TransferError)
        else:
            if status == "PROC":
                return False
            if status == "DONE":
                self._measured.append(self._owner.measure(self._nixl, piece.handle))
            else:
                error = TransferError(f"transfer from {self.peer.name!r}: NIXL reports {status}")
                self._error = self._error or error
        self._posted.remove(piece)
        if self._window is not None:
            self._piece_seconds = time.monotonic() - piece.posted_at
            self._window.return_room(piece.nbytes, self._piece_seconds)
        if not self._kept:
            self._owner.release(piece.handle)
        return True

    def _end(self) -> None:
        while self._unposted:
            self._owner.release(self._unposted.popleft().handle)
        if self._error is None:
            self._succeed()
        self.finished = True
        self._owner.ended(self, self._error)

    def _succeed(self) -> None:
        measured = [telemetry for telemetry in self._measured if telemetry is not None]
        if len(measured) == len(self._measured):
            self.telemetry = _sum_pieces(measured)
        if self._notif:
            try:
                self._nixl.send_notif(self.peer.name, self._notif)
            except Exception as exc:
                self._error = translate(exc, f"cannot notify {self.peer.name!r}")


class InFlight:
    """The transfers of one agent from post to end, and aborted ones until :meth:`Agent.poll` returns them.

    NIXL would release an unreferenced transfer while it still writes, so this object holds them.
    """

    def __init__(self, session: Session) -> None:
        """Begin without transfers."""
        self._session = session
        self._running: set[TransferHandle] = set()
        self._unclaimed: list[TransferHandle] = []
        self._telemetry = True

    def start(
        self, peer: Peer, count: int, pieces: Sequence[Piece], notif: bytes = b"", *, kept: bool = False
    ) -> TransferHandle:
        """Make and post a transfer.

        Args:
            peer: the owner of the memory that is read.
            count: number of descriptors, for messages.
            pieces: in the order in which they are posted. Those with bytes wait for room in the peer's window.
            notif: message to the peer once all of them are done; empty for no message.
            kept: whether the handles survive the end of the transfer.

        Raises:
            RequestError: NIXL refuses the descriptors. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        with self._session.lock:
            nixl = self._session.usable(peer)
            handles: deque[MadePiece] = deque()
            try:
                for make, nbytes in pieces:
                    handles.append(MadePiece(self.handle_of(nixl, peer, count, make), nbytes))
            except KvhmaError:
                for piece in handles:
                    self.release(piece.handle)
                raise
            window = peer.window if any(piece.nbytes for piece in handles) else None
            transfer = TransferHandle(peer, self, nixl, handles, kept, window, notif)
            if window is not None:
                window.enter(transfer)
            self._running.add(transfer)
        transfer.post()
        return transfer

    def start_nothing(self, peer: Peer) -> TransferHandle:
        """Return a transfer without bytes, which has ended: NIXL has no empty transfers.

        Raises:
            PeerLostError: the peer is gone.
        """
        transfer = TransferHandle(peer, self, self._session.usable(peer), deque())
        transfer.telemetry, transfer.finished = Telemetry(0, 0), True
        return transfer

    def handle_of(self, nixl: NixlAgent, peer: Peer, count: int, make: Callable[[NixlAgent], NixlHandle]) -> NixlHandle:
        """Make NIXL's handle of a transfer, see :meth:`start`; the session's lock is held."""
        try:
            return make(nixl)
        except KvhmaError:
            raise
        except Exception as exc:
            what = f"cannot read {count} descriptors of {peer.name!r} within registered memory"
            raise self._session.failure(exc, what, peer, RequestError) from exc

    def check_usable(self, peer: Peer) -> None:
        """Check that a peer can still be read.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: the agent is closed, or is closing.
        """
        self._session.usable(peer)

    @staticmethod
    def release(handle: NixlHandle) -> None:
        """Release NIXL's handle of a transfer that is not in flight."""
        with contextlib.suppress(Exception):  # NIXL lists what it cannot release yet
            handle.release()

    def running(self, peer: Peer | None = None) -> list[TransferHandle]:
        """Return the transfers of one peer, or all, that have not ended."""
        with self._session.lock:
            return [transfer for transfer in self._running if peer is None or transfer.peer is peer]

    def poll_aborted(self) -> list[TransferHandle]:
        """Poll the aborted transfers; return those that have ended since the last call."""
        for transfer in self.running():
            if transfer.aborted:
                transfer.drive()
        with self._session.lock:
            ended, self._unclaimed = self._unclaimed, []
        return ended

    def drain(self, timeout: float, what: str, peer: Peer | None = None) -> None:
        """Poll the transfers of one peer, or all, until they have ended. New ones are refused by now.

        Raises:
            TransferError: some have not ended after `timeout` seconds; `what` begins the message.
        """
        transfers = self.running(peer)
        deadline = time.monotonic() + timeout
        while transfers := [transfer for transfer in transfers if not transfer.drive()]:
            if time.monotonic() >= deadline:
                raise TransferError(f"{what}: {len(transfers)} transfers still in flight after {timeout} s")
            time.sleep(_DRAIN_SLEEP)

    def measure(self, nixl: NixlAgent, handle: NixlHandle) -> Telemetry | None:
        """Return NIXL's measurements of a transfer, or None without measurements."""
        if not self._telemetry:
            return None
        try:
            raw = nixl.get_xfer_telemetry(handle)
        except Exception:
            # NIXL's environment can disable telemetry. The transfer is still good, and later ones have no telemetry
            # either.
            self._telemetry = False
            return None
        return Telemetry(raw.descCount, raw.totalBytes, raw.startTime, raw.postDuration, raw.xferDuration)

    def ended(self, transfer: TransferHandle, error: KvhmaError | None) -> None:
        """Record the end of a transfer."""
        with self._session.lock:
            self._running.discard(transfer)
            if transfer.aborted:
                self._unclaimed.append(transfer)
            self._session.note_loss(transfer.peer, error)


def _sum_pieces(pieces: Sequence[Telemetry]) -> Telemetry:
    """Return the measurements of a transfer from those of its pieces."""
    start_us = min(piece.start_us for piece in pieces)
    return Telemetry(
        sum(piece.descriptors for piece in pieces),
        sum(piece.nbytes for piece in pieces),
        start_us,
        sum(piece.post_us for piece in pieces),
        max(piece.start_us + piece.transfer_us for piece in pieces) - start_us,
    )
