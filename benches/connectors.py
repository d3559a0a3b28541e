# SPDX-License-Identifier: Apache-2.0
"""KvhmaConnector beside vLLM's own NixlConnector and beside no connector, in real engines that serve tiny models.

In every round each of them takes its turn with the same prompts; only the ratio within a round counts. Times are
measured outside of the connectors, around vLLM's calls. Prints Markdown, which is benches/RESULTS_E2E.md, and draws
docs/assets/waterfall.svg. Needs the engines of `make e2e`, and `tests` on the path.

    python benches/connectors.py [--quick] [--only cold warm apart kept stall rested large] [--models gemma3 ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from handoffs import waterfall
from handoffs.alone import WIDE
from handoffs.pairs import Bench, Pairs, Turn
from handoffs.tables import COMPUTED, EVEN, HIT, MET, OURS, THEIRS, Row, rotated, table
from support.engines import Engine, Zygote
from support.engines.zygote import ENVIRONMENT, vllm_version
from support.handoff import prompts

MODELS = {
    "llama": "FA",
    "gemma3": "FA + SWA",
    "nemotron_h": "FA + Mamba2",
    "qwen3_next": "FA + GDN",
    "deepseek_v2": "MLA",
}
TWO = ("gemma3", "nemotron_h")
"""Models of the slow measures."""

CONNECTORS = (OURS, THEIRS, EVEN)
LENGTHS = (301, 2001)
AT_ONCE = (1, 16)
COLD_STARTS = 3
STARTS = 3
"""Of all engines: equal engines differ by some percent from start to start."""

ROUNDS = 2
"""Of each start."""

LEAST_ROUNDS = 2
APART_STARTS = 2
"""Of engines on separate cores: their times depend less on the start."""

ROW_SECONDS = 150
"""After this time no further round begins: processors without matrix instructions need minutes for some prompts."""

PHASES = ("P, prefill", "P, hand-off", "D")
LEAST_SECONDS = 5e-5
"""A group of threads that needs less with every connector has no row."""

BEYOND = "first token, beyond an own hit without a connector"
OWN_HIT = "own hit in the same engine"
PREFILL = "P's answer"
NEXT = "second token, after the first"
ORDER = ("load", "slowest load", "first token", "slowest first token", BEYOND, NEXT, OWN_HIT, PREFILL)

KEPT_SECONDS = 10.0
"""How long P holds an unread request; twice its sleep between two steps."""

REST_SECONDS = 3.0
"""After the read: a step that frees its blocks, and the spinning of worker and scheduler after that."""

KEPT_ROUNDS = 3
WATERFALLS = 9
STALL_STARTS = 2
STALL_ROUNDS = 4
"""Of each start."""

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Of all engines. Otherwise a step returns memory to the system and faults it in again, one engine's thousands of pages
more than another's, depending on its heap. VLLM asks for tcmalloc on CPUs, which retains memory too."""

SHORT_SPIN = {"KVHMA_E2E_SPIN_SECONDS": "0.001"}
"""VLLM's processes spin for a second while they wait. On two cores they take them from threads that load."""
OTHER_TOKENS = 2000
"""Of the answer that D generates meanwhile, and that is aborted when the loads have ended."""

LARGE = {"hf_overrides": {"num_key_value_heads": 1}, "load_format": "dummy", "dtype": "bfloat16"}
LARGE_BLOCKS = 1_000_000
LARGE_PAGE = 4096

PICTURE = Path(__file__).parents[1] / "docs/assets/waterfall.svg"
PICTURED = "gemma3"


def warm(bench: Bench, name: str) -> None:
    """Later requests, beside their floors."""
    found = rows_of(bench, CONNECTORS)
    stages: dict[str, dict[str, float]] = {}
    for start in range(starts := 1 if bench.quick else STARTS):
        with bench.pairs(name, *rotated((*CONNECTORS, HIT), start)) as pairs:
            set_up(pairs, name, told=start > 0)
            measure(found, pairs)
            if start == starts - 1:
                stages = {which: watched(pairs, which, 2 if bench.quick else WATERFALLS) for which in CONNECTORS}
    for rows in found:
        print(*rows.tables(f"{name} ({MODELS[name]}): {rows.what}"), sep="\n")
    counts = [row for rows in found if rows.at_once == 1 for row in rows.counts]
    print(table(f"{name}: descriptors and bytes of a request", counts))
    title = f"{name}: a request of 301 tokens, from D's client to its first token"
    print(f"\n### {title}\n\n{waterfall.lines(stages)}", flush=True)
    if name == PICTURED and not bench.quick:
        PICTURE.write_text(waterfall.draw(title, stages), encoding="utf-8")


