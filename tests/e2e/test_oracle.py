# SPDX-License-Identifier: Apache-2.0
"""The tiny models as oracles: the noise of two plain engines, and the effect of one wrong block.

The other tests draw conclusions from equal answers, which this test justifies. With one block of one layer corrupted on
P in the middle of a hand-off, D's answer must move far beyond the noise. The hand-off is vLLM's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines
from support.engines.compare import distance
from support.engines.tiny import MODELS
from support.handoff import arguments, at_once

# One prompt's blocks are held until the end: reused blocks would hold the content that they replace.
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"kv_lease_duration": 600},
}
LENGTH = 301
TOKENS = 12
DS = {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}  # vLLM sets it for its connector; SD has another kernel
FACTOR = 1000
# GDN's kernel computes a chunk differently from single tokens. P leaves the last token to D, so the plain engine must
# compute that token alone as well: three chunks of 100 tokens, and one more.
CHUNKED = "qwen3_next"


def handed(p: Engine, d: Engine, prompt: list[int], layer: str = "", block: int = 0, how: str = "") -> Answer:
    first = p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE).result()
    if layer:
        group = next(g for g, have in enumerate(p.rpc("e2e_groups")[0]) if layer in have["layers"])
        ids = first.kv_transfer_params["remote_block_ids"][group]
        p.rpc("e2e_overwrite", layer, ids[block], how)
    return d.generate(prompt, max_tokens=TOKENS, kv_transfer_params=first.kv_transfer_params).result()


@pytest.mark.parametrize("name", MODELS)
def test_one_wrong_block_shows(name: str, zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(name)
    prompts = [[rng.randrange(512) for _ in range(LENGTH)] for _ in range(6)]
    prompt, other = prompts[:2]
    nixl, plain_arguments = arguments(name, kv_transfer_config=NIXL), arguments(name) | DS
    with engines(zygote, model(name), tmp_path, prefill=nixl, decode=nixl, plain=plain_arguments) as (p, d, plain):
        alone = [plain.generate(each, max_tokens=TOKENS).result() for each in prompts]
        crowd = at_once(plain, prompts, max_tokens=TOKENS)
        if name == CHUNKED:  # several requests share a step and are cut elsewhere: another computation
            print(f"\n{name}: requests cut elsewhere {max(map(distance, alone, crowd)):.2g}")
            crowd = alone
        second = [d.generate(each, max_tokens=TOKENS).result() for each in prompts]
        good = handed(p, d, prompt)
        assert len({tuple(answer.token_ids) for answer in alone}) == len(prompts)
        assert all(-6 < lp < -0.01 for answer in alone for lp in answer.logprobs)
        plain_noise = max(distance(a, b) for answers in (crowd, second) for a, b in zip(alone, answers, strict=True))
        noise = max(plain_noise, distance(alone[0], good))
        print(f"\n{name}: noise {plain_noise:.2g}, after a hand-off {distance(alone[0], good):.2g}")

        held = p.generate(other, max_tokens=1, kv_transfer_params=REMOTE_DECODE).result()
        effects = {}
        for group, have in enumerate(p.rpc("e2e_groups")[0]):
            stale = held.kv_transfer_params["remote_block_ids"][group]
            live = [at for at, block in enumerate(stale) if block != 0]
            for layer in have["layers"][:1]:  # others of a group are read by the same descriptors
                for at in sorted({live[0], live[-1]}):
                    for how in ("noise", f"block {stale[at]}"):
                        got = handed(p, d, prompt, layer, at, how)
                        effects[layer, at, how.split()[0]] = distance(good, got)
        for what, effect in sorted(effects.items(), key=lambda item: item[1])[:6]:
            print(f"  {effect:.2g} nats, {effect / max(noise, 1e-7):.3g} x noise: {what}")
        weakest = min(effects.values())
        print(f"{name}: {len(effects)} spoilt blocks, weakest effect {weakest:.2g} nats")
        assert weakest > FACTOR * noise
