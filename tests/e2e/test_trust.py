# SPDX-License-Identifier: Apache-2.0
"""Attacks of a client on other clients, with live engines: it neither gets nor blocks what belongs to others."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import Engine, Zygote, engines
from support.engines.compare import difference
from support.handoff import all_free, arguments, decode, failures, hand_over, kvhma, noise, prefill, prompts, same
from support.waiting import until

Models = Callable[[str], Path]


def forge(own: dict[str, Any], victim: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an attacker's request with another request's blocks, and a digest that is right without a
    secret."""
    forged = copy.deepcopy(own)
    mine = forged["kvhma"]
    mine["spans"] = victim["kvhma"]["spans"]
    fields = [mine["version"], own["remote_engine_id"], int(mine["instance"], 16), own["remote_request_id"]]
    fields += [int(mine["generation"], 16), mine["lease"], mine["tokens"], mine["prompt"], mine["spans"]]
    mine["digest"] = hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()
    return forged


def two_held(p: Engine, name: str, seed: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Two prompts of one length that P holds: the victim's and the attacker's."""
    asked = prompts((name, seed), [301, 301])
    return asked, [prefill(p, prompt) for prompt in asked]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_of_another_request(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """P holds the attacker's request too, so it has to know which parameters it handed out: any client can compute a
    digest without a secret."""
    settings = {
        "p": kvhma(name),
        "d": kvhma(name, policy="recompute"),
        "strict": kvhma(name, policy="fail"),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, strict):
        for engine in (d, strict):
            (theirs, mine), (victim, own) = two_held(p, name, engine.log.name)
            # An engine without parameters is a plain one; the other request's cache is unchanged.
            plain = strict if engine is d else d
            expected = {
                what: plain.generate(prompt, max_tokens=16).result()
                for what, prompt in (("victim's", theirs), ("attacker's", mine))
            }
            got = decode(engine, mine, forge(own, victim)).result()
            if engine is strict:
                assert got.finish_reason == "error"
                assert got.token_ids == []
            else:
                same(name, got, expected["attacker's"], "computed here")
            assert difference(got, expected["victim's"], noise(name)) is not None
            until(lambda: p.sample("vllm:kvhma_digest_refused_total") > 0)  # P sleeps, and reports with its next step
            assert failures(engine, "request") + failures(engine, "expired") >= 1
            # No other client has lost anything: neither the victim, nor a later client with the attacker's prompt.
            same(name, decode(engine, theirs, victim).result(), expected["victim's"], "the victim")
            same(name, engine.generate(mine, max_tokens=16).result(), expected["attacker's"], "later")
            same(name, hand_over(p, engine, mine), expected["attacker's"], "handed off later")
        assert "does not match the parameters that P returned" in (tmp_path / "p.log").read_text()
        assert p.alive
        all_free(d)
        all_free(strict)


@pytest.mark.smoke
def test_engines_with_a_secret(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    secret = tmp_path / "secret"
    secret.write_text("the secret of these two engines\n")
    settings = {
        "p": kvhma(name, extra={"secret_file": str(secret)}),
        "d": kvhma(name, extra={"secret_file": str(secret)}),
        "without": kvhma(name, extra={"handshake_timeout": 2}),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, without):
        (theirs, mine), (victim, own) = two_held(p, name, "secret")
        expected = without.generate(theirs, max_tokens=16).result()
        for engine, params, text in (
            (d, forge(own, victim), "kvhma.digest is"),
            (without, victim, "this engine has none"),
            (without, forge(own, victim) | {"kvhma": forge(own, victim)["kvhma"] | {"signed": False}}, None),
        ):
            prompt = theirs if params is victim else mine
            assert decode(engine, prompt, params).result().finish_reason == "error"
            log = tmp_path / ("d.log" if engine is d else "without.log")
            assert text is None or text in log.read_text()
        same(name, decode(d, theirs, victim).result(), expected, "with the secret")
        secret.write_text("another secret of these two engines\nthe secret of these two engines\n")
        time.sleep(1.5)
        # Signed with the old secret, over a connection with both.
        same(name, decode(d, mine, own).result(), without.generate(mine, max_tokens=16).result(), "while it changes")
        (more,) = prompts((name, "more"), [301])
        same(name, hand_over(p, d, more), without.generate(more, max_tokens=16).result(), "afterwards")
        all_free(p)
        all_free(d)


def test_requests_that_nobody_reads(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """20 unread requests held 95 % of P's blocks for as long as their lease: P served no other client."""
    name = "llama"
    settings = {
        "p": kvhma(name, block_size=32, num_gpu_blocks_override=64, max_model_len=512),
        "d": kvhma(name, extra={"handshake_timeout": 2}),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        total = p.state()["all_blocks"] - 1
        asked = prompts((name, "unread"), [97] * 20)
        told = [prefill(p, prompt) for prompt in asked]  # 4 blocks each
        assert total - p.state()["free_blocks"] <= total / 2 + 4
        dropped = p.sample("vllm:kvhma_held_dropped_total")
        assert dropped == 20 - total // 2 // 4
        until(lambda: p.sample("vllm:kvhma_held_leases") == 20 - dropped)  # P sleeps, except for an occasional step
        assert p.sample("vllm:kvhma_pinned_blocks") == 4 * (20 - dropped)
        assert p.sample("vllm:kvhma_oldest_unread_seconds") > 0
        # Other requests continue: a long prompt of P's own, and hand-offs of the newest and of one more.
        (long,) = prompts((name, "long"), [480])
        assert p.generate(long, max_tokens=2, timeout=30).result().error is None
        same(name, decode(d, asked[-1], told[-1]).result(), plain.generate(asked[-1], max_tokens=16).result(), "newest")
        assert decode(d, asked[0], told[0]).result().finish_reason == "error", "its blocks were evicted"
        (more,) = prompts((name, "more"), [97])
        same(name, hand_over(p, d, more), plain.generate(more, max_tokens=16).result(), "one more")
        assert "max_held_share" in (tmp_path / "p.log").read_text()
        all_free(d)
