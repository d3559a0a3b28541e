# SPDX-License-Identifier: Apache-2.0
"""P's lease board as a decode worker reads it. Before a read it shows whose memory that is, afterwards what P held."""

from __future__ import annotations

import logging
import math
import threading
import time

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import HandshakeError, KvhmaError, RequestError, TransferError
from kvhma.geometry import Geometry, Region
from kvhma.nixl import Agent, Peer, PreparedRead, TransferHandle
from kvhma.nixl.arrays import row_of
from kvhma.vllm.config.identity import decode_extra
from kvhma.vllm.wire.lease_board import BOARD_BYTES, OPENED, OWNER_BYTES, board_region, owner_of
from kvhma.vllm.wire.peer_log import logger as peer_logger

logger = logging.getLogger("vllm.kvhma")

_PLACES = 16
"""Places for boards that are registered together."""

_AT_ONCE_SECONDS = 5e-4
"""How long a thread polls a read that it has begun. A read over the network takes some 10 µs."""

_LATE_SECONDS = 1e-2
"""How long to wait for a read of the board in all. After that D asks P."""

_SEE_LOG = "its log says why"


class BoardReader:
    """Reads one board, again and again. Safe to use from several threads."""

    def __init__(self, memory: BoardMemory, place: int, read: PreparedRead) -> None:
        """Own a place and the prepared read that fills it."""
        self._memory = memory
        self._place: int | None = place
        self._read = read
        self._owner = owner_of(read.peer.payload.public_key)
        self._lock = threading.Lock()
        self._reading: TransferHandle | None = None
        self._began_at = self._shown_at = 0.0
        self._board = b""
        self._useful = True

    @property
    def useful(self) -> bool:
        """Whether the board is P's, P writes to it and it can be read, as far as this process knows."""
        return self._useful

    @property
    def in_flight(self) -> bool:
        """Whether a read may still write to its place."""
        reading = self._reading
        return reading is not None and not reading.drive()

    def check_owner(self, timeout: float) -> None:
        """Check that the memory is that of the worker which signed its identity. It reads the board, the first time.

        Args:
            timeout: seconds to wait for the read.

        Raises:
            HandshakeError: the board is another worker's, or no board.
            PeerLostError: the worker is gone.
            TransferError: the read failed, or did not end in time.
        """
        peer = self._read.peer
        with self._lock:
            if not self._read_anew(timeout):
                raise TransferError(f"the lease board of {peer.name!r} was not read in {timeout} s")
        found = self._board[:OWNER_BYTES]
        if found != self._owner:
            raise HandshakeError(
                f"the memory that {peer.name!r} names is not that worker's: its lease board begins with {found.hex()}, "
                f"and with the key that signed the worker identity it would begin with {self._owner.hex()}"
            )

    def look(self, since: float) -> tuple[float, bytes]:
        """Return the latest known content of the board, and when its read began.

        Args:
            since: time on the monotonic clock. It reads the board again, and waits a moment, for content after this.

        Returns:
            A time on the monotonic clock, and the board. If the board is not useful or takes too long: infinity,
            and an empty board.
        """
        with self._lock:
            try:
                self._take_reading()
                if self._useful and self._reading is None and self._shown_at <= since:
                    self._read_anew(_AT_ONCE_SECONDS)
            except KvhmaError as error:  # if P is lost, the question to P will fail
                logger.info(
                    "kvhma: cannot read the lease board of %r, so it is asked for its leases: %s",
                    self._read.peer.name,
                    error,
                )
                self._useful = False
            late = self._reading is not None and time.monotonic() - self._began_at > _LATE_SECONDS
            return (math.inf, b"") if late or not self._useful else (self._shown_at, self._board)

    def _read_anew(self, seconds: float) -> bool:
        """Begin to read the board, and wait for it; return whether it was read in some seconds. The lock is held."""
        self._began_at = time.monotonic()
        self._reading = self._read.post()
        done = self._reading.wait(seconds)
        self._take_reading()
        return done

    def _take_reading(self) -> None:
        """Store the board if a read has ended."""
        if self._useful and self._place is not None and self._reading is not None and self._reading.poll() == "done":
            self._reading, self._shown_at = None, self._began_at
            self._board = self._memory.copy_board(self._place)
            self._useful = self._board.startswith(self._owner + OPENED)

    def close(self) -> None:
        """Stop reading and free the place, after any read in flight. It may be called again."""
        with self._lock:
            self._useful = False
            if self._place is not None and self.in_flight:
                self._memory.close_later(self)
            elif self._place is not None:
                self._read.release()
                self._memory.free_place(self._place)
                self._place = None


