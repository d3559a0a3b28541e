# SPDX-License-Identifier: Apache-2.0
"""The picture of a replay shows numbers that are counted here once more, from its own axes; its texts are readable."""

from __future__ import annotations

import json
import re
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import kvhma
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.models import model
from kvhma.replay.report import without_clipping
from support.cli_run import cli, refused

SVG = "{http://www.w3.org/2000/svg}"
CHARACTER, SIZE = 7.6, 13
"""Width of a character in pixels at the size of most texts, generously."""


def drawn(folder: Path, rows: list[tuple[float, int, int]], name: str, *options: str) -> ET.Element:
    """Return the picture of requests: seconds, tokens, and the number of an identity for all blocks of a prompt."""
    lines = []
    for at, tokens, first in rows:
        ids = list(range(first, first - (-tokens // 512)))
        lines.append({"timestamp": at * 1e3, "input_length": tokens, "output_length": 3, "hash_ids": ids})
    path, svg = folder / "some <&> requests.jsonl", folder / "out.svg"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "curves" not in cli("replay", path, name, "--svg", svg, "--json", *options).form
    return ET.parse(svg).getroot()


@cache
def costs(name: str) -> tuple[Any, Any]:
    engine = EngineOptions()
    sides = of_model(model(name), engine, engine, RequestOptions(1 << 16))
    return (
        kvhma.cost(without_clipping(sides.decode), without_clipping(sides.prefill)),
        kvhma.cost(sides.decode, sides.prefill),
    )


def texts(root: ET.Element) -> list[tuple[float, float, float, float, str]]:
    """Return the boxes of all texts: left, right, top, bottom."""
    found = []
    for text in root.iter(f"{SVG}text"):
        style, content = text.get("class"), text.text or ""
        width = len(content) * CHARACTER * (15 / SIZE if style == "head" else 1)
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        left = x - width * {"end": 1.0, "mid": 0.5}.get(style or "", 0.0)
        found.append((left, left + width, y - SIZE, y + 3, content))
    return found


def axis(root: ET.Element, style: str, low: float, high: float, *, is_log: bool) -> Any:
    """Return what turns pixels of an axis into values, by the first and the last label between two heights."""
    key = "y" if style == "end" else "x"
    labels = [
        (float(text.get(key, "")) - (4 if key == "y" else 0), float((text.text or "").replace(",", "")))
        for text in root.iter(f"{SVG}text")
        if text.get("class") == style
        and low < float(text.get("y", "")) < high
        and re.fullmatch(r"[\d.,e+]+", text.text or "")
    ]
    (first, value), (last, largest) = labels[0], labels[-1]
    if is_log:
        return lambda at: exp(log(value) + (at - first) / (last - first) * (log(largest) - log(value)))
    return lambda at: value + (at - first) / (last - first) * (largest - value)


def curves(root: ET.Element, style: str) -> list[list[tuple[float, float]]]:
    """Return the points of the curves of a rule, without those of the legend."""
    found = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline") if line.get("class") == style]
    points = [[tuple(map(float, point.split(","))) for point in each] for each in found]
    return [each for each in points if len(each) > 2]


def some_rows(number: int, seconds: float) -> list[tuple[float, int, int]]:
    rng = np.random.default_rng(7)
    tokens = np.minimum(rng.lognormal(7, 1.2, number).astype(int) + 20, 60_000)
    return list(
        zip(
            np.sort(rng.random(number) * seconds).tolist(),
            tokens.tolist(),
            (rng.integers(0, 9, number) * 1000).tolist(),
            strict=True,
        )
    )


def test_rates_links_bytes_and_density(tmp_path: Path) -> None:
    rows = some_rows(900, 3000)
    start = rows[0][0]
    root = drawn(tmp_path, rows, "gemma-3-4b", "--engines", "1P2D")
    x = axis(root, "mid", 320, 345, is_log=False)
    y = axis(root, "end", 90, 330, is_log=False)
    whole, clipped = costs("gemma-3-4b")
    for style, of in (("whole", whole), ("clipped", clipped)):
        sums = np.zeros(300)
        for at, tokens, _ in rows:
            sums[int((at - start) // 10)] += of.of(tokens).bytes
        points = curves(root, style)[0]
        assert len(points) == int((rows[-1][0] - start) // 10) + 1
        for at, rate in points:
            window = round((x(at) * 60 - 5) / 10)
            assert x(at) * 60 == pytest.approx(10 * window + 5, abs=0.1)
            assert y(rate) == pytest.approx(sums[window] * 8e-9 / 10, abs=y(100) / 5000)

    peak = max(y(rate) for _, rate in curves(root, "whole")[0])
    links = [y(float(line.get("y1", ""))) for line in root.iter(f"{SVG}line") if line.get("class") == "link"]
    expected = [2 * rate for rate in (10, 25, 100, 400)]
    assert links == pytest.approx(expected[: sum(rate < peak for rate in expected) + 1], rel=2e-3)
    assert any(content == "10 Gb/s × 2 ranks of D" for *_, content in texts(root))

    x = axis(root, "mid", 600, 640, is_log=True)
    y = axis(root, "end", 430, 610, is_log=True)
    for style, of in (("whole", whole), ("clipped", clipped)):
        points = curves(root, style)[1]
        assert x(points[0][0]) == pytest.approx(min(tokens for _, tokens, _ in rows), rel=1e-3)
        for at, nbytes in points:
            around = [of.of(max(round(x(at)) + more, 1)).bytes / 1e6 for more in range(-12, 13)]
            assert min(around) * 0.999 < y(nbytes) < max(around) * 1.001

    bars = [{key: float(bar.get(key, "")) for key in ("x", "width", "height")} for bar in root.iter(f"{SVG}rect")]
    shares = np.array([bar["width"] * bar["height"] for bar in bars])
    shares /= shares.sum()
    for bar, share in zip(bars, shares, strict=True):
        first, last = (round(x(at)) for at in (bar["x"], bar["x"] + bar["width"]))
        near = [sum(first + d <= tokens < last + d for _, tokens, _ in rows) / 900 for d in (-2, -1, 0, 1, 2)]
        assert min(near) - 2e-3 < share < max(near) + 2e-3


@pytest.mark.parametrize(
    ("rows", "name", "options"),
    [
        ([(0, 700, 0)], "gemma-3-4b", ()),
        ([(0, 3, 0), (1, 3, 0)], "DeepSeek-V3", ()),
        ([(0, 3, 0), (4e7, 60_000, 0), (4e7, 60_000, 0)], "NVIDIA-Nemotron-3-Nano-30B-A3B", ("--link", "0.001")),
        ([(3 * at, 16 + 9 * at, at) for at in range(3000)], "gemma-3-4b", ("--engines", "3P9D")),
        (some_rows(4000, 9e4), "gemma-3-4b", ("--engines", "900P900D")),
    ],
)
def test_every_trace_has_a_readable_picture(
    tmp_path: Path, rows: list[tuple[float, int, int]], name: str, options: tuple[str, ...]
) -> None:
    root = drawn(tmp_path, rows, name, *options)
    width, height = (float(size) for size in root.get("viewBox", "").split()[2:])
    points = [
        tuple(map(float, point.split(",")))
        for line in root.iter(f"{SVG}polyline")
        for point in line.get("points", "").split()
    ]
    assert 4 < len(points) + len(list(root.iter(f"{SVG}rect"))) <= 2000
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    boxes = texts(root)
    assert len(boxes) > 5
    for number, (left, right, top, bottom, content) in enumerate(boxes):
        assert (left >= 0, right <= width, bottom <= height) == (True,) * 3, content
        for other in boxes[:number]:
            apart = right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top
            assert apart, (content, other)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    drawn(tmp_path, [(0, 700, 0)], "gemma-3-4b")
    error = refused("replay", tmp_path / "some <&> requests.jsonl", "gemma-3-4b", "--svg", tmp_path / "none/out.svg")
    assert "none/out.svg" in error


def luminance(color: str) -> float:
    channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_colors_and_sizes(tmp_path: Path) -> None:
    """Texts have a contrast of 4.5 to 1 in light and dark, curves of 3 to 1; no text is below 13 pixels."""
    style = drawn(tmp_path, [(0, 700, 0)], "gemma-3-4b").findtext(f"{SVG}style") or ""
    for rules in (
        [rule for rule in style.split("\n") if "dark" not in rule],
        [rule for rule in style.split("\n") if "dark" in rule],
    ):
        colors = {name: luminance(color) for name, color in re.findall(r"--(\w+): (#\w{6})", "".join(rules))}
        paper = colors.pop("paper")
        for name, color in colors.items():
            contrast = (max(color, paper) + 0.05) / (min(color, paper) + 0.05)
            assert contrast >= {"ink": 4.5, "grid": 1}.get(name, 3), (name, contrast)
        assert colors.keys() >= {"ink", "whole", "clipped", "each_group"}
    assert min(map(int, re.findall(r"(\d+)px", style.replace("3px; paint", "")))) >= 13
