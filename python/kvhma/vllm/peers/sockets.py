# SPDX-License-Identifier: Apache-2.0
"""Socket options for both ends of a connection."""

from __future__ import annotations

import socket

_OPTIONS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Detect a vanished peer after a minute. These are Linux's names; other systems have some of them."""


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and detect a peer that vanishes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
