# SPDX-License-Identifier: Apache-2.0
"""P's lease board as a decode worker reads it. If it has a mark after a read, P held the blocks during the read."""

from __future__ import annotations

import logging
import math
import threading
import time

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import KvhmaError
from kvhma.geometry import Geometry, Region
from kvhma.nixl import Agent, Peer, PreparedRead, TransferHandle
from kvhma.nixl.arrays import row_of
from kvhma.vllm.wire.lease_board import BOARD_BYTES, MARK_BYTES, OPENED

logger = logging.getLogger("vllm.kvhma")

_PLACES = 16
"""Places for boards that are registered together."""

_AT_ONCE_SECONDS = 5e-4
"""How long a thread polls a read that it has begun. A read over the network takes some 10 µs."""

_LATE_SECONDS = 1e-2
"""How long to wait for a read of the board in all. After that D asks P."""


class BoardReader:
    """Reads one board, again and again. Safe to use from several threads."""

    def __init__(self, memory: BoardMemory, place: int, read: PreparedRead) -> None:
        """Own a place and the prepared read that fills it."""
        self._memory = memory
        self._place: int | None = place
        self._read = read
        self._lock = threading.Lock()
        self._reading: TransferHandle | None = None
        self._began_at = self._shown_at = 0.0
        self._board = b""
        self._useful = True

    @property
    def useful(self) -> bool:
        """Whether P writes to the board and it can be read, as far as this process knows."""
        return self._useful

    @property
    def in_flight(self) -> bool:
        """Whether a read may still write to its place."""
        reading = self._reading
        return reading is not None and not reading.drive()

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
                    self._began_at = time.monotonic()
                    self._reading = self._read.post()
                    self._reading.wait(_AT_ONCE_SECONDS)
                    self._take_reading()
            except KvhmaError as error:  # if P is lost, the question to P will fail
                logger.info(
                    "kvhma: cannot read the lease board of %r, so it is asked for its leases: %s",
                    self._read.peer.name,
                    error,
                )
                self._useful = False
            late = self._reading is not None and time.monotonic() - self._began_at > _LATE_SECONDS
            return (math.inf, b"") if late or not self._useful else (self._shown_at, self._board)

    def _take_reading(self) -> None:
        """Store the board if a read has ended."""
        if self._useful and self._place is not None and self._reading is not None and self._reading.poll() == "done":
            self._reading, self._shown_at = None, self._began_at
            self._board = self._memory.copy_board(self._place)
            self._useful = self._board[MARK_BYTES:].startswith(OPENED)

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

    def reader(self, peer: Peer, address: int) -> BoardReader:
        """Return a reader of the board at an address of a peer's memory.

        Raises:
            KvhmaError: the peer's memory cannot be read there.
        """
        with self._lock:
            to_close, self._to_close = self._to_close, set()
        for reader in to_close:
            reader.close()
        place = self._take_place()
        try:
            local = Region(self._boards[place].ctypes.data, BOARD_BYTES)
            read = self._agent.prepare_read(peer, row_of(local), row_of(Region(address, BOARD_BYTES)))
        except BaseException:
            self.free_place(place)
            raise
        return BoardReader(self, place, read)

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
