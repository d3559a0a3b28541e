# SPDX-License-Identifier: Apache-2.0
"""Engines as hosts: a network namespace each, all on one bridge, so that each cable can be unplugged."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BRIDGE = "soak"
SUBNET = "10.78.0"


class NoNamespaces(Exception):
    """This machine allows no namespaces; the text has the reason."""


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


def enter_namespaces() -> None:
    """Move this process, which has one thread, to its own mounts and network. They end with its last descendant, even
    if the process is killed.

    Raises:
        NoNamespaces: this machine allows none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000 | 0x40000000):  # CLONE_NEWNS | CLONE_NEWNET
        raise NoNamespaces(f"unshare: {os.strerror(ctypes.get_errno())}")
    _mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE


def mount_memory(folder: Path, mebibytes: int) -> None:
    """Mount a file system of a limited size."""
    folder.mkdir(exist_ok=True)
    _mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"mode=1777,size=%dm" % mebibytes)


def _mount(*arguments: object) -> None:
    if ctypes.CDLL(None, use_errno=True).mount(*arguments):
        raise NoNamespaces(f"mount {arguments[1]!r}: {os.strerror(ctypes.get_errno())}")


class Hosts:
    """Namespaces by the name of the engine. The bridge has an address too: this process reaches all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        if shutil.which("ip") is None:
            raise NoNamespaces("no `ip`: install iproute2")
        enter_namespaces()
        self._names = list(names)
        mount_memory(Path("/run/netns"), 1)
        try:
            _ip("link", "set", "lo", "up")
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for name in names:
                self._add(name)
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"the kernel allows no network namespaces here: {error.stderr.strip()}") from None

    def _add(self, name: str) -> None:
        outside, inside = f"h{name}", f"v{name}"
        _ip("netns", "add", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", name)
        _ip("link", "set", outside, "master", BRIDGE)
        _ip("link", "set", outside, "up")
        for command in (f"addr add {self.address(name)}/24 dev {inside}", f"link set {inside} up", "link set lo up"):
            _ip("-n", name, *command.split())

    def address(self, name: str) -> str:
        return f"{SUBNET}.{1 + self._names.index(name)}"

    def env(self, name: str) -> dict[str, str]:
        """Environment of an engine in that namespace; on one machine UCX would find other paths than the cable."""
        return {
            "KVHMA_E2E_NETNS": name,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.address(name),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": f"v{name}",
        }

    def unplug(self, name: str) -> None:
        """From now on no packet gets in or out, and no peer is notified."""
        _ip("link", "set", f"h{name}", "down")

    def plug(self, name: str) -> None:
        _ip("link", "set", f"h{name}", "up")
