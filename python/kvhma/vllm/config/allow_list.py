# SPDX-License-Identifier: Apache-2.0
"""From which engines D may read: those of ``allowed_prefill_engines``; without that setting, what a secret decides.

With a secret the connection proves that an engine has it. Without a secret a client that can write parameters could
have D read from any host of the internet. So D then reads only from private networks, and from engines that its
operator has named.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from kvhma.vllm.wire.params import Address

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_ENTRY = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\](?P<mask>/\d+)?|(?P<host>[^\[\]:]+))(?::(?P<port>\d{1,5}))?")
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as IPv6 writes them."""

_IPV4 = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
_PRIVATE = tuple(map(ipaddress.ip_network, (*_IPV4, "::1", "fc00::/7", "fe80::/10")))
"""Loopback, and networks that the internet does not route: RFC 1918, RFC 6598 (pods of some clusters), RFC 4193, links.

IPv4's link-local addresses are left out: clouds serve the credentials of a host at one of them."""

ANY = "any"
"""Value of the setting with which requests may name any engine."""


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


@dataclass(frozen=True, slots=True)
class AllowedSources:
    """Which engines D may read from.

    Attributes:
        listed: entries of the setting, `ANY`, or None if it is not set.
        named: where engines of ``prefill_engines`` listen; these are always allowed.
        has_secret: whether this engine has a secret.
    """

    listed: tuple[AllowedEngines, ...] | str | None
    named: tuple[Address, ...]
    has_secret: bool

    @property
    def only_private(self) -> bool:
        """Whether D reads only from private networks, and from engines that are named."""
        return self.listed is None and not self.has_secret

    def refusal(self, address: Address) -> str | None:
        """Return why a request may not be loaded from an address; None if it may. This does not look up names.

        Args:
            address: host and port, as in the parameters. If it is a name, see :meth:`refusal_of_host` too.
        """
        if isinstance(self.listed, tuple):
            covered = any(entry.covers(address) for entry in self.listed) or self._is_named(address)
            return None if covered else f"{address} is not among allowed_prefill_engines"
        return self.refusal_of_host(address, address) if address.is_numeric else None

    def refusal_of_host(self, address: Address, numeric: Address) -> str | None:
        """Return why D may not connect to what an address is; None if it may.

        Args:
            address: as in the parameters.
            numeric: the same address, looked up.
        """
        if not self.only_private:
            return None
        if _is_private(numeric.host) or self._is_named(address):
            return None
        where = f"{address}" if address.is_numeric else f"{address} ({numeric.host})"
        return (
            f"{where} is no private address, and this engine has no secret and no allowed_prefill_engines: name the "
            f'engine there or in prefill_engines, or set secret_file; "{ANY}" allows all engines'
        )

    def _is_named(self, address: Address) -> bool:
        return any(AllowedEngines.at(named).covers(address) for named in self.named)


@lru_cache(1024)  # the step of an engine asks for each request, mostly about the same few hosts
def _is_private(host: str) -> bool:
    network = _network(host.partition("%")[0])
    return network is not None and any(network[0] in private for private in _PRIVATE)


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
