# SPDX-License-Identifier: Apache-2.0
"""Times to the first token equal those of a simulation of events, written from the definitions in docs/replay.md."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvhma
from kvhma._kvhma import first_tokens
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.errors import RequestError
from kvhma.models import model
from kvhma.replay.policies import THRESHOLDS
from kvhma.replay.report import engines_of, hits_of, replay
from kvhma.replay.traces import Trace, read_trace

TRACES = Path(__file__).parents[3] / "shared/traces"


class Server:
    """Does jobs one after the other, in the order in which they came."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[int, Any]] = deque()
        self.until: Any = 0

    def backlog(self, now: Any) -> Any:
        """Work that is left."""
        rest = self.until - now if self.jobs else 0
        return rest + sum(seconds for _, seconds in list(self.jobs)[1:])


def events(ways: Sequence[Sequence[Any]]) -> tuple[list[Any], list[bool]]:
    """Walk from event to event: a request arrives, or the first job of a server is done."""
    arrivals, at_p, at_d, prefill, read, decode, expected = ways
    servers: dict[tuple[str, int], Server] = defaultdict(Server)
    queue: list[Any] = [(at, 1, request, "arrival", None) for request, at in enumerate(arrivals)]
    heapq.heapify(queue)
    waits, handed_off = [None] * len(arrivals), [False] * len(arrivals)

    def begin(name: tuple[str, int], now: Any) -> None:
        server = servers[name]
        request, seconds = server.jobs[0]
        server.until = now + seconds
        heapq.heappush(queue, (server.until, 0, request, "done", name))

    def submit(name: tuple[str, int], request: int, seconds: Any, now: Any) -> None:
        servers[name].jobs.append((request, seconds))
        if len(servers[name].jobs) == 1:
            begin(name, now)

    while queue:
        now, _, request, what, name = heapq.heappop(queue)
        p, d = ("P", at_p[request]), ("D", at_d[request])
        if what == "arrival":
            remote = servers[p].backlog(now) + prefill[request] + expected[request]
            if remote < servers[d].backlog(now) + decode[request]:
                handed_off[request] = True
                submit(p, request, prefill[request], now)
            else:
                submit(d, request, decode[request], now)
            continue
        servers[name].jobs.popleft()
        if servers[name].jobs:
            begin(name, now)
        if name[0] == "P":
            submit(("link", at_d[request]), request, read[request], now)
        else:
            waits[request] = now - arrivals[request]
    return waits, handed_off


