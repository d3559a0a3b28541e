# SPDX-License-Identifier: Apache-2.0
"""Features that deployments enable for requests, all at once in both engines: asynchronous scheduling, adapters and
structured output. D answers as a plain engine does, which schedules step by step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import Engine, Zygote, engines
from support.handoff import (
    all_free,
    arguments,
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


@pytest.fixture(scope="module")
def trio(zygote: Zygote, model: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, ...]]:
    """P, D and an engine without connector, which schedules nothing ahead."""
    folder = tmp_path_factory.mktemp("deployments")
    each = {"skip_tokenizer_init": False, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    # JSON allows any number of spaces between two words.
    each |= {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    ahead = each | {"async_scheduling": True, "scheduling_policy": "priority"}
    settings = {
        "p": kvhma(NAME, **ahead),
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
    all_free(p, d)


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
    all_free(p, d)


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
    all_free(p, d)
