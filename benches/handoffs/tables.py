# SPDX-License-Identifier: Apache-2.0
"""Rows with a column for each connector and floor, and the ratios of measurements of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

OURS, THEIRS, EVEN = "kvhma", "NixlConnector", "NixlConnector, even terms"
MET = "kvhma, met"
HIT, COMPUTED = "own hit", "computes it"
"""Columns. `EVEN`: vLLM's connector with our delay of the progress thread and all cores. `MET`: ours with
`prefill_engines`. `HIT` and `COMPUTED`: an engine without a connector that has the prompt in its prefix cache, or not."""


@dataclass
class Row:
    """One measure, by column and round."""

    what: str
    unit: str = "ms"
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, value: float) -> None:
        self.values.setdefault(column, []).append(value)

    def most(self) -> float:
        """The largest median of any column."""
        return max(statistics.median(values) for values in self.values.values())

    def cells(self, columns: Sequence[str]) -> list[str]:
        first, *others = columns
        cells = [self._median(first)]
        for column in others:
            cells += [self._median(column), *(self._ratio(first, column) if column in (THEIRS, EVEN) else ())]
        return cells

    def _median(self, column: str) -> str:
        return show(statistics.median(self.values[column]), self.unit) if self.values.get(column) else "–"

    def _ratio(self, of: str, column: str) -> tuple[str]:
        ours, theirs = self.values.get(of, []), self.values.get(column, [])
        if not ours or not theirs or len(ours) != len(theirs):
            return ("–",)
        if min(*ours, *theirs) <= 0:
            return ("no ratio",)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        return (compared(ratios),)


def compared(ratios: Sequence[float]) -> str:
    """The median of ratios that are above 1 where kvhma is better, and their quartiles if there are several."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}×"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    verdict = "better" if low > 1 else "worse" if high < 1 else "tie"
    return f"{middle:.2f}× ({low:.2f} to {high:.2f}) {verdict}"


def show(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value * 1e3:,.2f} ms"
    return f"{value / 2**20:,.1f} MiB" if unit == "MiB" else f"{value:,.0f}"


def table(title: str, rows: Iterable[Row], columns: Sequence[str] = (OURS, THEIRS, EVEN)) -> str:
    """Markdown: the first column, and each other one with its ratio to the first where it is a connector of vLLM."""
    head = [columns[0]]
    for column in columns[1:]:
        head += [column, f"/ {columns[0]}"] if column in (THEIRS, EVEN) else [column]
    lines = [f"\n### {title}\n", f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    return "\n".join([*lines, *(f"| {row.what} | {' | '.join(row.cells(columns))} |" for row in rows)])


def rotated(columns: Sequence[str], number: int) -> list[str]:
    """The order in a round: each comes first equally often, and every other round runs backwards."""
    start = number // 2 % len(columns)
    order = [*columns[start:], *columns[:start]]
    return order[::-1] if number % 2 else order
