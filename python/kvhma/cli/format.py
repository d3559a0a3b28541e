# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the commands: options, formats of numbers and names, progress."""

from __future__ import annotations

import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

STYLES = ("table", "json", "csv", "markdown")
"""The formats in which a command can print its tables."""

_GAP = 2
_WORD = 24
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def output_options(command: F) -> F:
    """Add ``--json`` and ``-q`` to a command."""
    command = click.option("-q", "--quiet", is_flag=True, help="Only the result: no notes, no progress.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def table_options(command: F) -> F:
    """Add ``--format``, ``--json`` and ``-q``; the command gets `style`, one of `STYLES`, and `quiet`."""

    @functools.wraps(command)
    def styled(*arguments: Any, style: str, as_json: bool, **given: Any) -> Any:
        return command(*arguments, style="json" if as_json else style, **given)

    text = "How to print it; --json is short for json."
    choice = click.option("--format", "style", type=click.Choice(STYLES), default="table", show_default=True, help=text)
    return cast("F", output_options(choice(styled)))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text.

    Attributes:
        title: the line above it.
        align: a letter for each column: ``l`` for words, ``n`` for names that are never broken, ``r`` for numbers.
        columns: headings.
        rows: cells of each row.
        caption: the lines below it.
    """

    title: str
    align: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def table(self, width: int) -> Table | Text:
        """Return its columns and rows for a terminal.

        Only words are wrapped. Where numbers would not fit, each cell becomes a line with the name of its column.
        """
        cells = [[printable(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = _widths(self.align, cells, width)
        if widths is None:
            return Text(_listed(cells))
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
        for letter, name, column in zip(self.align, cells[0], widths, strict=True):
            justify: Literal["left", "right"] = "right" if letter == "r" else "left"
            table.add_column(Text(name), justify=justify, width=column, overflow="fold")
        for row in cells[1:]:
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> str:
        """Return it as Markdown."""
        rules = ["---:" if letter == "r" else "---" for letter in self.align]
        lines = [" | ".join(_escaped(cell) for cell in row) for row in (self.columns, *self.rows)]
        lines.insert(1, " | ".join(rules))
        text = "\n".join(f"| {line} |" for line in lines)
        title = f"**{_escaped(self.title)}**\n\n" if self.title else ""
        return f"{title}{text}\n" + "".join(f"\n{_escaped(line)}\n" for line in self.caption.splitlines())


def print_result(style: str, *, form: object, rows: Sequence[Mapping[str, Any]], sheets: Sequence[Sheet]) -> None:
    """Print a result in one of `STYLES`.

    Args:
        style: the style.
        form: the result for ``json``.
        rows: the result for ``csv``.
        sheets: the result for ``table`` and ``markdown``.
    """
    if style == "json":
        print_json(form)
    elif style == "csv":
        print_csv(rows)
    else:
        print_sheets(sheets, style)


def print_sheets(sheets: Sequence[Sheet], style: str) -> None:
    """Print tables, with an empty line between them, in the style ``table`` or ``markdown``."""
    if style == "markdown":
        click.echo("\n".join(sheet.markdown() for sheet in sheets), nl=False)
        return
    console = Console()
    for index, sheet in enumerate(sheets):
        if index:
            console.print()
        # Not the table's own title, which would be as narrow as the table.
        if sheet.title:
            console.print(Text(printable(sheet.title)), style="bold", soft_wrap=True)
        console.print(sheet.table(console.width))
        if sheet.caption:
            console.print(Text(printable(sheet.caption)), style="dim", soft_wrap=True)


def _widths(align: str, cells: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the width of each column, or None if words and numbers need more room. Paths and the like are folded."""
    natural = [
        max(cell_len(line) for cell in column for line in cell.split("\n")) for column in zip(*cells, strict=True)
    ]
    widths = []
    for letter, (name, *column) in zip(align, zip(*cells, strict=True), strict=True):
        words = [word[:_WORD] for text in (name, *(column if letter == "l" else ())) for word in text.split()]
        widths.append(max((cell_len(text) for text in (*words, *(() if letter == "l" else column))), default=0))
    room -= sum(widths) + _GAP * (len(widths) - 1)
    for _ in range(min(room, sum(natural) - sum(widths))):
        # The column that would have the most lines.
        widest = max(range(len(widths)), key=lambda index: natural[index] / max(widths[index], 0.5))
        widths[widest] += 1
    return widths if room >= 0 else None


def _listed(cells: Sequence[Sequence[str]]) -> str:
    """Write each row as lines of a name and a value; the first cell begins a row, and empty cells are left out."""
    names = [" ".join(name.split()) for name in cells[0]]
    across = max(map(cell_len, names)) + _GAP
    lines = []
    for row in cells[1:]:
        lines.append("  ".join(filter(None, (names[0], row[0]))))
        lines += [
            f"  {name}{' ' * (across - cell_len(name))}{cell}"
            for name, cell in zip(names[1:], row[1:], strict=True)
            if cell
        ]
    return "\n".join(lines)


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of plain values as CSV, with a first row that names the columns. Numbers are not rounded."""
    writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _escaped(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ")


def print_json(form: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(form, indent=1, allow_nan=False))


def printable(text: str) -> str:
    """Escape characters with which a name in a hostile file could affect a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """Write a number of bytes with three or four digits and a unit."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Write a time with three digits or so and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def plural(number: int, word: str) -> str:
    """Write a number with its noun."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers short: ``0–3, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in found)


def working(what: str, quiet: bool) -> AbstractContextManager[object]:
    """Show a running task on the error stream of a terminal."""
    console = Console(stderr=True)
    return nullcontext() if quiet or not console.is_terminal else console.status(what)


def progress(quiet: bool) -> Progress:
    """Return bars for the error stream, shown only on a terminal and removed at the end."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=quiet or not console.is_terminal)


def watched(what: str, items: Iterable[T], quiet: bool, total: int | None = None) -> Iterable[T]:
    """Iterate over items, with a progress bar on the error stream of a terminal; `total` if they have no length."""
    with progress(quiet) as bar:
        yield from bar.track(items, total, description=what)
