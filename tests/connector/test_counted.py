# SPDX-License-Identifier: Apache-2.0
"""What a request costs the scheduler's thread, counted: time depends on load, the number of functions does not.

Each different function of kvhma that a request touches is cold in an engine that computes between two steps, and costs
ten times a warm one. A change that raises one of these numbers changes it here.
"""

import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from benches import scheduler_time
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

import kvhma
from kvhma.vllm.loads import decode
from support.engines.engine import free_port

PACKAGE = str(Path(kvhma.__file__).parent)
DIFFERENT = {"P": 37, "D": 46}
CALLS = {"P": 44, "D": 94}
IDLE_CALLS = 4
"""Most functions of kvhma, and calls of them: of a request of 1,000 tokens without windows, and of an idle step."""


class CountingClock(scheduler_time.Clock):
    """Counts the calls of kvhma's functions within vLLM's calls of a connector, instead of their time."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def timed(self, name, method):
        def call(*arguments, **more):
            before = sys.getprofile()
            sys.setprofile(self.count)
            try:
                return method(*arguments, **more)
            finally:
                sys.setprofile(before)

        return call

    def count(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code] += 1

    def take_calls(self):
        calls, self.calls = self.calls, Counter()
        return calls


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(scheduler_time, "Clock", CountingClock)
    monkeypatch.setattr(scheduler_time, "LENGTHS", (1_000,))
    monkeypatch.setattr(decode, "_CLAIM_AFTER_SECONDS", math.inf)
    init_none_hash(sha256)
    made = {
        side: scheduler_time.Engine("kvhma", role, ("full",), free_port())
        for side, role in (("P", "kv_producer"), ("D", "kv_consumer"))
    }
    yield made
    for engine in made.values():
        engine.close()


def test_what_a_request_touches(engines):
    fewest = {}
    for number in range(5):  # a thread of the connector may report in between
        prompt = random.Random(number).choices(range(128_000), k=1_000)
        scheduler_time.hand_off(engines["P"], engines["D"], f"cmpl-{number}", prompt)
        for side, engine in engines.items():
            calls = engine.clock.take_calls()
            fewest[side] = min(fewest.get(side, (math.inf, 0)), (len(calls), calls.total()))
    for _ in range(3):
        engines["P"].clock.take_calls()
        engines["P"].step()
    idle = engines["P"].clock.take_calls().total()
    found = {side: different for side, (different, _) in fewest.items()}, {side: n for side, (_, n) in fewest.items()}
    assert found[0]["P"] <= DIFFERENT["P"], found
    assert found[0]["D"] <= DIFFERENT["D"], found
    assert found[1]["P"] <= CALLS["P"], found
    assert found[1]["D"] <= CALLS["D"], found
    assert idle <= IDLE_CALLS, idle
