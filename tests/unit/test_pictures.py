# SPDX-License-Identifier: Apache-2.0
"""Pictures are readable: in light and dark, in the width of the documentation's column, checked in a real browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvhma.cli.bench import _write as write_points
from kvhma.cli.link import Point
from kvhma.cli.svg import COLORS, PALETTES, Drawing
from kvhma.costs import Link
from support.browser import COLUMN, answer, needs_browser
from support.cli_run import cli

NANO = "NVIDIA-Nemotron-3-Nano-30B-A3B"
MAX_BYTES = 300_000
ROOT = Path(__file__).parents[2]
ASSETS = sorted((ROOT / "docs" / "assets").glob("*.svg"))


def contrast(first: str, second: str) -> float:
    """As WCAG 2.2 defines it, of two colors as #rrggbb."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("setting", PALETTES)
def test_colors(setting: str) -> None:
    """The checks without a browser: 4.5 to 1 for texts, 3 to 1 for shapes, also where shapes are faded."""
    of = PALETTES[setting]
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    for text in ("ink", "soft"):
        assert contrast(of[text], of["paper"]) >= 4.5
    assert contrast(of["ink"], of["pad"]) >= 4.5
    for index in range(COLORS):
        shape = of[f"c{index}"]
        assert contrast(shape, of["paper"]) >= 3
        for opacity in (1, 0.8, 0.62, 0.46, 0.3, 0.22):
            mixed = "#" + "".join(
                f"{round(above * opacity + below * (1 - opacity)):02x}"
                for above, below in zip(bytes.fromhex(shape[1:]), bytes.fromhex(of["paper"][1:]), strict=True)
            )
            assert contrast(of["ink"], mixed) >= 4.5, (setting, index, opacity)


WINDOW = "--window-size=1220,6000"
LIGHT = ("--blink-settings=preferredColorScheme=1",)
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
PROBE = """<pre id="answer"></pre><script>
const svg = document.querySelector("svg"), wrong = [], pale = [], small = [], outside = [], crossing = [];
let seen = 0, labels = 0;
for (const shape of [...svg.querySelectorAll("rect")]) {
  const box = shape.getBoundingClientRect(), owner = shape.closest("g") || shape;
  if (!owner.querySelector("title") || box.width < 8) continue;
  seen += 1;
  const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (!hit || !(hit.closest("g") || hit).querySelector("title")) wrong.push(owner.textContent);
}
const channels = text => text.match(/[\\d.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;

const luminance = rgb => { const [r, g, b] = rgb.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };

const contrast = (a, b) => { const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05); };

const paper = getComputedStyle(svg).backgroundColor, edge = svg.getBoundingClientRect(), boxes = [];
for (const text of svg.querySelectorAll("text")) {
  const box = text.getBoundingClientRect(), style = getComputedStyle(text);

  labels += 1;
  if (parseFloat(style.fontSize) * edge.width / svg.viewBox.baseVal.width < 11) small.push(text.textContent);
  if (box.left < edge.left || box.right > edge.right || box.bottom > edge.bottom) outside.push(text.textContent);

  for (const [other, words] of boxes)
    if (box.left < other.right - 1 && other.left < box.right - 1 &&
        box.top < other.bottom - 3 && other.top < box.bottom - 3)
      crossing.push([text.textContent, words]);

  boxes.push([box, text.textContent]);
  for (const x of [box.left + 1, (box.left + box.right) / 2, box.right - 1]) {
    let below = channels(paper).slice(0, 3);
    for (const shape of document.elementsFromPoint(x, (box.top + box.bottom) / 2).reverse()) {
      if (!svg.contains(shape) || shape === svg) continue;
      const found = getComputedStyle(shape), fill = found.fill.startsWith("url")
        ? getComputedStyle(svg).getPropertyValue("--pad") : found.fill;

      if (fill === "none") continue;
      const rgb = fill.startsWith("#") ? [1, 3, 5].map(at => parseInt(fill.slice(at, at + 2), 16)) : channels(fill);

      below = below.map((value, at) => value + (rgb[at] - value) * parseFloat(found.opacity));
    }

    const ratio = contrast(channels(style.fill).slice(0, 3), below);
    if (!(ratio >= 4.5)) pale.push([text.textContent, ratio]);
  }
}
document.getElementById("answer").textContent =
  JSON.stringify({seen, labels, wrong, pale, small, outside, crossing, paper, width: edge.width});
</script>"""


