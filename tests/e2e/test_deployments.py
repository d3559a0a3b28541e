# SPDX-License-Identifier: Apache-2.0
"""Features that deployments enable for requests, all at once in both engines: asynchronous scheduling, priorities,
adapters, structured output, and clients that disconnect. D answers as a plain engine does, which schedules step by
step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import Engine, Zygote, engines
from support.engines.compare import difference
from support.handoff import (
    all_free,
    arguments,
    at_once,
    computed,
    decode,
    hand_over,
    kvhma,
    loads,
    noise,
    prefill,
    prompts,
    same,
)
from support.tokenizer import END, text, with_tokenizer
from support.weights import adapter

Models = Callable[[str], Path]
NAME = "llama"
LEASE = 20
"""Seconds for which P holds unclaimed blocks: a client may disconnect before D is notified of its request."""


@pytest.fixture(scope="module")
def trio(zygote: Zygote, model: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, ...]]:
    """P, D and an engine without connector, which schedules nothing ahead."""
    folder = tmp_path_factory.mktemp("deployments")
    each = {"skip_tokenizer_init": False, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    # JSON allows any number of spaces between two words.
    each |= {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    ahead = each | {"async_scheduling": True, "scheduling_policy": "priority"}
    lease = {"kv_lease_duration": LEASE}
    settings = {
        "p": kvhma(NAME, extra=lease, **ahead),
        "d": kvhma(NAME, policy="recompute", **ahead),
        "plain": arguments(NAME, **each),
    }
    with engines(zygote, with_tokenizer(model(NAME), folder / "model"), folder, **settings) as trio:
        yield trio


def test_steps_are_scheduled_ahead(trio: tuple[Engine, ...]) -> None:
    p, d, plain = trio
    assert [engine.state()["scheduler"] for engine in trio] == ["AsyncScheduler", "AsyncScheduler", "Scheduler"]
    for engine in trio:
        engine.core("e2e_steps_ahead")
    before = loads(d)
    many = prompts("ahead", [33, 65, 301, 600, 1200, 2001])
    expected = [plain.generate(prompt, max_tokens=16).result() for prompt in many]
    for prompt, right in zip(many, expected, strict=True):
        same(NAME, hand_over(p, d, prompt), right, f"of {len(prompt)} tokens")
    answers = [decode(d, prompt, prefill(p, prompt)) for prompt in many]
    for answer, right in zip(answers, expected, strict=True):
        same(NAME, answer.result(), right, "at once")
    got = decode(d, many[2], prefill(p, many[2], prompt_logprobs=1)).result()
    same(NAME, got, expected[2], "with log-probabilities of the prompt at P")
    assert loads(d) - before == 2 * len(many) + 1
    assert [engine.core("e2e_steps_ahead") for engine in trio] == [2, 2, 0]
    for engine in (p, d):
        all_free(engine)


SHAPES: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["left", "right", "neither of them"]},
    "json": {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "many": {"type": "integer", "maximum": 99}},
            "required": ["name", "many"],
            "additionalProperties": False,
        },
    },
    "regex": {"regex": "[a-f]{3}-[0-9]{5}"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_structured_output(shape: str, trio: tuple[Engine, ...]) -> None:
    p, d, plain = trio
    before = loads(d)
    asked = {"structured_outputs": SHAPES[shape], "ignore_eos": False}
    many = prompts(shape, [33, 150, 301])
    expected = [plain.generate(prompt, max_tokens=60, **asked).result() for prompt in many]
    for prompt, right in zip(many, expected, strict=True):
        assert right.error is None
        # A proxy sends P the client's body, and P begins an answer in this format.
        got = decode(d, prompt, prefill(p, prompt, **asked), max_tokens=60, **asked).result()
        same(NAME, got, right, shape)
        assert got.token_ids[-1] == END, got
        said = text(got.token_ids)
        if shape == "choice":
            assert said in SHAPES["choice"]["choice"]
        elif shape == "json":
            # The grammar lets control characters into strings.
            assert set(json.loads(said, strict=False)) == {"name", "many"}
        else:
            assert said[3] == "-"
    assert loads(d) - before == len(many)
    for engine in (p, d):
        all_free(engine)


def test_adapters_that_have_other_numbers(trio: tuple[Engine, ...], tmp_path: Path) -> None:
    """Each engine numbers its adapters as they come, so one number may be another adapter at the other engine."""
    p, d, plain = trio
    tuned = [(name, adapter(tmp_path / name, layers=3, hidden=128, seed=at)) for at, name in enumerate("ab")]
    before, other = loads(d), computed(d, "other_prompt")
    many = prompts("adapters", [301, 150])
    for engine, order in ((p, tuned), (d, tuned[::-1])):
        for one in order:
            engine.generate(many[0], max_tokens=1, adapter=one).result()
    expected = {
        (at, which): plain.generate(prompt, max_tokens=16, adapter=tuned[which]).result()
        for at, prompt in enumerate(many)
        for which in (0, 1)
    }
    assert abs(expected[0, 0].logprobs[0] - expected[0, 1].logprobs[0]) > 100 * noise(NAME), "two that say the same"
    for (at, which), right in expected.items():
        params = prefill(p, many[at], adapter=tuned[which])
        same(NAME, decode(d, many[at], params, adapter=tuned[which]).result(), right, f"adapter {which}")
    assert (loads(d) - before, computed(d, "other_prompt") - other) == (4, 0)
    for which in (0, 1):  # the other's: D computes it itself, and P holds the blocks for a right request
        params = prefill(p, many[0], adapter=tuned[1 - which])
        same(NAME, decode(d, many[0], params, adapter=tuned[which]).result(), expected[0, which], "the other one's")
        decode(d, many[0], params, adapter=tuned[1 - which]).result()
    assert (loads(d) - before, computed(d, "other_prompt") - other) == (6, 2)
    for engine in (p, d):
        all_free(engine)


def test_clients_that_go_away(trio: tuple[Engine, ...]) -> None:
    """Before P has answered, before D's first token, in the middle of D's answer: both engines free all blocks."""
    p, d, plain = trio
    before = loads(d)
    long, short, other = prompts("clients", [2001, 301, 40])
    for seconds in (0.001, 0.01, 0.03):
        assert "TimeoutError" in str(p.generate(long, max_tokens=1, timeout=seconds).result().error)
    all_free(p)
    for seconds in (0.001, 0.003, 0.01, 0.02):
        left = decode(d, short, prefill(p, short), max_tokens=2000, timeout=seconds).result()
        assert "TimeoutError" in str(left.error)
    for engine in (p, d):
        all_free(engine)
    hand_over(p, d, other)  # loads that have ended without a client are counted with the next step
    loaded = loads(d)
    left = decode(d, short, prefill(p, short), max_tokens=2000, timeout=0.6).result()
    assert "TimeoutError" in str(left.error)
    assert left.token_ids == plain.generate(short, max_tokens=len(left.token_ids)).result().token_ids != []
    assert loads(d) == loaded + 1 > before
    for engine in (p, d):
        all_free(engine)
    same(NAME, hand_over(p, d, short), at_once(plain, [short], max_tokens=16)[0], "after all that")


def test_few_blocks(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Requests that D has no room for: too long for it, one at a time, and by priority.

    vLLM refuses prompts longer than `max_model_len` before it calls a connector; P holds their blocks for its lease. A
    pool that has no room for `max_model_len` tokens stops an engine at its start.
    """
    lease = 5.0
    limit = 320
    settings = {
        "p": kvhma(NAME, extra={"kv_lease_duration": lease}),
        "d": kvhma(NAME, scheduling_policy="priority", max_model_len=limit, num_gpu_blocks_override=limit // 32 + 2),
        "plain": arguments(NAME),
    }
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        longer, one, two, last, low, high = prompts(
            "few blocks", [limit + 1, limit - 16, limit - 16, limit - 1, 125, 125]
        )
        refused = decode(d, longer, prefill(p, longer)).result(30)
        assert re.search(f"maximum .*length is {limit}", str(refused.error)), refused
        all_free(d)
        all_free(p)

        # Each needs nearly all of D's blocks: the second waits for the first to end, and P renews its lease.
        fit = {16: one, 15: two, 1: last}
        right = {length: plain.generate(prompt, max_tokens=length).result() for length, prompt in fit.items()}
        answers = {length: decode(d, prompt, prefill(p, prompt), max_tokens=length) for length, prompt in fit.items()}
        for length, answer in answers.items():
            same(NAME, answer.result(60), right[length], f"of {len(fit[length])} tokens")
        assert loads(d) == len(fit)

        # Two that outgrow D's blocks together: the first is less urgent, and has to make room.
        expected = [plain.generate(prompt, max_tokens=100).result() for prompt in (low, high)]
        first = decode(d, low, prefill(p, low), max_tokens=100, priority=5)
        second = decode(d, high, prefill(p, high), max_tokens=100, priority=1)
        got = [first.result(60), second.result(60)]
        for answer, wanted in zip(got, expected, strict=True):
            # A preempted request computes its answer so far in other chunks.
            found = difference(answer, wanted, 2 * noise(NAME))
            assert found is None, found
        assert d.sample("vllm:num_preemptions_total") > 0
        assert got[0].begun < got[1].begun
        assert got[0].begun + got[0].seconds > got[1].begun + got[1].seconds
        assert loads(d) == len(fit) + 2
        for engine in (p, d):
            all_free(engine)
