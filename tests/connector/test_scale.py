# SPDX-License-Identifier: Apache-2.0
"""Many engines at once, and the edge of each limit and just beyond: refused or queued, with a line of the log.

Other tests cover the limits of a worker (`max_peers`, handshakes: test_prefill_engines.py), of a request's readers and
of held blocks (test_lease_table.py), and the bytes of the side channel (tests/attacks).
"""

import logging

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from kvhma.errors import HandshakeError
from kvhma.vllm.peers import connections
from kvhma.vllm.peers.client import Client, IdleClients
from kvhma.vllm.wire.messages import MAX_CLAIMS, Leases, Renew, write_claim
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey
from kvhma.vllm.wire.secrets import Secrets
from support.cluster import DecodeHost, PrefillHost, cluster
from support.listening import listening
from support.waiting import until

OPEN = Secrets()


def claim(number: int) -> LeaseClaim:
    return LeaseClaim(LeaseKey(f"request {number}", number), number, bytes(16))


def test_8_prefill_engines_and_64_decode_ranks():
    """Each rank reads from several prefill engines, and every lease is released."""
    with cluster((8, 2), (8, 8)) as (p, d):
        handed = [p.finish(index, 8) for index in range(8)]
        took, _ = d.run([[some[engine] for some in handed] for engine in range(8)], drivers=4, rate=None)
        assert took.errors == []
        assert len(took.path) == 8 * 8 * 8
        assert len(took.handshake) == 8 * 64, "each rank has shaken hands with each engine once"
        assert sum(engine.counted.numbers["handshakes"] for engine in d.engines) == 8 * 64
        until(lambda: p.held() == 0)
        assert p.counted.by_label("side_channel_refused") == {}


def test_more_engines_in_turns_than_a_worker_keeps():
    """The edge of `max_peers`: the worker keeps this many. With one more, in turns, each needs a handshake each
    time."""
    p = PrefillHost(17, 1)
    d = DecodeHost(1, 1, max_peers=16)

    def handshakes(engines: int, rounds: int) -> int:
        before = d.engines[0].counted.numbers["handshakes"]
        for index in list(range(engines)) * rounds:
            took, _ = d.run([p.finish(index, 1)], drivers=1, rate=None)
            assert took.errors == []
        return d.engines[0].counted.numbers["handshakes"] - before

    try:
        assert handshakes(16, 3) == 16
        assert 1 <= handshakes(17, 20) < 17 * 20 / 2
        until(lambda: p.held() == 0)
    finally:
        d.close()
        p.close()


def test_a_message_with_more_claims_is_refused():
    with listening() as listener, Client(listener.at, 5, OPEN) as client:
        claims = [write_claim(claim(index)) for index in range(MAX_CLAIMS + 1)]
        assert len(client.ask(Renew(claims[:-1]), Leases).states) == MAX_CLAIMS
        with pytest.raises(HandshakeError, match=r"claims"):
            client.ask(Renew(claims), Leases)
        assert len(client.ask(Renew(claims[:1]), Leases).states) == 1, "the connection stays"


def test_more_connections_than_a_listener_keeps_cost_a_new_one_and_no_answer(monkeypatch, caplog):
    """Engines beyond the limit replace each other's connections, with a line of the log, and each question is
    answered."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    with listening() as listener, caplog.at_level(logging.WARNING, "vllm.kvhma"):
        pools = [IdleClients(OPEN, 4) for _ in range(9)]
        try:

            def ask_all(some):
                for pool in some:
                    client = pool.take_client(listener.at) or Client(listener.at, 5, OPEN)
                    assert len(client.ask(Renew([write_claim(claim(1))]), Leases).states) == 1
                    pool.release_client(listener.at, client)

            for _ in range(2):
                ask_all(pools[:8])
            assert listener.counted.by_label("side_channel_refused") == {}
            assert caplog.text == ""
            for _ in range(2):
                ask_all(pools)
            assert listener.counted.by_label("side_channel_refused")["room"] > 0
            assert "8 connections to the side channel; closing the idlest, from 127.0.0.1" in caplog.text
        finally:
            for pool in pools:
                pool.close()
