# SPDX-License-Identifier: Apache-2.0
"""The steps with engines: P, D and others share one device, or the host. Each engine schedules ahead, and on a device
it replays graphs."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpu import steps, transfers
from gpu.place import Outcome, Place
from gpu.steps import Step
from kvhma import __version__ as kvhma_version
from support.engines import Answer, Engine, Zygote, engines, make_models
from support.engines.compare import difference, distance
from support.engines.zygote import ENVIRONMENT, REPO, vllm_version
from support.engines.zygote_process import ON_DEVICE
from support.handoff import (
    CHUNK,
    LEASE,
    all_free,
    arguments,
    at_once,
    decode,
    failures,
    hand_over,
    kvhma,
    loads,
    prefill,
)
from support.handoff import prompts as random_prompts
from support.waiting import until

LENGTHS = (101, 201, 301, 1201)
"""A plain engine, which computes `CHUNK` tokens in a step, computes the last one alone. So does D. In bfloat16 a sum
depends on what is computed beside it."""

TOKENS = 16
GROWTH = 64 << 20
"""Bytes by which 200 hand-offs may make the memory grow."""

FAILURES = ("peer_lost", "handshake", "transfer")
"""How the connector may report that P is dead."""


def facts(place: Place, outcome: Outcome) -> None:
    """Report versions, and what `make gpu` reports first."""
    outcome.add("vLLM, NIXL, kvhma", f"{vllm_version()}, {version('nixl')}, {kvhma_version}")
    transfers.facts(place, outcome)


def _ahead(place: Place) -> dict[str, Any]:
    """Arguments of every engine. Four of them share a device, in the dtype that its attention kernels need."""
    both = {"async_scheduling": True, "kv_cache_memory_bytes": 256 << 20}
    return both | (
        {} if place.is_host else {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    )


@contextlib.contextmanager
def _zygote(place: Place) -> Iterator[tuple[Zygote, Path]]:
    """Yield what engines are forked from, and a folder for models and logs."""
    benches = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{REPO / 'benches'}"}
    more = {"KVHMA_E2E_SPIN_SECONDS": "0.01"} if place.is_host else {ON_DEVICE: "1", "TORCHDYNAMO_DISABLE": "0"}
    with tempfile.TemporaryDirectory() as name, Zygote(Path(name) / "zygote.log", benches | more) as zygote:
        yield zygote, Path(name)


@contextlib.contextmanager
def _engines(place: Place, model: str, *names: str, **extra: Any) -> Iterator[tuple[Engine, ...]]:
    """Yield ready engines that schedule ahead and, on a device, have captured graphs; `plain` has no connector."""
    each = _ahead(place) | {"max_num_batched_tokens": CHUNK}
    made = {name: (arguments if name == "plain" else partial(kvhma, extra=extra))(model, **each) for name in names}
    with _zygote(place) as (zygote, folder):
        (path,) = make_models(zygote, folder / "models", model)
        with engines(zygote, path, folder, **made) as ready:
            assert {engine.state()["scheduler"] for engine in ready} == {"AsyncScheduler"}
            assert place.is_host or all(engine.rpc("e2e_graphs")[0] for engine in ready), "no graphs"
            yield ready


@dataclass(frozen=True)
class Expected:
    """A plain engine's answers, and by how many nats right answers may differ from them."""

    answers: list[Answer]
    noise: float

    @classmethod
    def of(cls, place: Place, plain: Engine, prompts: list[list[int]]) -> Expected:
        """Ask one by one, then at once: on a device, batches of other sizes are summed in another order.

        The noise is at least three times what the last bit of a logit may be.
        """
        alone = [plain.generate(prompt, max_tokens=TOKENS).result() for prompt in prompts]
        together = at_once(plain, prompts, max_tokens=TOKENS)
        return cls(alone, max(1e-4 if place.is_host else 0.1, 3 * max(map(distance, alone, together))))

    def check(self, answers: list[Answer]) -> float:
        """Return the largest difference; raise AssertionError if an answer is another one."""
        found = [difference(got, right, self.noise) for got, right in zip(answers, self.answers, strict=True)]
        assert not any(found), found
        return max(map(distance, answers, self.answers))


