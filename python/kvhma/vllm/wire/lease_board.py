# SPDX-License-Identifier: Apache-2.0
"""P's lease board: registered memory that shows decode workers whose memory they read, and what P holds.

**Whose memory.** The board begins with a hash of the key that signs the worker's identity. D reads it before it reads
any cache, through the connection that reads the caches. NIXL's metadata is public, so an unknown peer could sign an
identity with P's metadata in it: D would read P's memory for that peer's requests. But the hash is of P's key.

A hash proves nothing where other peers choose bytes. If P also loads, another engine's caches and boards are in P's
registered memory. So boards have a separate range of addresses, where no peer's bytes ever get, and an identity names
its board by a small number. All of the range can be read: over TCP, a read of an unmapped address ends P's process.

**What P holds.** P's scheduler writes a mark for each request that it holds, and removes the mark before the blocks can
be freed. Once its read has ended, a decode worker reads the board again. No two requests have the same mark. So a mark
that is on the board then was there during the whole read: P held the blocks. This needs no clocks and no answer of P.
If the mark is missing, D asks P.

The memory belongs to P's worker, which has the NIXL agent; the scheduler writes to it through the worker's file. In
another container or on another host the scheduler cannot open that file. Then D asks P::

     0  32 bytes  hash of the worker's key
    32  16 bytes  OPENED, once the scheduler writes here
    48  16 bytes  mark of a request, or zeros
    ..            to BOARD_BYTES
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np

from kvhma.geometry import Region
from kvhma.vllm.wire.params import LeaseKey

BOARD_BYTES = 16 << 10
"""Bytes of a board: 1,021 requests. D asks P about any others."""

OWNER_BYTES = 32
MARK_BYTES = 16
OPENED = b"kvhma leases 2\0\0"

BOARD_PLACES = 256
"""Number of boards that a process can have."""

_FIRST_PLACE = 1 << 45
"""Address of place 0. Linux maps nothing there by itself, with address spaces of 47 bits or more."""

_PLACE_BYTES = 64 << 10
"""From one place to the next: the largest pages of a kernel."""

_FIXED, _FIXED_NOREPLACE, _NORESERVE = 0x10, 0x10_0000, 0x4000
"""Of mmap: map at this address, replacing all that is there; or fail if something is there; count no memory for it."""

assert len(OPENED) == MARK_BYTES  # noqa: S101

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class BoardFile:
    """Where the scheduler finds the board of a worker on its host.

    Attributes:
        path: of the worker's file.
        owner: hash at the start of the file. On another host the same path is another file.
    """

    path: str
    owner: bytes = field(repr=False)


class LeaseBoard:
    """The board of a worker: a file without a name, which exists while a process has it open.

    Attributes:
        place: number of its place, for the worker's identity.
        region: its memory, to be registered.
        file: for the scheduler; None if this machine has no such files. Then no scheduler opens it.
    """

    def __init__(self, public_key: bytes) -> None:
        """Make an empty board.

        Args:
            public_key: of the worker, 32 bytes.

        Raises:
            OSError: this process cannot map memory at any place.
        """
        self._descriptor = _make_file()
        try:
            self.place = _PLACES.map_board(self._descriptor)
        except OSError:
            self.close()
            raise
        weakref.finalize(self, _PLACES.unmap_board, self.place).atexit = False
        self.region = board_region(self.place)
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * BOARD_BYTES).from_address(self.region.base))
        owner = owner_of(public_key)
        self._bytes[:OWNER_BYTES] = np.frombuffer(owner, np.uint8)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.file = None if self._descriptor < 0 else BoardFile(path, owner)

    def close(self) -> None:
        """Close the file; a second call does nothing. The memory stays as long as this object exists."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _make_file() -> int:
    """Return the descriptor of a new file for a board; -1 if this machine has no files without a name."""
    try:
        descriptor = os.memfd_create("kvhma-leases")
    except OSError:
        return -1
    os.truncate(descriptor, BOARD_BYTES)
    return descriptor


class _Places:
    """The places of this process, all mapped: those without a board to read-only zeros."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped = False
        self._free: list[int] = []

    def map_board(self, descriptor: int) -> int:
        """Map a file, or with -1 new memory, at a free place; return the number of the place.

        Raises:
            OSError: something else is mapped there, or there is no free place.
        """
        with self._lock:
            if not self._mapped:
                _map(_FIRST_PLACE, BOARD_PLACES * _PLACE_BYTES, mmap.PROT_READ, _FIXED_NOREPLACE | _NORESERVE, -1)
                self._mapped = True
                self._free += reversed(range(BOARD_PLACES))
        # Without the lock: Python may collect a board, and so call `unmap_board`, anywhere in this thread.
        try:
            place = self._free.pop()
        except IndexError:
            raise OSError(f"this process has {BOARD_PLACES} lease boards already") from None
        _map(board_region(place).base, BOARD_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED, descriptor)
        return place

    def unmap_board(self, place: int) -> None:
        """Map zeros again."""
        _map(board_region(place).base, BOARD_BYTES, mmap.PROT_READ, _FIXED, -1)
        self._free.append(place)


def _map(address: int, nbytes: int, rights: int, how: int, descriptor: int) -> None:
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = _libc.mmap(address, nbytes, rights, kind | how, descriptor, 0)
    if found == address:
        return
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map a lease board at {address:#x}")
    _libc.munmap(found, nbytes)
    raise OSError(f"Linux maps no lease board at {address:#x}, but at {found:#x}: it is older than 4.17")


_PLACES = _Places()


def board_region(place: int) -> Region:
    """Return the memory of the board at a place, below `BOARD_PLACES`, of any worker's process."""
    return Region(_FIRST_PLACE + place * _PLACE_BYTES, BOARD_BYTES)


def owner_of(public_key: bytes) -> bytes:
    """Return the hash, 32 bytes, with which the board of the worker with this key begins."""
    return hashlib.blake2b(public_key, digest_size=OWNER_BYTES, person=b"kvhma owner").digest()


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
