# SPDX-License-Identifier: Apache-2.0
"""Without a secret, parameters cannot have D connect to a host of the internet, by its address or by a name."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from kvhma.errors import HandshakeError
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.peers import names, peers
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.listening import listening

PUBLIC = "198.51.100.7"
PRIVATE = [
    "127.0.0.1",
    "127.9.9.9",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fd00::1",
    "fe80::1%eth0",
    "::ffff:10.0.0.1",
]
OTHERS = f"""
    {PUBLIC} 172.32.0.1 192.169.0.1 100.128.0.1 11.0.0.1 169.254.169.254 0.0.0.0 255.255.255.255
    2001:db8::1 :: ::ffff:{PUBLIC} fec0::1 ff02::1%eth0 64:ff9b::a00:1
""".split()
NO_SECRET = Secrets()
ASK = AskEngineInfo(PROTOCOL)


def refusal(host: str, *, has_secret: bool = False, **extra: Any) -> str | None:
    return Settings.read(extra).sources(has_secret=has_secret).refusal(Address(host, 5600))


@pytest.mark.parametrize("host", PRIVATE)
def test_private_networks_need_no_setting(host: str) -> None:
    assert refusal(host) is None


@pytest.mark.parametrize("host", OTHERS)
def test_other_addresses_are_refused_without_a_secret(host: str) -> None:
    found = refusal(host)
    assert found is not None
    for word in (host, "no private address", "secret", "allowed_prefill_engines", "prefill_engines"):
        assert word in found


def test_what_allows_an_address_of_the_internet() -> None:
    assert refusal(PUBLIC, has_secret=True) is None
    assert refusal(PUBLIC, prefill_engines=[f"{PUBLIC}:5600"]) is None
    assert refusal(PUBLIC, prefill_engines=[f"{PUBLIC}:5601"]) is not None
    assert refusal(PUBLIC, allowed_prefill_engines=["198.51.100.0/24"]) is None
    assert refusal(PUBLIC, allowed_prefill_engines="any") is None
    # A list says which engines, with or without a secret.
    assert refusal("10.0.0.1", allowed_prefill_engines=["198.51.100.0/24"], has_secret=True) is not None


@pytest.fixture
def leads_to(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the hosts that the next look-ups of any name find, in turn; the last one stays."""
    hosts: list[str] = []

    def found(host: str, port: int, family: int, kind: int) -> list[Any]:
        numeric = hosts.pop(0) if len(hosts) > 1 else hosts[0]
        return [(family, kind, 0, "", (numeric, port))]

    monkeypatch.setattr(names, "getaddrinfo", found)
    return hosts


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """Return the addresses that clients are made for."""
    made: list[Address] = []

    def client(address: Address, *args: Any, **kwargs: Any) -> Client:
        made.append(address)
        return Client(address, *args, **kwargs)

    monkeypatch.setattr(peers, "Client", client)
    return made


def asking(**extra: Any) -> closing[Peers]:
    settings = Settings.read(extra)
    return closing(Peers(5, NO_SECRET, Counted(), settings.sources(has_secret=False)))


def test_a_name_counts_as_what_it_is(leads_to: list[str], dialled: list[Address]) -> None:
    leads_to.append(PUBLIC)
    with asking() as d, pytest.raises(HandshakeError, match=rf"p.example:5600 \({PUBLIC}\) is no private address"):
        d.ask(Address("p.example", 5600), ASK, EngineInfo).result(10)
    assert dialled == []
    assert d._counters.numbers["refused_sources:not_allowed"] == 1


def test_a_name_that_leads_elsewhere_later_is_looked_at_again(leads_to: list[str], dialled: list[Address]) -> None:
    """DNS rebinding: the first answer is a private address, the next one is not."""
    with listening() as p, asking() as d:
        leads_to += ["127.0.0.1", PUBLIC]
        at = Address("p.example", p.at.port)
        assert d.ask(at, ASK, EngineInfo, anew=True).result(10).protocol == PROTOCOL
        with pytest.raises(HandshakeError, match="is no private address"):
            d.ask(at, ASK, EngineInfo, anew=True).result(10)
    assert [address.host for address in dialled] == ["127.0.0.1"]


def test_an_operators_name_may_lead_anywhere(leads_to: list[str], dialled: list[Address]) -> None:
    leads_to.append(PUBLIC)
    with asking(prefill_engines=["p.example:5600"], handshake_timeout=0.2) as d:
        d.check_host(Address("p.example", 5600), Address(PUBLIC, 5600))
        with pytest.raises(HandshakeError, match="is no private address"):
            d.check_host(Address("q.example", 5600), Address(PUBLIC, 5600))
