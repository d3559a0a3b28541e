# SPDX-License-Identifier: Apache-2.0
"""Untrusted clients at the side channels: junk, silent connections, questions whose answers they never read."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter

Address = tuple[str, int]


class UntrustedClient(threading.Thread):
    """Connects again and again, each time to one of the side channels with one kind of attack."""

    def __init__(self, addresses: list[Address], seed: str, number: int, stop: threading.Event):
        super().__init__(name=f"hostile {number}", daemon=True)
        self._addresses = addresses
        self._rng = random.Random(f"{seed} hostile {number}")
        self._over = stop
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        kinds = [self._junk, self._length, self._unread, self._silent, self._crowd, self._half]
        while not self._over.wait(self._rng.uniform(0.2, 1.5)):
            kind = self._rng.choice(kinds)
            address = self._rng.choice(self._addresses)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                kind(address, stack)
                self.done[kind.__name__[1:]] += 1

    def _connect(self, address: Address, stack: contextlib.ExitStack) -> socket.socket:
        return stack.enter_context(socket.create_connection(address, 2))

    def _junk(self, address: Address, stack: contextlib.ExitStack) -> None:
        raw = self._connect(address, stack)
        raw.sendall(
            self._rng.choice([b"GET / HTTP/1.1\r\n\r\n", self._rng.randbytes(5000), b"\x16\x03\x01\x02\x00\x01"])
        )

    def _length(self, address: Address, stack: contextlib.ExitStack) -> None:
        # Announces this many bytes, sends some of them.
        raw = self._connect(address, stack)
        raw.sendall(struct.pack("<I", self._rng.choice([0, 1, 1 << 20, (1 << 32) - 1])))
        for _ in range(self._rng.randrange(20)):
            raw.sendall(bytes(1 << 14))

    def _unread(self, address: Address, stack: contextlib.ExitStack) -> None:
        # Whole messages, each of which is answered, from a client that never reads.
        raw = self._connect(address, stack)
        raw.settimeout(1)
        body = self._rng.choice([b"\x92\xa1x\x01", b"\x81\xa1x\xc0", self._rng.randbytes(100)])
        for _ in range(100):
            raw.sendall((struct.pack("<I", len(body)) + body) * 100)
        self._over.wait(self._rng.uniform(0, 3))

    def _silent(self, address: Address, stack: contextlib.ExitStack) -> None:
        self._connect(address, stack)
        self._over.wait(self._rng.uniform(0, 8))

    def _crowd(self, address: Address, stack: contextlib.ExitStack) -> None:
        crowd = [self._connect(address, stack) for _ in range(100)]
        for raw in crowd:
            raw.sendall(b"\xff")
        self._over.wait(self._rng.uniform(0, 3))

    def _half(self, address: Address, stack: contextlib.ExitStack) -> None:
        raw = self._connect(address, stack)
        raw.shutdown(socket.SHUT_WR)
        self._over.wait(self._rng.uniform(0, 3))
