# SPDX-License-Identifier: Apache-2.0
"""What the steps found, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.place import Outcome
from gpu.steps import STEPS

_WIDTH, _LEFT, _RIGHT, _LINE = 900, 420, 90, 18


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
    lines += ["", "## What is settled by that", "", "| page | what it says | |", "|---|---|---|"]
    for result in results:
        for claim in STEPS[result.number - 1].settles:
            found = "shown" if claim.is_asserted else "measured, see above"
            shown = "not: host memory" if device == "cpu" else found if not result.problem else "not shown"
            lines.append(f"| {claim.page} | {claim.text} | {shown} (step {result.number}) |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], output: Path) -> None:
    """Draw every time that was measured, on a logarithmic scale."""
    from kvhma.cli.svg import Drawing  # needs packages that a machine with a device may lack

    times = [(result.number, what, seconds) for result in results for what, seconds in result.outcome.seconds.items()]
    drawing = Drawing(_WIDTH, "Times on a device", "A bar for each time that the steps measured, from 1 µs on")
    drawing.text(10, 24, "Times of the steps, from 1 µs on, each tenfold the same distance", "head")
    longest = max((seconds for *_, seconds in times), default=1e-6)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1.0, math.log10(longest / 1e-6))
    for index, (number, what, seconds) in enumerate(times):
        y = 44 + _LINE * index
        drawing.text(_LEFT - 8, y + 12, f"{number}. {what}", "end")
        width = scale * max(0.0, math.log10(seconds / 1e-6))
        drawing.rect(_LEFT, y, width, _LINE - 4, f"c{number % 8}", f"{what}: {seconds * 1e3:.3f} ms")
        drawing.text(_LEFT + width + 6, y + 12, f"{seconds * 1e3:.3g} ms", "soft")
    drawing.save(output, 60 + _LINE * len(times))
