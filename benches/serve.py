# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` against P, D and a proxy: kvhma, vLLM's NixlConnector in three forms, and one plain engine.

Columns serve the same random prompts in turns, and the engines of the other columns are stopped meanwhile. A round is
one run of each column, or of the two on even terms; ratios are taken within a round. Prints Markdown, which is
benches/RESULTS_SERVE.md. Needs the engines of `make e2e`, and `tests` on the path.

    python benches/serve.py [--models gemma3 DIRECTORY ...] [--cells 0:10 0:32 ...] [--starts 3] [--requests 80]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from handoffs import cpu
from handoffs.alone import alone
from handoffs.bars import draw
from handoffs.pairs import ENV, transfer
from handoffs.tables import EVEN, HIT, OURS, THEIRS
from harness import compared, rotated, table
from support.engines import Engine, Zygote, make_models
from support.engines.engine import free_port
from support.engines.serve_client import bench_serve
from support.engines.tiny import WITH_STATE
from support.engines.zygote import ENVIRONMENT, vllm_version
from support.handoff import arguments
from support.tokenizer import with_tokenizer
from support.waiting import until

WITHOUT_HMA, TICKETS, PLAIN = "NixlConnector, without HMA", "kvhma, tickets", "one engine"
COLUMNS = (OURS, TICKETS, EVEN, THEIRS, WITHOUT_HMA, PLAIN)
SETTINGS = {OURS: OURS, TICKETS: OURS, EVEN: EVEN, THEIRS: THEIRS, WITHOUT_HMA: THEIRS, PLAIN: HIT}

SAME = {
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 4096,
    "skip_tokenizer_init": False,
}
HOST = "127.0.0.1"


class Workload(NamedTuple):
    """Mean tokens of a prompt and of an answer; each varies by half."""

    name: str
    tokens_in: int
    tokens_out: int


WORKLOADS = (Workload("ShareGPT's means", 215, 194), Workload("long prompts", 2000, 32))


class Measure(NamedTuple):
    """A number of the client: its key, its unit, and whether more is better."""

    what: str
    key: str
    unit: str
    more: bool = False


MEASURES = (
    Measure("requests", "request_throughput", "/s", more=True),
    Measure("time to first token, mean", "mean_ttft_ms", " ms"),
    Measure("the same, p99", "p99_ttft_ms", " ms"),
    Measure("time per output token, mean", "mean_tpot_ms", " ms"),
    Measure("processor time of the engines, a request", "cpu_ms", " ms"),
)


@dataclass
class Column:
    """The engines of a column, and where a client asks them."""

    engines: list[Engine]
    port: int

    def ask(
        self, zygote: Zygote, folder: Path, model: Path, workload: Workload, at_once: int, requests: int, seed: int
    ) -> dict[str, Any]:
        """Run vLLM's client once; return what it measured, and `cpu_ms`.

        Raises:
            RuntimeError: the client failed, or a request did.
        """
        options = {
            "base-url": f"http://{HOST}:{self.port}",
            "tokenizer": model,
            "random-input-len": workload.tokens_in,
            "random-output-len": workload.tokens_out,
            "random-range-ratio": 0.5,
            "num-prompts": requests,
            "max-concurrency": at_once,
            "seed": seed,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": 99,
        }
        pids = [pid for engine in self.engines for pid in engine.pids()]
        before = cpu.read(pids)
        found = bench_serve(zygote, folder, options, "--save-detailed")
        found["cpu_ms"] = 1e3 * sum(cpu.spent(before, cpu.read(pids)).values()) / requests
        if found["completed"] != requests:
            failed = next(filter(None, found["errors"]), "")
            raise RuntimeError(f"{requests - found['completed']} of {requests} requests failed: {failed[-2000:]}")
        return found


