# SPDX-License-Identifier: Apache-2.0
"""Options of sockets for both ends of a connection, and a socket that wakes a thread."""

from __future__ import annotations

import contextlib
import socket

_OPTIONS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Detect a vanished peer after a minute. These are Linux's names; other systems have some of them."""

_DRAIN = 4096
"""Most wake-ups that one turn of a thread takes; others wake it once more."""


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and detect a peer that vanishes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Waker:
    """Wakes a thread that waits for sockets. Any thread may call :meth:`wake`."""

    def __init__(self) -> None:
        """Open two sockets.

        Raises:
            OSError: the process has no more descriptors.
        """
        self._waits, self._wakes = socket.socketpair()
        for end in (self._waits, self._wakes):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor that is readable once the thread is to wake."""
        return self._waits.fileno()

    def wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # if full, the thread wakes anyway; if closed, it has ended
            self._wakes.send(b"!")

    def drain(self) -> None:
        """Take what has woken the thread."""
        with contextlib.suppress(OSError):
            self._waits.recv(_DRAIN)

    def close(self) -> None:
        """Close both sockets."""
        self._waits.close()
        self._wakes.close()
