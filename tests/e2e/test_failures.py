# SPDX-License-Identifier: Apache-2.0
"""Engines that die, leases that end, requests that are cancelled: never a wrong token, never a leaked block."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.engines import Engine, Zygote, engines, free_port
from support.handoff import (
    all_free,
    arguments,
    at_once,
    decode,
    failures,
    hand_over,
    kvhma,
    loads,
    prefill,
    prompts,
    same,
)
from support.waiting import until

Models = Callable[[str], Path]
QUICK = {"handshake_timeout": 3}


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.smoke), "nemotron_h"])
def test_p_killed_before_during_and_after_and_restarted(
    name: str, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    # Over TCP a transfer lasts long enough to be cut off in the middle.
    tcp = {"UCX_TLS": "tcp,self"}
    port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    settings = {
        "p": kvhma(name, env=tcp | port),
        "d": kvhma(name, policy="recompute", extra=QUICK, env=tcp),
        "strict": kvhma(name, policy="fail", extra=QUICK, env=tcp),
    }
    settings["p"]["kv_transfer_config"]["engine_id"] = "the same in both lives"
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, strict):
        after, *during = prompts(name, [301] + [1500] * 6)
        before, again, stale = prompts((name, 2), [301] * 3)
        # An engine without parameters is a plain one.
        asked = (after, *during, before, again, stale)
        expected = dict(zip(map(tuple, asked), at_once(d, asked, max_tokens=16), strict=True))

        same(name, hand_over(p, d, after), expected[tuple(after)], "before anything happens")
        same(name, hand_over(p, strict, after), expected[tuple(after)], "before anything happens")
        told = {tuple(prompt): prefill(p, prompt) for prompt in (before, stale, *during)}
        running = decode(d, after, prefill(p, after), max_tokens=200)
        got = [decode(d, prompt, told[tuple(prompt)], request_id=f"during {at}") for at, prompt in enumerate(during)]
        strictly = [decode(strict, prompt, told[tuple(prompt)]) for prompt in during]
        until(lambda: got[0].done() or is_known(d, "during 0"))
        p.kill()
        for prompt, answer in zip(during, got, strict=True):
            same(name, answer.result(), expected[tuple(prompt)], "while it was read")
        for prompt, answer in zip(during, strictly, strict=True):
            if answer.result().finish_reason != "error":
                same(name, answer.result(), expected[tuple(prompt)], "while it was read")
        assert len(running.result().token_ids) == 200
        same(name, decode(d, before, told[tuple(before)]).result(), expected[tuple(before)], "before")
        assert decode(strict, before, told[tuple(before)]).result().finish_reason == "error"
        all_free(d, strict)

        with replace(p, log=tmp_path / "p-again.log") as second:
            for engine in (d, strict):
                same(name, hand_over(second, engine, again), expected[tuple(again)], "after a restart")
            # The second P does not hold what the first P promised, with any content in these blocks.
            same(name, decode(d, stale, told[tuple(stale)]).result(), expected[tuple(stale)], "stale")
            refused = decode(strict, stale, told[tuple(stale)]).result()
            assert refused.finish_reason == "error"
            assert "kvhma.instance" in (tmp_path / "strict.log").read_text()
            all_free(second)
        all_free(d)


@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_leases(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        # Two unread requests are more than half of so few blocks.
        "p": kvhma(
            name,
            extra={"kv_lease_duration": 3, "max_held_share": 1.0},
            num_gpu_blocks_override=40,
            max_model_len=1024,
        ),
        "d": kvhma(name, policy="recompute", extra=QUICK, max_num_seqs=1),
        "strict": kvhma(name, policy="fail", extra=QUICK),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, strict):
        late, *others = prompts(name, [301] * 12)
        expected = d.generate(late, max_tokens=16).result()
        told = [prefill(p, late) for _ in range(2)]
        assert len(p.state()["requests"]) == 2
        until(lambda: p.sample("vllm:kvhma_expired_total", reason="unclaimed") == 2)
        all_free(p)
        for prompt in others:  # they get the blocks of the late request
            p.generate(prompt, max_tokens=1).result()
        # D has read other requests' content, and P answers that it no longer holds the blocks.
        same(name, decode(d, late, told[0]).result(), expected, "after its lease")
        assert decode(strict, late, told[1]).result().finish_reason == "error"
        assert (failures(d, "expired"), failures(strict, "expired")) == (1, 1)

        # A request that waits in D renews its lease, and loads its cache when there is room.
        blockers = [d.generate(late, max_tokens=2000, request_id=f"blocker {at}") for at in range(4)]
        waiting = decode(d, late, prefill(p, late), request_id="late", timeout=None)
        until(lambda: waiting.done() or is_known(d, "late"))
        prefill(p, others[0])  # it is never claimed: when it expires, a lease has passed
        until(lambda: p.sample("vllm:kvhma_expired_total", reason="unclaimed") == 3)
        assert not blockers[-1].done(), "nothing was in the way"
        # vLLM 0.31 loads a request that it has no room to run.
        assert len(p.state()["requests"]) == 1 or loads(d) == 1, "the lease of a request that waits at D has ended"
        for at in range(len(blockers)):
            d.abort(f"blocker {at}")
        same(name, waiting.result(), expected, "that waited")
        assert (failures(d, "expired"), loads(d)) == (1, 1)
        all_free(p)


def test_given_up_in_any_phase(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "nemotron_h"
    settings = {"p": kvhma(name), "d": kvhma(name, extra=QUICK, policy="recompute"), "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        (good,) = prompts(name, [301])
        right = plain.generate(good, max_tokens=16).result()
        rng = random.Random(1)

        def round_of(number: int) -> None:
            answers = []
            for at, prompt in enumerate(prompts((name, number), [rng.choice([33, 301, 1200]) for _ in range(8)])):
                request_id = f"round {number}, {at}"
                answers.append(decode(d, prompt, prefill(p, prompt), request_id=request_id, max_tokens=64))
                for _ in range(rng.choice([0, 0, 1, 4, 16])):
                    d.state()  # a turn of D's engine
                d.abort(request_id)
            assert {answer.result().finish_reason for answer in answers} <= {"abort", "length"}
            all_free(d, p)

        round_of(0)
        census = [engine.rpc("e2e_census")[0] for engine in (p, d)]
        for number in range(1, 6):
            round_of(number)
        for engine, before in zip((p, d), census, strict=True):
            after = engine.rpc("e2e_census")[0]
            assert after["python_threads"] == before["python_threads"]
            assert after["files"] <= before["files"] + 2
        same(name, hand_over(p, d, good), right, "after all that")

        # P stalls in the handshake: D's request is cancelled, and its blocks are freed when the handshake fails.
        told = prefill(p, good)
        p.pause()
        try:
            answer = decode(d, good, told | {"remote_host": "127.0.0.1"}, request_id="frozen")
            until(lambda: is_known(d, "frozen"))
            d.abort("frozen")
            answer.result()
            all_free(d)
        finally:
            p.go_on()
        all_free(p)


def is_known(engine: Engine, request_id: str) -> bool:
    """Whether a request has reached an engine and has not ended; vLLM may add to its name."""
    return any(name.startswith(request_id) for name in engine.state()["requests"])


@pytest.mark.smoke
def test_d_killed(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    extra = {"kv_lease_duration": 3}
    settings = {"p": kvhma(name, extra=extra), "d": kvhma(name), "other": kvhma(name), "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, other, plain):
        many = prompts(name, [1200] * 8)
        told = [prefill(p, prompt) for prompt in many]
        answers = [decode(d, prompt, params) for prompt, params in zip(many, told, strict=True)]
        until(lambda: answers[0].done() or d.state()["requests"])
        d.kill()
        assert all(answer.exception(10) is not None or answer.result() for answer in answers)
        same(name, hand_over(p, other, many[0]), plain.generate(many[0], max_tokens=16).result(), "of another D")
        all_free(p)
        assert loads(other) == 1
