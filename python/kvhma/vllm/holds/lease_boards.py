# SPDX-License-Identifier: Apache-2.0
"""The lease boards of P's workers: P's scheduler writes on them which leases exist."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from pathlib import Path

from kvhma.vllm.wire.lease_board import BOARD_BYTES, MARK_BYTES, OPENED, OWNER_BYTES, BoardFile

logger = logging.getLogger("vllm.kvhma")


class LeaseBoards:
    """All boards that this process can write to; all show the same. The lock of the lease table must be held.

    Attributes:
        free: the places that have no mark.
    """

    def __init__(self, files: Iterable[BoardFile] = ()) -> None:
        """Open the boards of some workers; a board that cannot be opened is skipped."""
        self._boards = [board for file in files if (board := _open(file)) is not None]
        self.free = list(range(OWNER_BYTES + MARK_BYTES, BOARD_BYTES, MARK_BYTES)) if self._boards else []

    def show_mark(self, mark: bytes) -> int | None:
        """Show a mark; return its place, or None if the board is full."""
        if not self.free:
            return None
        place = self.free.pop()
        self._write(place, mark)
        return place

    def hide_mark(self, place: int | None) -> None:
        """Remove a mark. No reader finds it after this returns."""
        if place is not None:
            self._write(place, bytes(MARK_BYTES))
            self.free.append(place)

    def _write(self, place: int, mark: bytes) -> None:
        # A reader may see half of the old and half of the new mark, which equals no mark.
        for board in self._boards:
            board[place : place + MARK_BYTES] = mark


def _open(file: BoardFile) -> mmap.mmap | None:
    path = Path(file.path)
    try:
        if not path.is_file():  # the worker may be on another host; never open a device here
            raise FileNotFoundError(f"{file.path} is not a file")
        with path.open("r+b", buffering=0) as opened:
            board = mmap.mmap(opened.fileno(), BOARD_BYTES)
            if board[:OWNER_BYTES] != file.owner:
                raise FileNotFoundError(f"{file.path} is another process's board")
    except (OSError, ValueError) as error:
        logger.info("kvhma: decode engines will ask P about leases: cannot open the worker's lease board: %s", error)
        return None
    board[OWNER_BYTES:] = OPENED.ljust(BOARD_BYTES - OWNER_BYTES, b"\0")
    return board
