# SPDX-License-Identifier: Apache-2.0
"""Checks of ``kvhma doctor`` on this host's network cards and on the memory that they may lock."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from kvhma.cli.checks import Row
from kvhma.cli.format import size

_NET, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_STATUS = Path("/proc/self/status")
_IPC_LOCK = 14
"""The bit of the capability that lifts the limit on locked memory."""


def look_at_host() -> Iterator[Row]:
    """Check network cards and memlock."""
    if platform.system() != "Linux":
        yield Row("network cards", "note", "looked for on Linux only")
        return
    net, rdma = _network_devices(), _rdma_ports()
    yield _cards(net, rdma)
    yield _memlock(rdma)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # some drivers do not report it
        return ""


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _network_devices() -> dict[str, str]:
    """Return the network devices that are up, with their speed if it is known."""
    found = {}
    for device in _children(_NET):
        if device.name == "lo" or _read(device / "operstate") != "up":
            continue
        speed = _read(device / "speed")
        found[device.name] = f" ({int(speed) / 1000:g} Gb/s)" if speed.isdigit() else ""
    return found


def _rdma_ports() -> dict[str, tuple[bool, str]]:
    """Return the ports of RDMA devices, as ``mlx5_0:1``, with state and rate, and whether each is active."""
    found = {}
    for device in _children(_RDMA):
        for port in _children(device / "ports"):
            state = _read(port / "state").rpartition(":")[2].strip()  # "4: ACTIVE"
            found[f"{device.name}:{port.name}"] = (
                state == "ACTIVE",
                f"{state or 'state unknown'}, {_read(port / 'rate') or 'rate unknown'}",
            )
    return found


def _cards(net: dict[str, str], rdma: dict[str, tuple[bool, str]]) -> Row:
    name = "network cards"
    listed = [f"{device}{speed}" for device, speed in net.items()]
    listed += [f"{port} ({text})" for port, (_, text) in rdma.items()]
    found = ", ".join(listed) or "none is up but lo"
    chosen = [device for device in os.environ.get("UCX_NET_DEVICES", "").split(",") if device not in ("", "all")]
    known = {"lo", *net, *rdma, *(port.partition(":")[0] for port in rdma)}
    if absent := [device for device in chosen if device not in known]:
        fix = "net_devices or UCX_NET_DEVICES with names that are up here"
        return Row(name, "failed", f"{found}; UCX_NET_DEVICES also has {', '.join(absent)}", fix)
    if not chosen and (idle := [port for port, (active, _) in rdma.items() if not active]):
        fix = f"net_devices or UCX_NET_DEVICES without {', '.join(idle)}: UCX may choose a card that leads nowhere"
        return Row(name, "note", found, fix)
    return Row(name, "ok", found)


def _memlock(rdma: dict[str, tuple[bool, str]]) -> Row:
    import resource  # not there on every system

    name = "memlock"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Row(name, "ok", "unlimited")
    capabilities = [line.split()[1] for line in _read(_STATUS).splitlines() if line.startswith("CapEff:")]
    if capabilities and int(capabilities[0], 16) >> _IPC_LOCK & 1:
        return Row(name, "ok", f"{size(limit)}, which the capability IPC_LOCK lifts")
    if not rdma:
        return Row(name, "ok", f"{size(limit)}; only RDMA needs more")
    fix = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd), ulimits: {memlock: -1} (Compose), IPC_LOCK (Kubernetes)"
    )
    return Row(name, "note", f"{size(limit)}: RDMA locks the caches' pages, and registering them will fail", fix)
