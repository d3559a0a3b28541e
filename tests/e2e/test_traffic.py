# SPDX-License-Identifier: Apache-2.0
"""P is killed and restarted under load, as in a rollout or after a crash."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import REMOTE_DECODE, Engine, EngineFailed, Zygote, engines, free_port
from support.handoff import all_free, arguments, decode, hand_over, kvhma, prompts, same
from support.waiting import until

Models = Callable[[str], Path]
QUICK = {"handshake_timeout": 1, "kv_lease_duration": 10}


class Traffic:
    """Clients that ask P, then D, one request after the other, and record how each ended."""

    def __init__(self, name: str, p: Engine, d: Engine, expected: list[tuple[list[int], Any]]) -> None:
        self.p = p
        self.ended: Counter[str] = Counter()
        self._name, self._d, self._expected = name, d, expected
        self._wrong: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        if self._wrong:
            raise self._wrong[0]

    def until(self, outcome: str, times: int) -> None:
        until(lambda: self._wrong or self.ended[outcome] >= times)
        assert not self._wrong, self._wrong

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            prompt, right = self._expected[number % len(self._expected)]
            number += 1
            try:
                self.ended[self._one(prompt, right)] += 1
            except BaseException as error:  # kept for the test's own thread
                self._wrong.append(error)
                return

    def _one(self, prompt: list[int], right: Any) -> str:
        try:
            told = self.p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE).result(60)
        except EngineFailed:
            time.sleep(0.1)  # a proxy answers 502 meanwhile
            return "P is gone"
        if told.kv_transfer_params is None:
            assert told.error is not None, told
            return "P is gone"
        got = decode(self._d, prompt, told.kv_transfer_params, timeout=60).result(90)
        if got.finish_reason == "error":
            return "D could not read"
        same(self._name, got, right, "in traffic")
        return "answered"


@pytest.mark.parametrize("policy", ["fail", pytest.param("recompute", marks=pytest.mark.smoke)])
def test_p_restarts_in_the_middle_of_traffic(policy: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Requests are answered rightly or fail as documented; requests after the restart are answered, by a load."""
    name = "gemma3"
    settings = {
        "p": kvhma(name, extra=QUICK, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}),
        "d": kvhma(name, policy=policy, extra=QUICK),
        "plain": arguments(name),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, plain):
        many = prompts("traffic", [33, 301, 150, 600, 1200])
        expected = [(prompt, plain.generate(prompt, max_tokens=16).result()) for prompt in many]
        with Traffic(name, p, d, expected) as traffic:
            traffic.until("answered", 12)
            p.kill()
            traffic.until("P is gone", 3)
            before = traffic.ended["answered"]
            with Engine(
                zygote, p.model_dir, tmp_path / "again.log", kv_transfer_config=p.kv_transfer_config, env=p.env,
                engine_args=p.engine_args,
            ) as again:  # fmt: skip
                traffic.p = again
                traffic.until("answered", before + 12)
                traffic.stop()
                print(dict(traffic.ended))
                assert traffic.ended["D could not read"] <= (3 if policy == "fail" else 0)
                loaded = d.sample("vllm:kvhma_load_seconds_count")
                same(name, hand_over(again, d, many[1]), expected[1][1], "afterwards")
                assert d.sample("vllm:kvhma_load_seconds_count") == loaded + 1
                all_free(again)
        all_free(d)
