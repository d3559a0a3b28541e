# SPDX-License-Identifier: Apache-2.0
"""`kvhma replay` beside kvcache-simulator and Dynamo's replay on the same files, as whole processes, in turns.

Prints Markdown, which is benches/RESULTS_REPLAY.md.

    python benches/replay.py TRACE PYTHON [--rounds 3] [--requests 1000000]

TRACE is in Mooncake's form; it is repeated with fresh identities and shifted times. PYTHON has the other two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import compared, rotated, section

OURS = [sys.executable, "-m", "kvhma", "replay"]
ALL = ["--engines", "4P2D", "--prefill-tokens-per-second", "20k/8k", "--decode-pool", "400GB"]
DYNAMO = "import sys; from dynamo.replay import run_trace_replay as run; run([sys.argv[1]], trace_block_size=512)"


def repeat(source: Path, to: Path, number: int, *, with_ids: bool = True) -> Path:
    """Write a trace of so many requests."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    span = rows[-1]["timestamp"] + 1000
    names = 1 + max(max(row["hash_ids"], default=0) for row in rows)
    with to.open("w", encoding="utf-8") as file:
        for index in range(number):
            turn, at = divmod(index, len(rows))
            row = rows[at] | {"timestamp": rows[at]["timestamp"] + turn * span}
            ids = [each + turn * names for each in row.pop("hash_ids")]
            file.write(json.dumps(row | ({"hash_ids": ids} if with_ids else {})) + "\n")
    return to


def measured(command: list[str]) -> tuple[float, float]:
    """Return the seconds and the peak MiB of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command}: ended with {status}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1_000_000)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        files = {
            f"{number:,} requests with identities": (number, repeat(given.trace, Path(folder) / f"{number}", number))
            for number in (given.requests // 100, given.requests // 10, given.requests)
        }
        name = f"{given.requests:,} requests of lengths"
        files[name] = given.requests, repeat(given.trace, Path(folder) / "lengths", given.requests, with_ids=False)
        rows = []
        for title, (number, path) in files.items():
            model, rival = "gemma-3-27b", [f"{given.python.parent}/kvcache-simulator", "run", "--trace", f"{path}"]
            rival += ["--model", "llama-3.1-8b", "--block-size", "512", "--policies", "lru", "--no-progress"]
            commands = {"kvhma": [*OURS, f"{path}", model, "-q"], "kvhma, all": [*OURS, f"{path}", model, "-q", *ALL]}
            if title != name:
                commands |= {"kvcache-simulator": [*rival, "--budgets-gib", "400"]}
            if number == given.requests // 100:
                commands |= {"Dynamo": [f"{given.python}", "-c", DYNAMO, f"{path}"]}
            rounds = [
                {command: measured(commands[command]) for command in rotated([*commands], turn)}
                for turn in range(given.rounds)
            ]
            for command in commands:
                seconds = statistics.median(each[command][0] for each in rounds)
                cells = f"{seconds:.2f}", f"{number / seconds:,.0f}", f"{max(each[command][1] for each in rounds):,.0f}"
                ratio = compared([each[command][0] / each["kvhma"][0] for each in rounds])
                rows.append((title, command, *cells, "" if command.startswith("kvhma") else ratio))
                title = ""
    note = "kvhma: whole and clipped prompts, D's cache by both rules; all: queues, policies and P's cache too."
    head = ("file", "command", "s", "requests a second", "MiB", "its time / kvhma's")
    section("A trace, from the start of a process to its end", head, rows, note)


if __name__ == "__main__":
    main()
