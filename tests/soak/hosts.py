# SPDX-License-Identifier: Apache-2.0
"""Engines as hosts: a network namespace each, all on one bridge, so that each cable can be unplugged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence


class NoNamespaces(Exception):
    """This machine allows no namespaces; the text has the reason."""


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


class Hosts:
    """Namespaces by the name of the engine. The bridge has an address too: this process reaches all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        if shutil.which("ip") is None:
            raise NoNamespaces("no `ip`: install iproute2")
        tag = os.getpid() % 10_000
        self._bridge = f"soak{tag}"
        self._subnet = f"10.78.{os.getpid() % 250}"
        self._tags = {name: f"{name}x{tag}" for name in names}
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in names:
                self._add(name)
        except subprocess.CalledProcessError as error:
            self.close()
            raise NoNamespaces(f"the kernel allows no network namespaces here: {error.stderr.strip()}") from None

    def _add(self, name: str) -> None:
        tag = self._tags[name]
        outside, inside = f"h{tag}", f"v{tag}"
        _ip("netns", "add", tag)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", tag)
        _ip("link", "set", outside, "master", self._bridge)
        _ip("link", "set", outside, "up")
        for command in (f"addr add {self.address(name)}/24 dev {inside}", f"link set {inside} up", "link set lo up"):
            _ip("-n", tag, *command.split())

    def address(self, name: str) -> str:
        return f"{self._subnet}.{1 + list(self._tags).index(name)}"

    def env(self, name: str) -> dict[str, str]:
        """Environment of an engine in that namespace; on one machine UCX would find other paths than the cable."""
        return {
            "KVHMA_E2E_NETNS": self._tags[name],
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.address(name),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": f"v{self._tags[name]}",
        }

    def unplug(self, name: str) -> None:
        """From now on no packet gets in or out, and no peer is notified."""
        _ip("link", "set", f"h{self._tags[name]}", "down")

    def plug(self, name: str) -> None:
        _ip("link", "set", f"h{self._tags[name]}", "up")

    def close(self) -> None:
        for tag in self._tags.values():
            subprocess.run(["ip", "netns", "del", tag], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)
