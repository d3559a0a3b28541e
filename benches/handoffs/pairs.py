# SPDX-License-Identifier: Apache-2.0
"""Pairs of real engines by their connector, and what one turn of a pair measures."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handoffs import DELAY, MODULE, cpu
from handoffs.alone import alone
from handoffs.tables import EVEN, HIT, MET, OURS, THEIRS
from handoffs.waterfall import stages
from kvhma.nixl.library import READER_PROGRESS_DELAY_US
from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines, make_models
from support.engines.engine import free_port
from support.handoff import LEASE, arguments, prompts

POOL_BYTES = 512 << 20

QUIET_SECONDS = 1.3
"""A worker of vLLM spins for a second after its last step: on few cores it would take them from the next turn."""

AFTER_SECONDS = 0.03
"""The work after the last token of a hand-off, such as releasing P's blocks, counts for this time."""

SAME: dict[str, Any] = {
    # Room for a whole prompt in a step.
    "max_num_batched_tokens": 2560,
    "kv_cache_memory_bytes": POOL_BYTES,
}
UNCACHED = ("nemotron_h", "deepseek_v2")
"""Models without prefix hits on CPUs: engines with Mamba2's states end with the first request, and for MLA vLLM turns
the prefix cache off."""

ENV = {
    # VLLM sets these only where its own connector is named.
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}


@dataclass(frozen=True)
class Turn:
    """Requests that were handed off at the same time; all times in seconds.

    Attributes:
        loads: from the call that orders a load to the end of the call that reports it, of each request.
        first_tokens: as D's client sees it, of each request.
        after: from the first token to the end of the answer, one token later.
        prefills: time to the first token of P, which gives one.
        calls: the connector's time in each of D's steps between the first order and the last report.
        gaps: from step to step of D, meanwhile.
        quiet_calls: the connector's time in each step before.
        processor: processor time of a request, by engine, process and group of threads.
        stages: when each stage was reached, if there was one request.
    """

    loads: list[float]
    first_tokens: list[float]
    after: list[float]
    prefills: list[float]
    calls: list[float]
    gaps: list[float]
    quiet_calls: list[float]
    processor: dict[str, float]
    stages: dict[str, float]


def sound(answer: Answer) -> Answer:
    if answer.error is not None or answer.finish_reason != "length":
        raise RuntimeError(f"an answer ended with {answer.finish_reason}: {answer.error}")
    return answer


def ask(engine: Engine, asked: Sequence[list[int]], tokens: int, **more: Any) -> list[Future[Answer]]:
    return [engine.generate(prompt, max_tokens=tokens, timeout=120, **more) for prompt in asked]


def firsts(answers: Sequence[Future[Answer]]) -> list[float]:
    return [sound(answer.result(120)).first_seconds or 0.0 for answer in answers]


@dataclass(frozen=True)
class Moment:
    """The time, and how long each thread of an engine had run by then, in seconds."""

    at: float
    times: cpu.Times


@dataclass
class Watched:
    """An engine whose threads are counted.

    Attributes:
        engine: the engine.
        recorded: whether it has a connector, which records its calls.
    """

    engine: Engine
    recorded: bool
    _roles: dict[int, str] = field(default_factory=dict)
    _pids: list[int] = field(default_factory=list)

    def roles(self) -> dict[int, str]:
        """The roles of its processes."""
        if not self._roles:
            worker = self.engine.rpc("e2e_census")[0]["pid"]
            self._roles = {worker: "worker", cpu.parent(worker): "scheduler"}
        return self._roles

    def pin(self, core: int) -> None:
        """Let all its threads run on one core only."""
        for pid in self.engine.pids():
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})

    def moment(self) -> Moment:
        """How long its threads have run by now, without asking it."""
        if not self._pids:
            self._pids = self.engine.pids()
        return Moment(time.perf_counter(), cpu.read(self._pids))

    def ask_both(self, method: str) -> list[Any]:
        """Call a method of the connector in the worker and in the scheduler, if there is one."""
        if not self.recorded:
            return []
        return [self.engine.rpc("e2e_connector", method)[0], self.engine.core("e2e_connector", method)]

    def spent(self, since: Moment, until: Moment, records: list[dict[str, Any]]) -> dict[str, float]:
        """Seconds of its threads between two readings, by process and purpose, and within calls of its connector."""
        told = self.ask_both("bench_process")
        names = {one["pid"]: {int(thread): name for thread, name in one["threads"].items()} for one in told}
        found = cpu.by_group(cpu.spent(since.times, until.times), self.roles(), names)
        for process, record in zip(("worker", "scheduler"), records, strict=False):
            calls = ((int(moment) / 1e3, seconds) for moment, seconds in record["cpu"].items())
            found[f"{process}: {cpu.CALLS}"] = sum(seconds for at, seconds in calls if since.at <= at <= until.at)
        return found

    def caches(self) -> str:
        """The groups of its caches."""
        groups = self.engine.rpc("e2e_groups")[0]
        kinds = Counter(f"{one['kind']} of {one['block_size']}, {one['page_bytes']} B" for one in groups)
        return "; ".join(f"{count} × {kind}" for kind, count in kinds.items())


