# SPDX-License-Identifier: Apache-2.0
"""Prefix hits, chunked prefill, preemption and many requests at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import Zygote, engines
from support.engines.compare import difference, distance
from support.handoff import all_free, arguments, at_once, decode, hand_over, kvhma, loads, noise, prefill, prompts, same

Models = Callable[[str], Path]


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_prefix_hits_and_chunks(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        "p": kvhma(name, enable_prefix_caching=True, max_num_batched_tokens=64),
        "d": kvhma(name, enable_prefix_caching=True),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        block = max(group["block_size"] for group in p.rpc("e2e_groups")[0] if "Mamba" not in group["kind"])
        base, other = prompts(name, [5 * block + 7, 5 * block])
        cases = {
            "nothing cached": base,
            "short": base[: block + 3] + other,
            "block-aligned": base[: 3 * block] + other,
            "to the last block": base,
            "one more token": [*base, 5],
            "whole blocks only": base[: 4 * block],
        }
        moved = {}
        for what, prompt in cases.items():
            expected = plain.generate(prompt, max_tokens=16).result()
            before = d.loaded_tokens()
            got = hand_over(p, d, prompt)
            same(name, got, expected, what)
            moved[what] = d.loaded_tokens() - before
        print(f"{name}: tokens loaded {moved}")
        assert moved["nothing cached"] >= len(base) - 1
        # Of a window D reads the end again. Its states are further apart than these blocks.
        if name != "qwen3_next":
            assert moved["block-aligned"] <= len(cases["block-aligned"]) - 2 * block
        assert moved["to the last block"] < 2 * block
        for engine in (p, d):
            all_free(engine)


LONG_CHUNKS: dict[str, Any] = {"hf_overrides": {"attention_chunk_size": 1024}}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.mark.parametrize(
    ("name", "p_block", "d_block", "policy", "both", "ranks", "fewer"),
    [
        ("gemma3", 32, 32, "fail", {}, {}, 3),
        ("gpt_oss", 32, 128, "recompute", {}, {}, 6),
        ("gemma3", 64, 32, "fail", {}, {}, 3),
        ("gemma3", 32, 32, "fail", {}, TWO_RANKS, 3),
        ("llama4", 32, 32, "fail", LONG_CHUNKS, {}, 1.1),
    ],
    ids=["gemma3-32-32", "gpt_oss-32-128", "gemma3-64-32", "gemma3-32-32-two-ranks", "llama4-32-32"],
)
def test_questions_about_one_document(
    name: str,
    p_block: int,
    d_block: int,
    policy: str,
    both: dict[str, Any],
    ranks: dict[str, Any],
    fewer: float,
    zygote: Zygote,
    model: Models,
    tmp_path: Path,
) -> None:
    """D has full attention's blocks of the document, and reads the last window of each question.

    By vLLM's own rule D reads the document again for the next three questions: `fewer` times the bytes or more.
    """
    settings = {
        "p": kvhma(name, block_size=p_block, enable_prefix_caching=True, **both),
        "d": kvhma(name, block_size=d_block, policy=policy, enable_prefix_caching=True, **both, **ranks),
        # As P does: tokens that are computed after a hit are rounded differently.
        "plain": arguments(name, enable_prefix_caching=True, **both, **ranks),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        document, *ends = prompts((name, p_block), [1600, 503, 90, 37, 260])
        cases = {f"question {index}": document + end for index, end in enumerate(ends)}
        cases["its beginning"] = document[: 1280 + 1]
        cases["the first question again"] = cases["question 0"]
        answer = plain.generate(cases["question 3"], max_tokens=24).result().token_ids
        cases["the next turn"] = turn = cases["question 3"] + answer + ends[1]
        cases["half of full attention evicted"] = cases["question 0"]
        cases["the next turn, all else evicted"] = turn
        evicted = {"half of full attention evicted": (1024, True), "the next turn, all else evicted": (0, False)}
        expected = {what: plain.generate(prompt, max_tokens=24).result() for what, prompt in cases.items()}
        # Two ranks round sums differently from P, but both rules of hits read the same bytes.
        bound = noise(name) if ranks else 1e-5
        read, hits, answers, worst = defaultdict(list), defaultdict(list), {}, 0.0
        for rule in ("each group's", "vLLM's"):
            for what, prompt in cases.items():
                if what in evicted:
                    d.idle()
                    d.core("e2e_evict", prompt, *evicted[what])
                before = [d.sample(f"vllm:{metric}") for metric in ("kvhma_bytes_sum", "prefix_cache_hits_total")]
                got = hand_over(p, d, prompt, max_tokens=24)
                assert difference(got, expected[what], bound) is None, (what, rule)
                assert difference(got, answers.setdefault(what, got), 1e-5) is None, (what, rule)
                worst = max(worst, distance(got, expected[what]))
                after = [d.sample(f"vllm:{metric}") for metric in ("kvhma_bytes_sum", "prefix_cache_hits_total")]
                for found, old, new in zip((read, hits), before, after, strict=True):
                    found[what].append(new - old)
            all_free(p, d)
            if rule == "each group's":
                d.core("e2e_hit_as_vllm")
        print(f"{name} {p_block} to {d_block}: at most {worst:.2g} nats from the plain engine")
        for what in cases:
            (ours, theirs), (our_bytes, their_bytes) = hits[what], read[what]
            print(f"| {what} | {theirs:,.0f} → {ours:,.0f} | {their_bytes:,.0f} → {our_bytes:,.0f} |")
        for index in (1, 2, 3):
            assert hits[f"question {index}"][0] == 1600 // d_block * d_block
        # Of windows that D lacks something is left to load.
        assert hits["its beginning"][0] == (1280 if name == "llama4" else 1280 - d_block)
        assert hits["half of full attention evicted"][0] == 1024
        assert hits["the next turn, all else evicted"][0] == (len(turn) - 1) // d_block * d_block
        assert all(ours <= theirs for ours, theirs in read.values())
        ours, theirs = (sum(read[f"question {index}"][rule] for index in (1, 2, 3)) for rule in (0, 1))
        assert theirs > fewer * ours
        assert loads(d) == sum(moved > 0 for rules in read.values() for moved in rules) * d.tensor_parallel_size


@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h", "qwen3_next"])
def test_many_at_once(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    both = kvhma(name)
    with engines(zygote, model(name), tmp_path, p=both, d=both, plain=arguments(name)) as (p, d, plain):
        many = prompts(name, [20 + 17 * index for index in range(32)])
        expected = at_once(plain, many, max_tokens=16)
        # All of them wait at D for their caches at the same time.
        told = [prefill(p, prompt) for prompt in many]
        got = [decode(d, prompt, params) for prompt, params in zip(many, told, strict=True)]
        for prompt, answer, right in zip(many, got, expected, strict=True):
            # The number of requests in a step decides how sums are rounded.
            found = difference(answer.result(), right, 2 * noise(name))
            assert found is None, f"of {len(prompt)} tokens: {found}"
        for engine in (p, d):
            all_free(engine)


@pytest.mark.parametrize(
    ("name", "blocks", "longest"), [("llama", 30, 160), ("gemma3", 120, 160), ("qwen3_next", 45, 800)]
)
def test_preemption(name: str, blocks: int, longest: int, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        "p": kvhma(name),
        # Room for most of the requests to start, and for fewer of them to end.
        "d": kvhma(name, num_gpu_blocks_override=blocks, max_model_len=longest),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        block = max(group["block_size"] for group in p.rpc("e2e_groups")[0] if "Mamba" not in group["kind"])
        many = prompts(name, [2 * block - 3] * 12)
        expected = at_once(plain, many, max_tokens=2 * block)
        told = [prefill(p, prompt) for prompt in many]
        got = [decode(d, prompt, params, max_tokens=2 * block) for prompt, params in zip(many, told, strict=True)]
        for answer, right in zip(got, expected, strict=True):
            # A preempted request computes its answer so far in other chunks than before.
            found = difference(answer.result(), right, 2 * noise(name))
            assert found is None, found
        preempted = d.sample("vllm:num_preemptions_total")
        print(f"{name}: {preempted:g} preemptions, {loads(d)} loads")
        assert preempted > 0
        assert loads(d) == len(many)
        all_free(d)
        all_free(p)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "ours", "theirs"), [("gemma3", 32, 128), ("gpt_oss", 32, 128), ("gemma3", 64, 96), ("gpt_oss", 64, 96)]
)
def test_what_a_load_leaves_in_the_prefix_cache(
    name: str, ours: int, theirs: int, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    """The requests after a hand-off, which hit the blocks that it filled.

    D's first block of a window holds older tokens too, which P has freed if its blocks are shorter. D's prefix cache
    must not serve such a block.
    """
    settings = {
        "p": kvhma(name, block_size=ours),
        "d": kvhma(name, block_size=theirs, enable_prefix_caching=True),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        for length in (445, 429, 404):
            first, second, third = prompts((name, length), [length, 21, 64])
            shared = first[: length // theirs * theirs]
            expected = at_once(plain, [first, shared + second, shared + third], max_tokens=16)
            same(name, hand_over(p, d, first), expected[0], f"{length}: first")
            alone = d.generate(shared + second, max_tokens=16).result()
            same(name, alone, expected[1], f"{length}: second, at D alone")
            same(name, hand_over(p, d, shared + third), expected[2], f"{length}: third")
        for engine in (p, d):
            all_free(engine)
