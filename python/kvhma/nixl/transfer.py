# SPDX-License-Identifier: Apache-2.0
"""One transfer, from its post until its memory may be used again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvhma.errors import KvhmaError, PeerLostError, TransferError
from kvhma.nixl.library import NixlAgent, NixlHandle, translate
from kvhma.nixl.peer import Peer

_LONGEST_SLEEP = 1e-3


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What NIXL measured of a finished transfer.

    Attributes:
        descriptors: descriptors that went to the transport, after NIXL merged neighbours.
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
    """A read of a peer's memory in flight, as :meth:`Agent.read` and :meth:`Agent.read_ids` return it.

    :class:`kvhma.Transfer` says which bytes a request needs; this is NIXL's work on one source's part of them. It
    has to be polled until it ends: NIXL makes progress, and notifies the peer, inside the poll. Until it
    ends the destination must neither be freed nor used for anything else. There is no way to stop it early,
    since NIXL lets a released transfer run on; :meth:`abort` only hands the polling over to
    :meth:`Agent.poll`.

    Any thread may poll.

    Attributes:
        peer: whose memory is read.
        telemetry: what NIXL measured, once done; None before, after a failure, and where NIXL's environment turns it
            off.
        aborted: whether :meth:`abort` took it over.
    """

    peer: Peer
    _work: tuple[NixlAgent, NixlHandle] | None
    _measure: Callable[[NixlAgent, NixlHandle], Telemetry | None]
    _on_end: Callable[[TransferHandle, KvhmaError | None], None]
    telemetry: Telemetry | None = field(default=None, init=False)
    aborted: bool = field(default=False, init=False)
    _error: KvhmaError | None = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @classmethod
    def empty(cls, peer: Peer) -> TransferHandle:
        """Return a transfer that had nothing to read and is done."""
        transfer = cls(peer, None, lambda nixl, handle: None, lambda transfer, error: None)
        transfer.telemetry = Telemetry(0, 0)
        transfer._finished = True
        return transfer

    @property
    def finished(self) -> bool:
        """Whether it ended, well or badly: nothing will be written to its destination any more."""
        return self._finished

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL lost the transfer. It has ended; so it has after PeerLostError.
        """
        with self._lock:
            self._step()
        if self._error is not None:
            raise self._error
        return "done" if self._finished else "running"

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
        """Give up the outcome.

        The transfer goes on, and its destination stays in use until :meth:`Agent.poll` returns this object.

        Returns:
            Whether it is still in flight. False: it has ended, and :meth:`Agent.poll` will not return it.
        """
        with self._lock:
            if not self._finished:
                self.aborted = True
            return not self._finished

    def post(self) -> None:
        """Hand it to the transport; done once, by the agent."""
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
        return self._finished

    def _step(self, *, first: bool = False) -> None:
        """Post it, or ask how far it is."""
        if self._work is None:
            return
        nixl, handle = self._work
        try:
            status = nixl.transfer(handle) if first else nixl.check_xfer_state(handle)
        except Exception as exc:
            # The agent never removes a peer under a transfer, so it is "not found" only where NIXL dropped the peer by
            # itself, as newer versions do when one of its transfers finds it disconnected. The endpoint has failed
            # then, and all its transfers with it.
            gone = type(exc).__name__ == "nixlNotFoundError"
            what = f"transfer from {self.peer.name!r} {'cannot start' if first else 'lost'}"
            self._end(translate(exc, what, PeerLostError if gone else TransferError))
            return
        if status == "DONE":
            self.telemetry = self._measure(nixl, handle)
            self._end(None)
        elif status != "PROC":
            self._end(TransferError(f"transfer from {self.peer.name!r}: NIXL reports {status}"))

    def _end(self, error: KvhmaError | None) -> None:
        if self._work is not None:
            with contextlib.suppress(Exception):  # it has ended; NIXL keeps what it cannot release yet on a list
                self._work[1].release()
        self._work = None
        self._error = error
        self._finished = True
        self._on_end(self, error)
