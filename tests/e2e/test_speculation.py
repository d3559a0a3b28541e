# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on one side only: D answers as a plain engine does, this request and the next ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, hand_over, kvhma, prompts, same

Models = Callable[[str], Path]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Loops make an engine draft; random tokens do not. Lengths are around the blocks of 32 and the rows of the convolution.
PROMPTS = [*prompts("speculation", [2, 3, 4, 33, 101, 301]), [1, 2, 3, 4, 5, 6, 7, 8] * 20, [5, 6, 7] * 50, [9, 8] * 60]


@pytest.mark.parametrize("order", ["SD", "DS"])
def test_ngram_on_one_side(order: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "nemotron_h"
    env = {"VLLM_SSM_CONV_STATE_LAYOUT": order}
    settings = {
        "without": kvhma(name, env=env),
        "with_": kvhma(name, env=env, speculative_config=NGRAM),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (without, with_, plain):
        # vLLM's kernels for CPUs answer wrongly with drafts, whoever computed the prompt.
        with_.rpc("e2e_right_drafts")
        for p, d in ((with_, without), (without, with_)):
            for prompt in PROMPTS:
                expected = plain.generate(prompt, max_tokens=32).result()
                same(name, hand_over(p, d, prompt, max_tokens=32), expected, f"of {len(prompt)} tokens")
                # What is left in the blocks and slots of this request is no part of the next one.
                same(name, d.generate(prompt, max_tokens=32).result(), expected, f"again, of {len(prompt)} tokens")
        assert with_.sample("vllm:spec_decode_num_accepted_tokens_total") > 0
        assert without.sample("vllm:kvhma_load_seconds_count") == with_.sample("vllm:kvhma_load_seconds_count")
        for engine in (without, with_):
            all_free(engine)
