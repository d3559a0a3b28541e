# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep and wake up hand off and load as before, by vLLM's own calls.

Its CPU worker ignores both calls. In its place the extension does what the GPU worker does, and overwrites the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Engine, Zygote, engines
from support.handoff import all_free, arguments, compare, decode, failures, kvhma, loads, prefill, prompts

NAME = "nemotron_h"


def nap(engine: Engine) -> None:
    engine.core("sleep", 1, "wait", timeout=120)
    assert engine.core("is_sleeping")
    engine.core("wake_up", None, timeout=120)
    assert not engine.core("is_sleeping")


def test_both_engines_sleep(zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"prefill": kvhma(NAME), "decode": kvhma(NAME), "plain": arguments(NAME)}
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        if not all(engine.rpc("e2e_sleep_as_gpus_do")[0] for engine in (p, d)):
            pytest.skip("vLLM tells its connectors that caches are remapped from 0.33 on")
        compare(NAME, p, d, plain, [301])
        (prompt,) = prompts("held", [65])
        old = prefill(p, prompt)
        nap(p)
        assert decode(d, prompt, old).result().finish_reason == "error"
        # D may find that the old agent is gone, or that another incarnation answers.
        assert failures(d, "peer_lost") + failures(d, "handshake") == 1
        compare(NAME, p, d, plain, [302, 33])
        nap(d)
        nap(p)
        compare(NAME, p, d, plain, [303, 34])
        assert loads(d) == 5
        all_free(p, d)