class BoardMemory:
    """Memory for boards: a place for each worker. Safe to use from several threads."""

    def __init__(self, agent: Agent) -> None:
        """Start without registered memory."""
        self._agent = agent
        self._lock = threading.Lock()
        self._boards: list[NDArray[np.uint8]] = []
        """The boards by place."""
        self._free: list[int] = []
        self._to_close: set[BoardReader] = set()

    def checked_reader(self, peer: Peer, timeout: float, *, with_secret: bool) -> BoardReader | None:
        """Return a reader of a worker's board, after one read that checks whose memory it is.

        Args:
            peer: the worker.
            timeout: seconds to wait for the read.
            with_secret: whether the worker identity came from an engine with the same secret.

        Returns:
            The reader; None if there is no board, which only an engine with the secret may lack.

        Raises:
            HandshakeError: the memory is not that of the worker that signed its identity, or nothing proves that it is.
            PeerLostError: the worker is gone.
            TransferError: the board could not be read now.
        """
        place = decode_extra(peer.payload.extra).place
        if place is None and with_secret:
            peer_logger.warning("kvhma: %s; D reads from it because it has our secret: %s", _no_board(peer), _SEE_LOG)
            return None
        if place is None:
            raise HandshakeError(f"{_no_board(peer)}: {_SEE_LOG}, or set secret_file at both engines")
        try:
            reader = self.reader(peer, place)
        except RequestError as error:
            raise HandshakeError(f"{peer.name!r} did not register the lease board that it names: {error}") from error
        try:
            reader.check_owner(timeout)
        except BaseException:
            reader.close()
            raise
        return reader

    def reader(self, peer: Peer, place: int) -> BoardReader:
        """Return a reader of the board at a place of a peer's process.

        Raises:
            RequestError: the peer has not registered that memory.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot prepare the read.
        """
        with self._lock:
            to_close, self._to_close = self._to_close, set()
        for reader in to_close:
            reader.close()
        own = self._take_place()
        try:
            local = Region(self._boards[own].ctypes.data, BOARD_BYTES)
            read = self._agent.prepare_read(peer, row_of(local), row_of(board_region(place)))
        except BaseException:
            self.free_place(own)
            raise
        return BoardReader(self, own, read)

    def copy_board(self, place: int) -> bytes:
        """Return the content of a place."""
        return self._boards[place].tobytes()

    def close_later(self, reader: BoardReader) -> None:
        """Close a reader when the next reader is made."""
        with self._lock:
            self._to_close.add(reader)

    def free_place(self, place: int) -> None:
        """Free a place that no read writes to any more."""
        with self._lock:
            self._free.append(place)

    def _take_place(self) -> int:
        with self._lock:
            if not self._free:
                more = np.zeros((_PLACES, BOARD_BYTES), np.uint8)
                region = Region(more.ctypes.data, more.nbytes)
                self._agent.register(Geometry(regions=(region,), groups=(), layers=()))
                self._free += range(len(self._boards), len(self._boards) + _PLACES)
                self._boards.extend(more)
            return self._free.pop()


def _no_board(peer: Peer) -> str:
    return f"worker {peer.name!r} has no lease board that shows whose memory it is"
