# SPDX-License-Identifier: Apache-2.0
"""The addresses where the transport listens, as the kernel reports them."""

import json
import os
import socket
import subprocess
import sys

import pytest

from kvhma.nixl.ports import listening_sockets
from kvhma.vllm.config import net_devices as devices
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.wire.params import Address


def agents_listen_at(**extra: object) -> list[dict[str, object]]:
    """In a separate process start an agent as a worker does, and prewarm it; return the listening sockets."""
    text = """
import json, os, sys
from kvhma.nixl import Agent
from kvhma.nixl.ports import listening_sockets
from kvhma.vllm.config.net_devices import choose_devices
from kvhma.vllm.config.settings import Settings

before = listening_sockets()
settings = Settings.read(json.loads(sys.argv[1]))
choose_devices(settings, settings.side_channel_host)
agent = Agent("P")
agent.prewarm_transport()
found = [dict(host=one.host, device=one.device) for one in listening_sockets() - before]
print(json.dumps(found), file=sys.stderr)
os._exit(0)
"""
    environ = {name: value for name, value in os.environ.items() if name != devices.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", text, json.dumps(extra)], env=environ, capture_output=True, text=True, timeout=60
    )
    return json.loads(done.stderr.strip().splitlines()[-1])


def test_nothing_listens_beyond_loopback_if_the_side_channel_does_not():
    """S3: with the side channel on loopback, UCX's own port was open on every interface, and any client that reached it
    could read and write the worker's memory."""
    pytest.importorskip("nixl")
    found = agents_listen_at(side_channel_host="localhost")
    assert found, "UCX listens"
    assert {one["host"] for one in found} <= {"127.0.0.1", "::1"}
    assert {one["device"] for one in found} == {"lo"}


def test_ucx_listens_on_the_devices_of_the_setting_only():
    pytest.importorskip("nixl")
    wanted = next((name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))), None)
    if wanted is None:
        pytest.skip("one network device only")
    every = agents_listen_at(side_channel_host="192.0.2.1")
    if not {one["device"] for one in every} >= {wanted, "lo"}:
        pytest.skip("UCX listens on one device only")
    found = agents_listen_at(side_channel_host="192.0.2.1", net_devices=wanted)
    assert {one["device"] for one in found} == {wanted}
    found = agents_listen_at(side_channel_host="localhost", net_devices=f"{wanted},lo")
    assert {one["device"] for one in found} == {wanted, "lo"}


@pytest.mark.parametrize(
    ("setting", "host", "given", "expected"),
    [
        (None, "localhost", None, "lo"),
        (None, "127.0.0.5", None, "lo"),
        (None, "::1", None, "lo"),
        (None, "10.0.0.1", None, None),
        (None, "p.example", None, None),
        (None, "0.0.0.0", None, None),
        (None, "10.0.0.1", "eth1", "eth1"),
        (None, "localhost", "eth1", "eth1"),
        ("mlx5_0:1,eth0", "localhost", None, "mlx5_0:1,eth0"),
        ("eth0", "10.0.0.1", "eth1", "eth0"),
    ],
)
def test_which_devices(monkeypatch, setting, host, given, expected):
    monkeypatch.delenv(devices.ENVIRONMENT, raising=False)
    if given is not None:
        monkeypatch.setenv(devices.ENVIRONMENT, given)
    monkeypatch.setattr(devices, "os", type("Os", (), {"environ": (environ := dict(os.environ))}))
    devices.choose_devices(Settings(net_devices=setting), host)
    assert environ.get(devices.ENVIRONMENT) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("localhost", "LOCALHOST.", "a.localhost", "127.8.9.1", "::1")],
        *[(host, False) for host in ("localhost.example", "", "::", "10.0.0.1", "127.0.0.1.example")],
    ],
)
def test_what_is_loopback(host, expected):
    assert devices.is_loopback(host) is expected


def test_the_kernel_says_what_listens():
    before = listening_sockets()
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("", 0)) as every,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=False) as six,
        socket.create_connection(four.getsockname()),
    ):
        found = {(one.host, one.port, one.device) for one in listening_sockets() - before}
        assert found == {
            ("127.0.0.1", four.getsockname()[1], "lo"),
            ("0.0.0.0", every.getsockname()[1], "all"),
            ("::", six.getsockname()[1], "all"),
        }
    assert listening_sockets() == before


def test_what_cannot_be_reached_for_want_of_a_device_is_said(monkeypatch):
    monkeypatch.setenv(devices.ENVIRONMENT, "lo")
    assert "set net_devices, or side_channel_host" in devices.unreachable(Address("10.0.0.1", 1))
    assert devices.unreachable(Address("127.0.0.1", 1)) is None
    monkeypatch.setenv(devices.ENVIRONMENT, "eth0")
    assert devices.unreachable(Address("10.0.0.1", 1)) is None
