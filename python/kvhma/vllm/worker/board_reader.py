# SPDX-License-Identifier: Apache-2.0
"""P's lease board as a decode worker reads it: what it shows after a read was held during it, and nobody is asked."""

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
"""Places for boards that are registered at a time."""

_AT_ONCE_SECONDS = 5e-4
"""How long a thread stays with a reading that it has begun: a network of engines takes some 10 µs."""

_LATE_SECONDS = 1e-2
"""How long a reading is waited for altogether; P is asked then."""


class BoardReader:
    """Reads one board, as often as it is wanted. Safe to use from several threads."""

    def __init__(self, memory: BoardMemory, place: int, read: PreparedRead) -> None:
        """Take over a place and the read that fills it."""
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
        """Whether P writes to it and it can be read, as far as is known."""
        return self._useful

    @property
    def in_flight(self) -> bool:
        """Whether something may still be written to its place."""
        reading = self._reading
        return reading is not None and not reading.drive()

    def look(self, since: float) -> tuple[float, bytes]:
        """Return the latest time at which it is known what the board has shown, and what that was.

        Args:
            since: what it has shown after this time on the monotonic clock is wanted, and waited for a moment.

        Returns:
            A time on the monotonic clock, and the board. A board that is not useful, or takes too long, shows nothing
            now and later.
        """
        with self._lock:
            try:
                self._take()
                if self._useful and self._reading is None and self._shown_at <= since:
                    self._began_at = time.monotonic()
                    self._reading = self._read.post()
                    self._reading.wait(_AT_ONCE_SECONDS)
                    self._take()
            except KvhmaError as error:  # if P is lost, who asks it hears so
                logger.info("kvhma: %r is asked for its leases: %s", self._read.peer.name, error)
                self._useful = False
            late = self._reading is not None and time.monotonic() - self._began_at > _LATE_SECONDS
            return (math.inf, b"") if late or not self._useful else (self._shown_at, self._board)

    def _take(self) -> None:
        """Take what was read, if a reading has ended."""
        if self._useful and self._place is not None and self._reading is not None and self._reading.poll() == "done":
            self._reading, self._shown_at = None, self._began_at
            self._board = self._memory.copy(self._place)
            self._useful = self._board[MARK_BYTES:].startswith(OPENED)

    def close(self) -> None:
        """Read no more, and give the place back; where a reading is in flight, later. May be called again."""
        with self._lock:
            self._useful = False
            if self._place is not None and self.in_flight:
                self._memory.close_later(self)
            elif self._place is not None:
                self._read.release()
                self._memory.free(self._place)
                self._place = None


class BoardMemory:
    """Memory that boards are read into: a place for each worker. Safe to use from several threads."""

    def __init__(self, agent: Agent) -> None:
        """Register nothing yet."""
        self._agent = agent
        self._lock = threading.Lock()
        self._boards: list[NDArray[np.uint8]] = []
        """By place."""
        self._free: list[int] = []
        self._to_close: set[BoardReader] = set()

    def reader(self, peer: Peer, address: int) -> BoardReader:
        """Return a reader of the board at an address of a peer's memory.

        Raises:
            KvhmaError: nothing can be read there.
        """
        with self._lock:
            to_close, self._to_close = self._to_close, set()
        for one in to_close:
            one.close()
        place = self._take_place()
        try:
            local = Region(self._boards[place].ctypes.data, BOARD_BYTES)
            read = self._agent.prepare_read(peer, row_of(local), row_of(Region(address, BOARD_BYTES)))
        except BaseException:
            self.free(place)
            raise
        return BoardReader(self, place, read)

    def copy(self, place: int) -> bytes:
        """Return what is in a place."""
        return self._boards[place].tobytes()

    def close_later(self, reader: BoardReader) -> None:
        """Close a reader again when the next one is made."""
        with self._lock:
            self._to_close.add(reader)

    def free(self, place: int) -> None:
        """Nothing is read into a place any more."""
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
