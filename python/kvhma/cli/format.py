# SPDX-License-Identifier: Apache-2.0
"""What the commands have in common: options, how numbers and names are written, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def output_options(command: F) -> F:
    """Add ``--json`` and ``-q`` to a command."""
    command = click.option("-q", "--quiet", is_flag=True, help="Only the result: no notes, no progress.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(form: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(form, indent=1, allow_nan=False))


def printable(text: str) -> str:
    """Escape what a name in a hostile file could do to a terminal."""
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


def new_table(title: str, *columns: str, words: int = 1) -> Table:
    """Return a table without a frame; of its columns the first `words` are words, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < words else "right", overflow="fold")
    return table


def working(what: str, quiet: bool) -> AbstractContextManager[object]:
    """Show on a terminal, on the error stream, that something is done."""
    console = Console(stderr=True)
    return nullcontext() if quiet or not console.is_terminal else console.status(what)


def progress(quiet: bool) -> Progress:
    """Return bars for the error stream, shown on a terminal only and gone when done."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=quiet or not console.is_terminal)


def watched(what: str, items: Sequence[T], quiet: bool) -> Iterable[T]:
    """Go through items; on a terminal a bar on the error stream shows how far."""
    with progress(quiet) as bar:
        yield from bar.track(items, description=what)
