# SPDX-License-Identifier: Apache-2.0
"""Network devices that NIXL's UCX uses, and which of its ports other hosts can reach.

A peer that reaches a port of UCX can read and write the worker's memory. UCX has no secret, and checks no key over TCP.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable

from kvhma.nixl.ports import ListeningSocket
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.wire.params import Address

logger = logging.getLogger("vllm.kvhma")

ENVIRONMENT = "UCX_NET_DEVICES"
_LOOPBACK = "lo"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback, as far as its text shows. It does not look up names."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")


def choose_devices(settings: Settings, advertised_host: str) -> None:
    """Choose the devices of every UCX that this process starts from now on.

    If the engine advertises a loopback address, all its peers are on this machine, and UCX uses only loopback.

    This sets the environment variable, because NIXL's own parameter only accepts InfiniBand devices: it appends a port
    to each name.
    """
    if settings.net_devices is not None:
        os.environ[ENVIRONMENT] = settings.net_devices
    elif is_loopback(advertised_host):
        # Only peers on this machine can ask this engine for worker identities.
        os.environ.setdefault(ENVIRONMENT, _LOOPBACK)


def unreachable(address: Address) -> str | None:
    """Return why UCX of this process cannot reach an address, if the chosen devices are the reason."""
    if os.environ.get(ENVIRONMENT) != _LOOPBACK or is_loopback(address.host):
        return None
    return (
        f"UCX uses {_LOOPBACK!r} only here, which does not lead to {address.host}: set net_devices, or "
        "side_channel_host to an address that other engines reach"
    )


def warn_of_open_ports(opened: Iterable[ListeningSocket]) -> None:
    """Log the ports of the transport that other hosts can reach."""
    found = [str(listening) for listening in opened if not listening.is_loopback]
    if found:
        logger.warning(
            "kvhma: NIXL listens on %s: any peer that reaches it can read and write this worker's memory, with or "
            "without a secret. Let only engines reach it, or choose other net_devices",
            ", ".join(found),
        )
