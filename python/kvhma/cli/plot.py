# SPDX-License-Identifier: Apache-2.0
"""Predicted time and bytes over tokens, a line for each pair of engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvhma.cli.format import duration, size
from kvhma.cli.svg import COLORS, COLUMN, Drawing

_LEFT, _RIGHT, _HEIGHT = 88, COLUMN - 24, 200
_MARK = 8
_MAX_TICKS = 6


class Point(NamedTuple):
    """One request between one pair of engines."""

    tokens: int
    seconds: float
    nbytes: int


class Line(NamedTuple):
    """The requests between one pair of engines, and the same requests in another column, for a dashed line."""

    points: list[Point]
    compared: list[Point]


def plot(title: str, lines: Mapping[str, Line], column: str) -> tuple[Drawing, float]:
    """Draw two panels with a common legend. Only eight lines are drawn; the page says how many are left out.

    Args:
        title: the title.
        lines: a line for each pair of engines.
        column: name of the other column.
    """
    shown = dict(list(lines.items())[:COLORS])
    page = Drawing(COLUMN, title, "Predicted time and bytes by tokens of the prompt; both axes are logarithmic.")
    y = page.paragraph(12, 28, title, "big")
    y = page.paragraph(12, y, "Both axes are logarithmic. Hover over a mark for its numbers.", "soft") + 12
    for name, value, unit in (("predicted time", _seconds, duration), ("bytes, all ranks", _nbytes, size)):
        page.text(12, y, name, "head")
        _panel(page, y + 16, shown, column, value, unit)
        y += _HEIGHT + 64
    page.text(_RIGHT, y - 14, "tokens of the prompt", "small soft end")
    for index, pair in enumerate(shown):
        page.rect(12, y - 10, 12, 12, f"c{index}")
        page.text(32, y, pair)
        y += 18
    if any(line.compared for line in shown.values()):
        y = page.paragraph(12, y, f"dashed, with empty marks: {column}", "soft")
    if len(lines) > len(shown):
        y = page.paragraph(12, y, f"and {len(lines) - len(shown)} pairs more, which only the table has", "soft")
    return page, y


def _seconds(point: Point) -> float:
    return point.seconds


def _nbytes(point: Point) -> float:
    return point.nbytes


def _panel(
    page: Drawing,
    y: float,
    lines: Mapping[str, Line],
    column: str,
    value: Callable[[Point], float],
    unit: Callable[[float], str],
) -> None:
    points = [point for line in lines.values() for point in (*line.points, *line.compared)]
    across = _axis((point.tokens for point in points), _LEFT, _RIGHT - _LEFT)
    marks = ticks([value(point) for point in points])
    up = _axis((*marks, *map(value, points)), y + _HEIGHT, -_HEIGHT)
    page.rect(_LEFT, y, _RIGHT - _LEFT, _HEIGHT, "frame")
    for mark in marks:
        page.line([(_LEFT, up(mark)), (_RIGHT, up(mark))], "grid")
        page.text(_LEFT - 6, up(mark) + 4, unit(mark), "small soft end")
    counts = sorted({point.tokens for point in points})
    last = -math.inf
    for count in counts:
        if (x := across(count)) - last > 52:
            page.text(x, y + _HEIGHT + 16, f"{count:,}", "small soft mid")
            last = x
    for index, (pair, line) in enumerate(lines.items()):
        for name, requests, curve, shape in (
            (f"{column}, {pair}", line.compared, f"s{index} other", f"s{index} empty"),
            (pair, line.points, f"s{index}", f"c{index}"),
        ):
            ends = [(across(point.tokens), up(value(point))) for point in requests]
            if ends:
                page.line(ends, curve)
            for point, (x, height) in zip(requests, ends, strict=True):
                hover = f"{name}\n{point.tokens:,} tokens: {size(point.nbytes)}, {duration(point.seconds)}"
                page.rect(x - _MARK / 2, height - _MARK / 2, _MARK, _MARK, shape, hover)


def _axis(values: Iterable[float], start: float, length: float) -> Callable[[float], float]:
    """Return the position of a value on a logarithmic axis with a margin at both ends."""
    logs = [math.log(value) for value in values]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    return lambda value: start + length * (0.06 + 0.88 * (math.log(value) - low) / span)


def ticks(values: Sequence[float]) -> list[float]:
    """Return up to six round values near those given: powers of two from 1 on, fractions of ten below."""
    low, high = min(values), max(values)
    if low >= 1:
        exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        return [2.0**exponent for exponent in exponents][:: -(-len(exponents) // _MAX_TICKS)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    near = [part * 10.0**decade for decade in decades for part in (1, 2, 5)]
    inside = [value for value in near if low / 2 < value < high * 2]
    return inside[:: -(-len(inside) // _MAX_TICKS)]
