# SPDX-License-Identifier: Apache-2.0
"""Digests of the content of blocks, between real engines: hand-offs agree, and one corrupted block of each kind
fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhma._kvhma import text_to_ids
from support.engines import Engine, Zygote, engines
from support.handoff import all_free, arguments, compare, decode, failures, kvhma, prefill, prompts, same
from support.waiting import until

pytestmark = pytest.mark.smoke
Models = Callable[[str], Path]
ALL = {"content_digests": "all"}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


def compared(d: Engine, result: str) -> int:
    return int(d.sample("vllm:kvhma_content_digests_total", result=result))


def summed(p: Engine) -> int:
    """Requests that P's workers have summed, once for each rank."""
    return int(p.sample("vllm:kvhma_digest_seconds_count"))


@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h", "qwen3_next", "deepseek_v2"])
def test_one_spoilt_block_of_each_kind_of_layer_fails_the_load(
    name: str, zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    recomputes = kvhma(name, policy="recompute", extra=ALL, constants={"kvhma.vllm.loads.decode.LOAD_RETRIES": 0})
    settings = {"p": kvhma(name, extra=ALL), "d": recomputes, "plain": arguments(name)}
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        compare(name, p, d, plain, [33, 301])
        assert (compared(d, "match"), d.sample("vllm:kvhma_failed_loads_total")) == (2, 0)
        groups = p.rpc("e2e_groups")[0]
        for index, group in enumerate(groups):
            (prompt,) = prompts((name, index), [301])
            before = summed(p)
            params = prefill(p, prompt)
            until(lambda before=before: summed(p) > before)
            _, ids = params["kvhma"]["spans"][index]
            p.rpc("e2e_overwrite", group["layers"][0], int(text_to_ids(ids, 1 << 20)[-1]), "noise")
            got = decode(d, prompt, params).result()
            assert failures(d, "digest") == compared(d, "mismatch") == index + 1, group
            same(name, got, plain.generate(prompt, max_tokens=16).result(), "computed by D", alone=len(prompt))
        log = (tmp_path / "d.log").read_text()
        assert log.count("failed (digest): what was loaded is not what P holds: ") == len(groups)
        for engine in (p, d):
            all_free(engine)


@pytest.mark.parametrize("name", ["llama", "nemotron_h", "deepseek_v2"])
@pytest.mark.parametrize("at_p", [True, False])
def test_ranks_that_differ(name: str, at_p: bool, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    ranks = [TWO_RANKS, {}] if at_p else [{}, TWO_RANKS]
    settings = {
        "p": kvhma(name, extra=ALL, **ranks[0]),
        "d": kvhma(name, extra=ALL, **ranks[1]),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        compare(name, p, d, plain, [33, 301], ranks_differ=True)
        assert (compared(d, "match"), d.sample("vllm:kvhma_failed_loads_total")) == (2, 0)
        for engine in (p, d):
            all_free(engine)
