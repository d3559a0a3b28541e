# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on one side or on both: D answers as a plain engine does, this request and the next ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, hand_over, kvhma, loads, prompts, same
from support.weights import eagle, mimo

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
        # vLLM's kernels for CPUs answer wrongly with drafts, for prompts from any engine.
        with_.rpc("e2e_right_drafts")
        for p, d in ((with_, without), (without, with_)):
            for prompt in PROMPTS:
                expected = plain.generate(prompt, max_tokens=32).result()
                same(name, hand_over(p, d, prompt, max_tokens=32), expected, f"of {len(prompt)} tokens")
                # The next request does not use what is left in the blocks and slots of this one.
                same(name, d.generate(prompt, max_tokens=32).result(), expected, f"again, of {len(prompt)} tokens")
        assert with_.sample("vllm:spec_decode_num_accepted_tokens_total") > 0
        assert without.sample("vllm:kvhma_load_seconds_count") == with_.sample("vllm:kvhma_load_seconds_count")
        all_free(without, with_)


def draft(method: str, llama: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and the configuration of its drafts."""
    if method == "mtp":
        return mimo(llama, folder), {"method": "mtp", "num_speculative_tokens": 1}
    drafter = llama if method == "draft_model" else eagle(llama, folder)
    return llama, {"method": method, "model": str(drafter), "num_speculative_tokens": 3}


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_drafts_of_a_model(method: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """P and D draft with a model, whose layers are transferred too; or D alone does, and begins without them."""
    name = "llama"
    target, speculation = draft(method, model(name), tmp_path / "draft")
    settings = {
        "p": kvhma(name, speculative_config=speculation),
        "d": kvhma(name, speculative_config=speculation),
        "without": kvhma(name),
        "plain": arguments(name),
    }
    with engines(zygote, target, tmp_path, **settings) as (p, d, without, plain):
        layers = [sum(len(group["layers"]) for group in engine.rpc("e2e_groups")[0]) for engine in (d, without)]
        assert layers[0] > layers[1], "what drafts has no cache"
        drafted = []
        for at_p, at_d in ((p, d), (without, d), (p, without)):
            for prompt in PROMPTS:
                expected = plain.generate(prompt, max_tokens=32).result()
                same(name, hand_over(at_p, at_d, prompt, max_tokens=32), expected, f"of {len(prompt)} tokens")
                same(name, at_d.generate(prompt, max_tokens=32).result(), expected, f"again, of {len(prompt)} tokens")
            counts = ("num_draft_tokens", "num_accepted_tokens")
            drafted.append(tuple(int(d.sample(f"vllm:spec_decode_{count}_total")) for count in counts))
        print(f"{method}: drafted and accepted {drafted}")
        assert 0 < drafted[0][0] < drafted[1][0] == drafted[2][0]
        assert (loads(d), loads(without)) == (2 * len(PROMPTS), len(PROMPTS))
        all_free(p, d, without)
