# SPDX-License-Identifier: Apache-2.0
"""Prefix hits, chunked prefill, preemption and many requests at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.engines.compare import difference
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


@pytest.mark.parametrize(
    ("name", "p_block", "d_block", "policy"),
    [("gemma3", 32, 32, "fail"), ("gpt_oss", 32, 128, "recompute"), ("gemma3", 64, 32, "fail")],
)
def test_questions_about_one_document(
    name: str, p_block: int, d_block: int, policy: str, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    """D has full attention's blocks of the document, and reads the last window of each question."""
    settings = {
        "p": kvhma(name, block_size=p_block, enable_prefix_caching=True),
        "d": kvhma(name, block_size=d_block, policy=policy, enable_prefix_caching=True),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        document, *ends = prompts((name, p_block), [1600, 203, 90, 37, 260])
        cases = {f"question {index}": document + end for index, end in enumerate(ends)}
        cases["its beginning"] = document[: 1280 + 1]
        cases["the first question again"] = document + ends[0]
        read, hits = {}, {}
        for what, prompt in cases.items():
            expected = plain.generate(prompt, max_tokens=24).result()
            before = [d.sample(f"vllm:{metric}") for metric in ("kvhma_bytes_sum", "prefix_cache_hits_total")]
            got = hand_over(p, d, prompt, max_tokens=24)
            assert difference(got, expected, 1e-5) is None, what
            after = [d.sample(f"vllm:{metric}") for metric in ("kvhma_bytes_sum", "prefix_cache_hits_total")]
            read[what], hits[what] = (new - old for old, new in zip(before, after, strict=True))
        print(f"{name} {p_block} to {d_block}: bytes {read}, tokens hit {hits}")
        for index in (1, 2, 3):
            assert hits[f"question {index}"] == 1600 // d_block * d_block
            assert read[f"question {index}"] < read["question 0"] / 2
        assert hits["its beginning"] == 1280 // d_block * d_block - d_block * (1280 % d_block == 0)
        assert loads(d) == len(cases)
        for engine in (p, d):
            all_free(engine)


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