def look(picture: str, flags: tuple[str, ...], folder: Path) -> Any:
    """The measurements of a browser without a network, for a picture in the documentation's column."""
    page = folder / "page.html"
    style = f"<style>body{{margin:0;width:{COLUMN}px}}svg{{max-width:100%;height:auto;display:block}}</style>"
    page.write_text(f"<!doctype html><meta charset=utf-8>{style}<body>{picture}{PROBE}</body>")
    return answer(page, WINDOW, *flags)


PICTURES: dict[str, tuple[object, ...]] = {
    "nano": ("map", NANO, "--tokens", 4000, "--prefill", "tp=2", "--decode", "tp=4,block=64"),
    "dense": ("map", "google/gemma-3-27b-it", "--tokens", "32k", "--pool", "used", "--cached", 8000),
    "names": ("map", "DeepSeek-V3", "--tokens", 3000, "--pool", "used", "--tensors", 2),
    "sweep": ("sweep", "openai/gpt-oss-20b", "--decode", "tp=1/2/4,block=16/64/128", "--tokens", "500/1k/8k/64k"),
}


def waterfall() -> str:
    """What `make bench-e2e` draws of hand-offs, with stages as far apart as they were."""
    sys.path.insert(0, str(ROOT / "benches"))
    try:
        from handoffs.waterfall import STAGES, draw
    finally:
        sys.path.remove(str(ROOT / "benches"))
    times = (0, 0.9, 1.1, 1.3, 1.35, 1.4, 1.55, 1.7, 2.5, 14.25)
    rows = {stage: at / 1e3 for stage, at in zip(STAGES, times, strict=True)}
    without = {stage: at for stage, at in rows.items() if stage != "checked"}
    return draw("A request of 301 tokens, alone", {"kvhma": rows, "NixlConnector": without})


def of_link(path: Path) -> None:
    """What `kvhma bench link -o` draws, without a link."""
    points = []
    for block in (4096, 16384, 65536, 1 << 18, 1 << 20):
        for descriptors in (1024, 1):
            seconds = descriptors * 3e-6 + block * 1024 / 4e10
            points.append(Point(block, 1024, descriptors, seconds, seconds))
    write_points(path, points, Link(3e-6, 4e10, "here"))


@needs_browser
@pytest.mark.parametrize(("flags", "paper"), [(LIGHT, "rgb(255, 255, 255)"), (DARK, "rgb(20, 23, 28)")])
@pytest.mark.parametrize("name", [*PICTURES, "waterfall", "link", *(path.name for path in ASSETS)])
def test_in_a_browser(name: str, flags: tuple[str, ...], paper: str, tmp_path: Path) -> None:
    """On the reader's choice of paper: everything has a tooltip, and labels are readable in the width of the docs."""
    path = next((path for path in ASSETS if path.name == name), tmp_path / "m.svg")
    if name in PICTURES:
        assert cli(*PICTURES[name], "-o", path).code == 0
    elif name == "waterfall":
        path.write_text(waterfall())
    elif name == "link":
        of_link(path)
    assert path.stat().st_size < MAX_BYTES
    found = look(path.read_text(), flags, tmp_path)
    assert (found["paper"], found["width"]) == (paper, COLUMN)
    assert found["seen"] >= 6
    assert found["labels"] > 20
    for what in ("wrong", "pale", "small", "outside", "crossing"):
        assert found[what] == [], what


@needs_browser
def test_the_browser_finds_errors(tmp_path: Path) -> None:
    """Checks the probe: if it always succeeded it would prove nothing."""
    page = Drawing(1376, "", "")
    page.rect(0, 0, 200, 40, "read", "black on black")
    page.text(10, 20, "cannot be read")
    page.text(1370, 60, "beyond the edge")
    page.text(1370, 62, "over it")
    found = look(page.svg(100), LIGHT, tmp_path)
    assert found["pale"][0][0] == "cannot be read"
    assert found["small"][0] == "cannot be read"
    assert found["outside"] == ["beyond the edge", "over it"]
    assert found["crossing"] == [["over it", "beyond the edge"]]
