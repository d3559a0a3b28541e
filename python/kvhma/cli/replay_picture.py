# SPDX-License-Identifier: Apache-2.0
"""The two pictures of ``kvhma replay --svg``: rates over time with links, and bytes of a request by its length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import floor, log10
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from kvhma.cli.format import printable

_LEFT, _RIGHT = 76, 780
_LINE = 18
"""Pixels between two lines of text."""
_NAMES = {"whole": "whole prompts", "clipped": "clipped", "each_group": "and D's cache, a hit of each group"}
_STYLE = (
    "svg { --paper: #ffffff; --ink: #1c1f24; --grid: #aab1bb; --whole: #6b7480; --clipped: #2f7fd6; }",
    "svg { --each_group: #d2601a; background: var(--paper); font: 13px system-ui, sans-serif; }",
    "@media (prefers-color-scheme: dark) { svg { --paper: #14171c; --ink: #e6e8eb; --grid: #565f6b; } }",
    "@media (prefers-color-scheme: dark) { svg { --whole: #9aa3af; --clipped: #5b9fe8; --each_group: #e58a4e; } }",
    "text { fill: var(--ink); stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }",
    ".head { font-size: 15px; font-weight: 600; } .end { text-anchor: end; } .mid { text-anchor: middle; }",
    ".grid { stroke: var(--grid); stroke-width: 0.5; } .link { stroke: var(--ink); stroke-dasharray: 6 4; }",
    "polyline { fill: none; stroke-width: 1.8; } rect { fill: var(--grid); }",
    *(f".{rule} {{ stroke: var(--{rule}); }}" for rule in _NAMES),
)

_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


class _Axis(NamedTuple):
    """Pixels of the values between two ends."""

    low: float
    high: float
    start: float
    end: float
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        low, high, here = map(self.scale, (self.low, self.high, value))
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return up to a dozen round values."""
        if self.scale is log10:
            powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) < 4 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
            return [value for value in found if self.low <= value <= self.high]
        power = 10.0 ** floor(log10(self.high / 6))
        step = power * next(step for step in (1, 2, 5, 10) if step * power >= self.high / 6)
        return [step * count for count in range(floor(self.high / step) + 1)]


class _Drawing:
    """Shapes on a page of 800 pixels."""

    def __init__(self, title: str) -> None:
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": "0 0 800 720", "width": "800"})
        ET.SubElement(self.root, "title").text = printable(title)
        ET.SubElement(self.root, "style").text = "\n".join(_STYLE)

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.add("text", style, x=x, y=y).text = printable(text)

    def add(self, tag: str, style: str, **places: float) -> ET.Element:
        return ET.SubElement(self.root, tag, {key: f"{at:.2f}" for key, at in places.items()} | {"class": style})

    def curve(self, xs: Iterable[float], ys: Iterable[float], style: str) -> None:
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(xs, ys, strict=True))
        ET.SubElement(self.root, "polyline", {"points": points, "class": style})

    def axes(self, x: _Axis, y: _Axis, x_label: Callable[[float], str], y_label: Callable[[float], str]) -> None:
        """Draw lines at round values, and write the values beside and below."""
        for value in y.ticks():
            self.add("line", "grid", x1=_LEFT, x2=_RIGHT, y1=y.at(value), y2=y.at(value))
            self.text(_LEFT - 8, y.at(value) + 4, y_label(value), "end")
        for value in x.ticks():
            self.text(x.at(value), y.start + _LINE, x_label(value), "mid")

    def legend(self, y: float, rules: Iterable[str]) -> None:
        for place, rule in enumerate(rules):
            x = _LEFT + 150 * place
            self.curve((x, x + 24), (y - 4, y - 4), rule)
            self.text(x + 30, y, _NAMES[rule])


def picture(name: str, curves: Mapping[str, Any], links: Mapping[str, float], readers: int) -> str:
    """Draw both pictures as one SVG file.

    Args:
        name: of the trace and the model.
        curves: of :func:`kvhma.replay.report.replay`.
        links: Gb/s of each link, by name.
        readers: ranks of all D's, each with such a link.

    Returns:
        The file.
    """
    drawing = _Drawing(name)
    times, rates = curves["seconds"], curves["gigabits_per_second"]
    peak = max(float(each.max()) for each in rates.values())
    lines = sorted((rate * readers, link) for link, rate in links.items())
    # Links that are faster than the first one above the curve only press the curve down.
    lines = lines[: sum(rate < peak for rate, _ in lines) + 1]
    seconds, unit = next((size, unit) for size, unit in _UNITS if times[-1] >= 5 * size or size == 1)
    x = _Axis(0, (times[-1] + curves["window"] / 2) / seconds, _LEFT, _RIGHT)
    y = _Axis(0, 1.1 * max(peak, lines[-1][0]), 320, 100)
    drawing.text(_LEFT, 24, name[:80], "head")
    drawing.text(_LEFT, 52, f"Gb/s of all engines, means of {curves['window']:g} s, over {unit}", "head")
    drawing.legend(76, rates)
    drawing.axes(x, y, "{:g}".format, "{:,g}".format)
    for rule, each in rates.items():
        drawing.curve(map(x.at, times / seconds), map(y.at, each), rule)
    last = y.start
    for rate, link in lines:
        drawing.add("line", "link", x1=_LEFT, x2=_RIGHT, y1=y.at(rate), y2=y.at(rate))
        if last - y.at(rate) >= _LINE:
            last = y.at(rate)
            drawing.text(_RIGHT, last - 5, f"{link[:40]} × {readers:,} ranks of D" if readers > 1 else link[:40], "end")

    tokens, nbytes, edges = curves["tokens"], curves["bytes"], curves["edges"]
    x = _Axis(tokens[0], max(tokens[-1], edges[-1]), _LEFT, _RIGHT, log10)
    low = nbytes["clipped"].min()
    y = _Axis(low, max(nbytes["whole"].max(), 2 * low), 600, 440, log10)
    drawing.text(_LEFT, 384, "MB of a request by its tokens; below, how many requests have so many", "head")
    drawing.legend(408, nbytes)
    drawing.axes(x, y, "{:,g}".format, lambda value: f"{value / 1e6:,g}")
    for rule, each in nbytes.items():
        drawing.curve(map(x.at, tokens), map(y.at, each), rule)
    heights = curves["density"] / curves["density"].max() * 60
    for low, high, height in zip(edges, edges[1:], heights, strict=False):
        drawing.add("rect", "", x=x.at(low), width=x.at(high) - x.at(low), y=700 - height, height=height)
    return ET.tostring(drawing.root, encoding="unicode") + "\n"
