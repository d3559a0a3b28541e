# SPDX-License-Identifier: Apache-2.0
"""P and D as two hosts: network namespaces joined by a cable, and nothing but TCP between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, compare, kvhma, loads

pytestmark = pytest.mark.smoke


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Addresses of two namespaces by their names."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip`: install iproute2")
    tag = f"kvhma{os.getpid() % 100_000}"
    names = {f"{tag}p": "10.77.0.1", f"{tag}d": "10.77.0.2"}
    ends = {name: f"v{name}"[:15] for name in names}
    try:
        for name in names:
            run("ip", "netns", "add", name)
        first, second = ends.values()
        run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for name, address in names.items():
            run("ip", "link", "set", ends[name], "netns", name)
            for command in (f"addr add {address}/24 dev {ends[name]}", f"link set {ends[name]} up", "link set lo up"):
                run("ip", "-n", name, *command.split())
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"the kernel allows no network namespaces here: {error.stderr.strip()}")
    yield names
    for name in names:
        run("ip", "netns", "del", name)


def test_two_hosts(hosts: dict[str, str], zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    name = "nemotron_h"
    sides = {}
    for role, (namespace, address) in zip("pd", hosts.items(), strict=True):
        env = {
            "KVHMA_E2E_NETNS": namespace,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
            # On one machine UCX would find other paths than the cable.
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": f"v{namespace}"[:15],
        }
        sides[role] = kvhma(name, env=env)
    with engines(zygote, model(name), tmp_path, **sides, plain=arguments(name)) as (p, d, plain):
        compare(name, p, d, plain, [33, 301, 1201])
        assert loads(d) == 3
        all_free(p)
