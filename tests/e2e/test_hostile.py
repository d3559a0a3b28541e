# SPDX-License-Identifier: Apache-2.0
"""Malicious parameters and messages: the engine continues, and the next good request is right."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.engines import Zygote, engines, free_port
from support.handoff import all_free, arguments, decode, hand_over, kvhma, prefill, prompts, same

Models = Callable[[str], Path]
NAME = "gemma3"
VALUES = [None, "", "x", 7, -1, True, [], {}, "y" * 100_000, [[1]] * 1000, {"a": None}, 10**30, float("nan")]
SPANS = [
    [],
    [[0, ""]],
    [[0, "1-9"]] * 3,
    [[0, "0"]] * 7,  # the null block
    [[0, "1-10"]] * 7,  # one group's blocks in all of them
    [[0, "1,1,1,1,1,1,1,1,1,1"]] * 7,
    [[0, "2000000000"]] * 7,
    [[2**31, "1"]] * 7,
    [[0, "1-9999999"]] * 7,
    "1-9",
    [[0]] * 7,
]


def broken(good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key missing and with values that it cannot have, one at a time."""
    for key in good:
        yield f"no {key}", {name: value for name, value in good.items() if name != key}
        for value in VALUES:
            yield f"{key} = {ascii(value)[:20]}", good | {key: value}
    for key in good["kvhma"]:
        own = {name: value for name, value in good["kvhma"].items() if name != key}
        yield f"no kvhma.{key}", good | {"kvhma": own}
        for value in VALUES:
            yield f"kvhma.{key} = {ascii(value)[:20]}", good | {"kvhma": own | {key: value}}
    for spans in SPANS:
        yield f"spans = {ascii(spans)[:30]}", good | {"kvhma": good["kvhma"] | {"spans": spans}}
    reversed_groups = copy.deepcopy(good)
    reversed_groups["kvhma"]["spans"].reverse()
    yield "groups reversed", reversed_groups
    short = copy.deepcopy(good)
    short["kvhma"]["spans"][-1][1] = short["kvhma"]["spans"][-1][1].rpartition("-")[0]
    yield "a block too few", short
    yield "another engine's size", good | {"tp_size": 2}
    yield "a foreign host", good | {"remote_host": "192.0.2.1"}
    yield "a closed port", good | {"remote_port": free_port()}
    yield "two roles", good | {"do_remote_decode": True}
    for whole in (
        [],
        [1],
        "text",
        7,
        True,
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"kvhma": 1},
    ):
        yield f"params = {whole!a}", whole


def test_parameters(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    # One permanent failure for each request: D does not retry a refused request.
    extra = {"handshake_timeout": 0.5, "kv_lease_duration": 600}
    both = kvhma(NAME, extra=extra)
    with engines(zygote, model(NAME), tmp_path, p=both, d=both, plain=arguments(NAME)) as (p, d, plain):
        prompt, other = prompts(NAME, [301] * 2)
        expected = plain.generate(prompt, max_tokens=4).result()
        refused = served = 0
        good = prefill(p, prompt)
        for number in itertools.count():
            # Blocks that were read are no longer held: each case starts from parameters with one error. A refusal
            # leaves P's blocks alone, so that most cases share a prefill.
            if not p.state()["requests"]:
                good = prefill(p, prompt)
            what, params = next(itertools.islice(broken(good), number, None), ("", None))
            if params is None:
                break
            got = decode(d, prompt, params, max_tokens=4).result()
            if got.finish_reason == "error" or got.error is not None:  # of the engine, or of vLLM's front end
                refused += 1
            else:
                # Parameters without a hand-off, or with unused keys: the tokens are right.
                same(NAME, got, expected, what)
                served += 1
            assert d.alive, what
        same(NAME, decode(d, prompt, good, max_tokens=4).result(), expected, "good")
        assert len(p.state()["requests"]) <= 1
        print(f"{number} broken parameters: {refused} refused, {served} answered right")
        assert refused > served
        same(NAME, hand_over(p, d, other), plain.generate(other, max_tokens=16).result(), "after all that")
        all_free(d)


def test_broken_requests_to_p(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    both = kvhma(NAME)
    with engines(zygote, model(NAME), tmp_path, p=both, d=both, plain=arguments(NAME)) as (p, d, plain):
        prompt, other = prompts(NAME, [100, 301])
        for value in VALUES:
            for key in ("do_remote_decode", "do_remote_prefill"):
                p.generate(prompt, max_tokens=1, kv_transfer_params={key: value}).result()
            # A first step of several tokens, of none, and one that a stop cuts short.
            p.generate(prompt, max_tokens=3, kv_transfer_params={"do_remote_decode": True, "x": value}).result()
        same(NAME, hand_over(p, d, other), plain.generate(other, max_tokens=16).result(), "after all that")


def talk(address: tuple[str, int]) -> None:
    """Junk, huge and slow messages to a side channel."""
    greeting_of_zeromq = b"\xff" + b"\0" * 8 + b"\x7f"
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), greeting_of_zeromq, b"\x16\x03\x01\x02\x00\x01", b""):
        with socket.create_connection(address) as raw:
            raw.sendall(data)
    for data in (b"\xc1", os.urandom(100), b"", b"x" * (1 << 20), msgspec.msgpack.encode(("get_meta_msg", 0, 7))):
        with socket.create_connection(address) as raw:
            raw.sendall(struct.pack("<I", len(data)) + data)
            assert b"problem" in raw.recv(1000)
    # One message of 3,000 MiB: no listener accepts it.
    with socket.create_connection(address) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(struct.pack("<I", 3000 << 20))
        sent, part = 0, bytes(1 << 20)
        while sent < 256 << 20:
            sent += raw.send(part)
        raise AssertionError("the listener takes a message that it cannot want")


@pytest.mark.smoke
def test_the_side_channel(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    port = free_port()
    settings = {
        "p": kvhma(NAME, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}),
        "d": kvhma(NAME, extra={"handshake_timeout": 2}),
        "plain": arguments(NAME),
    }
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
        try:
            for raw in slow[::2]:
                raw.sendall(b"\x01")
            talk(("127.0.0.1", port))
            first, second = prompts(NAME, [301, 65])
            same(NAME, hand_over(p, d, first), plain.generate(first, max_tokens=16).result(), "after junk")
            talk(("127.0.0.1", port))
            same(NAME, hand_over(p, d, second), plain.generate(second, max_tokens=16).result(), "after more junk")
        finally:
            for raw in slow:
                raw.close()
