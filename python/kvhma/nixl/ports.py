# SPDX-License-Identifier: Apache-2.0
"""This process's TCP, from the Linux kernel: where it listens and what it has received. UCX does not report either."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_SIOCGIFADDR = 0x8915
_RECEIVED = slice(128, 136)
"""Where Linux's tcp_info has the bytes that a connection has received, from Linux 4.1 on."""


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A TCP socket that accepts connections.

    Attributes:
        host: numeric address; all zeros for every address of the machine.
        port: its port.
        device: name of the network device with the address; ``all`` for every device, ``?`` if unknown.
    """

    host: str
    port: int
    device: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port} ({self.device})"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback


def listening_sockets() -> set[ListeningSocket]:
    """Return the TCP sockets of this process that accept connections; an empty set without ``/proc``."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    devices = _devices()
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                # sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode ...
                columns = line.split()
                if columns[3] == _LISTENING and columns[9] in inodes:
                    found.add(_read(columns[1], devices))
    return found


def received_bytes() -> dict[int, int] | None:
    """Return how many bytes each TCP connection of this process has received, by its file; None without ``/proc``."""
    libc = ctypes.CDLL(None)
    info = ctypes.create_string_buffer(_RECEIVED.stop)
    received = {}
    try:
        files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return None
    for file in files:
        length = ctypes.c_uint32(len(info))
        # Python's sockets would own the file.
        if libc.getsockopt(file, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)) == 0:
            received[file] = int.from_bytes(info.raw[_RECEIVED], sys.byteorder) if length.value == len(info) else 0
    return received


def came_by_tcp(nbytes: int, before: dict[int, int] | None, after: dict[int, int] | None) -> bool:
    """Whether a read of so many bytes came over TCP, or may have: some connection has received as many meanwhile.

    Args:
        nbytes: of the read.
        before: result of :func:`received_bytes` before the read, with its connection set up.
        after: the same, after the read.
    """
    if before is None or after is None:
        return True
    if after and not any(after.values()):  # sandboxes such as gVisor do not count
        return True
    return any(count - before.get(file, 0) >= nbytes for file, count in after.items())


def _read(address: str, devices: dict[str, str]) -> ListeningSocket:
    """Parse ``0100007F:1F90``: the address in 32-bit words of this machine's byte order, and the port."""
    words, _, port = address.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    numeric = ipaddress.ip_address(packed)
    mapped = numeric.ipv4_mapped if isinstance(numeric, ipaddress.IPv6Address) else None
    host = str(mapped or numeric)
    return ListeningSocket(host, int(port, 16), "all" if numeric.is_unspecified else devices.get(host, "?"))


def _devices() -> dict[str, str]:
    """Return the network device of each address: the first IPv4 address of each device, and all IPv6 addresses."""
    found = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the device has no IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found