@dataclass
class Pair:
    """A prefill and a decode engine with the same connector, or one engine without any that is both."""

    p: Watched
    d: Watched

    def begin(self) -> None:
        """Compute a prompt in both, so that the first hand-off has no other first-time work."""
        for one in {id(side): side for side in (self.p, self.d)}.values():
            for prompt in prompts("warm", [40, 301, 40]):
                firsts(ask(one.engine, [prompt], 4))
            one.roles()
            one.moment()
            one.ask_both("bench_take")

    def turn(self, asked: list[list[int]], *, beside: int = 0) -> Turn:
        """Hand off prompts at the same time, `beside` an answer of this many tokens that D is generating."""
        p, d = self.p, self.d
        idle = p.moment()
        told = ask(p.engine, asked, 1, kv_transfer_params=REMOTE_DECODE)
        params = [sound(answer.result(120)).kv_transfer_params for answer in told]
        prefilled = p.moment()
        taken = {"P, prefill": p.ask_both("bench_take")}
        d.ask_both("bench_take")  # a call wakes a worker, so it comes before the pause
        time.sleep(QUIET_SECONDS)
        other = ask(d.engine, prompts("beside", [40]), beside, request_id="beside") if beside else []
        if other:
            time.sleep(0.4)
        begun = p.moment(), d.moment()
        given = [
            ask(d.engine, [prompt], 2, kv_transfer_params=one)[0] for prompt, one in zip(asked, params, strict=True)
        ]
        answers = [sound(answer.result(120)) for answer in given]
        if other and other[0].done():
            raise RuntimeError("the other answer of D ended too early: nothing was measured")
        time.sleep(AFTER_SECONDS)
        ended = p.moment(), d.moment()
        taken |= {"P, hand-off": p.ask_both("bench_take"), "D": d.ask_both("bench_take")}
        if other:
            d.engine.abort("beside")
            other[0].result(120)
        processor = processor_times(
            {
                "P, prefill": p.spent(idle, prefilled, taken["P, prefill"]),
                "P, hand-off": p.spent(begun[0], ended[0], taken["P, hand-off"]),
                "D": d.spent(begun[1], ended[1], taken["D"]),
            },
            len(asked),
        )
        for side in (p, d):
            side.engine.idle()
            side.ask_both("bench_take")
        return summary(taken["D"], answers, firsts(told), processor)

    def keep(self, prompt: list[int], seconds: float, after: float) -> tuple[float, dict[str, float]]:
        """Let P hold a prompt's cache, then D read it; without a connector there is nothing to hold.

        Returns:
            Steps that P's worker makes in a second, and P's processor time in a second of it and in the time `after`
            the read.
        """
        p, d = self.p, self.d
        (told,) = ask(p.engine, [prompt], 1, **({"kv_transfer_params": REMOTE_DECODE} if p.recorded else {}))
        params = sound(told.result(120)).kv_transfer_params
        time.sleep(QUIET_SECONDS)
        p.ask_both("bench_take")
        begun = p.moment()
        time.sleep(seconds)
        until = p.moment()
        steps = [len(record["steps"]) for record in p.ask_both("bench_take")[:1]]
        if p.recorded:
            sound(ask(d.engine, [prompt], 2, kv_transfer_params=params)[0].result(120))
        read = p.moment()
        time.sleep(after)
        ended = p.moment()
        p.engine.idle()
        found = {
            f"processor time in a second: {what}": taken / seconds
            for what, taken in processor_times({"P": p.spent(begun, until, [])}, 1).items()
            if what.endswith(("all processes", cpu.ALL))
        }
        last = processor_times({"P": p.spent(read, ended, [])}, 1)["P: all processes"]
        return sum(steps) / seconds, found | {f"processor time in {after:g} s after it was read": last}

    def hit_tokens(self, length: int) -> int:
        """Tokens of a prompt that D can find in its own prefix cache: whole blocks, and not the last token."""
        if not self.d.engine.engine_args["enable_prefix_caching"]:
            return 0
        block = max(group["block_size"] for group in self.d.engine.rpc("e2e_groups")[0])
        return (length - 1) // block * block

    def hit(self, asked: list[list[int]]) -> list[float]:
        """First tokens of prompts that D has in its own prefix cache but for one token.

        They are cut to end one token after the possible hit: D computes one token, as after a hand-off. D computes them
        itself before: a hand-off leaves only the last state, which is no hit.
        """
        engine = self.d.engine
        hit = self.hit_tokens(len(asked[0]))
        cut = [prompt[: hit + 1] for prompt in asked]
        firsts(ask(engine, cut, 1))
        time.sleep(QUIET_SECONDS)
        answers = ask(engine, cut, 2)
        found = firsts(answers)
        cached = [answer.result().num_cached_tokens for answer in answers]
        if set(cached) != {hit}:
            raise RuntimeError(f"{cached} tokens were own hits, not {hit}")
        engine.idle()
        return found

    def compute(self, asked: list[list[int]]) -> tuple[list[float], list[float], dict[str, float]]:
        """First tokens of prompts that it computes, asked as D is and as P is, and the latter's processor time."""
        before = self.d.moment()
        prefills = firsts(ask(self.d.engine, [[prompt[0] ^ 1, *prompt[1:]] for prompt in asked], 1))
        after = self.d.moment()
        time.sleep(QUIET_SECONDS)
        found = firsts(ask(self.d.engine, asked, 2))
        spent = processor_times({"P, prefill": self.d.spent(before, after, [])}, len(asked))
        return found, prefills, spent


