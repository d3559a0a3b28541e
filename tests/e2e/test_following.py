# SPDX-License-Identifier: Apache-2.0
"""D follows P's computation in real engines: all kinds of models, ranks and blocks, and every way to end."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines
from support.engines.tiny import MODELS
from support.handoff import all_free, arguments, failures, kvhma, prefill, prompts, same
from support.waiting import until

Models = Callable[[str], Path]
STEP = {"max_num_batched_tokens": 100}
"""P's tokens per step: prompts of 401 tokens and more take several steps."""

SLOW = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
"""P's tokens per step where a test has to act while it computes."""

SMALL = {"kvhma.vllm.options.tickets.following.PIECE_TOKENS": 16}
ALL = {"content_digests": "all"}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


class Pair:
    """P and D, and what a proxy knows of P."""

    def __init__(self, p: Engine, d: Engine, *, prompt: Sequence[int] = (1, 2, 3)) -> None:
        """Learn where P's scheduler listens, as a proxy does."""
        self.p, self.d = p, d
        told = prefill(p, prompt)
        self.address = {"remote_host": told["remote_host"], "remote_port": told["remote_port"]}
        d.generate(prompt, max_tokens=1, kv_transfer_params=told).result()

    def compute(self, prompt: Sequence[int], ticket: str, **more: Any) -> Future[Answer]:
        params = REMOTE_DECODE | {"kvhma_ticket": ticket}
        return self.p.generate(prompt, max_tokens=1, kv_transfer_params=params, **more)

    def follow(self, prompt: Sequence[int], ticket: str, **more: Any) -> Future[Answer]:
        params = {"do_remote_prefill": True, "kvhma_ticket": ticket, **self.address}
        return self.d.generate(prompt, kv_transfer_params=params, **({"max_tokens": 16} | more))

    def both(self, prompt: Sequence[int], *, first: str = "p") -> Future[Answer]:
        """Ask both; return D's answer."""
        ticket = new_ticket()
        if first == "p":
            self.compute(prompt, ticket)
        answer = self.follow(prompt, ticket)
        if first == "d":
            self.compute(prompt, ticket)
        return answer

    def right(self, name: str, plain: Engine, lengths: Sequence[int]) -> None:
        """Ask both for prompts of some lengths, one after the other, and compare each with the plain engine."""
        for prompt in prompts((name, self.p.log.stem), lengths):
            expected = plain.generate(prompt, max_tokens=16).result()
            same(name, self.both(prompt).result(), expected, len(prompt))

    def pieces(self) -> int:
        return int(self.d.sample("vllm:kvhma_pieces_total"))

    def ended(self, how: str) -> int:
        return int(self.d.sample("vllm:kvhma_followed_total", end=how))


