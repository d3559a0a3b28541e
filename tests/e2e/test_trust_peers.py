# SPDX-License-Identifier: Apache-2.0
"""Untrusted peers that listen as if they were engines, and that talk to workers, with live engines."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhma.nixl import Agent, AgentOptions, decode_handshake, encode_handshake
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.names import resolve
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    EngineInfo,
    LeaseState,
    Outcome,
    SignedWorkerIdentity,
)
from kvhma.vllm.wire.params import Address, LeaseClaim
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines import Zygote, engines, free_port
from support.handoff import all_free, failures, hand_over, kvhma, loads, prefill, prompts, same
from support.handoff import decode as decode_at

pytestmark = pytest.mark.smoke
Models = Callable[[str], Path]
NAME = "gemma3"


class Liar:
    """Answers that it holds every request."""

    def renew(self, claims: list[LeaseClaim]) -> list[LeaseState]:
        return [LeaseState.HELD] * len(claims)

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Record nothing."""


def hello_of(params: dict[str, Any]) -> tuple[EngineInfo, bytes]:
    """Ask an engine for its name and for the identity of its worker, as any client of its side channel can."""
    address = resolve(Address(params["remote_host"], params["remote_port"]), 5)
    with Client(address, 5, Secrets()) as client:
        info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        return info, client.ask(AskWorkerIdentity(*info.ranks[0], secrets.token_bytes(16)), SignedWorkerIdentity).data


def changed(hello: bytes) -> bytes:
    """A worker identity with one more space."""
    said = decode_handshake(hello)
    return encode_handshake(
        said.metadata,
        said.geometry,
        name=said.name,
        incarnation=said.incarnation,
        extra=said.extra + b" ",
        public_key=said.public_key,
    )


@contextlib.contextmanager
def listening(info: EngineInfo, hello: bytes) -> Iterator[Address]:
    """Listen as if this were that engine, with the attacker's key."""
    address = Address("127.0.0.1", free_port())
    listener = Listener(
        address,
        LocalEngine(
            info.engine_id,
            int.from_bytes(info.incarnation_id, "big"),
            {info.ranks[0]: (hello, new_agent_key()[0])},
        ),
        leases=Liar(),
        secrets=Secrets(),
        counters=Counted(),
    )
    try:
        yield address
    finally:
        listener.close()


def at(params: dict[str, Any], address: Address) -> dict[str, Any]:
    return params | {"remote_host": address.host, "remote_port": address.port}


def test_a_fake_engine_locks_nobody_out(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """S7: a fake engine repeated P's identity with changed `extra` before D had connected to P. D read from it, and
    could not read from the real P any more: "... says that it has the agent ..., which is at ..."."""
    extra = {"handshake_timeout": 2}
    with engines(zygote, model(NAME), tmp_path, p=kvhma(NAME), d=kvhma(NAME, extra=extra)) as (p, d):
        first, second = prompts(NAME, [301, 150])
        expected = [p.generate(prompt, max_tokens=16).result() for prompt in (first, second)]
        params = prefill(p, first)
        info, hello = hello_of(params)
        for said in (changed(hello), hello):
            with listening(info, said) as fake:
                got = decode_at(d, first, at(params, fake)).result()
                assert got.finish_reason == "error"
        assert (tmp_path / "d.log").read_text().count("was not signed by that agent") >= 2
        assert failures(d, "handshake") == 2
        same(NAME, decode_at(d, first, params).result(), expected[0], "from the real one")
        same(NAME, hand_over(p, d, second), expected[1], "and again")
        assert loads(d) == 2
        all_free(d)
        all_free(p)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_engines_that_the_operator_does_not_allow(policy: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """S2: one request that named an attacker's peer poisoned D's prefix cache for all clients: `prefill_engines` lists
    engines to connect to, not engines that are allowed."""
    port = free_port()
    settings = {
        "p": kvhma(NAME, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}),
        "d": kvhma(
            NAME,
            policy=policy,
            enable_prefix_caching=True,
            extra={"allowed_prefill_engines": [f"127.0.0.0/8:{port}"], "handshake_timeout": 2},
        ),
    }
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d):
        (prompt,) = prompts(NAME, [301])
        expected = p.generate(prompt, max_tokens=16).result()
        params = prefill(p, prompt)
        met = []
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            stranger.settimeout(0.1)
            done = threading.Event()

            def accept() -> None:
                while not done.is_set():
                    with contextlib.suppress(TimeoutError):
                        met.append(stranger.accept())

            thread = threading.Thread(target=accept)
            thread.start()
            here = Address("127.0.0.1", stranger.getsockname()[1])
            for address in (here, Address("localhost", here.port), Address("::ffff:127.0.0.1", here.port)):
                got = decode_at(d, prompt, at(params, address)).result()
                if policy == "fail":
                    assert got.finish_reason == "error"
                else:
                    same(NAME, got, expected, "computed here")
            done.set()
            thread.join()
        assert not met, "no peer was asked"
        assert d.sample("vllm:kvhma_refused_sources_total") == 3
        assert "allowed_prefill_engines" in (tmp_path / "d.log").read_text()
        same(NAME, d.generate(prompt, max_tokens=16).result(), expected, "later, by a client with the same prompt")
        same(NAME, decode_at(d, prompt, params).result(), expected, "from the one that is allowed")


def test_what_strangers_send_to_a_worker(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """S12: notifications that peers sent piled up in NIXL for as long as the worker lived."""
    with engines(zygote, model(NAME), tmp_path, p=kvhma(NAME), d=kvhma(NAME)) as (p, d):
        first, second = prompts(NAME, [301, 150])
        expected = [p.generate(prompt, max_tokens=16).result() for prompt in (first, second)]
        params = prefill(p, first)
        _, hello = hello_of(params)
        stranger = Agent(f"stranger-{hashlib.sha256(hello).hexdigest()[:8]}", AgentOptions())
        try:
            peer = stranger.connect(hello)
            for _ in range(5000):
                stranger.notify(peer, bytes(1000))
            same(NAME, decode_at(d, first, params).result(), expected[0], "meanwhile")
            dropped = 0.0
            for _ in range(50):
                same(NAME, hand_over(p, d, second), expected[1], "and again")
                dropped = p.sample("vllm:kvhma_dropped_notifications_total")
                if dropped >= 5000:
                    break
            assert dropped == 5000
        finally:
            stranger.close()
