# SPDX-License-Identifier: Apache-2.0
"""Transfers, from their post until their memory may be reused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvhma.errors import KvhmaError, PeerLostError, RequestError, TransferError
from kvhma.nixl.library import NixlAgent, NixlHandle, translate
from kvhma.nixl.peer import Peer
from kvhma.nixl.session import Session

_LONGEST_SLEEP = 1e-3
_DRAIN_SLEEP = 5e-4


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
    """

    peer: Peer
    _work: tuple[NixlAgent, NixlHandle] | None
    _owner: InFlight
    telemetry: Telemetry | None = None
    _kept: bool = False
    """Whether NIXL's handle belongs to a :class:`kvhma.nixl.PreparedRead`, which posts it again."""
    aborted: bool = field(default=False, init=False)
    _error: KvhmaError | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def finished(self) -> bool:
        """Whether it ended, successful or not; nothing writes to its destination any more."""
        return self._work is None

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL lost the transfer. It has ended, as after PeerLostError.
        """
        with self._lock:
            self._step()
        if self._error is not None:
            raise self._error
        return "done" if self.finished else "running"

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
        """Post the transfer; the agent does this once.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it, or it has ended.
        """
        with self._lock:
            if self._work is None:
                raise TransferError("the transfer has ended")
            self._step(first=True)
        if self._error is not None:
            raise self._error

    def drive(self) -> bool:
        """Make progress unless another thread does; return whether the transfer has ended."""
        if self._lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._lock.release()
        return self.finished

    def _step(self, *, first: bool = False) -> None:
        """Post it, or ask for its state."""
        if self._work is None:
            return
        nixl, handle = self._work
        try:
            status = nixl.transfer(handle) if first else nixl.check_xfer_state(handle)
        except Exception as exc:
            # The agent never removes a peer with a transfer. So "not found" means that NIXL removed the peer itself, as
            # newer versions do when a transfer finds it disconnected. Then the endpoint has failed, and all its
            # transfers with it.
            gone = type(exc).__name__ == "nixlNotFoundError"
            what = f"transfer from {self.peer.name!r} {'cannot start' if first else 'lost'}"
            self._end(translate(exc, what, PeerLostError if gone else TransferError))
            return
        if status == "DONE":
            self.telemetry = self._owner.measure(nixl, handle)
            self._end(None)
        elif status != "PROC":
            self._end(TransferError(f"transfer from {self.peer.name!r}: NIXL reports {status}"))

    def _end(self, error: KvhmaError | None) -> None:
        if self._work is not None and not self._kept:
            with contextlib.suppress(Exception):  # it has ended; NIXL lists what it cannot release yet
                self._work[1].release()
        self._error = error
        self._work = None
        self._owner.ended(self, error)


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
        self, peer: Peer, count: int, make: Callable[[NixlAgent], NixlHandle], *, kept: bool = False
    ) -> TransferHandle:
        """Make and post a transfer.

        Args:
            peer: the owner of the memory that is read.
            count: number of descriptors, for messages.
            make: makes NIXL's handle, or returns an existing one.
            kept: whether the handle survives the end of the transfer.

        Raises:
            RequestError: NIXL refuses the descriptors. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        with self._session.lock:
            nixl = self._session.usable(peer)
            transfer = TransferHandle(peer, (nixl, self.handle_of(nixl, peer, count, make)), self, _kept=kept)
            self._running.add(transfer)
        transfer.post()
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

    @property
    def is_running(self) -> bool:
        """Whether any transfer has not ended."""
        return bool(self._running)

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
