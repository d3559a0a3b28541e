# SPDX-License-Identifier: Apache-2.0
"""Where an engine listens: on which network devices NIXL's UCX does, and what of it others can reach.

Whoever reaches a port of UCX, and knows what a hello says, reads and writes the worker's memory. UCX knows no secret.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable

from kvhma.nixl.ports import ListeningSocket
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.params import Address

logger = logging.getLogger("vllm.kvhma")

ENVIRONMENT = "UCX_NET_DEVICES"
_LOOPBACK = "lo"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host, as far as that can be told without looking its name up."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")


def choose_devices(settings: Settings, advertised_host: str) -> None:
    """Choose the devices of every UCX that this process starts from now on.

    Where others reach the engine at a loopback address, all of them are on this machine.

    NIXL's own parameter takes InfiniBand devices only: it writes a port behind each name. So it is the environment's.
    """
    if settings.net_devices is not None:
        os.environ[ENVIRONMENT] = settings.net_devices
    elif is_loopback(advertised_host):
        # An engine that nobody else can ask for hellos has no peer elsewhere.
        os.environ.setdefault(ENVIRONMENT, _LOOPBACK)


def unreachable(address: Address) -> str | None:
    """Return why UCX of this process does not reach an address, if it is for want of devices."""
    if os.environ.get(ENVIRONMENT) != _LOOPBACK or is_loopback(address.host):
        return None
    return (
        f"UCX uses {_LOOPBACK!r} only here, which does not lead to {address.host}: set net_devices, or "
        "side_channel_host to an address that others reach"
    )


def warn_of_open_ports(opened: Iterable[ListeningSocket]) -> None:
    """Say in the log which ports of the transport others can reach."""
    found = [str(one) for one in opened if not one.is_loopback]
    if found:
        logger.warning(
            "kvhma: NIXL listens on %s: who reaches it can read and write this worker's memory, with or without a "
            "secret; let only engines reach it, or choose other net_devices",
            ", ".join(found),
        )
