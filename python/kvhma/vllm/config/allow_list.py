# SPDX-License-Identifier: Apache-2.0
"""Which addresses the parameters of a request may name: the setting ``allowed_prefill_engines``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias

from kvhma.vllm.wire.params import Address

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_ENTRY = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\](?P<mask>/\d+)?|(?P<host>[^\[\]:]+))(?::(?P<port>\d{1,5}))?")
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as IPv6 writes them."""


@dataclass(frozen=True, slots=True)
class AllowedEngines:
    """One entry of the setting.

    Names are not looked up. A name matches the same name in parameters, never an address.

    Attributes:
        host: a name in lower case, or a network; a single address is a network with one address.
        port: of the side channel; None for every port.
    """

    host: str | Network
    port: int | None = None

    @classmethod
    def read(cls, text: str) -> AllowedEngines | None:
        """Read ``host``, ``address`` or ``network``, each with ``:port`` or without; None for anything else.

        IPv6 with a port is in brackets: ``[2001:db8::1]:5600``, ``[2001:db8::]/32:5600``.
        """
        alone = _network(text)
        if alone is not None:
            return cls(alone)
        found = _ENTRY.fullmatch(text)
        if found is None:
            return None
        host = found["host"] or found["bracketed"] + (found["mask"] or "")
        port = None if found["port"] is None else int(found["port"])
        if port is not None and not 0 < port < 1 << 16:
            return None
        network, name = _network(host), _name(host)
        if network is not None:
            return cls(network, port)
        # The system's resolver reads a name that ends in a number as an address.
        return cls(name, port) if _NAME.fullmatch(name) and not name.rpartition(".")[2].isdigit() else None

    @classmethod
    def at(cls, address: Address) -> AllowedEngines:
        """Return the entry that allows only this address."""
        return cls(_network(address.host.partition("%")[0]) or _name(address.host), address.port)

    def covers(self, address: Address) -> bool:
        """Return whether it allows an address."""
        if self.port is not None and self.port != address.port:
            return False
        if isinstance(self.host, str):
            return self.host == _name(address.host)
        if not address.is_numeric:
            return False  # this includes "10.0.0.1/32", which looks like an address and would be looked up as a name
        numeric = _network(address.host.partition("%")[0])
        return numeric is not None and numeric.version == self.host.version and numeric[0] in self.host


def _name(host: str) -> str:
    return host.lower().removesuffix(".")


def _network(text: str) -> Network | None:
    """Return an address or a network; IPv4 inside IPv6 as IPv4."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        packed = network.network_address.packed[-4:]
        return ipaddress.IPv4Network((packed, network.prefixlen - 96))
    return network
