# SPDX-License-Identifier: Apache-2.0
"""Loads of live engines that raise an exception, and loads that take long."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, decode, failures, hand_over, kvhma, loads, prefill, prompts, same

Models = Callable[[str], Path]
NAME = "gemma3"


def test_a_panic_in_a_load(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """S8: a panic of Rust is no `Exception`."""
    with engines(zygote, model(NAME), tmp_path, p=kvhma(NAME), d=kvhma(NAME), plain=arguments(NAME)) as (p, d, plain):
        many = prompts(NAME, [301] * 6)
        expected = [plain.generate(prompt, max_tokens=16).result() for prompt in many]
        told = [prefill(p, prompt) for prompt in many]
        memory, pump = ("kvhma.vllm.device.memory", "DeviceMemory"), ("kvhma.vllm.reads.read_pump", "ReadPump")
        # The first load waits for a handshake, so the engine's own thread cannot read it.
        d.rpc("e2e_panic_once", *pump, "_drive")
        same(NAME, decode(d, many[0], told[0]).result(), expected[0], "whose thread begins again")
        places = [(*memory, "zero"), (*memory, "copy_in"), (*pump, "_drive")]
        for place, prompt, params in zip(places, many[1:], told[1:], strict=False):
            d.rpc("e2e_panic_once", *place)
            assert decode(d, prompt, params).result().finish_reason == "error", place
        for index in (4, 5):
            same(NAME, decode(d, many[index], told[index]).result(), expected[index], "after all that")
        assert failures(d, "internal") == 3
        assert d.sample("vllm:kvhma_thread_restarts_total", thread="kvhma-reads") == 1
        all_free(d)


def test_a_load_that_needs_nobody_at_p(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """P's processes are stopped or busy: P's lease board, like its blocks, is read from its memory."""
    extra = {"handshake_timeout": 60}
    settings = {"p": kvhma(NAME, extra=extra), "d": kvhma(NAME, extra=extra), "plain": arguments(NAME)}
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        first, second = prompts(NAME, [301] * 2)
        expected = [plain.generate(prompt, max_tokens=16).result() for prompt in (first, second)]
        same(NAME, hand_over(p, d, first), expected[0], "before")
        params = prefill(p, second)
        p.pause()
        try:
            same(NAME, decode(d, second, params).result(), expected[1], "while P is stopped")
        finally:
            p.go_on()
        assert d.sample("vllm:kvhma_lease_checks_total", by="board") == 2
        all_free(d)
        all_free(p)


def test_a_load_while_p_stands_still(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    # Its board would show that it holds the blocks; for digests D asks P.
    extra = {"kv_lease_duration": 2, "handshake_timeout": 60, "content_digests": 1.0}
    settings = {"p": kvhma(NAME, extra=extra), "d": kvhma(NAME, extra=extra), "plain": arguments(NAME)}
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        first, second = prompts(NAME, [301] * 2)
        expected = [plain.generate(prompt, max_tokens=16).result() for prompt in (first, second)]
        same(NAME, hand_over(p, d, first), expected[0], "before")
        params = prefill(p, second)
        p.pause()
        try:
            waiting = decode(d, second, params)
            time.sleep(6)
            assert not waiting.done()
        finally:
            p.go_on()
        same(NAME, waiting.result(), expected[1], "P held the blocks: it could not free them either")
        log = (tmp_path / "d.log").read_text()
        assert log.count("its lease at P is 2 s") == 1
        assert f"{params['remote_host']}:{params['remote_port']} has taken" in log
        assert (d.sample("vllm:kvhma_slow_loads_total"), loads(d)) == (1, 2)
        all_free(d)
        all_free(p)
