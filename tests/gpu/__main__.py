# SPDX-License-Identifier: Apache-2.0
"""Run the steps, each in a separate process with a time limit, and report what they found: ``python -m gpu``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu.place import Outcome, environment
from gpu.steps import STEPS

LIMIT_SECONDS = 90


@dataclass(frozen=True)
class Result:
    """The findings of a step, and its error; empty if it succeeded."""

    number: int
    outcome: Outcome
    problem: str = ""

    @property
    def verdict(self) -> str:
        return "failed" if self.problem else "passed"


def markdown(results: Sequence[Result], device: str) -> str:
    """Return the page of results."""
    lines = [
        "# Results on a device",
        "",
        f"Made by `make gpu` on `{device}`: torch, NIXL and kvhma, no engine. Times are of single runs.",
        "",
        "| step | | found | |",
        "|---|---|---|---|",
    ]
    for result in results:
        name = f"{result.number}. {STEPS[result.number - 1].name}"
        facts = result.outcome.facts or [("", result.problem.replace("\n", "<br>").replace("|", "\\|"))]
        for index, (what, found) in enumerate(facts):
            first = (name, result.verdict) if index == 0 else ("", "")
            lines.append(f"| {' | '.join((*first, what, found))} |")
    return "\n".join(lines) + "\n"


def run(number: int, device: str, limit: float = LIMIT_SECONDS) -> Result:
    """Run a step; in every case it ends, and so do the processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu.steps", str(number), device, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        with process:
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                said = f"not done after {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # with its child processes
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0 and file.exists():
            return Result(number, Outcome(**json.loads(file.read_text())))
    return Result(number, Outcome(), "\n".join(said.splitlines()[-12:]) or f"ended with {process.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--device", help="as torch names it; cpu shows only that the steps work")
    parser.add_argument("--steps", default="", help="numbers, separated by commas; all by default")
    parser.add_argument("--output", type=Path, help="folder for RESULTS_GPU.md; nothing is written without it")
    options = parser.parse_args(arguments)
    if options.device is None and not torch.accelerator.is_available():
        print("no device: torch finds no accelerator, so nothing was tried")
        return 0
    device = options.device or f"{torch.accelerator.current_accelerator()}:0"
    numbers = [int(number) for number in options.steps.split(",") if number] or range(1, len(STEPS) + 1)
    results = []
    for number in numbers:
        results.append(run(number, device))
        print(f"{number:2} {results[-1].verdict:7} {STEPS[number - 1].name}", flush=True)
    text = markdown(results, device)
    print(f"\n{text}")
    if options.output is not None:
        (options.output / "RESULTS_GPU.md").write_text(text)
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