@contextlib.contextmanager
def proxy(p: int, d: int, *, tickets: bool) -> Iterator[int]:
    """The port of ``kvhma.proxy`` before P and D, which it also is before engines of vLLM's connector."""
    port = free_port()
    command = [sys.executable, "-m", "kvhma.proxy", "--prefill", f"http://{HOST}:{p}", "--decode", f"http://{HOST}:{d}"]
    command += ["--host", HOST, "--port", str(port), *(["--tickets"] if tickets else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2) as reply:
        return bool(reply.status == 200)
    return False


@contextlib.contextmanager
def served(zygote: Zygote, model: Path, name: str, folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Column]]:
    """All columns, ready to be asked."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Column] = {}
        for index, column in enumerate(columns):
            more: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True} if column == WITHOUT_HMA else {}
            base = arguments(name) | SAME | more
            ports = [free_port() for _ in range(1 if column == PLAIN else 2)]
            engines = [
                Engine(
                    zygote,
                    model,
                    folder / f"{index}-{side}.log",
                    kv_transfer_config=transfer(SETTINGS[column], 0),
                    env=dict(ENV),
                    engine_args=base,
                    http=(HOST, port),
                )
                for side, port in zip("pd", ports, strict=False)
            ]
            for engine in engines:
                engine.start()
                stack.callback(engine.kill)
            for engine in engines:
                engine.ready()
            asked = ports[0] if column == PLAIN else stack.enter_context(proxy(*ports, tickets=column == TICKETS))
            found[column] = Column(engines, asked)
            until(lambda asked=asked: answers(asked))
        yield found


@dataclass
class Table:
    """The rounds of one model, workload and concurrency: of each, the client's numbers by column."""

    title: str
    requests: int
    starts: int
    rounds: list[Mapping[str, dict[str, Any]]] = field(default_factory=list)

    def markdown(self) -> str:
        """Medians, and kvhma's ratio to each other column in the same round with its quartiles."""
        columns = self._columns()
        whole, even = sum(len(found) == len(columns) for found in self.rounds), len(self.rounds)
        rounds = f"{whole} rounds" + (f" ({even} on even terms)" if even > whole else "")
        head = [f"{self.requests} requests in a run, {rounds}, {self.starts} starts", *columns]
        cells = ([measure.what, *(self._cell(measure, column) for column in columns)] for measure in MEASURES)
        return f"\n### {self.title}\n\n{table(head, cells)}"

    def rates(self) -> dict[str, float]:
        """Requests a second of each column, as a share of kvhma's in the same round: medians."""
        return {
            column: statistics.median(1 / ratio for ratio in self._ratios(MEASURES[0], column))
            for column in self._columns()
        }

    def _columns(self) -> list[str]:
        return [column for column in COLUMNS if any(column in found for found in self.rounds)]

    def _cell(self, measure: Measure, column: str) -> str:
        values = [found[column][measure.key] for found in self.rounds if column in found]
        shown = f"{statistics.median(values):,.2f}{measure.unit}"
        return shown if column == OURS else f"{shown}, {compared(self._ratios(measure, column))}"

    def _ratios(self, measure: Measure, column: str) -> list[float]:
        """Kvhma compared with a column in each round; above 1 is better for kvhma, for times and for rates."""
        pairs = [(found[OURS][measure.key], found[column][measure.key]) for found in self.rounds if column in found]
        return [ours / theirs if measure.more else theirs / ours for ours, theirs in pairs]


HEAD = """\
# Results of serving, by vLLM's own client

Made by `benches/serve.py` (`make bench-serve`): `vllm bench serve` asks P and D through `kvhma.proxy`, or one engine
directly. The engines are vLLM {vllm} on CPUs, in float32; tiny models have random weights. Prompts are random, and lengths
vary by half. Prefix caches are off. With few requests in a run p99 is about the slowest.

The machine is shared and noisy, so ratios count: above 1 is better for kvhma in each row. They are taken within a round,
so they need not be those of the medians beside them. Brackets have the quartiles of the ratios; with 1 between them it is
a tie. *Even terms* may have more rounds than other columns, since differences are small there.

*NixlConnector* is vLLM's as it is, and its progress threads spin. *Even terms* is the same class, whose threads sleep as
kvhma's do. *Without HMA* starts it with `--disable-hybrid-kv-cache-manager`. *One engine* has all cores and no hand-off.

vLLM's own figures for the columns *without HMA* and *NixlConnector* are of vllm#32204, with ShareGPT on eight H100:
13.48 and 14.65 requests a second, 92.65 and 45.78 ms to the first token on average, 2,410 and 563 ms at p99.

{machine}"""


