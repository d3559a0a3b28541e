# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: calls in turns, ratios of one round with their quartiles, and tables in Markdown."""

from __future__ import annotations

import gc
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key")

BURST = 0.001
"""Seconds of a burst: shorter than the time that a busy machine lets a process run at a stretch."""


def in_turns(calls: Mapping[Key, Callable[[], Any]], rounds: int = 200) -> dict[Key, float]:
    """Return the fastest mean time of each call in seconds: bursts of the calls alternate, so noise affects all."""
    counts = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(BURST / max(time.perf_counter() - start, 1e-7)))
    fastest = dict.fromkeys(calls, float("inf"))
    # Without garbage collections the side that makes more objects is at its best.
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                fastest[name] = min(fastest[name], (time.perf_counter() - start) / counts[name])
    finally:
        gc.enable()
    return fastest


def rotated(columns: Sequence[str], number: int) -> list[str]:
    """The order in a round: each comes first equally often, and every other round runs backwards."""
    start = number // 2 % len(columns)
    order = [*columns[start:], *columns[:start]]
    return order[::-1] if number % 2 else order


def compared(ratios: Sequence[float]) -> str:
    """The median of ratios that are above 1 where kvhma is better, and their quartiles if there are several."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}×"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    verdict = "better" if low > 1 else "worse" if high < 1 else "tie"
    return f"{middle:.2f}× ({low:.2f} to {high:.2f}) {verdict}"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def section(title: str, head: Iterable[str], rows: Iterable[Iterable[Any]], note: str = "") -> None:
    """Print a table below its title, and a paragraph after it."""
    print(f"## {title}\n\n{table(head, rows)}\n")
    if note:
        print(textwrap.fill(note, 120, break_long_words=False, break_on_hyphens=False) + "\n")