def processor_times(phases: dict[str, dict[str, float]], requests: int) -> dict[str, float]:
    """Seconds of a request, by phase, process and group of threads; sums of all, and of a connector's share."""
    found: dict[str, float] = {}
    for phase, groups in phases.items():
        threads = {label: seconds for label, seconds in groups.items() if not label.endswith(cpu.CALLS)}
        found[f"{phase}: all processes"] = sum(threads.values())
        for process in ("scheduler", "worker"):
            own = [seconds for label, seconds in threads.items() if label.startswith(f"{process}: ")]
            found[f"{phase}, {process}: {cpu.ALL}"] = sum(own)
        if threads.keys() != groups.keys():
            added = [seconds for label, seconds in groups.items() if cpu.of_connector(label)]
            found[f"{phase}: the connector's calls and threads, and NIXL's"] = sum(added)
        found |= {f"{phase}, {label}": seconds for label, seconds in groups.items()}
    return {label: seconds / requests for label, seconds in found.items()}


def summary(
    taken: list[dict[str, Any]], answers: list[Answer], prefills: list[float], processor: dict[str, float]
) -> Turn:
    steps = taken[0]["steps"]
    ordered: dict[str, float] = {}
    loaded: dict[str, float] = {}
    for step in steps:
        ordered = step["ordered"] | ordered
        loaded |= step["loaded"]
        if step["failed"]:
            raise RuntimeError(f"loads failed: {step['failed']}")
    if len(ordered) != len(answers) or ordered.keys() != loaded.keys():
        raise RuntimeError(f"{len(answers)} requests, but {len(ordered)} loads were ordered and {len(loaded)} reported")
    first = next(index for index, step in enumerate(steps) if step["ordered"])
    last = max(index for index, step in enumerate(steps) if step["loaded"])
    gaps = [after["begun"] - before["begun"] for before, after in itertools.pairwise(steps)]
    events = [tuple(event) for record in taken for event in record["events"]]
    return Turn(
        loads=[loaded[name] - ordered[name] for name in ordered],
        first_tokens=[answer.first_seconds or 0.0 for answer in answers],
        after=[answer.seconds - (answer.first_seconds or 0.0) for answer in answers],
        prefills=prefills,
        calls=[step["calls"] for step in steps[first : last + 1]],
        gaps=gaps[first : last + 1],
        quiet_calls=[step["calls"] for step in steps[:first]],
        processor=processor,
        stages=stages(events, answers[0].begun, answers[0].first_seconds or 0.0) if len(answers) == 1 else {},
    )