CELLS = "0 short prompts or 1 long prompts, a colon, and how many are asked at a time"


def cell(text: str) -> tuple[int, int]:
    workload, _, at_once = text.partition(":")
    return int(workload), int(at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description="vllm bench serve, beside vLLM's own connector.")
    parser.add_argument("--models", nargs="*", default=["gemma3", "nemotron_h"], help="tiny models, or directories")
    parser.add_argument(
        "--cells", nargs="*", type=cell, default=[(w, c) for w in (0, 1) for c in (1, 10, 32)], help=CELLS
    )
    parser.add_argument("--columns", nargs="*", default=[*COLUMNS], choices=COLUMNS)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of each start")
    parser.add_argument(
        "--even-rounds", type=int, default=2, help="more rounds of kvhma and even terms, after each round"
    )
    parser.add_argument("--requests", type=int, default=80, help="of a run; a tenth if one is asked at a time")
    parser.add_argument("--picture", type=Path, help="an SVG of the requests a second")
    options = parser.parse_args()
    env = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).resolve().parent}"}
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores for engines, proxy and client"
    print(HEAD.format(machine=machine, vllm=vllm_version()), flush=True)
    shown: dict[str, dict[str, float]] = {}
    for name in options.models:
        tables: dict[tuple[int, int], Table] = {}
        try:
            for start in range(options.starts):
                with tempfile.TemporaryDirectory() as made, Zygote(Path(made) / "zygote.log", env) as zygote:
                    measure(zygote, Path(made), name, start, options, tables)
        finally:  # what was measured before a failure is worth its hour
            for one in tables.values():
                print(one.markdown(), flush=True)
                shown[one.title] = one.rates()
    if options.picture:
        about = "Requests a second, compared with kvhma's in the same round: medians; longer is better"
        options.picture.write_text(draw("Serving, by vLLM's own client", about, shown, "{:.2f} ×".format))


def measure(
    zygote: Zygote,
    folder: Path,
    name: str,
    start: int,
    options: argparse.Namespace,
    tables: dict[tuple[int, int], Table],
) -> None:
    """Run the rounds of one start of all engines."""
    is_real = Path(name).is_dir()
    model = Path(name) if is_real else with_tokenizer(make_models(zygote, folder, name)[0], folder / "model")
    columns = rotated([one for one in options.columns if one != WITHOUT_HMA or name not in WITH_STATE], start)
    with served(zygote, model, "" if is_real else name, folder, columns) as found:
        running = [engine for column in found.values() for engine in column.engines]
        for column in columns:  # the first run of engines does much for the first time
            with alone(found[column].engines, running):
                found[column].ask(zygote, folder, model, WORKLOADS[0], 4, 8, 0)
        even = [column for column in (OURS, EVEN) if column in columns]
        more = [even[:: -1 if (start + number) % 2 else 1] for number in range(options.even_rounds)]
        rounds = [order for number in range(options.rounds) for order in (rotated(columns, start + number), *more)]
        for index, at_once in options.cells:
            workload = WORKLOADS[index]
            title = f"{Path(name).name}, {workload.name}: {workload.tokens_in:,} tokens in, "
            title += f"{workload.tokens_out} out, {at_once} at a time"
            requests = options.requests if at_once > 1 else max(1, options.requests // 10)
            for number, order in enumerate(rounds):
                results: dict[str, dict[str, Any]] = {}
                for column in order:
                    with alone(found[column].engines, running):
                        seed = 1000 * start + number
                        result = found[column].ask(zygote, folder, model, workload, at_once, requests, seed)
                    results[column] = result
                    print(f"{title}: {column}: {result['request_throughput']:.2f}/s", file=sys.stderr, flush=True)
                tables.setdefault((index, at_once), Table(title, requests, options.starts)).rounds.append(results)


if __name__ == "__main__":
    main()
