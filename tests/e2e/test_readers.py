# SPDX-License-Identifier: Apache-2.0
"""Several readers of one prompt, other weights, paths and adapters, and log-probabilities of a prompt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.handoff import (
    all_free,
    arguments,
    computed,
    decode,
    failures,
    hand_over,
    kvhma,
    loads,
    noise,
    prefill,
    prompts,
    same,
)
from support.weights import adapter, fine_tune

Models = Callable[[str], Path]
MANY = {"temperature": 1.0, "top_k": 1}  # vLLM refuses several samples at temperature 0; these are as greedy


@pytest.mark.parametrize("name", ["gemma3", "nemotron_h"])
def test_samples_of_one_prompt(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    reads = kvhma(name, policy="recompute")  # a late reader computes
    settings = {"p": kvhma(name), "d": reads, "e": reads, "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, e, plain):
        one, spread, many, late = prompts(name, [301, 150, 65, 33])
        expected = {len(prompt): plain.generate(prompt, max_tokens=16).result() for prompt in (one, spread, many, late)}

        answer = decode(d, one, prefill(p, one), n=3, **MANY).result()
        assert len(answer.others) == 2
        for sample in (answer, *answer.others):
            same(name, sample, expected[301], "of three on one engine")
        assert (loads(d), computed(d, "late_reader")) == (3, 0)
        all_free(p)

        # Spread as a data-parallel front end spreads them over its engines.
        params = prefill(p, spread)
        answers = [
            decode((d, e)[index % 2], spread, params, request_id=f"{index}_parent", **MANY) for index in range(4)
        ]
        for got in answers:
            same(name, got.result(), expected[150], "of four on two engines")
        assert loads(d) + computed(d, "late_reader") == 5
        assert loads(e) + computed(e, "late_reader") == 2
        all_free(p)

        answer = decode(d, many, prefill(p, many), n=16, **MANY).result()
        for sample in (answer, *answer.others):
            # The number of requests in a step decides how sums are rounded.
            assert sample.token_ids == expected[65].token_ids
        all_free(p)

        params = prefill(p, late)
        same(name, decode(d, late, params, request_id="0_late").result(), expected[33])
        all_free(p)  # after the time for late readers
        before = computed(e, "late_reader")
        same(name, decode(e, late, params, request_id="1_late").result(), expected[33], "long after the first")
        assert computed(e, "late_reader") == before + 1
        assert failures(d, "expired") == failures(e, "expired") == 0
        for engine in (p, d, e):
            all_free(engine)


def test_other_weights(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """At the same path, as after an update while P runs, and under one `model_id`."""
    name = "gemma3"
    tuned = fine_tune(model(name), tmp_path / "fine-tune")
    current = tmp_path / "current"
    current.symlink_to(model(name))
    named = {"extra": {"model_id": "the same, says the operator"}}
    with engines(zygote, current, tmp_path, p=kvhma(name), q=kvhma(name, **named)) as (p, q):
        current.unlink()
        current.symlink_to(tuned)
        updated = {"strict": kvhma(name), "d": kvhma(name, policy="recompute"), "plain": arguments(name)}
        with (
            engines(zygote, current, tmp_path, **updated) as (strict, d, plain),
            engines(zygote, tuned, tmp_path, vouched=kvhma(name, **named)) as (vouched,),
        ):
            (prompt,) = prompts(name, [301])
            expected = plain.generate(prompt, max_tokens=16).result()
            at_p = p.generate(prompt, max_tokens=16).result()
            assert abs(at_p.logprobs[0] - expected.logprobs[0]) > 100 * noise(name), "these two are not the same"
            assert hand_over(p, strict, prompt).finish_reason == "error"
            assert hand_over(q, vouched, prompt).finish_reason == "error"
            same(name, hand_over(p, d, prompt), expected, "computed by D")
            for engine in (strict, d, vouched):
                assert (loads(engine), failures(engine, "unsupported")) == (0, 1)
            for log in ("p", "q", "strict", "vouched"):
                assert "weights of the model are" in (tmp_path / f"{log}.log").read_text()


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h"])
def test_log_probabilities_of_the_prompt_at_p(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """P cannot stop one token early for them."""
    recomputes = kvhma(name, policy="recompute")  # with `fail` a state that is ahead fails
    settings = {"p": kvhma(name, max_num_batched_tokens=128), "d": recomputes, "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        lengths = [65, 129, 257, 301]  # also with one token alone in the last chunk
        for length in lengths:
            (prompt,) = prompts((name, length), [length])
            expected = plain.generate(prompt, max_tokens=16).result()
            got = decode(d, prompt, prefill(p, prompt, prompt_logprobs=1)).result()
            same(name, got, expected, f"of {length} tokens")
            # Where D is asked for them too, vLLM computes all of the prompt there: P frees its blocks at once.
            asked = {"prompt_logprobs": 1}
            same(name, decode(d, prompt, prefill(p, prompt, **asked), **asked).result(), expected, "asked of both")
            all_free(p)
        assert computed(d, "skip_reading_prefix_cache") == len(lengths)
        state = name == "nemotron_h"
        assert loads(d) == (0 if state else len(lengths))
        assert computed(d, "state_ahead") == (len(lengths) if state else 0)
        for engine in (p, d):
            all_free(engine)


def test_an_adapter_on_one_side(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    tuned = ("fine", adapter(tmp_path / "adapter", layers=3, hidden=128))
    able = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": True}
    settings = {
        "p": kvhma(name, **able),
        "d": kvhma(name, policy="recompute", **able),
        "plain": arguments(name, enable_lora=True),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        one, other, both = prompts(name, [301, 300, 299])
        expected = {
            (len(prompt), with_it is not None): plain.generate(prompt, max_tokens=16, adapter=with_it).result()
            for prompt in (one, other, both)
            for with_it in (None, tuned)
        }
        apart = abs(expected[301, True].logprobs[0] - expected[301, False].logprobs[0])
        assert apart > 100 * noise(name), "an adapter that changes nothing proves nothing"
        for prompt, at_p, at_d in ((one, tuned, None), (other, None, tuned)):
            got = decode(d, prompt, prefill(p, prompt, adapter=at_p), adapter=at_d).result()
            same(name, got, expected[len(prompt), at_d is not None], "adapter on one side")
            again = d.generate(prompt, max_tokens=16, adapter=at_d).result()
            same(name, again, expected[len(prompt), at_d is not None], "the next request")
        assert (loads(d), computed(d, "other_prompt")) == (0, 2)
        got = decode(d, both, prefill(p, both, adapter=tuned), adapter=tuned).result()
        same(name, got, expected[299, True], "adapter on both sides")
        assert loads(d) == 1

        copied = ("fine", shutil.copytree(tuned[1], tmp_path / "copy"))
        (prompt,) = prompts("copied", [298])
        right = plain.generate(prompt, max_tokens=16, adapter=tuned).result()
        same(name, decode(d, prompt, prefill(p, prompt, adapter=tuned), adapter=copied).result(), right, "another path")
        assert loads(d) == 2

        # D loads what the files have now. P still has what they had, and cannot know whether it does.
        late = ("late", adapter(tmp_path / "late", layers=3, hidden=128, seed=2))
        before, after = prompts("late", [297, 296])
        params = prefill(p, before, adapter=late)
        shutil.rmtree(late[1])
        adapter(late[1], layers=3, hidden=128, seed=3)
        for prompt, given in ((before, params), (after, prefill(p, after, adapter=late))):
            right = plain.generate(prompt, max_tokens=16, adapter=late).result()
            same(name, decode(d, prompt, given, adapter=late).result(), right, "its files changed")
        assert (loads(d), computed(d, "other_prompt")) == (2, 4)


def test_other_paths_of_one_model(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """The operators name it."""
    name = "gemma3"
    copy = shutil.copytree(model(name), tmp_path / "copy")
    named = {"extra": {"model_id": "mine"}}
    with (
        engines(zygote, model(name), tmp_path, p=kvhma(name, **named), plain=arguments(name)) as (p, plain),
        engines(zygote, copy, tmp_path, d=kvhma(name, **named), strict=kvhma(name)) as (d, strict),
    ):
        (prompt,) = prompts(name, [301])
        same(name, hand_over(p, d, prompt), plain.generate(prompt, max_tokens=16).result(), "under another path")
        assert loads(d) == 1
        assert hand_over(p, strict, prompt).finish_reason == "error"
        assert f"model of the model is {str(copy)!r} here" in (tmp_path / "strict.log").read_text()
