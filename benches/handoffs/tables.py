# SPDX-License-Identifier: Apache-2.0
"""Measures with a column for each connector and floor, ratios of one round, and the tables that they fill."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from harness import compared, table

OURS, THEIRS, EVEN = "kvhma", "NixlConnector", "NixlConnector, even terms"
MET = "kvhma, met"
HIT, COMPUTED = "own hit", "computes it"
"""Columns. `EVEN`: vLLM's connector with our delay of the progress thread and all cores. `MET`: ours with
`prefill_engines`. `HIT` and `COMPUTED`: an engine without a connector that has the prompt in its prefix cache, or not."""

ORDER = (OURS, MET, THEIRS, EVEN, HIT, COMPUTED)
RATIO = " / kvhma"
"""Follows the name of a column that is compared with kvhma's."""


@dataclass
class Row:
    """One measure, by column and round."""

    what: str
    unit: str = "ms"
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, value: float) -> None:
        self.values.setdefault(column, []).append(value)

    def median(self, column: str) -> str:
        return show(statistics.median(self.values[column]), self.unit) if self.values.get(column) else "–"

    def ratio(self, column: str) -> str:
        """A column compared with kvhma's in the same round; above 1 is better for kvhma."""
        ours, theirs = self.values.get(OURS, []), self.values.get(column, [])
        if not ours or not theirs or len(ours) != len(theirs):
            return "–"
        if min(*ours, *theirs) <= 0:
            return "no ratio"
        return compared([b / a for a, b in zip(ours, theirs, strict=True)])

    def medians(self, column: str) -> str:
        """Kvhma's median and that of a column."""
        return f"{self.median(OURS)}; {self.median(column)}"

    def beside(self, column: str) -> str:
        """Both medians and the ratio."""
        return f"{self.medians(column)}; {self.ratio(column)}"

    def cells(self) -> dict[str, str]:
        """A cell for each column with values, and one with the ratio to kvhma where it is a connector of vLLM."""
        found = {}
        for column in (column for column in ORDER if column in self.values):
            found[column] = self.median(column)
            if column in (THEIRS, EVEN):
                found[column + RATIO] = self.ratio(column)
        return found


def show(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value * 1e3:,.2f} ms"
    return f"{value / 2**20:,.1f} MiB" if unit == "MiB" else f"{value:,.0f}"


class Tables:
    """Tables by title, filled cell by cell, in the order of the first cell of each table, row and column."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[str, dict[str, str]]] = {}

    def add(self, title: str, row: str, cells: dict[str, str]) -> None:
        self._cells.setdefault(title, {}).setdefault(row, {}).update(cells)

    def markdown(self) -> str:
        return "\n".join(self._table(title, rows) for title, rows in self._cells.items())

    def _table(self, title: str, rows: dict[str, dict[str, str]]) -> str:
        columns = dict.fromkeys(column for cells in rows.values() for column in cells)
        lines = ([row, *(cells.get(column, "") for column in columns)] for row, cells in rows.items())
        return f"\n### {title}\n\n{table(['', *columns], lines)}"