def apart(bench: Bench, name: str) -> None:
    """The same with P and D on separate cores, as if neither shared any with the other."""
    columns = (OURS, EVEN)
    found = rows_of(bench, columns)
    for start in range(1 if bench.quick else APART_STARTS):
        with bench.pairs(name, *rotated((*columns, HIT), start), apart=True) as pairs:
            measure(found, pairs)
    for rows in found:
        times, _ = rows.tables(f"{name} ({MODELS[name]}), P and D on separate cores: {rows.what}")
        print(times, flush=True)


def rows_of(bench: Bench, columns: Sequence[str]) -> list[Warm]:
    lengths = LENGTHS[:1] if bench.quick else LENGTHS
    return [Warm(columns, at_once, length) for at_once in AT_ONCE for length in lengths]


def measure(found: Sequence[Warm], pairs: Pairs) -> None:
    """Run some more rounds of each row, with engines that have just started."""
    for which in found[0].columns:
        pairs.turn(which, prompts("first", [301]))
    for rows in found:
        rows.measure(pairs)


class Warm:
    """The measurements of this many requests at a time, of one length, with some connectors and an engine without."""

    def __init__(self, columns: Sequence[str], at_once: int, length: int) -> None:
        self.columns, self.at_once, self.length = columns, at_once, length
        self.what = f"{at_once} at a time, {length:,} tokens"
        self.rounds = self.starts = 0
        self._seconds = 0.0
        self.counts = [Row(f"{length:,} tokens: descriptors posted", ""), Row(f"{length:,} tokens: bytes", "MiB")]
        self._hit_tokens = 0
        self._times: dict[str, Row] = {}
        self._processor: dict[str, Row] = {}

    def measure(self, pairs: Pairs) -> None:
        """Run some more rounds, with engines that have just started."""
        self._hit_tokens = pairs[HIT].hit_tokens(self.length)
        before = {which: counted(pairs[which].d.engine, which) for which in self.columns}
        taken = 0
        while taken < ROUNDS and (self._seconds < ROW_SECONDS or (not taken and self.rounds < LEAST_ROUNDS)):
            begun = time.monotonic()
            self._round(pairs, prompts((self.length, self.at_once, self.rounds), [self.length] * self.at_once))
            self._seconds += time.monotonic() - begun
            self.rounds += 1
            taken += 1
        if taken:
            self.starts += 1
            for which in self.columns:
                now = counted(pairs[which].d.engine, which)
                for row, a, b in zip(self.counts, before[which], now, strict=True):
                    row.add(which, (b - a) / (taken * self.at_once))

    def _round(self, pairs: Pairs, asked: list[list[int]]) -> None:
        """All columns get the same prompts. The floor's engine takes its turn like the others."""
        floor = 0.0
        turns: dict[str, Turn] = {}
        for which in rotated((*self.columns, HIT), self.rounds):
            with pairs.only(which) as pair:
                if which == HIT:
                    computed, prefills, spent = pair.compute(asked)
                    self._add("first token", COMPUTED, statistics.median(computed))
                    self._add(PREFILL, COMPUTED, statistics.median(prefills))
                else:
                    turns[which] = pair.turn(asked)
                    spent = turns[which].processor
                hit = pair.hit(asked)
            for what, seconds in spent.items():
                self._processor.setdefault(what, Row(what)).add(COMPUTED if which == HIT else which, seconds)
            self._add(OWN_HIT, which, statistics.median(hit))
            floor = statistics.median(hit) if which == HIT else floor
        for which, turn in turns.items():
            for what, value in measures(turn, floor).items():
                self._add(what, which, value)

    def _add(self, what: str, column: str, value: float) -> None:
        self._times.setdefault(what, Row(what)).add(column, value)

    def tables(self, title: str) -> tuple[str, str]:
        """The tables of times and of processor times."""
        title += f", {self.rounds} rounds of {self.starts} starts"
        title += f", own hit of {self._hit_tokens:,}" if self._hit_tokens else ", one token in place of an own hit"
        columns = (*self.columns, HIT, COMPUTED)
        times = table(title, [self._times[what] for what in ORDER if what in self._times], columns)
        told = sorted(
            (row for row in self._processor.values() if row.most() >= LEAST_SECONDS), key=lambda row: by_phase(row.what)
        )
        return times, table(f"{title}: processor time of a request", told, (*self.columns, COMPUTED))


