# SPDX-License-Identifier: Apache-2.0
"""A real P that holds blocks makes hardly a step, and answers a reader at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Engine, Zygote, engines
from support.handoff import all_free, arguments, decode, hand_over, kvhma, prefill, prompts, same
from support.waiting import until

NAME = "nemotron_h"
IDLE_STEPS = "_kvhma_scheduler._idle_steps"


def idle_steps(engine: Engine) -> int:
    """Steps in a row without work."""
    return int(engine.core("e2e_connector", IDLE_STEPS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_p_rests_while_it_keeps_blocks(
    ranks: int, zygote: Zygote, model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"p": kvhma(NAME, tensor_parallel_size=ranks), "d": kvhma(NAME), "plain": arguments(NAME)}
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        kept, beside, after = prompts((NAME, "rest"), [301, 65, 97])
        expected = [plain.generate(prompt, max_tokens=16).result() for prompt in (kept, beside, after)]
        params = prefill(p, kept)
        time.sleep(0.5)
        before = idle_steps(p)
        time.sleep(4)
        assert idle_steps(p) - before <= 2, "one after five seconds, for the gauges"
        same(NAME, hand_over(p, d, beside), expected[1], "beside what is kept")
        same(NAME, decode(d, kept, params).result(), expected[0], "that was kept")
        all_free(p)
        before = idle_steps(p)
        time.sleep(2)
        assert idle_steps(p) - before <= 1
        until(lambda: p.sample("vllm:kv_cache_usage_perc") == 0)  # a step reports it
        same(NAME, hand_over(p, d, after), expected[2], "after a rest")
        for engine in (p, d):
            all_free(engine)
