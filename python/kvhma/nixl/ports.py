# SPDX-License-Identifier: Apache-2.0
"""The TCP ports on which this process listens, from the Linux kernel, because UCX does not report its ports."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_SIOCGIFADDR = 0x8915


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