def set_up(pairs: Pairs, name: str, *, told: bool) -> None:
    """Refuse engines that hold different caches; print what else could differ, if `told` does not have it yet."""
    found = {which: pairs[which].d.set_up() for which in (*CONNECTORS, HIT)}
    if len({one["groups"] for one in found.values()}) > 1:
        raise RuntimeError(f"the engines do not hold the same: {found}")
    if told:
        return
    # Names without a blank are code: only then they are cut where a table is too wide.
    cells = {what: [str(one.get(what, "–")) for one in found.values()] for what in found[OURS]}
    cells["groups"] = [f"`{text}`" for text in cells["groups"]]
    rows = [f"| {f'`{what}`' if '_' in what else what} | {' | '.join(texts)} |" for what, texts in cells.items()]
    print(f"\n### {name}: D's set-up\n\n| | {' | '.join(found)} |\n{'|---' * (len(found) + 1)}|", *rows, sep="\n")


def by_phase(label: str) -> tuple[int, bool, str]:
    """The place of a processor time: phases in their order, in each the sums first."""
    index, phase = next((index, one) for index, one in enumerate(PHASES) if label.startswith(one))
    return index, not label.startswith(f"{phase}:"), label


def measures(turn: Turn, floor: float) -> dict[str, float]:
    """The rows of a turn. `floor` is the first token of an own hit in an engine without a connector."""
    found = {"load": statistics.median(turn.loads), "first token": statistics.median(turn.first_tokens)}
    found[BEYOND] = found["first token"] - floor
    if len(turn.loads) > 1:
        found |= {"slowest load": max(turn.loads), "slowest first token": max(turn.first_tokens)}
    return found | {NEXT: statistics.median(turn.after), PREFILL: statistics.median(turn.prefills)}


def watched(pairs: Pairs, which: str, runs: int) -> dict[str, float]:
    """When a request of a connector reaches each stage; the last measure of its engines, because it slows them down."""
    pairs[which].d.ask_both("bench_watch")
    asked = prompts(("watched", which), [301] * (runs + 1))
    # The first request may still do some things for the first time.
    return waterfall.medians([pairs.turn(which, [prompt]).stages for prompt in asked][1:])


def counted(d: Engine, which: str) -> tuple[float, float]:
    """Descriptors posted and bytes read by an engine so far."""
    ours = "kvhma_posted_descriptors kvhma_bytes"
    names = ours if which in (OURS, MET) else "nixl_num_descriptors nixl_bytes_transferred"
    descriptors, nbytes = (d.sample(f"vllm:{name}_sum") for name in names.split())
    return descriptors, nbytes


def cold(bench: Bench, name: str) -> None:
    """The first hand-off between two engines."""
    load, token = Row("first load"), Row("its time to first token, less that of a warm one")
    columns = (OURS, MET, THEIRS, EVEN)
    starts = 1 if bench.quick else COLD_STARTS
    for start in range(starts):
        with bench.pairs(name, *columns) as pairs:
            blocks = pairs[OURS].d.engine.state()["all_blocks"]
            for which in rotated(columns, start):
                first, *others = (pairs.turn(which, [prompt]) for prompt in prompts((start, which), [301] * 4))
                load.add(which, first.loads[0])
                token.add(which, first.first_tokens[0] - statistics.median(turn.first_tokens[0] for turn in others))
    title = f"{name} ({MODELS[name]}): first request, 301 tokens, {starts} starts, {blocks:,} blocks"
    print(table(f"{title}, handshake included", (load, token), columns), flush=True)


