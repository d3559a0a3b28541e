# SPDX-License-Identifier: Apache-2.0
"""128 prefill engines and 1,024 decode ranks on one machine: real listeners, leases, renewers and plans; no bytes move.

Prefill engines are in some processes, decode engines of eight ranks in others, as `support.cluster` makes them. Prints
Markdown, which is benches/RESULTS_SCALE.md. Needs neither vLLM nor NIXL.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import platform
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.cluster import MODEL, TOKENS, DecodeHost, PrefillHost, Took
from support.listening import until

DRIVERS = 4
"""Threads of a decode process that hand off requests."""


@dataclass(frozen=True)
class Scale:
    """The size of a simulation.

    Attributes:
        prefill: prefill engines.
        prefill_ranks: of each.
        decode: decode engines.
        decode_ranks: of each.
        met: prefill engines that each decode engine reads from.
        requests: of each decode engine.
        processes: with prefill engines, and as many with decode engines.
        rate: hand-offs a second; None for the highest possible rate.
        settings: of the decode engines.
    """

    prefill: int = 128
    prefill_ranks: int = 2
    decode: int = 128
    decode_ranks: int = 8
    met: int = 4
    requests: int = 16
    processes: int = 4
    rate: float | None = 40.0
    secret: bool = False
    settings: tuple[tuple[str, Any], ...] = ()


def resident() -> int:
    """Bytes of memory of this process that it does not share."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def prefill_process(pipe: Connection, scale: Scale) -> None:
    before = resident()
    host = PrefillHost(scale.prefill // scale.processes, scale.prefill_ranks, secret=scale.secret)
    pipe.send(None)
    while (order := pipe.recv()) != "end":
        if order == "state":
            pipe.send(
                (resident() - before, threading.active_count(), descriptors(), host.held(), dict(host.counted.numbers))
            )
        else:
            pipe.send([host.finish(index, order) for index in range(len(host.leases))])
    host.close()


def decode_process(pipe: Connection, scale: Scale) -> None:
    before = resident()
    host = DecodeHost(scale.decode // scale.processes, scale.decode_ranks, secret=scale.secret, **dict(scale.settings))
    empty = resident() - before
    pipe.send(None)
    while (order := pipe.recv()) != "end":
        if order == "state":
            known = sum(len(rank._engines) for engine in host.engines for rank in engine.ranks)
            numbers: dict[str, int] = {}
            for engine in host.engines:
                for name, number in engine.counted.numbers.items():
                    numbers[name] = numbers.get(name, 0) + number
            pipe.send((resident() - before - empty, threading.active_count(), descriptors(), known, numbers))
        else:
            rate = None if scale.rate is None else scale.rate / scale.processes
            pipe.send(host.run(order, drivers=DRIVERS, rate=rate))
    host.close()


@contextlib.contextmanager
def processes(target: Any, scale: Scale) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, running = [], []
    for _ in range(scale.processes):
        pipe, other = context.Pipe()
        running.append(context.Process(target=target, args=(other, scale), daemon=True))
        running[-1].start()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    yield pipes
    for pipe in pipes:
        pipe.send("end")
    for one in running:
        one.join(30)


def ask(pipes: list[Connection], orders: list[Any]) -> list[Any]:
    for pipe, order in zip(pipes, orders, strict=True):
        pipe.send(order)
    return [pipe.recv() for pipe in pipes]


@dataclass
class Found:
    """The results of a simulation. Memory is that beyond an empty process, threads are all."""

    took: Took
    seconds: float
    prefill_states: list[tuple[int, int, int, int, dict[str, int]]]
    decode_states: list[tuple[int, int, int, int, dict[str, int]]]

    def count(self, name: str) -> int:
        return sum(
            number
            for *_, numbers in (*self.prefill_states, *self.decode_states)
            for key, number in numbers.items()
            if key.startswith(name)
        )


def simulate(scale: Scale) -> Found:
    """Hand off requests, from `met` prefill engines to each decode engine in turns."""
    with processes(prefill_process, scale) as prefill, processes(decode_process, scale) as decode:
        each = -(-scale.decode * scale.requests // scale.prefill)
        finished = list(itertools.chain(*ask(prefill, [each] * scale.processes)))
        left = [iter(some) for some in finished]
        work = [
            [next(left[(number + request % scale.met) % scale.prefill]) for request in range(scale.requests)]
            for number in range(scale.decode)
        ]
        share = scale.decode // scale.processes
        results = ask(decode, [work[first : first + share] for first in range(0, scale.decode, share)])
        total = Took()
        for took, _ in results:
            total += took

        def held() -> int:
            return sum(state[3] for state in ask(prefill, ["state"] * scale.processes))

        with contextlib.suppress(AssertionError):  # the table has a column for leases that are left
            until(lambda: held() == 0, seconds=60)
        states = ask(prefill, ["state"] * scale.processes), ask(decode, ["state"] * scale.processes)
        return Found(total, max(seconds for _, seconds in results), *states)


def milliseconds(values: list[float]) -> str:
    if len(values) < 2:
        return "–"
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49] * 1e3:.2f} / {cuts[98] * 1e3:.1f}"


def row(title: str, scale: Scale, found: Found) -> str:
    took = found.took
    questions = len(took.question)
    cells = [
        title,
        f"{len(took.path):,}",
        f"{questions / found.seconds:,.0f}",
        milliseconds(took.plan),
        milliseconds(took.question),
        milliseconds(took.path),
        f"{found.count('handshakes'):,}",
        milliseconds(took.handshake),
        f"{len(took.errors)}",
        f"{found.count('side_channel_refused')}",
        f"{sum(state[3] for state in found.prefill_states)}",
    ]
    return f"| {' | '.join(cells)} |"


def costs(scale: Scale, found: Found) -> str:
    """The cost of one engine in its process."""
    p, d = found.prefill_states, found.decode_states
    known = sum(state[3] for state in d)
    kib = 1 / 1024
    memory = sum(state[0] for state in p) / scale.prefill * kib
    lines = [
        "| a prefill engine, in its scheduler's process | |",
        "|---|---|",
        f"| memory, with {scale.decode * scale.decode_ranks * scale.met // scale.prefill} ranks connected | {memory:,.0f} KiB |",
        f"| threads | {sum(state[1] for state in p) / scale.prefill:.2f} |",
        f"| descriptors | {sum(state[2] for state in p) / scale.prefill:.0f} |",
        "",
        f"| a decode engine of {scale.decode_ranks} ranks | |",
        "|---|---|",
        f"| memory of a rank for each prefill engine that it knows | {sum(state[0] for state in d) / known * kib:,.0f} KiB |",
        f"| threads, of all its processes | {sum(state[1] for state in d) / scale.decode:.2f} |",
        f"| descriptors, of all its processes | {sum(state[2] for state in d) / scale.decode:.0f} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Many engines in simulation.")
    parser.add_argument("--quick", action="store_true", help="few of all: whether it runs, no numbers")
    options = parser.parse_args()
    full = Scale()
    if options.quick:
        full = replace(full, prefill=8, decode=8, requests=8, met=4, processes=2)
    print(
        HEAD.format(
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
        )
    )
    print(f"\n## {full.prefill} prefill engines, {full.decode * full.decode_ranks:,} decode ranks\n")
    print(
        "| | ranks' loads | questions/s | plan ms | question ms | control path ms | handshakes | each ms | errors "
        "| connections refused | leases left |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    few = (("max_peers", full.met // 2),)
    cases = {
        f"{full.rate:.0f} hand-offs/s": full,
        "as many as there can be": replace(full, rate=None),
        "the same, with a secret": replace(full, rate=None, secret=True),
        f"each rank meets {full.met}, `max_peers` is {full.met}": replace(
            full, rate=None, settings=(("max_peers", full.met),)
        ),
        f"each rank meets {full.met}, `max_peers` is {full.met // 2}": replace(full, rate=None, settings=few),
    }
    first: Found | None = None
    for title, scale in cases.items():
        found = simulate(scale)
        print(row(title, scale, found), flush=True)
        for error in sorted(set(found.took.errors))[:3]:
            print(f"<!-- {error} -->")
        first = first or found
    assert first is not None
    print(f"\n## What one engine costs\n\n{costs(full, first)}")
    print(NOTES.format(model=MODEL, tokens=TOKENS, scale=full, drivers=DRIVERS * full.processes))


HEAD = """\
# Results of many engines

Made by `benches/scale.py` (`make bench-scale`). All engines share one machine, which is noisy: counts
and how they grow are meaningful, times hardly.

{machine}"""

NOTES = """
Listeners, leases, renewers, handshakes, plans and questions are the connector's; NIXL's work is left out, and so are
the bytes. {model}, {tokens:,} tokens. Prefill engines have {scale.prefill_ranks} ranks. Decode engines have
{scale.decode_ranks}, and read from {scale.met} prefill engines each, in turns. {drivers} threads hand off requests, in
{scale.processes} processes beside {scale.processes} with the prefill engines.

Times are p50 / p99 of one rank. *Plan* is from the order to the plan of the transfer, *question* is asking P whether it
held the blocks and its answer, *control path* is both. A quarter of the requests is claimed and renewed meanwhile; the
scheduler releases all of them. *Leases left*: requests that P still holds a moment after the last hand-off. In the last
row each rank has room for half of the engines that it meets."""

if __name__ == "__main__":
    main()
