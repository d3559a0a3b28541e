# SPDX-License-Identifier: Apache-2.0
"""Loads while P is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, decode, hand_over, kvhma, loads, prefill, prompts, same
from support.waiting import until

Models = Callable[[str], Path]
NAME = "gemma3"


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
        all_free(d, p)


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
            until(lambda: "its lease at P is 2 s" in (tmp_path / "d.log").read_text())
            assert not waiting.done()
        finally:
            p.go_on()
        same(NAME, waiting.result(), expected[1], "P held the blocks: it could not free them either")
        log = (tmp_path / "d.log").read_text()
        assert log.count("its lease at P is 2 s") == 1
        assert f"{params['remote_host']}:{params['remote_port']} has taken" in log
        assert (d.sample("vllm:kvhma_slow_loads_total"), loads(d)) == (1, 2)
        all_free(d, p)
