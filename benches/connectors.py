# SPDX-License-Identifier: Apache-2.0
"""KvhmaConnector beside vLLM's own NixlConnector and beside no connector, in real engines that serve tiny models.

In every round each of them takes its turn with the same prompts; only the ratio within a round counts. Times are
measured outside of the connectors, around vLLM's calls. Prints Markdown, which is benches/RESULTS_E2E.md, and draws
docs/assets/waterfall.svg. Needs the engines of `make e2e`, and `tests` on the path.

    python benches/connectors.py [--quick] [--only cold warm apart kept stall rested] [--models gemma3 ...]
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
from handoffs.tables import COMPUTED, EVEN, HIT, MET, OURS, THEIRS, Row, Tables
from harness import rotated
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
Cell = tuple[str, Callable[[Row, str], str], str]
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

BEYOND = "first token, beyond an own hit without a connector"
NEXT = "second token, after the first"
PREFILL = "P's answer"
SHARE = "the connector's calls and threads, and NIXL's"

TIMES: dict[str, Cell] = {
    "first token": ("first token", Row.ratio, EVEN),
    "load": ("load", Row.ratio, EVEN),
    NEXT: (NEXT, Row.ratio, EVEN),
    PREFILL: (PREFILL, Row.ratio, EVEN),
    "first token, as it is": ("first token", Row.ratio, THEIRS),
    "load, as it is": ("load", Row.ratio, THEIRS),
    "beyond an own hit": (BEYOND, Row.medians, EVEN),
    "first token, with kvhma and computed": ("first token", Row.medians, COMPUTED),
}
"""Columns of the first table: which measure, as what, and of whom."""

PROCESSOR: dict[str, Cell] = {
    "P, while it computes": ("P, prefill: all processes", Row.ratio, EVEN),
    "P's scheduler": ("P, prefill, scheduler: all threads", Row.ratio, EVEN),
    "P, while D reads": ("P, hand-off: all processes", Row.ratio, EVEN),
    "D": ("D: all processes", Row.ratio, EVEN),
    "D's scheduler": ("D, scheduler: all threads", Row.ratio, EVEN),
    "connector and NIXL, at P": (f"P, prefill: {SHARE}", Row.medians, EVEN),
    "connector and NIXL, at D": (f"D: {SHARE}", Row.medians, EVEN),
    "in its calls by P's scheduler": ("P, prefill, scheduler: in calls of the connector", Row.medians, EVEN),
    "in its calls by D's scheduler": ("D, scheduler: in calls of the connector", Row.medians, EVEN),
}

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

PICTURE = Path(__file__).parents[1] / "docs/assets/waterfall.svg"
PICTURED = "gemma3"


def warm(bench: Bench, tables: Tables, name: str) -> None:
    """Later requests, beside their floors."""
    found = rows_of(bench, CONNECTORS)
    for start in range(starts := 1 if bench.quick else STARTS):
        with bench.pairs(name, *rotated((*CONNECTORS, HIT), start)) as pairs:
            check_caches(pairs)
            measure(found, pairs)
            if start == starts - 1 and name == PICTURED and not bench.quick:
                stages = {which: watched(pairs, which, WATERFALLS) for which in CONNECTORS}
                title = f"{name}: a request of 301 tokens, from D's client to its first token"
                PICTURE.write_text(waterfall.draw(title, stages), encoding="utf-8")
    for rows in found:
        rows.fill(tables, "Warm hand-offs", name, TIMES)
        rows.fill(tables, "Processor time of a request", name, PROCESSOR)
        if rows.at_once == 1:
            for row in rows.counts:
                title = "Descriptors and bytes of a request"
                tables.add(title, f"{name}, {rows.length:,} tokens", {row.what: row.beside(EVEN)})


def apart(bench: Bench, tables: Tables, name: str) -> None:
    """The same with P and D on separate cores, as if neither shared any with the other."""
    columns = (OURS, EVEN)
    found = rows_of(bench, columns)
    for start in range(1 if bench.quick else APART_STARTS):
        with bench.pairs(name, *rotated((*columns, HIT), start), apart=True) as pairs:
            measure(found, pairs)
    times = {column: cell for column, cell in TIMES.items() if cell[2] != THEIRS}
    for rows in found:
        rows.fill(tables, "Warm hand-offs, P and D on separate cores", name, times)


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
        self.rounds = self.starts = 0
        self._seconds = 0.0
        self.counts = [Row("descriptors", ""), Row("bytes", "MiB")]
        self.found: dict[str, Row] = {}

    def measure(self, pairs: Pairs) -> None:
        """Run some more rounds, with engines that have just started."""
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
                    floor = statistics.median(pair.hit(asked))
                else:
                    turns[which] = pair.turn(asked)
                    spent = turns[which].processor
            for what, seconds in spent.items():
                self._add(what, COMPUTED if which == HIT else which, seconds)
        for which, turn in turns.items():
            for what, value in measures(turn, floor).items():
                self._add(what, which, value)

    def _add(self, what: str, column: str, value: float) -> None:
        self.found.setdefault(what, Row(what)).add(column, value)

    def fill(self, tables: Tables, title: str, name: str, columns: Mapping[str, Cell]) -> None:
        """Add a line to a table."""
        cells = {column: show(self.found[what], of) for column, (what, show, of) in columns.items()}
        tables.add(title, f"{name} ({MODELS[name]}), {self.at_once} at a time, {self.length:,} tokens", cells)


def check_caches(pairs: Pairs) -> None:
    """Refuse engines that hold different caches."""
    found = {which: pairs[which].d.caches() for which in (*CONNECTORS, HIT)}
    if len(set(found.values())) > 1:
        raise RuntimeError(f"the engines do not hold the same: {found}")


def measures(turn: Turn, floor: float) -> dict[str, float]:
    """The rows of a turn. `floor` is the first token of an own hit in an engine without a connector."""
    first = statistics.median(turn.first_tokens)
    return {
        "load": statistics.median(turn.loads),
        "first token": first,
        BEYOND: first - floor,
        NEXT: statistics.median(turn.after),
        PREFILL: statistics.median(turn.prefills),
    }


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


def cold(bench: Bench, tables: Tables, name: str) -> None:
    """The first hand-off between two engines."""
    load, token = Row("first load"), Row("its time to first token, less that of a warm one")
    columns = (OURS, MET, THEIRS, EVEN)
    starts = 1 if bench.quick else COLD_STARTS
    for start in range(starts):
        with bench.pairs(name, *columns) as pairs:
            for which in rotated(columns, start):
                first, *others = (pairs.turn(which, [prompt]) for prompt in prompts((start, which), [301] * 4))
                load.add(which, first.loads[0])
                token.add(which, first.first_tokens[0] - statistics.median(turn.first_tokens[0] for turn in others))
    for row in (load, token):
        title = f"First request between two engines, 301 tokens, {starts} starts, handshake included"
        tables.add(title, f"{name} ({MODELS[name]}): {row.what}", row.cells())


def kept(bench: Bench, tables: Tables, name: str) -> None:
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
    for row in (steps, *rows.values()):
        tables.add(f"{name}: P holds a request for {KEPT_SECONDS:g} s, {rounds} rounds", row.what, row.cells())


def stall(bench: Bench, tables: Tables, name: str, how: str = "") -> None:
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
    title = f"16 loads of 2,001 tokens while D gives another answer, {starts * rounds} rounds of {starts} starts"
    for row in (*values.values(), nbytes):
        tables.add(title, row.what, {f"{name}{how}": row.beside(EVEN)})


def rested(bench: Bench, tables: Tables, name: str) -> None:
    """The same as :func:`stall` with engines that do not spin for long, as on machines with a core for each process."""
    stall(bench, tables, name, ", short spins")


def stalled(turn: Turn) -> dict[str, float]:
    processor = {what: seconds * len(turn.loads) for what, seconds in turn.processor.items()}
    return {
        "longest time of the connector in a step": max(turn.calls),
        "longest time of it in a step before the loads": max(turn.quiet_calls),
        "median of its time in a step before the loads": statistics.median(turn.quiet_calls),
        "longest gap between two tokens of the other answer": max(turn.gaps),
        "load, median of 16": statistics.median(turn.loads),
        "load, slowest of 16": max(turn.loads),
        "first token, median of 16": statistics.median(turn.first_tokens),
        "first token, slowest of 16": max(turn.first_tokens),
        "processor time of D, all processes": processor["D: all processes"],
        "processor time of NIXL's threads in D": processor.get("D, worker: NIXL", 0.0),
    }


class Part(NamedTuple):
    """The measures, their models, and the environment in which the engines start."""

    measure: Callable[[Bench, Tables, str], None]
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
    }
    parser = argparse.ArgumentParser(description="Hand-offs between real engines, beside vLLM's own.")
    parser.add_argument("--only", nargs="*", choices=[*parts], default=[*parts], help="which measures")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--quick", action="store_true", help="few rounds of one request: whether it runs, no numbers")
    options = parser.parse_args()
    env = ALLOCATOR | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).resolve().parent}"}
    tables = Tables()
    try:
        for part in (parts[name] for name in options.only):
            with (
                tempfile.TemporaryDirectory() as folder,
                Zygote(Path(folder) / "zygote.log", {**env, **part.env}) as zygote,
            ):
                for name in part.models:
                    if name in options.models:
                        part.measure(Bench(zygote, Path(folder), options.quick), tables, name)
    finally:  # what was measured before a failure is worth its hour
        print(HEAD.format(machine=machine()), tables.markdown(), HOW_TO_READ, sep="\n")


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

A ratio is vLLM's connector compared with kvhma in each round: the median, with the quartiles in brackets. Above 1 is
better for kvhma; with 1 between the quartiles it is a tie. Other cells are medians; of two, kvhma's is the first and
vLLM's connector, or who computes the prompt, is the second. A difference that is not positive has no ratio.

*NixlConnector*, or *as it is*, is vLLM's. *Even terms* is the same class, whose progress thread sleeps as long as
kvhma's and whose worker may use all cores. All ratios without a name are on even terms. *Own hit*
is an engine without a connector whose prefix cache has the prompt, cut to whole blocks and one token. Where no hit is
possible, a prompt of one token stands for it: if a block is longer than the prompt, and for Mamba2 and MLA on CPUs.

A load lasts from the call of `start_load_kv` that starts it to the end of the call of `get_transfer_results` that
reports it, in D's worker. A time of the connector in a step is the sum of vLLM's calls of it in D's worker; steps
before the loads only decode the other answer. The gap between two tokens is the time from step to step of D's worker.
*P's answer* is its time to the one token that it generates. *Short spins*: vLLM's processes spin for 1 ms, not a second.

Processor time is that of each thread while P computes the prompt, and from the request at D to 30 ms after its second
token. An engine's own threads spin while they wait, so their time includes waiting; time within calls of the connector
does not. With 16 at a time it is a sixteenth of the sum.

The first request is the first hand-off of two engines that have computed other prompts before. With `prefill_engines`
(*kvhma, met*) D knows P's address when it starts, and has done the handshake before.
"""

if __name__ == "__main__":
    main()
