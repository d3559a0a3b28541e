# SPDX-License-Identifier: Apache-2.0
"""The lease boards of P's workers, as its scheduler writes to them."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from pathlib import Path

from kvhma.vllm.wire.lease_board import BOARD_BYTES, MARK_BYTES, OPENED, BoardFile

logger = logging.getLogger("vllm.kvhma")


class LeaseBoards:
    """All boards that this process can write to; they show the same. Used under the lock of the lease table."""

    def __init__(self, files: Iterable[BoardFile] = ()) -> None:
        """Open the boards of some workers; one that cannot be is left out."""
        self._boards = [board for file in files if (board := _open(file)) is not None]
        self._free = list(range(2 * MARK_BYTES, BOARD_BYTES, MARK_BYTES)) if self._boards else []

    def show_mark(self, mark: bytes) -> int | None:
        """Show a mark; return its place, None if there is no room for it."""
        if not self._free:
            return None
        place = self._free.pop()
        self._write(place, mark)
        return place

    def hide_mark(self, place: int | None) -> None:
        """Take a mark away. Nobody finds it any more when this returns."""
        if place is not None:
            self._write(place, bytes(MARK_BYTES))
            self._free.append(place)

    def _write(self, place: int, mark: bytes) -> None:
        # One that is read meanwhile may be half of each, which is no mark.
        for board in self._boards:
            board[place : place + MARK_BYTES] = mark


def _open(file: BoardFile) -> mmap.mmap | None:
    path = Path(file.path)
    try:
        if not path.is_file():  # of another host's process, whose device must not be touched
            raise FileNotFoundError(f"{file.path} is no board")
        with path.open("r+b", buffering=0) as opened:
            board = mmap.mmap(opened.fileno(), BOARD_BYTES)
            if board[:MARK_BYTES] != file.cookie:
                raise FileNotFoundError(f"{file.path} is another board")
    except (OSError, ValueError) as error:
        logger.info("kvhma: decode engines will ask for leases: the worker's board cannot be opened: %s", error)
        return None
    board[MARK_BYTES:] = OPENED + bytes(BOARD_BYTES - 2 * MARK_BYTES)
    return board