@dataclass(frozen=True)
class Pairs:
    """Pairs of engines by their connector. The pairs that do not run now are stopped: they share the cores."""

    pairs: dict[str, Pair]

    def __getitem__(self, which: str) -> Pair:
        return self.pairs[which]

    @contextlib.contextmanager
    def only(self, which: str) -> Iterator[Pair]:
        """Let one pair run alone."""
        pair = self.pairs[which]
        running = (side.engine for other in self.pairs.values() for side in (other.p, other.d))
        with alone((pair.p.engine, pair.d.engine), running):
            yield pair

    def turn(self, which: str, asked: list[list[int]], *, beside: int = 0) -> Turn:
        with self.only(which) as pair:
            return pair.turn(asked, beside=beside)


@dataclass(frozen=True)
class Bench:
    """The source of engines, and how often each measure is taken."""

    zygote: Zygote
    folder: Path
    quick: bool

    @contextlib.contextmanager
    def pairs(self, name: str, *which: str, apart: bool = False, **more: Any) -> Iterator[Pairs]:
        """Engines of some connectors; those of `MET` are a decode engine beside the ones of `OURS`, `HIT` is one
        without a connector. `apart`: prefill engines have the first core for themselves, the others the last one."""
        base = arguments(name) | SAME | {"enable_prefix_caching": name not in UNCACHED} | more
        port = free_port()
        offered: dict[str, dict[str, Any]] = {
            OURS: {"p ours": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}, "d ours": {}},
            MET: {"d met": {}},
            THEIRS: {"p theirs": {}, "d theirs": {}},
            EVEN: {"p even": {}, "d even": {}},
            HIT: {"plain": {}},
        }
        settings = {
            side: base | {"env": ENV | env, "kv_transfer_config": transfer(one, port)}
            for one in which
            for side, env in offered[one].items()
        }
        model = make_models(self.zygote, self.folder, name)[0]
        with engines(self.zygote, model, self.folder, timeout=400, **settings) as made:
            sides = {
                side: Watched(engine, engine.kv_transfer_config is not None)
                for side, engine in zip(settings, made, strict=True)
            }
            if apart:
                first, *_, last = sorted(os.sched_getaffinity(0))
                for side, one in sides.items():
                    one.pin(first if side.startswith("p ") else last)
            of = {one: [sides[side] for side in offered[one]] for one in which}
            if MET in of:
                of[MET] = [of[OURS][0], *of[MET]]
            found = Pairs({one: Pair(both[0], both[-1]) for one, both in of.items()})
            for pair in found.pairs.values():
                pair.begin()
            yield found


def transfer(which: str, port: int) -> dict[str, Any] | None:
    """VLLM's setting for a column."""
    if which == HIT:
        return None
    extra: dict[str, Any] = {"kv_lease_duration": LEASE}
    if which == EVEN:
        extra[DELAY] = READER_PROGRESS_DELAY_US
    if which == MET:
        extra["prefill_engines"] = [f"localhost:{port}"]
    return {
        "kv_connector": "NixlConnector" if which in (THEIRS, EVEN) else "KvhmaConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
