# SPDX-License-Identifier: Apache-2.0
"""When to hand off: policies of a router on a simulated trace of 10,000 requests, in benches/RESULTS_POLICIES.md.

The trace, the engines and the times are models; nothing is measured but the time of `HandOffCost.of`. No clock is read
for anything else and the random numbers are seeded, so the tables are the same on every machine.
"""

from __future__ import annotations

import argparse
import heapq
import math
import platform
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import kvhma
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.format import size
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.models import Attention, model

REQUESTS = 10_000
LONG_SHARE, LONG_TOKENS = 0.1, 8_000
INPUT_TOKENS, OUTPUT_TOKENS = 215, 194
"""ShareGPT's means, as `vllm bench serve` is often run with."""
TURNS, PAUSE = 3.0, 20.0
PREFILL_SPEED, DECODE_SPEED = 10_000.0, 5_000.0
FIXED_SECONDS = 0.005
CACHE_TOKENS = 1 << 19
ENGINES = 2
ARRIVALS = 6.0
MODELS = ("gemma-3-27b", "NVIDIA-Nemotron-3-Nano-30B-A3B")
LINKS = (kvhma.Link(3e-6, 40e9, "3 µs, 40 GB/s"), kvhma.Link(3e-6, 1e9, "3 µs, 1 GB/s"))
THRESHOLDS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Request:
    """A turn of a conversation: its prompt has all earlier turns, whose length is `history`."""

    arrival: float
    conversation: int
    prompt: int
    history: int
    answer: int


def lognormal(rng: random.Random, mean: float, sigma: float, most: int) -> int:
    """Draw a length with a mean, before it is cut at `most`."""
    return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def trace(seed: int) -> list[Request]:
    """Draw conversations until there are enough requests, and sort the turns by arrival."""
    rng, found, start, conversation = random.Random(seed), [], 0.0, 0
    while len(found) < REQUESTS:
        start += rng.expovariate(ARRIVALS / TURNS)
        now, history = start, 0
        document = lognormal(rng, LONG_TOKENS, 0.8, 60_000) if rng.random() < LONG_SHARE else 0
        while True:
            prompt = history + document + lognormal(rng, INPUT_TOKENS, 1.0, 8_000)
            answer = lognormal(rng, OUTPUT_TOKENS, 0.8, 4_000)
            found.append(Request(now, conversation, prompt, history, answer))
            history, document = prompt + answer, 0
            now += 5 + rng.expovariate(1 / PAUSE)
            if rng.random() < 1 / TURNS:
                break
        conversation += 1
    return sorted(found, key=lambda request: request.arrival)[:REQUESTS]


class Cache:
    """The conversations that an engine has cached, the last used last."""

    def __init__(self) -> None:
        self.tokens: OrderedDict[int, int] = OrderedDict()
        self.used = 0

    def hit(self, request: Request) -> int:
        """Return the cached leading tokens; at least one token is always computed."""
        return min(self.tokens.get(request.conversation, 0), request.prompt - 1)

    def keep(self, conversation: int, tokens: int) -> None:
        """Store a conversation, and evict those that were not used for longest."""
        self.used += tokens - self.tokens.pop(conversation, 0)
        self.tokens[conversation] = tokens
        while self.used > CACHE_TOKENS:
            self.used -= self.tokens.popitem(last=False)[1]


@dataclass
class State:
    """What a router knows of the engines when it decides: when their work is done, and what they have cached."""

    prefill_free: list[float] = field(default_factory=lambda: [0.0] * ENGINES)
    decode_free: list[float] = field(default_factory=lambda: [0.0] * ENGINES)
    link_free: list[float] = field(default_factory=lambda: [0.0] * ENGINES)
    prefill_cache: list[Cache] = field(default_factory=lambda: [Cache() for _ in range(ENGINES)])
    decode_cache: list[Cache] = field(default_factory=lambda: [Cache() for _ in range(ENGINES)])


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy sees of a request: its cost, its missing tokens on D, and how long P and D are busy."""

    cost: kvhma.Cost
    missing: int
    prefill_wait: float
    decode_wait: float


Policy = Callable[[Choice], bool]
"""Returns whether to hand off."""


def by_threshold(limit: int) -> Policy:
    """Hand off prompts of which D lacks so many tokens, as llm-d's decider can."""
    return lambda choice: choice.missing >= limit


def by_cost(choice: Choice) -> bool:
    """Hand off if the first token is predicted to come earlier."""
    cost = choice.cost
    assert cost.compute_seconds is not None
    assert cost.remote_compute_seconds is not None
    remote = choice.prefill_wait + cost.remote_compute_seconds + cost.most_seconds
    return remote < choice.decode_wait + cost.compute_seconds


def by_token_bytes(token_bytes: float, link: kvhma.Link) -> Policy:
    """The same with the bytes that every token would have if every layer were full attention, and without states."""

    def decide(choice: Choice) -> bool:
        seconds = FIXED_SECONDS + choice.missing * token_bytes / link.bytes_per_second
        return by_cost(replace(choice, cost=choice.cost._replace(most_seconds=seconds)))

    return decide


@dataclass(frozen=True)
class Outcome:
    """A policy on the trace: times to first token in seconds, the share handed off, bytes, and D's time in prefills."""

    ttft: list[float]
    handed_over: int
    nbytes: int
    decode_seconds: float


