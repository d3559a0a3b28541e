# SPDX-License-Identifier: Apache-2.0
"""Common topologies of deployments: ranks, data parallel, a second connector, caches of fp8, pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import REMOTE_DECODE, Engine, Zygote, engines, free_port
from support.handoff import (
    all_free,
    arguments,
    compare,
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
from support.tokenizer import IMAGE, with_tokenizer
from support.waiting import until

Models = Callable[[str], Path]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_two_ranks_to_two(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    settings = {"p": kvhma(name, **TWO_RANKS), "d": kvhma(name, **TWO_RANKS), "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        compare(name, p, d, plain, [33, 301, 601], ranks_differ=True)
        # A load of the engine is one load of each of its ranks.
        for rank in ("0", "1"):
            assert d.sample("vllm:kvhma_rank_bytes_total", rank=rank) > 0
        assert d.sample("vllm:kvhma_failed_loads_total") == 0
        assert d.sample("vllm:kvhma_lease_checks_total", by="board") > 0, "the scheduler found its workers' boards"
        all_free(p, d)


def test_data_parallel(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Two engines of one rank at P, two of two ranks at D; every engine of P hands off to every engine of D.

    vLLM runs no mixture of experts with data parallel on CPUs (its communicator has no `all_gatherv`), so no rank waits
    for another rank's step here.
    """
    name = "llama"
    # vLLM 0.33 requires a memory node for each engine, unless this has any value.
    nodes = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}
    # Each engine adds its number to the port.
    ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} for _ in range(2)]
    settings = {
        "p": kvhma(name, data_parallel_size=2, env=nodes | ports[0]),
        "d": kvhma(name, data_parallel_size=2, tensor_parallel_size=2, env=nodes | ports[1]),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        ids = set()
        for number, (at_p, at_d) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            (prompt,) = prompts(("data parallel", number), [301])
            params = prefill(p, prompt, rank=at_p)
            ids.add((params["remote_engine_id"], params["remote_port"]))
            same(
                name,
                decode(d, prompt, params, rank=at_d).result(),
                plain.generate(prompt, max_tokens=16).result(),
                f"from {at_p} to {at_d}",
            )
        assert len(ids) == 2
        # As a front end spreads them by itself.
        many = prompts("data parallel", [33 + 40 * at for at in range(8)])
        expected = [plain.generate(prompt, max_tokens=16).result() for prompt in many]
        told = [p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE) for prompt in many]
        got = [decode(d, prompt, answer.result().kv_transfer_params) for prompt, answer in zip(many, told, strict=True)]
        for prompt, answer, right in zip(many, got, expected, strict=True):
            same(name, answer.result(), right, f"of {len(prompt)} tokens")
        for number in ("0", "1"):
            assert d.sample("vllm:kvhma_load_seconds_count", engine=number) > 2 * 2
        assert loads(d) == 2 * 12  # each of its engine's two ranks
        for engine in (p, d):
            until(lambda engine=engine: all(map(empty, engine.cores("e2e_state"))))


def empty(state: dict[str, Any]) -> bool:
    return not state["requests"] and state["free_blocks"] == state["all_blocks"] - 1


def beside_an_offloading_connector(name: str) -> dict[str, Any]:
    """Arguments of an engine that hands off, and stores blocks in host memory: with vLLM's connector for that, whose
    copies on a GPU's streams are replaced."""
    settings = kvhma(name, enable_prefix_caching=True)
    ours = settings["kv_transfer_config"]
    spec = {"spec_name": "HostSpec", "spec_module_path": "support.engines.offloading", "cpu_bytes_to_use": 64 << 20}
    theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec}
    settings["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": ours.pop("kv_load_failure_policy"),
        "kv_connector_extra_config": {"connectors": [ours, theirs]},
    }
    return settings


