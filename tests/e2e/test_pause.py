# SPDX-License-Identifier: Apache-2.0
"""Engines that pause, stop or hang, while a request waits at D for which P holds blocks.

No test relies on how long something takes: P counts why each lease ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.engines import Answer, Engine, Zygote, engines
from support.engines.compare import distance
from support.handoff import all_free, arguments, decode, failures, hand_over, kvhma, loads, prefill, prompts, same
from support.waiting import until

NAME = "llama"
LEASE = {"kv_lease_duration": 3}
SHORT_STEP = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "5", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def ended(p: Engine, reason: str) -> int:
    return int(p.sample("vllm:kvhma_expired_total", reason=reason))


@contextlib.contextmanager
def stopped(engine: Engine, process: str) -> Iterator[None]:
    """One process of an engine is stopped while this is open; its name is that of the engine's log."""
    pid = int(re.findall(rf"\({process} pid=(\d+)\)", engine.log.read_text(encoding="utf-8"))[-1])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def waiting(p: Engine, d: Engine, prompt: list[int]) -> Iterator[Future[Answer]]:
    """A request of P waits at a busy D, which has claimed its blocks; D has room for it afterwards."""
    params = prefill(p, prompt)
    d.generate(prompt[:40], max_tokens=3000, request_id="busy", timeout=None)
    answer = decode(d, prompt, params, timeout=None)
    until(lambda: p.core("e2e_connector", "_scheduler.context.leases._without_reader.used") == 0)
    yield answer
    with contextlib.suppress(Exception):
        d.abort("busy")


def test_pauses_and_stops(zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "p": kvhma(NAME, extra=LEASE),
        "d": kvhma(NAME, max_num_seqs=1, max_model_len=4096),
        "ranks": kvhma(NAME, max_num_seqs=1, max_model_len=4096, tensor_parallel_size=2, env=SHORT_STEP),
    }
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, ranks):
        prompt, *others = prompts(NAME, [301] * 6)
        right = d.generate(prompt, max_tokens=16).result()

        # P first: its caches are cleared at once.
        with waiting(p, d, others[0]) as answer:
            p.core("pause_scheduler", "keep", True)
        assert answer.result().finish_reason == "error"
        p.core("resume_scheduler")
        same(NAME, hand_over(p, d, prompt), right, "after P's pause")
        assert (ended(p, "reset"), failures(d, "handshake")) == (1, 1)

        # D first, then P.
        with waiting(p, d, others[1]) as answer:
            d.core("pause_scheduler", "keep", False)
            p.core("pause_scheduler", "keep", True)
            d.core("resume_scheduler")
        assert answer.result().finish_reason == "error"
        p.core("resume_scheduler")
        same(NAME, hand_over(p, d, prompt), right, "after both pauses")
        assert (ended(p, "reset"), failures(d, "handshake")) == (2, 2)

        # D alone, and D's core stopped by a signal.
        with waiting(p, d, others[2]) as answer:
            d.core("pause_scheduler", "keep", False)
            until(lambda: ended(p, "not_renewed") == 1)
            d.core("resume_scheduler")
        assert answer.result().finish_reason == "error"
        with waiting(p, d, others[3]) as answer, stopped(d, "EngineCore"):
            until(lambda: ended(p, "not_renewed") == 2)
        assert answer.result().finish_reason == "error"
        assert failures(d, "expired") == 2

        # P's pause leaves its caches: D reads meanwhile.
        params = prefill(p, prompt)
        p.core("pause_scheduler", "keep", False)
        same(NAME, decode(d, prompt, params).result(), right, "of a paused P")
        p.core("resume_scheduler")
        for engine in (p, d):
            all_free(engine)

        # One rank of a D hangs. P has its blocks, and vLLM ends that engine.
        with waiting(p, ranks, others[4]) as answer, stopped(ranks, "Worker_TP1"):
            until(lambda: ended(p, "not_renewed") == 3)
            ranks.kill()
        all_free(p)
        assert ended(p, "reset") == 2


def test_new_weights_in_a_pause(zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    """As reinforcement learning does: engines pause with cleared caches, get new weights, and resume."""
    settings = {"p": kvhma(NAME), "d": kvhma(NAME), "plain": arguments(NAME)}
    with engines(zygote, model(NAME), tmp_path, **settings) as (p, d, plain):
        (prompt,) = prompts("new weights", [301])
        old = plain.generate(prompt, max_tokens=16).result()
        same(NAME, hand_over(p, d, prompt), old, "before the new weights")
        params = prefill(p, prompt)
        for engine in (d, p, plain):
            engine.core("pause_scheduler", "keep", True)
            engine.rpc("e2e_new_weights")
        for engine in (d, p, plain):
            engine.core("resume_scheduler")
        assert decode(d, prompt, params).result().finish_reason == "error"
        until(lambda: "kvhma.instance is " in d.log.read_text(encoding="utf-8"))
        new = plain.generate(prompt, max_tokens=16).result()
        assert distance(new, old) > 0.01
        same(NAME, hand_over(p, d, prompt), new, "after the new weights")
        assert (failures(d, "handshake"), loads(d)) == (1, 2)
        for engine in (p, d):
            all_free(engine)


def test_pauses_beside_nixl_connector(zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    """P clears its caches in a pause while it holds a request that is not read, and one that a paused D waits for."""
    theirs = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": LEASE,
    }
    seconds: dict[str, list[float]] = {}
    for name, given in {"kvhma": kvhma(NAME, extra=LEASE), "nixl": arguments(NAME, kv_transfer_config=theirs)}.items():
        given |= {"max_model_len": 4096}
        settings = {"p": given, "d": given | {"max_num_seqs": 1}}
        with engines(zygote, model(NAME), tmp_path / name, **settings) as (p, d):
            first, unread, waits = prompts("beside", [301] * 3)
            hand_over(p, d, first)
            for prompt in (unread, waits):
                params = prefill(p, prompt)
                if prompt is waits:
                    d.generate(prompt[:40], max_tokens=3000, request_id="busy", timeout=None)
                    answer = decode(d, prompt, params, timeout=None)
                    until(lambda: "WAITING" in d.state()["requests"].values())
                    d.core("pause_scheduler", "keep", True)
                began = time.perf_counter()
                p.core("pause_scheduler", "keep", True)
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                p.core("resume_scheduler")
            d.core("resume_scheduler")
            d.abort("busy")
            assert answer.result().finish_reason is not None
    for what, ours, nixl in zip(("unread", "a paused D waits for it"), *seconds.values(), strict=True):
        print(f"{what}: P's pause took {ours:.3f} s, with NixlConnector {nixl:.3f} s, ratio {ours / nixl:.3f}")
        assert ours <= 1.2 * nixl
