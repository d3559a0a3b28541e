# SPDX-License-Identifier: Apache-2.0
"""P's lease board: registered memory in which decode workers see for themselves what P holds.

P's scheduler writes a mark for each request that it holds, and removes the mark before the blocks can be freed. Once
its read has ended, a decode worker reads the board as it reads caches. No two requests have the same mark. So a mark
that is on the board then was there during the whole read: P held the blocks. This needs no clocks and no answer of P.
If the mark is missing, D asks P.

The memory belongs to P's worker, which has the NIXL agent; the scheduler writes to it through the worker's file. In
another container or on another host the scheduler cannot open that file. Then D asks P::

     0  16 bytes  random, identifies the worker's file
    16  16 bytes  OPENED, once the scheduler writes here
    32  16 bytes  mark of a request, or zeros
    ..            to BOARD_BYTES
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from dataclasses import dataclass, field

import numpy as np

from kvhma.geometry import Region
from kvhma.vllm.wire.params import LeaseKey

BOARD_BYTES = 16 << 10
"""Bytes of a board: 1,022 requests. D asks P about any others."""

MARK_BYTES = 16
OPENED = b"kvhma leases 1\0\0"

assert len(OPENED) == MARK_BYTES  # noqa: S101


@dataclass(frozen=True, slots=True)
class BoardFile:
    """Where the scheduler finds the board of a worker on its host.

    Attributes:
        path: of the worker's file.
        cookie: random bytes at the start of the file. On another host the same path is another file.
    """

    path: str
    cookie: bytes = field(repr=False)


class LeaseBoard:
    """The board of a worker: a file without a name, which exists while a process has it open.

    Attributes:
        region: its memory, to be registered.
        file: for the scheduler.
    """

    def __init__(self) -> None:
        """Make an empty board.

        Raises:
            OSError: this machine does not support such files.
        """
        self._file = os.fdopen(os.memfd_create("kvhma-leases"), "r+b")
        self._file.truncate(BOARD_BYTES)
        self._bytes = np.frombuffer(mmap.mmap(self._file.fileno(), BOARD_BYTES), np.uint8)
        cookie = secrets.token_bytes(MARK_BYTES)
        self._bytes[:MARK_BYTES] = np.frombuffer(cookie, np.uint8)
        self.region = Region(self._bytes.ctypes.data, BOARD_BYTES)
        self.file = BoardFile(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", cookie)

    def close(self) -> None:
        """Close the file; a second call does nothing. The memory stays as long as this object exists."""
        self._file.close()


def mark_of(key: LeaseKey, digest: bytes) -> bytes:
    """Return the mark of a request that P holds.

    Args:
        key: names it.
        digest: of the parameters that P handed out for it. A reader with other parameters finds no mark.

    Returns:
        16 bytes.
    """
    text = digest + key.generation.to_bytes(8, "big") + key.request_id.encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=MARK_BYTES, person=b"kvhma lease").digest()