def simulate(requests: list[Request], costs: kvhma.HandOffCost, policy: Policy) -> Outcome:
    """Run the trace: P and D compute prompts, and D's links read, one after the other in the order of arrival."""
    state, ttft, reads = State(), [], []  # type: tuple[State, list[float], list[tuple[float, int, float, float]]]
    handed_over = nbytes = 0
    decode_seconds = 0.0

    def read_until(now: float) -> None:
        while reads and reads[0][0] <= now:
            done, engine, arrival, seconds = heapq.heappop(reads)
            state.link_free[engine] = max(done, state.link_free[engine]) + seconds
            ttft.append(state.link_free[engine] - arrival)

    for request in requests:
        now, engine = request.arrival, request.conversation % ENGINES
        read_until(now)
        hit, remote_hit = state.decode_cache[engine].hit(request), state.prefill_cache[engine].hit(request)
        cost = costs.of(request.prompt, hit, remote_hit)
        waits = max(state.prefill_free[engine] - now, 0.0), max(state.decode_free[engine] - now, 0.0)
        if policy(Choice(cost, request.prompt - hit, *waits)):
            assert cost.remote_compute_seconds is not None
            state.prefill_free[engine] = now + waits[0] + cost.remote_compute_seconds
            state.prefill_cache[engine].keep(request.conversation, request.prompt)
            heapq.heappush(reads, (state.prefill_free[engine], engine, now, cost.most_seconds))
            handed_over += 1
            nbytes += cost.bytes
        else:
            assert cost.compute_seconds is not None
            state.decode_free[engine] = now + waits[1] + cost.compute_seconds
            decode_seconds += cost.compute_seconds
            ttft.append(state.decode_free[engine] - now)
        state.decode_cache[engine].keep(request.conversation, request.prompt + request.answer)
    read_until(math.inf)
    return Outcome(sorted(ttft), handed_over, nbytes, decode_seconds)


def row(name: str, outcome: Outcome) -> str:
    """Return a row of the table."""
    mean, p99 = statistics.fmean(outcome.ttft), outcome.ttft[len(outcome.ttft) * 99 // 100]
    share = f"{100 * outcome.handed_over / len(outcome.ttft):.0f} %"
    times = f"{mean * 1e3:.0f} | {p99 * 1e3:,.0f}"
    return f"| {name} | {share} | {times} | {size(outcome.nbytes)} | {outcome.decode_seconds:,.0f} |"


def call_time(costs: kvhma.HandOffCost, requests: list[Request]) -> list[float]:
    """Return the processor time of each call in seconds, ascending."""
    found = []
    for request in requests:
        before = time.thread_time_ns()
        costs.of(request.prompt, request.history)
        found.append((time.thread_time_ns() - before) / 1e9)
    return sorted(found)


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    requests = trace(parser.parse_args().seed)
    prompts = sorted(request.prompt for request in requests)
    spread = f"{prompts[len(prompts) // 2]:,} tokens (median), {statistics.fmean(prompts):,.0f} (mean)"
    print(
        "# Results of policies\n\nMade by `benches/policies.py` (`make bench-policies`): a simulation, not engines.\n"
        f"{len(requests):,} requests, prompts of {spread}, {prompts[len(prompts) * 99 // 100]:,} (p99).\n"
        "The page [what a hand-off costs](../docs/cost.md) describes the trace and the policies."
    )
    for name in MODELS:
        one = model(name)
        prefill, decode = EngineOptions(tp_size=2), EngineOptions(tp_size=4)
        engines = of_model(one, prefill, decode, RequestOptions(1 << 17))
        token_bytes = sum(spec.kv_heads * spec.token_bytes for _, spec in one.specs if isinstance(spec, Attention))
        for link in LINKS:
            costs = kvhma.cost(
                engines.decode,
                engines.prefill,
                link,
                tokens_per_second=DECODE_SPEED,
                remote_tokens_per_second=PREFILL_SPEED,
                fixed_seconds=FIXED_SECONDS,
            )
            outcomes = {limit: simulate(requests, costs, by_threshold(limit)) for limit in THRESHOLDS}
            best = min(outcomes, key=lambda limit: statistics.fmean(outcomes[limit].ttft))
            assumed = by_token_bytes(token_bytes / decode.tp_size, link)
            print(f"\n## {name}, P TP 2 to D TP 4, {link.source}\n")
            print("| policy | handed off | TTFT mean, ms | p99 | bytes | D computed prompts for, s |")
            print("|---|---|---|---|---|---|")
            print(row("always", simulate(requests, costs, lambda _: True)))
            print(row("never", simulate(requests, costs, lambda _: False)))
            print(row("512 missing tokens or more", outcomes[512]))
            print(row(f"{best:,} or more, the best of {len(THRESHOLDS)}", outcomes[best]))
            print(row("bytes of a token × missing tokens", simulate(requests, costs, assumed)))
            print(row("`kvhma.cost`", simulate(requests, costs, by_cost)))
        took = call_time(costs, requests)
        times = f"median {took[len(took) // 2] * 1e6:.0f} µs, p99 {took[len(took) * 99 // 100] * 1e6:.0f} µs"
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        print(f"\nA call of `of` took {times} of processor time ({machine}).")


if __name__ == "__main__":
    main()
