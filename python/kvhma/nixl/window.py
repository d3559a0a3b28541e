# SPDX-License-Identifier: Apache-2.0
"""How many bytes may be in flight from a peer over TCP, and reads in pieces that fit in there.

If a reader dies during a read over TCP, UCX can end the process that it reads from. That is rare if little is in
flight. docs/nics.md has the measurements from which the bound was chosen.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import RequestError

WINDOW_BYTES = 4 << 20
"""Most bytes in flight from one peer to one agent, however fast the link is."""

LEAST_WINDOW_BYTES = 1 << 20
"""The bound while pieces take long."""

PIECE_SECONDS = 2e-2
"""A piece that takes longer has waited at the peer, because the link is slow or the peer serves others, too."""


class ReadWindow:
    """The bytes in flight from one peer. Safe to use from several threads.

    Reads get room in the order in which they began: the first one posts all its pieces before the next one posts any.
    """

    def __init__(self) -> None:
        """Begin with nothing in flight."""
        self._lock = threading.Lock()
        self._limit = WINDOW_BYTES
        self._in_flight = 0
        self._queue: dict[object, None] = {}

    @property
    def piece_bytes(self) -> int:
        """Most bytes of a piece of a read that begins now: two of them overlap."""
        return self._limit // 2

    def enter(self, read: object) -> None:
        """Let a read wait for room, after those that wait already."""
        with self._lock:
            self._queue[read] = None

    def take_room(self, read: object, nbytes: int) -> bool:
        """Take room for a piece of a read; return False if the window is full, or if it is not the read's turn.

        A piece that was cut for a larger window is in flight alone.
        """
        with self._lock:
            is_first = next(iter(self._queue), None) is read
            if not is_first or (self._in_flight and self._in_flight + nbytes > self._limit):
                return False
            self._in_flight += nbytes
            return True

    def return_room(self, nbytes: int, seconds: float) -> None:
        """Return the room of a piece that has ended, some seconds after its post."""
        with self._lock:
            self._in_flight -= nbytes
            if seconds > PIECE_SECONDS:
                self._limit = max(LEAST_WINDOW_BYTES, self._limit - nbytes)
            elif self._queue:  # the window is full
                self._limit = min(WINDOW_BYTES, self._limit + nbytes // 4)

    def leave(self, read: object) -> None:
        """Let the next read have its turn, if this one has posted all its pieces. A second call has no effect."""
        with self._lock:
            self._queue.pop(read, None)


def cut_rows(
    local: NDArray[np.uint64], remote: NDArray[np.uint64], piece_bytes: int
) -> list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Cut a read into pieces, in its order. Rows that cross from one piece to the next are cut.

    ::

        rows      |------a------|--b--|---------c---------|
        pieces    |-----a-----|a|--b--|---c---|-----c-----|
                  0           1               2           3 piece_bytes

    Args:
        local: rows ``(addr, len, device)`` to write, uint64 of shape (n, 3).
        remote: rows to read, with equal lengths.
        piece_bytes: bytes of each piece but the last one.

    Returns:
        Local and remote rows of each piece.

    Raises:
        RequestError: the lengths differ. One piece is not checked: NIXL does it.
    """
    ends = np.cumsum(local[:, 1])
    if ends[-1] <= piece_bytes:
        return [(local, remote)]
    if not np.array_equal(local[:, 1], remote[:, 1]):
        raise RequestError("local and remote descriptors differ in length")
    before = ends - local[:, 1]
    cuts = np.arange(piece_bytes, int(ends[-1]), piece_bytes, dtype=np.uint64)
    starts = np.union1d(before, cuts)
    row = np.searchsorted(before, starts, side="right") - 1
    offset, length = starts - before[row], np.diff(np.append(starts, ends[-1]))
    piece_starts = np.searchsorted(starts, cuts)
    own, peers = (
        np.split(np.stack([rows[row, 0] + offset, length, rows[row, 2]], axis=1), piece_starts)
        for rows in (local, remote)
    )
    return list(zip(own, peers, strict=True))