def new_ticket() -> str:
    return secrets.token_hex(16)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_all_kinds_of_models(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        "p": kvhma(name, **STEP),
        "d": kvhma(name, constants=SMALL),
        "plain": arguments(name, **STEP),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        pair = Pair(p, d)
        for length in (1, 2, 33, 401, 801, 1601):
            (prompt,) = prompts((name, length), [length])
            expected = plain.generate(prompt, max_tokens=16).result()
            same(name, pair.both(prompt, first="d" if length == 801 else "p").result(), expected, length)
        print(f"{name}: {pair.pieces()} pieces of {pair.ended('handed_over')} requests, {pair.ended('late')} came late")
        # On CPUs vLLM computes a prompt with latent attention in one step.
        assert (pair.pieces() > 2) is (name != "deepseek_v2")
        assert pair.ended("lost") == 0
        assert pair.ended("refused") <= 1, "of a prompt of one token nothing may be left to load"
        all_free(p, d)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_one_rank_to_two_and_back(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        "one": kvhma(name, constants=SMALL, **STEP),
        "two": kvhma(name, constants=SMALL, **STEP, **TWO_RANKS),
        "plain": arguments(name, **STEP),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (one, two_ranks, plain):
        for p, d in ((one, two_ranks), (two_ranks, one)):
            pair = Pair(p, d)
            pair.right(name, plain, [33, 601, 1001])
            assert pair.pieces() > 0
        all_free(one, two_ranks)


def test_p_that_preempts_a_prompt(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Other requests overwrite the blocks that P had announced; D reads them again.

    Eight answers grow beside a prompt of 32 of P's 59 blocks, from three blocks each to six. The prompt has room when
    it comes, but not when its last blocks are computed: vLLM preempts the request that came last.
    """
    name = "llama"
    settings = {
        "p": kvhma(name, block_size=32, num_gpu_blocks_override=60, max_model_len=1600, **SLOW),
        "d": kvhma(name, constants=SMALL),
        "plain": arguments(name, **SLOW),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        pair = Pair(p, d)
        *growing, followed = prompts(name, [65] * 8 + [1024])
        expected = plain.generate(followed, max_tokens=16).result()
        busy = [p.generate(prompt, max_tokens=127, ignore_eos=True) for prompt in growing]
        same(name, pair.both(followed).result(), expected, "beside answers that grow")
        for answer in busy:
            answer.result()
        preempted = int(p.sample("vllm:num_preemptions_total"))
        print(f"{preempted} preemptions, {pair.pieces()} pieces")
        assert preempted > 0
        assert pair.pieces() > 0
        all_free(p, d)


def test_clients_that_hang_up(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Either side may lose its client in any phase: no engine waits for it, and no block is held."""
    name = "gemma3"
    with engines(zygote, model(name), tmp_path, p=kvhma(name, **STEP), d=kvhma(name, constants=SMALL)) as (p, d):
        pair = Pair(p, d)
        for index, turns in enumerate([0, 1, 4, 8, 16] * 2):
            (prompt,) = prompts((name, index), [1601])
            ticket = new_ticket()
            at_p = pair.compute(prompt, ticket, request_id=f"p{index}")
            at_d = pair.follow(prompt, ticket, request_id=f"d{index}")
            for _ in range(turns):
                d.state()  # a turn of D's engine
            if index % 2:
                p.abort(f"p{index}")
                assert at_d.result().finish_reason in ("error", "length")
            else:
                d.abort(f"d{index}")
            for answer in (at_p, at_d):
                answer.result()
        all_free(p, d)


def test_p_that_is_killed_in_each_phase(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """While D waits for it, before and after its first piece, and when it has finished: D computes the lost part.

    Before that another D is killed, and P frees the blocks that it followed.
    """
    name = "gemma3"
    extra = {"kv_lease_duration": 3, "handshake_timeout": 1}
    settings = {f"p{phase}": kvhma(name, extra=extra, **SLOW) for phase in range(3)}
    settings |= {"other": kvhma(name, extra=extra, constants=SMALL)}
    settings |= {"d": kvhma(name, policy="recompute", extra=extra, constants=SMALL), "plain": arguments(name, **STEP)}
    with engines(zygote, model(name), tmp_path, **settings) as (*ps, other, d, plain):
        (prompt,) = prompts(name, [1601])
        expected = plain.generate(prompt, max_tokens=16).result()
        pair, ticket = Pair(ps[0], other), new_ticket()
        at_p, _ = pair.compute(prompt, ticket), pair.follow(prompt, ticket)
        other.kill()
        at_p.result()
        all_free(ps[0])
        for phase, p in enumerate(ps):
            pair, ticket = Pair(p, d), new_ticket()
            answer = pair.follow(prompt, ticket, timeout=300)
            at_p = pair.compute(prompt, ticket) if phase else None
            if phase == 0:
                until(lambda: d.state()["requests"])
            while phase == 1 and not read_pieces(d):
                assert at_p is not None
                assert not at_p.done()
            if phase == 2:
                assert at_p is not None
                at_p.result()
            p.kill()
            same(name, answer.result(), expected, f"P is gone, phase {phase}")
            all_free(d)


def compared(d: Engine, result: str) -> int:
    return int(d.sample("vllm:kvhma_content_digests_total", result=result))


def read_pieces(d: Engine) -> int:
    """Tokens of all pieces that D has read of requests that it follows now, except the last piece of each."""
    followed = d.core("e2e_connector", "_scheduler.context.rooms.0.with_blocks")
    return sum(int(tokens) for one in followed.values() for tokens in re.findall(r"\bdone_before=(\d+),", one))


@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_of_what_was_read_in_pieces(
    name: str, ranks: int, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    """They agree; and a block that D read right, but that was corrupted at P before P summed it, is found."""
    constants = SMALL | {"kvhma.vllm.loads.decode.LOAD_RETRIES": 0}
    settings = {
        "p": kvhma(name, extra=ALL, **SLOW),
        "d": kvhma(name, policy="recompute", extra=ALL, constants=constants, **(TWO_RANKS if ranks == 2 else {})),
        "plain": arguments(name, **STEP),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        pair = Pair(p, d)
        before = compared(d, "match")
        pair.right(name, plain, [33, 401, 1001])
        assert pair.pieces() > 0
        assert (compared(d, "match") - before, compared(d, "mismatch")) == (3, 0)
        (prompt,) = prompts((name, ranks, "spoilt"), [2401])
        expected = plain.generate(prompt, max_tokens=16).result()
        ticket = new_ticket()
        answers = [pair.compute(prompt, ticket, request_id="spoilt"), pair.follow(prompt, ticket)]
        while not read_pieces(d):
            assert not answers[0].done(), "P has computed all of it before a piece was read"
        groups = p.rpc("e2e_groups")[0]
        (full,) = (index for index, group in enumerate(groups) if group["kind"] == "FullAttentionSpec")
        p.rpc("e2e_overwrite", groups[full]["layers"][0], p.core("e2e_blocks", "spoilt")[full][0], "noise")
        same(name, answers[1].result(), expected, "computed by D")
        assert (failures(d, "digest"), compared(d, "mismatch")) == (ranks, 1)
        log = (tmp_path / "d.log").read_text()
        assert "what was loaded is not what P holds: full layers, tokens 0..1023" in log
        all_free(p, d)
