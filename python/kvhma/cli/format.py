# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the commands: options, formats of numbers and names, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_GAP = 2
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def output_options(command: F) -> F:
    """Add ``--json`` and ``-q`` to a command."""
    command = click.option("-q", "--quiet", is_flag=True, help="Only the result: no notes, no progress.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text.

    Attributes:
        title: the line above it.
        align: a letter for each column: ``l`` for words and names, ``r`` for numbers, which are never broken.
        columns: headings.
        rows: cells of each row.
        caption: the lines below it.
    """

    title: str
    align: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def table(self) -> Table:
        """Return its columns and rows for a terminal. Lines are wrapped between words; numbers stay whole."""
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
        for at, (letter, name) in enumerate(zip(self.align, self.columns, strict=True)):
            cells = [row[at] for row in self.rows]
            whole = [*name.split(), *(cells if letter == "r" else " ".join(cells).split())]
            justify: Literal["left", "right"] = "right" if letter == "r" else "left"
            table.add_column(Text(printable(name)), justify=justify, min_width=max(map(cell_len, whole), default=0))
        for row in self.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table


def print_sheets(sheets: Sequence[Sheet]) -> None:
    """Print tables, with an empty line between them. One that is wider than the terminal leaves its edge."""
    console = Console()
    for index, sheet in enumerate(sheets):
        if index:
            console.print()
        # Not the table's own title, which would be as narrow as the table.
        if sheet.title:
            console.print(Text(printable(sheet.title)), style="bold", soft_wrap=True)
        table = sheet.table()
        width = max(console.width, console.measure(table).minimum)
        console.print(table, width=width, crop=False)
        if sheet.caption:
            console.print(Text(printable(sheet.caption)), style="dim", soft_wrap=True)


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


def progress(quiet: bool) -> Progress:
    """Return bars for the error stream, shown only on a terminal and removed at the end."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=quiet or not console.is_terminal)


def watched(what: str, items: Iterable[T], quiet: bool, total: int | None = None) -> Iterable[T]:
    """Iterate over items, with a progress bar on the error stream of a terminal; `total` if they have no length."""
    with progress(quiet) as bar:
        yield from bar.track(items, total, description=what)
