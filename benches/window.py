# SPDX-License-Identifier: Apache-2.0
"""What the bound of the bytes in flight over TCP costs: reads with it and without it, in turns, on links of some rates.

Hosts are network namespaces of this machine (needs `ip` and `tc`, and the right to make them). Prints Markdown, which
is benches/RESULTS_WINDOW.md. Needs `tests` on the path.

    python benches/window.py [--rates 1gbit unlimited] [--rounds 25]
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvhma.nixl import Agent
from kvhma.nixl.peer import Peer
from kvhma.nixl.window import WINDOW_BYTES
from support.flat import flat_geometry, labelled

MIB = 1 << 20
LOADS = ((64 * MIB, 64 << 10), (64 * MIB, 8 << 10), (2 * MIB, 64 << 10))
"""Bytes of a load, and of a descriptor."""

WORKER = Path(__file__).parents[1] / "tests/nixl/worker.py"


cached = functools.cache(labelled)


def seconds(agent: Agent, peer: Peer, memory: np.ndarray, nbytes: int, row: int) -> float:
    """Time of a load: rows in random order, polled as often as the connector does."""
    order = np.random.default_rng(1).permutation(nbytes // row)
    rows = np.zeros((len(order), 3), np.uint64)
    rows[:, 1] = row
    local, remote = rows.copy(), rows
    local[:, 0] = memory.ctypes.data + np.arange(len(order)) * row
    remote[:, 0] = peer.geometry.regions[0].base + order * row
    began = time.perf_counter()
    transfer = agent.read(peer, local, remote)
    while transfer.poll() == "running":
        time.sleep(5e-4)
    took = time.perf_counter() - began
    expected = cached(nbytes // 4096, seed=1).reshape(-1, row)[order].reshape(-1)
    if not np.array_equal(memory[:nbytes], expected):
        sys.exit("a byte is wrong")
    return took


def read(payload: bytes, nbytes: int, row: int, rounds: int) -> None:
    """Print the fastest times without and with the bound, in milliseconds, and their ratio."""
    memory = np.zeros(nbytes, np.uint8)
    with Agent("D") as agent:
        agent.register(flat_geometry(memory))
        peer = agent.connect(payload)
        bounded = peer.window
        if bounded is None:
            sys.exit("the transport is not TCP")
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds + 1):
            for has_bound, found in times.items():
                peer.window = bounded if has_bound else None
                found.append(seconds(agent, peer, memory, nbytes, row))
        free, kept = min(times[False][1:]) * 1e3, min(times[True][1:]) * 1e3
        print("cells", f"{free:.1f}", f"{kept:.1f}", f"{kept / free:.2f}")


def main() -> None:
    from following import Host, cable, limit

    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", nargs="+", default=["1gbit", "unlimited"])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    print(
        "# The bound of the bytes in flight over TCP\n\nMade by `benches/window.py`: two agents in two network "
        f"namespaces, reads in turns, {options.rounds} rounds, the fastest of each. The bound is {WINDOW_BYTES / MIB:g} MiB, in "
        f"pieces of at most half of it. {platform.machine()}, {os.cpu_count()} cores, load of the machine "
        f"{os.getloadavg()[0]:.0f}.\n"
    )
    print("| link | load | descriptors of | without the bound | with it | ratio |\n|---|---|---|---|---|---|")
    with cable() as hosts:

        def start(host: Host, *command: str) -> subprocess.Popen[str]:
            inside = ["ip", "netns", "exec", host.namespace, sys.executable, *command]
            environment = os.environ | host.env
            return subprocess.Popen(
                inside,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

        for rate in options.rates:
            limit(hosts, rate)
            for nbytes, row in LOADS:
                with start(hosts[0], str(WORKER), "P", str(nbytes // 4096), "1") as p:
                    assert p.stdout is not None
                    sizes = map(str, (nbytes, row, options.rounds))
                    with start(hosts[1], __file__, p.stdout.readline().strip(), *sizes) as d:
                        output, _ = d.communicate()
                    p.communicate()
                (cells,) = (line.split()[1:] for line in output.splitlines() if line.startswith("cells"))
                free, kept, ratio = cells
                name = "no limit" if rate == "unlimited" else rate
                print(
                    f"| {name} | {nbytes // MIB} MiB | {row >> 10} KiB | {free} ms | {kept} ms | {ratio} |", flush=True
                )


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("-"):
        read(bytes.fromhex(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        main()
