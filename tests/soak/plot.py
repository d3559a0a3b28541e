# SPDX-License-Identifier: Apache-2.0
"""Resident memory of every process over time as one SVG: a panel for each engine and the proxy, a line for each process
and life."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soak.samples import Sample
from soak.schedule import ALL, Event

WIDTH, PANEL, LEFT, TOP, GAP = 1100, 190, 60, 30, 34
COLORS = {"front": "#888888", "core": "#1f77b4", "worker": "#d62728", "other": "#2ca02c", "proxy": "#17becf"}
MARKS = {
    "kill": "#d62728",
    "kill worker": "#d62728",
    "stop": "#ff7f0e",
    "stop one": "#ff7f0e",
    "partition": "#9467bd",
    "rotate": "#bcbd22",
    "full disk": "#8c564b",
    "full shm": "#e377c2",
}
OTHER = "#7f7f7f"


def plot(
    processes: Iterable[Sequence[Sample]],
    events: Iterable[Event],
    seconds: float,
    marks: Iterable[tuple[float, str]] = (),
) -> str:
    """The picture as text, with a vertical line and a word at each of the `marks`."""
    lines = [samples for samples in processes if len(samples) > 1]
    slots = sorted({samples[0].slot for samples in lines})
    most = max((one.rss for samples in lines for one in samples), default=1)
    height = TOP + len(slots) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="14">resident memory (MiB) over seconds; '
        + "; ".join(f'<tspan fill="{color}">{name}</tspan>' for name, color in (COLORS | MARKS).items())
        + "</text>",
    ]

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * at / max(seconds, 1)

    events, marks = list(events), list(marks)
    for row, slot in enumerate(slots):
        top = TOP + row * (PANEL + GAP)

        def y(rss: float, top: float = top) -> float:
            return top + PANEL * (1 - rss / (1.05 * most))

        parts.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 10}" height="{PANEL}" fill="#f7f7f7"/>')
        parts.append(f'<text x="4" y="{top + 12}" font-weight="bold">{slot}</text>')
        for step in range(5):
            value = most * step / 4
            parts.append(f'<text x="{LEFT - 6}" y="{y(value):.0f}" text-anchor="end">{value / 1024:.0f}</text>')
            parts.append(
                f'<text x="{x(seconds * step / 4):.0f}" y="{top + PANEL + 12}">{seconds * step / 4:.0f}</text>'
            )
        for event in events:
            if event.target in (slot, ALL):
                width = max(1.0, x(event.at + event.seconds) - x(event.at))
                parts.append(
                    f'<rect x="{x(event.at):.1f}" y="{top}" width="{width:.1f}" height="{PANEL}" '
                    f'fill="{MARKS.get(event.kind, OTHER)}" opacity="0.25"><title>{event.kind}</title></rect>'
                )
        for at, word in marks:
            parts.append(
                f'<path d="M{x(at):.1f} {top}v{PANEL}" stroke="black" stroke-dasharray="3"/>'
                f'<text x="{x(at) + 3:.1f}" y="{top + PANEL - 4}">{word}</text>'
            )
        for samples in lines:
            if samples[0].slot == slot:
                points = " ".join(f"{x(one.seconds):.1f},{y(one.rss):.1f}" for one in samples)
                color = COLORS[samples[0].process]
                parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.3"/>')
    return "\n".join([*parts, "</svg>\n"])