def kept(bench: Bench, name: str) -> None:
    """P's processor time while it holds an unread request, and after the read."""
    steps = Row("steps of its worker in a second", "")
    rows: dict[str, Row] = {}
    rounds = 1 if bench.quick else KEPT_ROUNDS
    with bench.pairs(name, *CONNECTORS, HIT) as pairs:
        for number in range(rounds):
            for which in rotated((*CONNECTORS, HIT), number):
                with pairs.only(which) as pair:
                    made, taken = pair.keep(prompts((which, number), [301])[0], KEPT_SECONDS, REST_SECONDS)
                if which in CONNECTORS:
                    steps.add(which, made)
                for what, seconds in taken.items():
                    rows.setdefault(what, Row(what)).add(which, seconds)
    title = f"{name}: P keeps a request for {KEPT_SECONDS:g} s, {rounds} rounds"
    print(table(title, (steps, *rows.values()), (*CONNECTORS, HIT)), flush=True)


def stall(bench: Bench, name: str, how: str = "") -> None:
    """D's steps while 16 large loads run."""
    values: dict[str, Row] = {}
    nbytes = Row("bytes of 16 loads", "MiB")
    starts, rounds = (1, 2) if bench.quick else (STALL_STARTS, STALL_ROUNDS)
    for start in range(starts):
        with bench.pairs(name, *rotated(CONNECTORS, start), kv_cache_memory_bytes=2 << 30, **WIDE) as pairs:
            before = {which: counted(pairs[which].d.engine, which)[1] for which in CONNECTORS}
            for number in range(rounds):
                for which in rotated(CONNECTORS, number):
                    turn = pairs.turn(which, prompts((name, number), [2001] * 16), beside=OTHER_TOKENS)
                    for what, value in stalled(turn).items():
                        values.setdefault(what, Row(what)).add(which, value)
            for which in CONNECTORS:
                nbytes.add(which, (counted(pairs[which].d.engine, which)[1] - before[which]) / rounds)
    title = f"{name} with wide heads: 16 loads of 2,001 tokens while D gives another answer"
    title += f", {starts * rounds} rounds of {starts} starts{how}"
    print(table(title, (*values.values(), nbytes)), flush=True)


def rested(bench: Bench, name: str) -> None:
    """The same as :func:`stall` with engines that do not spin for long, as on machines with a core for each process."""
    stall(bench, name, f", processes that spin for {float(SHORT_SPIN['KVHMA_E2E_SPIN_SECONDS']) * 1e3:g} ms")


def stalled(turn: Turn) -> dict[str, float]:
    processor = {what: seconds * len(turn.loads) for what, seconds in turn.processor.items()}
    return {
        "longest time of the connector in a step": max(turn.calls),
        "longest time of it in a step before the loads": max(turn.quiet_calls),
        "median of its time in a step before the loads": statistics.median(turn.quiet_calls),
        "sum of it over all steps of the loads": sum(turn.calls),
        "longest gap between two tokens of the other answer": max(turn.gaps),
        "that gap, less the median one before": max(turn.gaps) - statistics.median(turn.quiet),
        "load, median of 16": statistics.median(turn.loads),
        "load, slowest of 16": max(turn.loads),
        "first token, median of 16": statistics.median(turn.first_tokens),
        "first token, slowest of 16": max(turn.first_tokens),
        "processor time of D, all processes": processor["D: all processes"],
        "processor time of NIXL's threads in D": processor.get("D, worker: NIXL", 0.0),
    }


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
    for which in CONNECTORS:
        with bench.pairs(name, which, kv_cache_memory_bytes=LARGE_BLOCKS * LARGE_PAGE, **LARGE) as pairs:
            pair, d = pairs[which], pairs[which].d.engine
            blocks = d.state()["all_blocks"]
            pages = d.rpc("e2e_groups")[0][0]["page_bytes"]
            before = d.rpc("e2e_census")[0]["resident"]
            first, *others = (pair.turn([prompt]) for prompt in prompts("large", [301] * 4))
            added = d.rpc("e2e_census")[0]["resident"] - before
            later = statistics.median(turn.loads[0] for turn in others)
            values = (first.loads[0], max(first.calls), later, before - blocks * pages, added)
            for row, value in zip(rows, values, strict=True):
                row.add(which, value)
    print(table(f"{name}: a pool of {blocks:,} blocks", rows), flush=True)


