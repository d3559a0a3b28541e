# SPDX-License-Identifier: Apache-2.0
"""D answers as one plain engine does: all kinds of models, lengths, layouts of state and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.engines.tiny import MODELS
from support.handoff import all_free, arguments, compare, decode, failures, kvhma, loads, prefill, prompts, same

pytestmark = pytest.mark.smoke
Models = Callable[[str], Path]


def lengths(block: int) -> list[int]:
    """Around a block, past the window of 64 tokens, and where the window of the last token begins a block earlier."""
    return [1, 2, block - 1, block, block + 1, 65, 64 + block - 1, 64 + block, 301, 2001]


@pytest.mark.parametrize("name", MODELS)
def test_equal_ranks(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    both = kvhma(name)
    with engines(zygote, model(name), tmp_path, prefill=both, decode=both, plain=arguments(name)) as (p, d, plain):
        free = [engine.state()["free_blocks"] for engine in (p, d)]
        groups = p.rpc("e2e_groups")[0]
        block = next(group["block_size"] for group in groups if "Mamba" not in group["kind"])
        compare(name, p, d, plain, lengths(block))
        backoff = int(any("Mamba" in group["kind"] or "Sliding" in group["kind"] for group in groups))
        # For a prompt of one token P saves nothing: the last token is always computed.
        assert d.loaded_tokens() == sum(length - backoff for length in lengths(block)[1:])
        assert loads(d) == len(lengths(block)) - backoff
        for engine, blocks in zip((p, d), free, strict=True):
            engine.idle(free=blocks)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_both_orders_of_the_convolution(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {order: kvhma(name, env={"VLLM_SSM_CONV_STATE_LAYOUT": order.upper()}) for order in ("ds", "sd")} | {
        "plain": arguments(name)
    }
    with engines(zygote, model(name), tmp_path, **settings) as (ds, sd, plain):
        compare(name, ds, sd, plain, [33, 301])
        compare(name, sd, ds, plain, [301])


@pytest.mark.parametrize("name", ["llama", "gemma4", "nemotron_h", "nemotron_h_2", "qwen3_next"])
def test_one_rank_to_two_and_back(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {
        "one": kvhma(name),
        "two": kvhma(name, tensor_parallel_size=2, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (one, two, plain):
        compare(name, one, two, plain, [33, 301, 601], ranks_differ=True)
        compare(name, two, one, plain, [33, 301, 601], ranks_differ=True)
        all_free(one, two)


@pytest.mark.parametrize(("name", "mine", "theirs"), [("llama", 32, 64), ("gemma3", 96, 32)])
def test_other_block_sizes(name: str, mine: int, theirs: int, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    # vLLM's MLA on CPUs has only blocks of 16 tokens; the byte oracle cuts latents.
    settings = {
        "a": kvhma(name, block_size=mine),
        "b": kvhma(name, block_size=theirs),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (a, b, plain):
        sizes = [engine.rpc("e2e_groups")[0][0]["block_size"] for engine in (a, b)]
        assert sizes == [mine, theirs]
        compare(name, a, b, plain, [31, 33, 100, 301])
        compare(name, b, a, plain, [31, 33, 100, 301])


def test_blocks_that_must_not_be_cut_are_refused(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    # In bfloat16 the CPU's kernel may pack tiles over tokens; then D cannot read other block sizes.
    half = {"dtype": "bfloat16"}
    settings = {
        # P holds what `fails` could not read until its lease ends, for another engine.
        "p": kvhma(name, block_size=64, extra={"kv_lease_duration": 10}) | half,
        "recomputes": kvhma(name, policy="recompute", block_size=32) | half,
        "fails": kvhma(name, block_size=32) | half,
        "plain": arguments(name) | half,
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, recomputes, fails, plain):
        packed = "amx" in (p.rpc("e2e_kernels")[0])
        (prompt,) = prompts(name, [200])
        expected = plain.generate(prompt, max_tokens=16).result()
        got = decode(recomputes, prompt, prefill(p, prompt)).result()
        refused = decode(fails, prompt, prefill(p, prompt)).result()
        assert got.error is None
        assert max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True)) < 0.2
        if packed:
            assert refused.finish_reason == "error"
            assert (failures(recomputes, "unsupported"), failures(fails, "unsupported")) == (1, 1)
            for log in ("p", "fails"):
                assert 'axis "packed": extent' in (tmp_path / f"{log}.log").read_text()
        else:
            same(name, refused, expected)
        all_free(p)


def test_through_host_memory(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "nemotron_h"
    staged = kvhma(name, constants={"kvhma.vllm.config.engine_config.HOST": "host"})
    staged["kv_transfer_config"]["kv_buffer_device"] = "host"
    settings = {"staged": staged, "direct": kvhma(name), "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (staged_engine, direct, plain):
        compare(name, staged_engine, direct, plain, [33, 301])
        compare(name, direct, staged_engine, plain, [33, 301])


def test_the_drop_in_is_taken_for_upstreams(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "nemotron_h"
    drop_in = kvhma(name)
    drop_in["kv_transfer_config"] |= {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvhma.vllm.drop_in"}
    with engines(zygote, model(name), tmp_path, p=drop_in, d=kvhma(name), plain=arguments(name)) as (p, d, plain):
        compare(name, p, d, plain, [301])
        compare(name, d, p, plain, [301])


@pytest.mark.parametrize(("name", "ranks"), [("gemma3", 1), ("nemotron_h", 2)])
def test_rows_are_copied_between_engines_of_one_host(
    name: str, ranks: int, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of these two engines\n")
    extra = {"secret_file": str(secret), "backends": ["copy", "UCX"]}
    two = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}} if ranks == 2 else {}
    settings = {"p": kvhma(name, extra=extra), "d": kvhma(name, extra=extra, **two), "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        compare(name, p, d, plain, [33, 301, 2001], ranks_differ=ranks == 2)
        assert d.sample("vllm:kvhma_copied_bytes_total") == d.sample("vllm:kvhma_bytes_sum") > 0
