# SPDX-License-Identifier: Apache-2.0
"""A drawing as one SVG file that needs nothing else: shapes, texts that show on hovering, light and dark."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from kvhma.cli.format import printable
from kvhma.errors import RequestError

_STYLE = """
svg { background: var(--paper); font: 12px system-ui, sans-serif; --paper: #ffffff; --ink: #1c1f24; --soft: #6b7280;
  --line: #c9ced6; --pad: #e5e7eb; --c0: #2f6fb7; --c1: #c2601c; --c2: #2d8659; --c3: #8a4fb0; --c4: #b0365a;
  --c5: #5f7a1f; --c6: #1f7f8c; --c7: #8c6d1f; }
@media (prefers-color-scheme: dark) { svg { --paper: #14171c; --ink: #e6e8eb; --soft: #9aa3af; --line: #3b424d;
  --pad: #2a2f37; --c0: #6aa7ea; --c1: #ef9a5c; --c2: #62c493; --c3: #c594e8; --c4: #f0829f; --c5: #a9c95b;
  --c6: #5fc6d4; --c7: #d9b660; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .head { font-size: 16px; font-weight: 600; }
.big { font-size: 20px; font-weight: 700; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.small { font-size: 10px; } .frame { fill: none; stroke: var(--line); } .pad { fill: url(#pad); stroke: var(--line);
  stroke-width: 0.5; } .null { fill: none; stroke: var(--line); stroke-dasharray: 2 2; }
.read { fill: var(--ink); } .paper { fill: var(--paper); } .on { fill: var(--paper); font-weight: 600; }
text { pointer-events: none; } .link { opacity: 0.22; } .wide { stroke: var(--paper); stroke-width: 0.4; }
.held { opacity: 0.25; } .t0 { opacity: 1; } .t1 { opacity: 0.8; } .t2 { opacity: 0.62; } .t3 { opacity: 0.46; }
rect:hover, polygon:hover { stroke: var(--ink); stroke-width: 1; opacity: 1; }
""" + "\n".join(f".c{index} {{ fill: var(--c{index}); }}" for index in range(8))

COLORS = 8


class Drawing:
    """Shapes on a page that grows downwards."""

    def __init__(self, width: int, title: str, description: str) -> None:
        """Begin with nothing but a title and a description for those who cannot see it."""
        self.width = width
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        ET.SubElement(self._root, "title").text = printable(title)
        ET.SubElement(self._root, "desc").text = printable(description)
        ET.SubElement(self._root, "style").text = _STYLE
        pattern = {"id": "pad", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
        hatch = ET.SubElement(ET.SubElement(self._root, "defs"), "pattern", pattern)
        ET.SubElement(hatch, "rect", {"width": "6", "height": "6", "style": "fill:var(--paper)"})
        ET.SubElement(hatch, "path", {"d": "M0 6L6 0", "style": "stroke:var(--pad);stroke-width:2"})

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write a line; `y` is its base line."""
        self._add("text", "", {"x": _number(x), "y": _number(y), "class": style}).text = printable(text)

    def rect(self, x: float, y: float, width: float, height: float, style: str, hover: str = "") -> None:
        """Draw a box; one too thin to be seen is drawn a little wider."""
        box = {"x": _number(x), "y": _number(y), "width": _number(max(width, 0.6)), "height": _number(height)}
        self._add("rect", hover, {**box, "class": style})

    def band(self, top: tuple[float, float, float], bottom: tuple[float, float, float], style: str, hover: str) -> None:
        """Draw the band from one stretch to another; each is left end, right end, height."""
        (a, b, y), (c, d, z) = top, bottom
        points = ((a, y), (max(b, a + 0.6), y), (max(d, c + 0.6), z), (c, z))
        text = " ".join(f"{_number(x)},{_number(h)}" for x, h in points)
        self._add("polygon", hover, {"points": text, "class": f"link {style}"})

    def _add(self, tag: str, hover: str, attributes: dict[str, str]) -> ET.Element:
        shape = ET.SubElement(self._root, tag, attributes)
        if hover:
            ET.SubElement(shape, "title").text = printable(hover)
        return shape

    def save(self, output: Path, height: float) -> int:
        """Write the file, HTML if its name ends so, and return its bytes.

        Raises:
            RequestError: it cannot be written.
        """
        text = (self.svg(height) if output.suffix == ".svg" else self.html(height)).encode()
        try:
            output.write_bytes(text)
        except OSError as error:
            raise RequestError(f"--output {output}: {error.strerror or error}") from error
        return len(text)

    def svg(self, height: float) -> str:
        """Return the file, `height` pixels high."""
        self._root.set("viewBox", f"0 0 {self.width} {_number(height)}")
        self._root.set("width", str(self.width))
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def html(self, height: float) -> str:
        """Return the same as a page of its own."""
        title = ET.tostring(self._root[0], encoding="unicode")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">{title}'
            "<style>body{margin:0;background:Canvas}svg{max-width:100%;height:auto;display:block;margin:auto}</style>"
            f"</head><body>\n{self.svg(height)}</body></html>\n"
        )


def check_drawing(output: Path) -> None:
    """Refuse a file whose name says neither SVG nor HTML."""
    if output.suffix not in (".svg", ".html"):
        raise RequestError(f"--output {output}: its name must end in .svg or .html")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
