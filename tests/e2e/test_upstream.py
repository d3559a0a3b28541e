# SPDX-License-Identifier: Apache-2.0
"""The harness with a working connector: a hand-off by vLLM's own NixlConnector."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import REMOTE_DECODE, Zygote, engines
from support.engines.compare import difference, distance

pytestmark = pytest.mark.smoke
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(("name", "noise"), [("llama", 1e-4), ("nemotron_h", 1e-4)])
def test_hand_off(name: str, noise: float, zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(name)
    dtype = {"dtype": "float32"}
    nixl = dtype | {"kv_transfer_config": NIXL}
    with engines(zygote, model(name), tmp_path, prefill=nixl, decode=nixl, plain=dtype) as (p, d, plain):
        before = p.state()["free_blocks"]
        for length in (300, 333):
            prompt = [rng.randrange(512) for _ in range(length)]
            expected = plain.generate(prompt, max_tokens=16).result()
            first = p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE).result()
            assert first.kv_transfer_params, first
            got = d.generate(prompt, max_tokens=16, kv_transfer_params=first.kv_transfer_params).result()
            print(f"{name}, {length} tokens: {distance(got, expected):.2g} nats from plain")
            assert difference(got, expected, noise) is None
        assert d.loaded_tokens() >= 300 + 333 - 2
        p.idle(free=before)