def _round(place: Place, p: Engine, d: Engine, plain: Engine, seed: object) -> tuple[float, float, float]:
    """Hand off prompts one by one and at once.

    Returns:
        Nats by which D's answers differ from the plain engine's, may differ, and would differ with half of the prompt.
    """
    prompts = random_prompts(seed, LENGTHS)
    expected = Expected.of(place, plain, prompts)
    halves = at_once(
        plain, [[1] * (len(prompt) // 2) + prompt[len(prompt) // 2 :] for prompt in prompts], max_tokens=TOKENS
    )
    wrong = statistics.median(map(distance, halves, expected.answers))
    before = loads(d)
    one_by_one = [hand_over(p, d, prompt, max_tokens=TOKENS) for prompt in prompts]
    params = [prefill(p, prompt) for prompt in prompts]
    asked = [decode(d, prompt, told, max_tokens=TOKENS) for prompt, told in zip(prompts, params, strict=True)]
    worst = max(expected.check(one_by_one), expected.check([answer.result() for answer in asked]))
    # An answer is no proof: without a hand-off D silently computes the prompt.
    assert loads(d) - before == 2 * len(prompts)
    return worst, expected.noise, wrong


def _add(outcome: Outcome, rounds: list[tuple[float, float, float]]) -> None:
    worst, noise, wrong = zip(*rounds, strict=True)
    outcome.add("hand-offs whose answers equal a plain engine's", 2 * len(LENGTHS) * len(rounds))
    outcome.add("largest difference", f"{max(worst):.2g} nats")
    outcome.add("allowed: three times the plain engine's between one by one and at once", f"{max(noise):.2g} nats")
    outcome.add("median difference, at least, if half of the prompt is another", f"{statistics.median(wrong):.2g} nats")
    assert statistics.median(wrong) > max(noise), "answers would not show a wrong cache"


def answers(model: str, place: Place, outcome: Outcome) -> None:
    """Compare D's answers with a plain engine's, while steps are launched ahead."""
    with _engines(place, model, "p", "d", "plain") as (p, d, plain):
        for engine in (p, d):
            engine.core("e2e_steps_ahead")
        _add(outcome, [_round(place, p, d, plain, model)])
        ahead = [engine.core("e2e_steps_ahead") for engine in (p, d)]
        outcome.add("steps launched and not yet processed, P and D", ahead)
        assert min(ahead) > 1
        if not place.is_host:
            outcome.add("graphs that D has captured", d.rpc("e2e_graphs")[0])
        all_free(p, d)


def first_token(place: Place, outcome: Outcome) -> None:
    """Take turns with NixlConnector."""
    sys.path.append(str(REPO / "benches"))
    from handoffs.pairs import Bench
    from handoffs.tables import OURS, THEIRS, Row
    from harness import rotated

    with (
        _zygote(place) as (zygote, folder),
        Bench(zygote, folder, quick=True).pairs("gemma3", OURS, THEIRS, **_ahead(place)) as pairs,
    ):
        for length in (301, 2001):
            row = Row("first token")
            for number in range(place.size(9, 2) + 1):
                for which in rotated((OURS, THEIRS), number):
                    (seconds,) = pairs.turn(which, random_prompts((length, number), [length])).first_tokens
                    if number:  # the first round connects
                        row.add(which, seconds)
            for which in (OURS, THEIRS):
                outcome.add(f"first token of {length} tokens, {which}", row.median(which))
            outcome.add(f"ratio of {length} tokens, above 1 is better for kvhma", row.ratio(THEIRS))


def killed(place: Place, outcome: Outcome) -> None:
    """Kill P while D reads: a request of D has the right answer or ends with an error, and others do not notice."""
    with _engines(place, "gemma3", "p", "d", kv_lease_duration=LEASE, handshake_timeout=3) as (p, d):
        prompts = random_prompts("killed", [1500] * 8)
        expected = Expected.of(place, d, prompts)  # an engine without parameters is a plain one
        expected.check([hand_over(p, d, prompt, max_tokens=TOKENS) for prompt in prompts])
        told = [prefill(p, prompt) for prompt in prompts]
        running = d.generate(prompts[0], max_tokens=400)

        def ask(first: int, end: int) -> list[Future[Answer]]:
            return [decode(d, prompts[at], told[at], max_tokens=TOKENS) for at in range(first, end)]

        before = ask(0, 4)
        until(before[0].done)
        during = ask(4, 6)
        p.kill()
        ended = [answer.result() for answer in before + during + ask(6, 8)]
        outcome.add("four requests before P is killed, two during it, two after", [one.finish_reason for one in ended])
        for answer, right in zip(ended, expected.answers, strict=True):
            assert answer.finish_reason == "error" or difference(answer, right, expected.noise) is None
        failed = sum(answer.finish_reason == "error" for answer in ended)
        assert {answer.finish_reason for answer in ended[6:]} == {"error"}
        until(lambda: sum(failures(d, cause) for cause in FAILURES) == failed)
        outcome.add("reasons of the connector", {cause: failures(d, cause) for cause in FAILURES})
        assert len(running.result().token_ids) == 400
        expected.check([d.generate(prompt, max_tokens=TOKENS).result() for prompt in prompts])
        outcome.add("D's other answers", "complete and right, during and after")
        all_free(d)


def many(place: Place, outcome: Outcome) -> None:
    """Make 200 hand-offs, eight on the host: answers are right, and memory does not grow."""
    with _engines(place, "gemma3", "p", "d", "plain") as (p, d, plain):
        _round(place, p, d, plain, "warm-up")
        before = _memory(place, p, d)
        _add(outcome, [_round(place, p, d, plain, number) for number in range(place.size(25, 1))])
        for what, now in _memory(place, p, d).items():
            outcome.add(f"memory of {what} before and after", f"{before[what] >> 20} and {now >> 20} MiB")
            assert now - before[what] < GROWTH, what
        all_free(p, d)


def _memory(place: Place, p: Engine, d: Engine) -> dict[str, int]:
    """Return resident bytes of workers, and those in use on the device."""
    found = {name: engine.rpc("e2e_census")[0]["resident"] for name, engine in (("P's worker", p), ("D's worker", d))}
    if not place.is_host:
        free, everything = torch.cuda.mem_get_info(place.device)
        found["the device"] = everything - free
    return found


STEPS = (
    Step("what is there", facts),
    Step("answers, sliding windows", partial(answers, "gemma3")),
    Step("answers, Mamba2 states", partial(answers, "nemotron_h")),
    Step("first token beside NixlConnector", first_token),
    Step("a P that is killed", killed),
    Step("many hand-offs", many),
)

if __name__ == "__main__":
    os.environ["KVHMA_E2E_PYTHON"] = sys.executable
    steps.main(STEPS)
