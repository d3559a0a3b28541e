# SPDX-License-Identifier: Apache-2.0
"""The transfers of an agent that have not ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvhma.errors import KvhmaError, RequestError, TransferError
from kvhma.nixl.library import NixlAgent, NixlHandle
from kvhma.nixl.peer import Peer
from kvhma.nixl.session import Session
from kvhma.nixl.transfer import Telemetry, TransferHandle

_DRAIN_SLEEP = 5e-4


class InFlight:
    """The transfers of one agent from their post to their end, and ended ones that were aborted until they are polled.

    NIXL would release a transfer that nothing refers to while it still writes, so this object keeps them.
    """

    def __init__(self, session: Session) -> None:
        """Begin with none."""
        self._session = session
        self._running: set[TransferHandle] = set()
        self._ended: list[TransferHandle] = []
        self._telemetry = True

    def start(self, peer: Peer, count: int, make: Callable[[NixlAgent], NixlHandle]) -> TransferHandle:
        """Make and post a transfer.

        Args:
            peer: whose memory is read.
            count: how many descriptors it has, for messages.
            make: makes NIXL's handle of it.

        Raises:
            RequestError: NIXL refuses the descriptors. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        with self._session.lock:
            nixl = self._session.usable(peer)
            try:
                handle = make(nixl)
            except KvhmaError:
                raise
            except Exception as exc:
                what = f"cannot read {count} descriptors of {peer.name!r} within registered memory"
                raise self._session.failure(exc, what, peer, RequestError) from exc
            transfer = TransferHandle(peer, (nixl, handle), self._measure, self._end)
            self._running.add(transfer)
        transfer.post()
        return transfer

    def running(self, peer: Peer | None = None) -> list[TransferHandle]:
        """Return those that have not ended, of one peer or of all."""
        with self._session.lock:
            return [transfer for transfer in self._running if peer is None or transfer.peer is peer]

    def poll_aborted(self) -> list[TransferHandle]:
        """Drive the aborted ones; return those that have ended since the last call."""
        for transfer in self.running():
            if transfer.aborted:
                transfer.drive()
        with self._session.lock:
            ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout: float, what: str, peer: Peer | None = None) -> None:
        """Drive those of one peer, or of all, until they have ended. Nothing can be started by now.

        Raises:
            TransferError: some have not ended after `timeout` seconds; `what` begins the message.
        """
        transfers = self.running(peer)
        deadline = time.monotonic() + timeout
        while transfers := [transfer for transfer in transfers if not transfer.drive()]:
            if time.monotonic() >= deadline:
                raise TransferError(f"{what}: {len(transfers)} transfers still in flight after {timeout} s")
            time.sleep(_DRAIN_SLEEP)

    def _measure(self, nixl: NixlAgent, handle: NixlHandle) -> Telemetry | None:
        if not self._telemetry:
            return None
        try:
            raw = nixl.get_xfer_telemetry(handle)
        except Exception:
            # NIXL's environment can turn telemetry off; the transfer is good without it, and the next ones have none.
            self._telemetry = False
            return None
        return Telemetry(raw.descCount, raw.totalBytes, raw.startTime, raw.postDuration, raw.xferDuration)

    def _end(self, transfer: TransferHandle, error: KvhmaError | None) -> None:
        with self._session.lock:
            self._running.discard(transfer)
            if transfer.aborted:
                self._ended.append(transfer)
            self._session.note_loss(transfer.peer, error)
