# SPDX-License-Identifier: Apache-2.0
"""A drawing as a self-contained SVG file: shapes, texts that show on hovering, light and dark colors."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from kvhma.cli.format import printable

# Sizes in pixels by name. The drawings are as wide as a docs column.
SIZES = {"head": 14, "": 12, "small": 11}
PALETTES = {
    "light": {
        "paper": "#ffffff", "ink": "#1c1f24", "soft": "#5b6470", "line": "#aab1bb", "pad": "#d5d9df",
        "c0": "#4c92e2", "c1": "#e66c1a", "c2": "#39a16d", "c3": "#b178d2", "c4": "#dc6a90", "c5": "#7b9a27",
        "c6": "#2b9dac", "c7": "#b28919",
    },
    "dark": {
        "paper": "#14171c", "ink": "#e6e8eb", "soft": "#9aa3af", "line": "#565f6b", "pad": "#353b45",
        "c0": "#2e68aa", "c1": "#9c5322", "c2": "#337252", "c3": "#894aad", "c4": "#b03b62", "c5": "#5a6d26",
        "c6": "#2a6f78", "c7": "#7c631f",
    },
}  # fmt: skip
"""Colors of both settings. `ink` has a contrast of at least 4.5 to 1 on the paper and on c0 to c7. Those have at least
3 to 1 on the paper. Fading brings a color nearer to the paper, so texts on it only gain contrast."""


def _colors(name: str) -> str:
    return " ".join(f"--{key}: {value};" for key, value in PALETTES[name].items())


_RULES = (
    f"svg {{ background: var(--paper); font: {SIZES['']}px system-ui, sans-serif; {_colors('light')} }}",
    f"@media (prefers-color-scheme: dark) {{ svg {{ {_colors('dark')} }} }}",
    "text { fill: var(--ink); pointer-events: none; } .soft { fill: var(--soft); } .end { text-anchor: end; }",
    f".mid {{ text-anchor: middle; }} .small {{ font-size: {SIZES['small']}px; }}",
    f".head {{ font-size: {SIZES['head']}px; font-weight: 600; }}",
    "polyline { fill: none; stroke-width: 2; pointer-events: none; } .grid { stroke: var(--line); stroke-width: 0.5; }",
    "rect:hover { stroke: var(--ink); stroke-width: 1; opacity: 1; }",
    *(f".c{index} {{ fill: var(--c{index}); }} .s{index} {{ stroke: var(--c{index}); }}" for index in range(8)),
)
_STYLE = "\n" + "\n".join(_RULES)

COLUMN = 688
"""Width of the column of text in the documentation, in pixels."""
_THIN = 0.6


class Drawing:
    """Shapes on a page that grows downwards."""

    def __init__(self, width: int, title: str, description: str) -> None:
        """Begin with a title and a description for screen readers."""
        self.width = width
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        ET.SubElement(self._root, "title").text = printable(title)
        ET.SubElement(self._root, "desc").text = printable(description)
        ET.SubElement(self._root, "style").text = _STYLE

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write a line of text; `y` is its base line."""
        self._add("text", "", {"x": _number(x), "y": _number(y), "class": style}).text = printable(text)

    def rect(self, x: float, y: float, width: float, height: float, style: str, hover: str = "") -> None:
        """Draw a box; a box too thin to see is drawn a little wider."""
        box = {"x": _number(x), "y": _number(y), "width": _number(max(width, _THIN)), "height": _number(height)}
        self._add("rect", hover, {**box, "class": style})

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a line through points."""
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", "", {"points": text, "class": style})

    def _add(self, tag: str, hover: str, attributes: dict[str, str]) -> ET.Element:
        shape = ET.SubElement(self._root, tag, attributes)
        if hover:
            ET.SubElement(shape, "title").text = printable(hover)
        return shape

    def svg(self, height: float) -> str:
        """Return the file, `height` pixels high."""
        self._root.set("viewBox", f"0 0 {self.width} {_number(height)}")
        self._root.set("width", str(self.width))
        return ET.tostring(self._root, encoding="unicode") + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
