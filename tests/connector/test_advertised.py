# SPDX-License-Identifier: Apache-2.0
"""An engine may bind to one address and advertise another: wildcards, mapped ports, addresses that lead a decode engine
to itself."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from kvhma.errors import SettingsError
from kvhma.vllm.config import engine_config
from kvhma.vllm.config.engine_config import advertised_of, side_channel_of
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import free_port
from support.listening import hostile, pass_on
from support.params import text_of
from support.schedulers import request, scheduler, tables, tickets_of
from support.waiting import until


def config(index=0):
    return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index))


def addresses(index=0, **extra):
    settings = Settings.read(extra)
    return side_channel_of(config(index), settings), advertised_of(config(index), settings)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)


def test_one_address_where_nothing_says_otherwise():
    own = Address("10.0.0.7", 5602)
    assert addresses(2, side_channel_host="10.0.0.7") == (own, own)
    assert addresses() == (Address("localhost", 5600),) * 2


def test_a_port_mapping():
    """Each of several data-parallel engines has its own ports, inside and outside."""
    given = {"side_channel_host": "192.168.0.2", "advertised_host": "gate.example", "advertised_port": 31000}
    assert addresses(1, **given) == (Address("192.168.0.2", 5601), Address("gate.example", 31001))
    assert addresses(advertised_port=31000) == (Address("localhost", 5600), Address("localhost", 31000))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
@pytest.mark.parametrize("how", ["setting", "variable"])
def test_a_wildcard_is_never_told_to_others(monkeypatch, host, how):
    """A wildcard in `remote_host` leads a decode engine to itself."""
    given = {"side_channel_host": host} if how == "setting" else {}
    if how == "variable":
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert addresses(**given) == (Address(host, 5600), Address("10.0.0.7", 5600))
    assert addresses(**given, advertised_host="p.example")[1] == Address("p.example", 5600)
    monkeypatch.setattr(engine_config, "get_ip", lambda: "0.0.0.0")  # what vLLM returns on a machine without a network
    with pytest.raises(SettingsError, match=rf"side_channel_host is '{host}', .*: set advertised_host"):
        addresses(**given)


@contextlib.contextmanager
def engine(bind, advertised=None, engine_id="engine", **more):
    """A scheduler whose listener binds to this address."""
    made = scheduler(at=advertised or bind, bind=bind, engine_id=engine_id, **more)
    with contextlib.closing(made):
        yield made


def handed_over(p, name="r"):
    asked = request(name, params={"do_remote_decode": True})
    p.on_request_added(asked)
    return p.on_request_finished(asked, tables(p))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_an_engine_behind_a_mapping_is_reached_through_it(host):
    bind = Address(host, free_port())
    mapping = hostile(lambda raw: pass_on(raw, Address("127.0.0.1", bind.port)))  # as a container's published port
    with mapping as outside, engine(bind, outside) as p:
        params = handed_over(p)
        assert (params["remote_host"], params["remote_port"]) == outside
        with Client(outside, 5, Secrets()) as client:
            info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        assert int.from_bytes(info.incarnation_id, "big") == text_of(params)["instance"]
        assert info.advertised == outside


def refusal(d, params, tokens=41):
    asked = request("d", params=params, tokens=tokens)
    d.on_request_added(asked)
    failure = d.decode.pending["d"].refusal
    return "" if failure is None else failure.text


def test_parameters_that_lead_a_decode_engine_to_itself():
    """Both engines have vLLM's default address, on two hosts."""
    both = Address("localhost", free_port())
    elsewhere = Address("127.0.0.1", free_port())
    with engine(elsewhere, both, engine_id="p-engine") as p, engine(both, engine_id="d-engine", ranks=1) as d:
        text = refusal(d, handed_over(p))
        assert text.startswith(f"remote_host and remote_port {both} lead to this engine itself")
        assert "prefill engine 'p-engine': set its advertised_host" in text
        assert d.take_stats().data["refused_sources"] == {"itself": 1}


def test_a_decode_engine_at_every_address_knows_loopback_as_its_own():
    bind = Address("0.0.0.0", free_port())
    told = Address("127.0.0.1", bind.port)
    with (
        engine(Address("127.0.0.1", free_port()), told, engine_id="p-engine") as p,
        engine(bind, Address("10.0.0.8", bind.port), engine_id="d-engine", ranks=1) as d,
    ):
        assert "lead to this engine itself" in refusal(d, handed_over(p))


def test_a_ticket_that_leads_back_says_so():
    with engine(Address("127.0.0.1", free_port()), ranks=1, lease=1.0) as d:
        own = {"remote_host": "127.0.0.1", "remote_port": d.context.engine.address.port, "kvhma_ticket": "0" * 32}
        asked = request("d", params={"do_remote_prefill": True, **own}, tokens=41)
        d.on_request_added(asked)
        told = tickets_of(d).followed["d"].follower
        until(lambda: told.error)
        assert told.error.endswith(
            "and is this engine itself: set P's advertised_host to an address that reaches P from this host"
        )
