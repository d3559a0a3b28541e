# SPDX-License-Identifier: Apache-2.0
"""Resident memory of every process over time as one SVG: a panel for each engine and the proxy, a line for each process
and life."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvhma.cli.svg import COLUMN, Drawing
from soak.samples import Sample
from soak.schedule import ALL, Event

PANEL, LEFT, RIGHT, GAP = 110, 52, 12, 44
PROCESSES = ("front", "core", "worker", "other", "proxy")
EVENTS = ("kill", "kill worker", "stop", "stop one", "partition", "rotate", "full disk", "full shm")
TICKS = 4


def plot(
    processes: Iterable[Sequence[Sample]],
    events: Iterable[Event],
    seconds: float,
    marks: Iterable[tuple[float, str]] = (),
) -> str:
    """The picture as text, with a vertical line and a word at each of the `marks`."""
    lines = [samples for samples in processes if len(samples) > 1]
    events, marks = list(events), list(marks)
    most = max((one.rss for samples in lines for one in samples), default=1)
    title = "Resident memory of each process, MiB over seconds"
    page = Drawing(COLUMN, title, "A line for each process and life, a band for each fault.")
    page.text(12, 24, title, "head")
    legend(page, 42, "lines: ", [(name, f"c{color}") for color, name in enumerate(PROCESSES)])
    legend(page, 60, "bands: ", [(name, f"c{color} held") for color, name in enumerate(EVENTS)])

    def x(at: float) -> float:
        return LEFT + (COLUMN - LEFT - RIGHT) * at / max(seconds, 1)

    top = 92.0
    for slot in sorted({samples[0].slot for samples in lines}):

        def y(rss: float, top: float = top) -> float:
            return top + PANEL * (1 - rss / (1.05 * most))

        page.text(12, top - 6, slot)
        page.rect(LEFT, top, COLUMN - LEFT - RIGHT, PANEL, "frame")
        for step in range(TICKS + 1):
            page.text(LEFT - 6, y(most * step / TICKS) + 4, f"{most * step / TICKS / 1024:,.0f}", "end small soft")
            anchor = "" if step == 0 else "end" if step == TICKS else "mid"
            at = seconds * step / TICKS
            page.text(x(at), top + PANEL + 14, f"{at:,.0f}", f"{anchor} small soft".strip())
        for event in events:
            if event.target in (slot, ALL):
                color = EVENTS.index(event.kind) if event.kind in EVENTS else len(EVENTS) - 1
                width = x(event.at + event.seconds) - x(event.at)
                page.rect(x(event.at), top, width, PANEL, f"c{color} held", f"{event.kind}, {event.at:,.0f} s")
        for at, word in marks:
            page.line([(x(at), top), (x(at), top + PANEL)], "grid")
            page.text(x(at) + 4, top - 6, word, "small soft")
        for samples in lines:
            if samples[0].slot == slot:
                drawn = [samples[0]]
                for one in samples[1:]:
                    if x(one.seconds) - x(drawn[-1].seconds) >= 2:  # pixels
                        drawn.append(one)
                points = [(x(one.seconds), y(one.rss)) for one in drawn]
                page.line(points, f"s{PROCESSES.index(samples[0].process)}")
        top += PANEL + GAP
    return page.svg(top)


def legend(page: Drawing, y: float, title: str, entries: Sequence[tuple[str, str]]) -> None:
    """Write names, each behind a box of its color."""
    page.text(12, y, title, "small")
    left = 52.0
    for name, style in entries:
        page.rect(left, y - 9, 10, 10, style, name)
        page.text(left + 14, y, name, "small")
        left += 26 + 6.2 * len(name)