class Part(NamedTuple):
    """The measures, their models, and the environment in which the engines start."""

    measure: Callable[[Bench, str], None]
    models: tuple[str, ...]
    env: Mapping[str, str] = MappingProxyType({})


def main() -> None:
    parts: dict[str, Part] = {
        "cold": Part(cold, TWO),
        "warm": Part(warm, tuple(MODELS)),
        "apart": Part(apart, TWO[:1], SHORT_SPIN),
        "kept": Part(kept, TWO[:1]),
        "stall": Part(stall, TWO),
        "rested": Part(rested, TWO, SHORT_SPIN),
        "large": Part(large_pool, TWO[:1]),
    }
    parser = argparse.ArgumentParser(description="Hand-offs between real engines, beside vLLM's own.")
    parser.add_argument("--only", nargs="*", choices=[*parts], default=[*parts], help="which measures")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--quick", action="store_true", help="few rounds of one request: whether it runs, no numbers")
    options = parser.parse_args()
    env = ALLOCATOR | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).resolve().parent}"}
    print(HEAD.format(machine=machine()), flush=True)
    for part in (parts[name] for name in options.only):
        with (
            tempfile.TemporaryDirectory() as folder,
            Zygote(Path(folder) / "zygote.log", {**env, **part.env}) as zygote,
        ):
            for name in part.models:
                if name in options.models:
                    part.measure(Bench(zygote, Path(folder), options.quick), name)
    print(HOW_TO_READ)


def machine() -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("kvhma", "nixl"))
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores for all engines, vLLM {vllm_version()} on CPUs, {versions}"


HEAD = """\
# Results in real engines, against vLLM's own connector

Made by `benches/connectors.py` (`make bench-e2e`). The machine is shared and noisy: ratios, not times, count.
[What the columns are, and what could favour a side](../docs/benchmarks-engines.md#whole-engines).

{machine}"""

HOW_TO_READ = """
### How to read this

Columns are medians. A column of a vLLM connector also has the median of its ratios to kvhma in each round, with their
quartiles in brackets. A ratio above 1 is better for kvhma; with 1 between the quartiles it is a tie. A measurement that
was taken once has no quartiles. A difference that is not positive has no ratio.

*NixlConnector* is vLLM's as it is. *Even terms* is the same class, whose progress thread sleeps as long as kvhma's and
whose worker may use all cores. *Own hit* is an engine without a connector whose prefix cache has the prompt, cut to
whole blocks and one token. *Computes it* is the same engine computing it. No hit is possible where a block is longer
than the prompt, or vLLM caches no prefixes of the model on CPUs. There a prompt of one token stands for it, which is
faster than a hit would be. The row of own hits shows the same in D of each connector.

A load lasts from the call of `start_load_kv` that starts it to the end of the call of `get_transfer_results` that
reports it, in D's worker. A time of the connector in a step is the sum of vLLM's calls of it in D's worker; steps
before the loads only decode the other answer. The gap between two tokens is the time from step to step of D's worker.
*P's answer* is its time to the one token that it generates.

Processor time is that of each thread while P computes the prompt, and from the request at D to 30 ms after its second
token. An engine's own threads spin while they wait, so their time includes waiting; time within calls of the connector
does not. With 16 at a time it is a sixteenth of the sum. Groups of threads that need less than 0.05 ms with every
connector have no row.

The first request is the first hand-off of two engines that have computed other prompts before. With `prefill_engines`
(*kvhma, met*) D knows P's address when it starts, and has done the handshake before that request; NixlConnector has no
such setting.
"""

if __name__ == "__main__":
    main()
