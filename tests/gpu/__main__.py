# SPDX-License-Identifier: Apache-2.0
"""Run the steps, each in a separate process with a time limit, and report what they found: ``python -m gpu``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu import engine_steps, steps
from gpu.place import Outcome, environment
from gpu.steps import Step

NO_TIME = "no time left"
LEAST_SECONDS = 10
"""With less time left no further step begins."""


@dataclass(frozen=True)
class Suite:
    """The steps of a target of make: the module that runs one of them, the page of results, what runs, time limits."""

    command: str
    module: str
    steps: Sequence[Step]
    file: str
    needs: str
    step_seconds: float
    all_seconds: float = math.inf


TRANSFERS = Suite("gpu", "gpu.steps", steps.STEPS, "RESULTS_{}", "torch, NIXL and kvhma, no engine", 90)
ENGINES = Suite(
    "gpu-engines", "gpu.engine_steps", engine_steps.STEPS, "RESULTS_{}_ENGINES", "vLLM, NIXL and kvhma", 150, 480
)


@dataclass(frozen=True)
class Result:
    """The findings of a step, and its error; empty if it succeeded."""

    number: int
    outcome: Outcome
    problem: str = ""

    @property
    def verdict(self) -> str:
        return "not run" if self.problem == NO_TIME else "failed" if self.problem else "passed"


def markdown(results: Sequence[Result], device: str, suite: Suite) -> str:
    """Return the page of results."""
    lines = [
        f"# Results on a {'CPU, which prove nothing about a device' if device == 'cpu' else 'device'}",
        "",
        f"Made by `make {suite.command}` on `{device}`: {suite.needs}. Times are of single runs.",
        "",
        "| step | | found | |",
        "|---|---|---|---|",
    ]
    for result in results:
        name = f"{result.number}. {suite.steps[result.number - 1].name}"
        facts = list(result.outcome.facts)
        if result.problem or not facts:
            facts.append(("", result.problem.replace("\n", "<br>").replace("|", "\\|")))
        for index, (what, found) in enumerate(facts):
            first = (name, result.verdict) if index == 0 else ("", "")
            lines.append(f"| {' | '.join((*first, what, found))} |")
    return "\n".join(lines) + "\n"


def run(number: int, device: str, limit: float, suite: Suite = TRANSFERS) -> Result:
    """Run a step; in every case it ends, and so do the processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        process = subprocess.Popen(
            [sys.executable, "-m", suite.module, str(number), device, str(file)],
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
        outcome = Outcome(json.loads(file.read_text()) if file.exists() else [])
        if process.returncode == 0 and outcome.facts:
            return Result(number, outcome)
    return Result(number, outcome, "\n".join(said.splitlines()[-12:]) or f"ended with {process.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--device", help="as torch names it; cpu shows only that the steps work")
    parser.add_argument("--steps", default="", help="numbers, separated by commas; all by default")
    parser.add_argument("--engines", action="store_true", help="the steps with vLLM's engines")
    parser.add_argument("--output", type=Path, help="folder for the page of results; nothing is written without it")
    options = parser.parse_args(arguments)
    if options.device is None and not torch.accelerator.is_available():
        print("no device: torch finds no accelerator, so nothing was tried")
        return 0
    device = options.device or f"{torch.accelerator.current_accelerator()}:0"
    suite = ENGINES if options.engines else TRANSFERS
    # A page of steps on a CPU never replaces one of a device.
    name = suite.file.format("CPU" if device == "cpu" else "GPU") + ".md"
    numbers = [int(number) for number in options.steps.split(",") if number] or range(1, len(suite.steps) + 1)
    slower = 4 if device == "cpu" else 1  # tests run beside other work
    end = time.monotonic() + slower * suite.all_seconds
    results = []
    for number in numbers:
        limit = min(slower * suite.step_seconds, end - time.monotonic())
        enough = limit >= LEAST_SECONDS
        results.append(run(number, device, limit, suite) if enough else Result(number, Outcome(), NO_TIME))
        print(f"{number:2} {results[-1].verdict:7} {suite.steps[number - 1].name}", flush=True)
        text = markdown(results, device, suite)
        if options.output is not None:  # after each step: a run that is killed leaves what it has found
            (options.output / name).write_text(text)
    print(f"\n{text}")
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