def forget_prefixes(*of: Engine) -> None:
    """Empty the prefix caches of engines, but not what they keep in host memory."""
    for engine in of:
        all_free(engine)  # P sleeps, and frees the blocks half a second after the read
        assert engine.core("reset_prefix_cache")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beside_an_offloading_connector(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """vLLM itself excludes its two connectors that offload to host memory from CPUs."""
    both = beside_an_offloading_connector(name)
    settings = {"p": both, "d": both, "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        first, end = prompts("offloading", [301, 40])
        same(name, hand_over(p, d, first), plain.generate(first, max_tokens=16).result(), "hand-off")
        assert (loads(d), d.loaded_tokens()) == (1, 300 if name == "gemma3" else 301)
        forget_prefixes(p, d)
        # From host memory: the blocks that D loaded, and those that P computed.
        longer = first[:288] + end
        expected = plain.generate(longer, max_tokens=16).result()
        before = d.loaded_tokens()
        same(name, d.generate(longer, max_tokens=16).result(), expected, "from D's host memory")
        assert d.loaded_tokens() - before >= 256
        assert loads(d) == 1
        forget_prefixes(p, d)
        before = p.loaded_tokens()
        params = prefill(p, longer)
        assert p.loaded_tokens() - before >= 256
        same(name, decode(d, longer, params).result(), expected, "hand-off from P's host memory")
        all_free(p, d)


@pytest.mark.smoke
@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has caches of fp8 on processors with AVX-512 only"
)
def test_caches_of_fp8(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    fp8 = {"kv_cache_dtype": "fp8"}
    settings = {
        "p": kvhma(name, **fp8),
        "d": kvhma(name, **fp8),
        "other": kvhma(name, extra={"kv_lease_duration": 5}),
        "plain": arguments(name, **fp8),
        "whole": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, other, plain, whole):
        compare(name, p, d, plain, [33, 301, 600])
        assert loads(d) == 3
        (prompt,) = prompts(name, [301])
        right = plain.generate(prompt, max_tokens=16).result()
        exact = whole.generate(prompt, max_tokens=16).result()
        assert abs(right.logprobs[0] - exact.logprobs[0]) > 10 * noise(name), "caches of fp8 that round nothing"
        # The two kinds read nothing from each other: 5 seconds are P's lease.
        assert hand_over(other, d, prompt).finish_reason == "error"
        assert failures(d, "unsupported") == 1
        assert "cache_dtype of the model is" in (tmp_path / "d.log").read_text()
        all_free(p, d, other)


@pytest.mark.smoke
def test_pictures(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """A prompt is its tokens and the content of its pictures: with another picture it is another prompt."""
    name = "llava"
    words = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    settings = {
        "p": kvhma(name, **words),
        "d": kvhma(name, policy="recompute", **words),
        "plain": arguments(name, **words),
    }
    with engines(zygote, with_tokenizer(model(name), tmp_path / "model"), tmp_path, **settings) as (p, d, plain):
        one, two = prompts("pictures", [150, 100])
        prompt = [token % IMAGE for token in one] + [IMAGE] + [token % IMAGE for token in two] + [IMAGE, 7, 8, 9]

        def plainly(*pictures: int) -> Any:
            return plain.generate(prompt, max_tokens=16, pictures=pictures).result()

        right, other = plainly(1, 2), plainly(1, 3)
        assert right.error is None
        assert abs(right.logprobs[0] - other.logprobs[0]) > 100 * noise(name), "pictures that change nothing"
        got = decode(d, prompt, prefill(p, prompt, pictures=(1, 2)), pictures=(1, 2)).result()
        same(name, got, right, "the same pictures")
        assert (loads(d), computed(d, "other_prompt")) == (1, 0)
        params = prefill(p, prompt, pictures=(1, 2))
        same(name, decode(d, prompt, params, pictures=(1, 3)).result(), other, "another second picture")
        assert (loads(d), computed(d, "other_prompt")) == (1, 1)
        same(name, decode(d, prompt, params, pictures=(1, 2)).result(), right, "the right ones")
        all_free(p, d)


@pytest.mark.smoke
def test_pictures_that_only_p_has_seen(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Routers give D empty embeddings, or only P's expanded tokens.

    D caches its load under the picture's hash, so a later request with the picture itself hits it.
    """
    name = "llava"
    words = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    trusts = {"extra": {"mm_items": "trust_prefill"}}
    settings = {
        "p": kvhma(name, **trusts, **words),
        "d": kvhma(name, **trusts, **words, enable_mm_embeds=True, enable_prefix_caching=True),
        "strict": kvhma(name, **words, enable_mm_embeds=True),
        "plain": arguments(name, **words),
    }
    with engines(zygote, with_tokenizer(model(name), tmp_path / "model"), tmp_path, **settings) as (
        p,
        d,
        strict,
        plain,
    ):
        one, two = prompts("placeholders", [150, 100])
        one, two = ([token % IMAGE for token in part] for part in (one, two))
        prompt, expanded = [*one, IMAGE, *two], [*one, *[IMAGE] * 16, *two]
        right = {seed: plain.generate(prompt, max_tokens=16, pictures=(seed,)).result() for seed in (1, 2, 3)}
        assert abs(right[1].logprobs[0] - right[2].logprobs[0]) > 100 * noise(name), "pictures that change nothing"
        given: list[tuple[int, list[int], tuple[int, ...]]] = [
            (1, prompt, (-7,)),
            (2, prompt, (-7,)),  # another picture under the same placeholder
            (3, expanded, ()),
        ]
        for number, (seed, tokens, pictures) in enumerate(given, 1):
            params = prefill(p, prompt, pictures=(seed,))
            got = decode(d, tokens, params, pictures=pictures).result()
            same(name, got, right[seed], f"picture {seed}, given {pictures}")
            assert loads(d) == number
            all_free(p)
            # A client that sends D the picture itself hits its blocks.
            before = d.sample("vllm:prefix_cache_hits_total")
            again = d.generate(prompt, max_tokens=16, pictures=(seed,)).result()
            same(name, again, right[seed], f"picture {seed} at D alone")
            assert d.sample("vllm:prefix_cache_hits_total") - before > 150 + 16
        alone = d.generate(prompt, max_tokens=16, pictures=(-7,)).result()
        nothing = abs(alone.logprobs[0] - right[1].logprobs[0])
        assert nothing > 100 * noise(name), "the placeholder by itself is no picture"
        params = prefill(p, prompt, pictures=(1,))
        assert decode(strict, prompt, params, pictures=(-7,)).result().finish_reason == "error"
        assert failures(strict, "other_prompt") == 1
        same(name, decode(d, prompt, params, pictures=(-7,)).result(), right[1], "a right request")
        all_free(p, d, strict)