def decided(policy: str, read: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return the read that a policy expects, of infinite length if it decides by something else."""
    hands_off = {"always": missing >= 0, "never": missing < 0, "threshold": missing >= 5}
    return read if policy == "cost" else np.where(hands_off[policy], -np.inf, np.inf)


@pytest.mark.parametrize("policy", ["always", "never", "threshold", "cost"])
@pytest.mark.parametrize("seed", range(25))
def test_queues_are_those_of_events(policy: str, seed: int) -> None:
    """Times are halves of a second, so sums are exact and many events come at once."""
    rng = np.random.default_rng(seed)
    number = 60
    arrivals = np.sort(rng.integers(0, 80, number)) / 2
    engines = [rng.integers(0, most, number).astype(np.uint32) for most in rng.integers(1, 5, 2)]
    prefill, read, decode = (rng.integers(1, 13, number) / 2 for _ in range(3))
    ways = [arrivals, *engines, prefill, read, decode, decided(policy, read, rng.integers(0, 10, number))]
    waits, handed_off = events([each.tolist() for each in ways])
    found = first_tokens(*ways)
    assert found[0].tolist() == waits
    assert found[1].tolist() == handed_off


def engines(name: str, prefill: int, decode: int) -> Any:
    sides = (EngineOptions(tp_size=size) for size in (prefill, decode))
    return of_model(model(name), *sides, RequestOptions(1 << 17))


@pytest.mark.parametrize(
    ("file", "some", "numbers", "route"),
    [
        ("mooncake_conversation_first3600.jsonl", 500, (3, 2), "turns"),
        ("mooncake_synthetic_first3300.jsonl", 500, (2, 3), "round-robin"),
        ("AzureLLMInferenceTrace_code.csv", 1500, (2, 2), "round-robin"),
    ],
)
def test_policies_of_public_traces_by_their_definition(
    file: str, some: int, numbers: tuple[int, int], route: Any
) -> None:
    """The first requests, request by request with the cost that a router asks for."""
    if not (TRACES / file).is_file():
        pytest.skip("needs the public traces in ../shared/traces")
    trace = first(read_trace(TRACES / file), some)
    sides = engines("gemma-3-4b", 1, 2)
    link = kvhma.Link(3e-6, 1e9)
    given: dict[str, Any] = {"engines": numbers, "route": route, "fixed_seconds": 0.25}
    found = replay(trace, sides.decode, sides.prefill, speeds=(20_000, 5_000), links={"a": link}, **given)["policies"]

    at_p, at_d = (engines_of(trace, route, number) for number in numbers)
    speeds = {"tokens_per_second": 5_000, "remote_tokens_per_second": 20_000}
    costs = kvhma.cost(sides.decode, sides.prefill, link, **speeds)
    hits = hits_of(trace, sides.decode, "decode", at_d)[1].T.tolist()
    remote_hits = hits_of(trace, sides.prefill, "prefill", at_p)[0].min(axis=0).tolist()
    alone = hits_of(trace, sides.decode, "prefill", at_d)[0].min(axis=0)
    each = [costs.of(*request) for request in zip(trace.prompts.tolist(), hits, remote_hits, strict=True)]
    read, local = np.array([cost.most_seconds for cost in each]), [cost.compute_seconds for cost in each]
    remote = [cost.remote_compute_seconds for cost in each]
    missing = trace.prompts - np.min(hits, axis=1)

    def of(policy: str, expected: np.ndarray) -> list[float]:
        decode = ((trace.prompts - alone) / 5_000).tolist() if policy == "never" else local
        ways = (trace.seconds, at_p, at_d, remote, read, decode, expected)
        waits, handed_off = events([np.asarray(way).tolist() for way in ways])
        waits = sorted(wait + 0.25 * handed for wait, handed in zip(waits, handed_off, strict=True))
        at = 0.99 * (some - 1)
        p99 = waits[int(at)] + (at - int(at)) * (waits[int(at) + 1] - waits[int(at)])
        median = (waits[(some - 1) // 2] + waits[some // 2]) / 2
        return [sum(waits) / some, median, p99, sum(handed_off) / some]

    expected = {"always": of("always", np.full(some, -np.inf)), "never": of("never", np.full(some, np.inf))}
    thresholds = {tokens: of("", np.where(missing >= tokens, -np.inf, np.inf)) for tokens in THRESHOLDS}
    best = min(thresholds, key=lambda tokens: thresholds[tokens][0])
    expected |= {"threshold": thresholds[best], "cost": of("cost", read + 0.25)}
    for name, numbers_of in expected.items():
        assert [found["a"][name][key] for key in ("mean", "median", "p99", "handed_off")] == pytest.approx(numbers_of)
    assert found["a"]["threshold"]["tokens"] == best
    assert found["a"]["best"] == min(expected, key=lambda name: expected[name][0])


def caches_that_follow(trace: Trace, sides: Any, link: kvhma.Link, policy: str, numbers: int) -> float:
    """Return the mean time to the first token if P has only what it computed, and D only what it read or computed.

    A block is a node of the trace, which has 512 tokens.
    """
    assert trace.paths is not None
    costs = kvhma.cost(sides.decode, sides.prefill, link, tokens_per_second=5_000, remote_tokens_per_second=10_000)
    bounds, nodes = trace.paths.offsets.tolist(), trace.paths.nodes.tolist()
    at = engines_of(trace, "turns", numbers).tolist()
    computed, full, windows = ([set() for _ in range(numbers)] for _ in range(3))
    free = np.zeros((2, numbers))
    reads, waits = [], []
    for request, now in enumerate(trace.seconds.tolist()):
        engine, tokens = at[request], int(trace.prompts[request])
        path = nodes[bounds[request] : bounds[request + 1]]
        at_p, at_d = (
            next(
                (512 * block for block in range((tokens - 1) // 512) if path[block] not in held),
                (tokens - 1) // 512 * 512,
            )
            for held in (computed[engine], full[engine])
        )
        ends = (end for end in range(at_d // 512, 0, -1) if windows[engine].issuperset(path[max(0, end - 2) : end]))
        window = 512 * next(ends, 0)
        cost = costs.of(tokens, [at_d if group.window is None else window for group in sides.decode[0].groups], at_p)
        by_p = max(free[0, engine], now) + cost.remote_compute_seconds
        by_d = max(free[1, engine], now) + cost.compute_seconds
        whole = path[: tokens // 512]
        full[engine].update(whole)
        if policy == "always" or (policy == "cost" and by_p + cost.most_seconds < by_d):
            free[0, engine] = by_p
            reads.append((by_p, engine, now, cost.most_seconds))
            computed[engine].update(whole)
            windows[engine].update(whole[max(0, tokens + 1 - 1024) // 512 :])
        else:
            free[1, engine] = by_d
            waits.append(by_d - now)
            windows[engine].update(whole)
    link_free = [0.0] * numbers
    for ready, engine, now, seconds in sorted(reads):
        link_free[engine] = max(link_free[engine], ready) + seconds
        waits.append(link_free[engine] - now)
    return float(np.mean(waits))


@pytest.mark.parametrize("bandwidth", [1e9, 40e9])
@pytest.mark.parametrize("file", ["mooncake_conversation_first3600.jsonl", "mooncake_synthetic_first3300.jsonl"])
def test_caches_that_follow_the_policy_change_little(file: str, bandwidth: float) -> None:
    """Hits that do not depend on the policy are those of `always` and of `never`. Between them the mean is near."""
    if not (TRACES / file).is_file():
        pytest.skip("needs the public traces in ../shared/traces")
    trace, link = read_trace(TRACES / file), kvhma.Link(3e-6, bandwidth)
    options = [EngineOptions(tp_size=size, block_size=512) for size in (2, 4)]
    sides = of_model(model("gemma-3-27b"), *options, RequestOptions(1 << 17))
    given: dict[str, Any] = {"engines": (18, 18), "speeds": (10_000, 5_000), "links": {"a": link}}
    found = replay(trace, sides.decode, sides.prefill, **given)["policies"]["a"]
    for policy, tolerance in (("always", 1e-9), ("never", 1e-9), ("cost", 0.02)):
        exact = caches_that_follow(trace, sides, link, policy, 18)
        assert found[policy]["mean"] == pytest.approx(exact, rel=tolerance), policy


def first(trace: Trace, some: int) -> Trace:
    """Return the first requests of a trace."""
    paths = trace.paths
    if paths is not None:
        end = int(paths.offsets[some])
        paths = paths._replace(nodes=paths.nodes[:end], ends=paths.ends[:end], offsets=paths.offsets[: some + 1])
    sessions = None if trace.sessions is None else trace.sessions[:some]
    columns = {name: getattr(trace, name)[:some] for name in ("seconds", "prompts", "answers")}
    return replace(trace, sessions=sessions, paths=paths, **columns)


@pytest.mark.parametrize(
    ("file", "means", "threshold"),
    [
        ("AzureLLMInferenceTrace_conv.csv", {"always": 0.137, "threshold": 0.137, "cost": 0.134}, 128),
        ("AzureLLMInferenceTrace_code.csv", {"always": 0.940, "threshold": 0.489, "cost": 0.450}, 2048),
    ],
)
def test_whole_public_traces(file: str, means: dict[str, float], threshold: int) -> None:
    """Means that another simulation counted: gemma-3-27b, four pairs, 40 GB/s, 10,000 and 5,000 tokens a second."""
    if not (TRACES / file).is_file():
        pytest.skip("needs the public traces in ../shared/traces")
    sides = engines("gemma-3-27b", 2, 4)
    given: dict[str, Any] = {"engines": (4, 4), "speeds": (10_000, 5_000), "fixed_seconds": 0.005}
    found = replay(read_trace(TRACES / file), sides.decode, sides.prefill, links={"a": kvhma.Link(3e-6, 40e9)}, **given)
    outcomes = found["policies"]["a"]
    assert {name: outcomes[name]["mean"] for name in means} == pytest.approx(means, abs=5e-4)
    assert outcomes["threshold"]["tokens"] == threshold
    assert outcomes["best"] == "cost"


def test_what_the_policies_need() -> None:
    """Without the engines' numbers or speeds there is nothing to queue for."""
    trace = Trace("made", np.array([0.0, 1.0]), np.array([900, 40]), np.array([3, 4]), None, None)
    sides = engines("gemma-3-4b", 1, 1)
    links = {"a": kvhma.Link(3e-6, 1e9)}
    for given in ({"engines": (1, 1)}, {"speeds": (100.0, 100.0)}, {}):
        assert "policies" not in replay(trace, sides.decode, sides.prefill, links=links, **given)
    found = replay(trace, sides.decode, sides.prefill, links=links, speeds=(100.0, 50.0), decode_speed=0.5)
    assert found["prefill"]["for_each_d"] == pytest.approx((9.4 / 1) / (7 / 0.5))


WAYS: dict[str, Any] = {
    "arrivals": np.array([0.0, 1.0]),
    "at_prefill": np.array([0, 1], np.uint32),
    "at_decode": np.array([0, 0], np.uint32),
    "prefill": np.array([1.0, 1.0]),
    "read": np.array([1.0, 1.0]),
    "decode": np.array([3.0, 1.0]),
    "expected": np.array([1.0, 1.0]),
}
WRONG: dict[str, Any] = {
    "arrivals": np.array([1.0, 0.0]),
    "at_prefill": np.array([0, 1 << 20], np.uint32),
    "at_decode": np.array([0], np.uint32),
    "prefill": np.array([1.0, -1.0]),
    "read": np.array([1.0, np.inf]),
    "decode": np.array([np.nan, 1.0]),
    "expected": np.array([np.nan, 1.0]),
}


@pytest.mark.parametrize(("name", "value"), WRONG.items(), ids=WRONG)
def test_arrays_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    waits, handed_off = first_tokens(**WAYS)
    assert (waits.tolist(), handed_off.tolist()) == ([2.0, 1.0], [True, False])
    with pytest.raises(RequestError, match="arrivals"):
        first_tokens(**WAYS | {name: value})
