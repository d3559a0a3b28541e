# SPDX-License-Identifier: Apache-2.0
"""Times of several ways to do the same, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from drawing import COLUMN, Drawing

_LEFT, _RIGHT, _LINE = 190, 90, 16


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def draw(
    title: str,
    about: str,
    groups: Mapping[str, Mapping[str, float]],
    show: Callable[[float], str] = milliseconds,
) -> str:
    """An SVG: a block for each group, in it a bar for each way, with its value. Each block has its own scale."""
    drawing = Drawing(COLUMN, title, about)
    drawing.text(12, 26, title, "head")
    drawing.text(12, 46, about, "small soft")
    y = 70.0
    for name, of in groups.items():
        drawing.text(12, y, name)
        scale = (COLUMN - _LEFT - _RIGHT) / (max(of.values()) or 1.0)
        for color, (way, value) in enumerate(of.items()):
            y += _LINE
            shown = show(value)
            drawing.text(_LEFT - 8, y, way, "end small")
            drawing.rect(_LEFT, y - _LINE + 6, value * scale, _LINE - 5, f"c{color}", f"{name}, {way}: {shown}")
            drawing.text(_LEFT + value * scale + 6, y, shown, "small soft")
        y += 2 * _LINE
    return drawing.svg(y)
