# SPDX-License-Identifier: Apache-2.0
"""``kvhma map`` writes one self-contained file, whose shapes are the plan's numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import kvhma
from kvhma.cli.block_tables import block_tables, sequence_blocks
from kvhma.cli.pages import DrawnRank
from kvhma.cli.runs import Reading, draw_runs, scales
from kvhma.cli.svg import Drawing
from kvhma.models import model, models
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid

NANO = "NVIDIA-Nemotron-3-Nano-30B-A3B"
SVG = "{http://www.w3.org/2000/svg}"
LEFT, SPAN = 128, 548
MAX_BYTES = 300_000


def hovers(root: ET.Element, tag: str) -> list[str]:
    """Texts that shapes of a kind show."""
    return [shape[0].text or "" for shape in root.iter(f"{SVG}{tag}") if len(shape)]


def texts(root: ET.Element) -> list[Any]:
    return [text for text in root.iter(f"{SVG}text") if text.text]


def tiny(tmp_path: Path) -> tuple[kvhma.Geometry, Path]:
    one = tiny_hybrid(40)
    path = tmp_path / "tiny.json"
    path.write_bytes(one.to_json())
    return one, path


def test_every_run_is_drawn(tmp_path: Path) -> None:
    one, path = tiny(tmp_path)
    done = cli("map", path, "--tokens", 100, "--pool", "used", "-o", tmp_path / "m.svg", "--json")
    assert (done.code, done.err) == (0, "")
    root = ET.parse(tmp_path / "m.svg").getroot()
    bands = hovers(root, "g")
    assert len(bands) == done.form["runs"] > 4
    found = [re.search(r"P (0x\w+)\nD (0x\w+)\n([\d,]+) bytes", text) for text in bands]
    drawn = [(int(m[2], 16), int(m[1], 16), int(m[3].replace(",", ""))) for m in found if m]
    local, remote = (block_tables(one, 100, "used", seed) for seed in (0, 1))
    moved = kvhma.plan(one, one).transfer(100, kvhma.live_spans(one, 100, local), kvhma.live_spans(one, 100, remote))
    (read,) = moved.reads
    runs = [(a, b, n) for (a, n, _), (b, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True)]
    assert sorted(drawn) == sorted(runs)


def test_runs_are_drawn_at_their_addresses(tmp_path: Path) -> None:
    _, path = tiny(tmp_path)
    cli("map", path, "--tokens", 100, "-o", tmp_path / "m.svg")
    root = ET.parse(tmp_path / "m.svg").getroot()
    ends = [text.text for text in root.iter(f"{SVG}text") if re.fullmatch(r"0x\w+", text.text or "")]
    low, high = (int(str(text), 16) for text in ends[:2])
    for shape in root.iter(f"{SVG}g"):
        match = re.search(r"P (0x\w+)\n.*\n([\d,]+) bytes", shape[0].text or "")
        assert match
        address, length = int(match[1], 16), int(match[2].replace(",", ""))
        if not low <= address < high:
            continue  # it belongs to another tensor
        above, below, band = shape[1:]
        left, right = (float(point.split(",")[0]) for point in band.attrib["points"].split()[:2])
        assert left == pytest.approx(LEFT + (address - low) / (high - low) * SPAN, abs=0.02)
        assert right == pytest.approx(left + length / (high - low) * SPAN, abs=0.7)
        assert (float(above.attrib["x"]), float(above.attrib["width"])) == pytest.approx((left, right - left), abs=0.02)
        assert below.attrib["width"] == above.attrib["width"]  # one scale


def test_pages_parts_padding_and_layers(tmp_path: Path) -> None:
    done = cli("map", NANO, "--prefill", "tp=2", "--decode", "tp=4,block=64", "-o", tmp_path / "m.svg")
    assert done.code == 0
    root = ET.parse(tmp_path / "m.svg").getroot()
    boxes = hovers(root, "rect")
    one = layout(model(NANO), LayoutOptions(num_blocks=2, tp_size=4, block_size=64))
    state = next(y for y in one.layers if one.groups[y.group].kind == "ssm")
    rest = state.block_stride - state.page.nbytes
    assert f"{rest:,} bytes of {state.block_stride:,} are padding" in boxes
    for part in state.page.parts:
        assert any(f"\n{part.name}: " in text and f"{part.nbytes:,} bytes" in text for text in boxes)
    # One place of 30 has no layer: 23 states and 6 attentions in 5 groups of 6.
    assert [text for text in boxes if text.startswith("no layer of group")] == ["no layer of group 3 in tensor 5"]
    assert sum("\ntensor " in text for text in boxes) == 29
    # A rank of D reads half of P's state, which fills all of D's.
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert any(str(text).startswith("D rank 0 of 4 reads from P rank 0 of 2") for text in texts)


def test_bars_mark_the_bytes_read_from_a_block(tmp_path: Path) -> None:
    """A D rank of four reads half of what a P rank of two holds of a state, and all of its KV head."""
    cli("map", NANO, "--prefill", "tp=2", "--decode", "tp=4,block=64", "-o", tmp_path / "m.svg")
    bars = [
        int(match[1].replace(",", ""))
        for text in hovers(ET.parse(tmp_path / "m.svg").getroot(), "rect")
        if (match := re.fullmatch(r"read of block 1: .*, ([\d,]+) bytes", text))
    ]
    # On P, x, B and C are not contiguous, and neither are the last channels of C and ssm. On D all of them are.
    ours, theirs = 2134016 // 4, [3 * 2 * n for n in (1024, 256, 256)] + [16 * 64 * 128 * 4]
    assert sorted(bars) == sorted([ours, *theirs])


def test_blocks_of_the_request(tmp_path: Path) -> None:
    cli("map", "gemma-3-4b", "--tokens", 1700, "--cached", 160, "--pool", "used", "-o", tmp_path / "m.svg")
    root = ET.parse(tmp_path / "m.svg").getroot()
    boxes = hovers(root, "rect")
    one = layout(model("gemma-3-4b"), LayoutOptions(num_blocks=2))
    dead = sum(sum(block == 0 for block in table) for table in sequence_blocks(one, 1700))
    assert dead > 0
    # Every block is in a box with a count: a picture leaves out no block.
    found = [re.match(r"entr(?:y|ies) (\d+)(?: to (\d+))?: (?:([\d,]+) blocks, )?(.*)", text) for text in boxes]
    counts: dict[str, int] = {}
    for match in filter(None, found):
        number = int(match[3].replace(",", "")) if match[3] else 1
        assert number == int(match[2] or match[1]) - int(match[1]) + 1
        state = re.sub(r"block \d+, ", "", match[4])
        counts[state] = counts.get(state, 0) + number
    entries = 2 * sum(len(table) for table in sequence_blocks(one, 1700))
    assert counts == {"dropped": 2 * dead, "not read": 10, "read": entries - 2 * dead - 10}
    # D's prefix hit: ten blocks of the full group.
    (kept,) = [text for text in boxes if "not read" in text]
    assert kept.startswith("entries 0 to 9: 10 blocks, not read\ntokens 0 to 159\nblocks ")
    assert "10 not read" in [text.text for text in root.iter(f"{SVG}text")]


def test_runs_that_are_too_many_are_bands(tmp_path: Path) -> None:
    """Bands hold every run and every byte, cover what they hold, and have the colors of groups."""
    done = cli("map", "gemma-3-27b", "--tokens", 32768, "--pool", "used", "-o", tmp_path / "m.svg", "--json")
    assert done.form["runs"] > 10_000
    assert done.form["bytes"] < MAX_BYTES
    root = ET.parse(tmp_path / "m.svg").getroot()
    bands, runs, nbytes = hovers(root, "g"), 0, 0
    assert len(bands) < 500
    one = layout(model("gemma-3-27b"), LayoutOptions(num_blocks=6000))
    tables = [block_tables(one, 32768, "used", seed) for seed in (0, 1)]
    planned = cli("plan", "gemma-3-27b", "--tokens", 32768, "--pool", "used", "--json").form
    for text in bands:
        if match := re.match(
            r"group \d: ([\d,]+) runs, ([\d,]+) bytes\nP (0x\w+) to (0x\w+)\nD (0x\w+) to (0x\w+)$", text
        ):
            count, size = (int(match[at].replace(",", "")) for at in (1, 2))
            first, last, to, end = (int(match[at], 16) for at in (3, 4, 5, 6))
            assert min(last - first, end - to) >= size > 0
        else:
            match = re.search(r"\nP 0x\w+\nD 0x\w+\n([\d,]+) bytes$", text)
            assert match
            count, size = 1, int(match[1].replace(",", ""))
        runs, nbytes = runs + count, nbytes + size
    shown = [
        int(text.text.split()[0].replace(",", "")) for text in texts(root) if re.fullmatch(r"[\d,]+ runs", text.text)
    ]
    assert len(shown) == 6
    assert runs == sum(shown)
    assert nbytes <= planned["bytes"]
    assert {int(c) for g in root.iter(f"{SVG}g") for c in re.findall(r"c(\d)", g.attrib["class"])} == set(range(7))
    assert all(len(table) == 2048 for side in tables for table in side)


@pytest.mark.parametrize("name", models())
def test_every_picture_is_small(name: str, tmp_path: Path) -> None:
    for prefill, decode in (("tp=1", "tp=1,block=128"), ("tp=2,layout=NHD", "tp=1")):
        sides = ("--prefill", prefill, "--decode", decode, "--pool", "used", "--tokens", "9k", "--tensors", 64)
        done = cli("map", name, *sides, "-o", tmp_path / "m.svg", "--json")
        assert done.code == 0, done.err
        assert done.form["bytes"] == (tmp_path / "m.svg").stat().st_size < MAX_BYTES


def test_sides_that_differ_much_have_scales_of_their_own(tmp_path: Path) -> None:
    """D reads only the last block of a full block table on P: P's stretch is far longer."""
    one = tiny_hybrid(400)
    (tmp_path / "g.json").write_bytes(one.to_json())
    cli("map", tmp_path / "g.json", "--tokens", 100, "-o", tmp_path / "m.svg")
    said = [text.text for text in texts(ET.parse(tmp_path / "m.svg").getroot()) if "px:" in text.text]
    assert said
    assert all(text.startswith("1 px: ") for text in said)
    runs = np.array([(1 << 20, 1 << 24, 64), ((1 << 20) + 64, (1 << 24) + 64_000, 64)], np.uint64)
    above, below = scales(runs)
    assert above.at((1 << 24) + 64_064) == below.at((1 << 20) + 128) == LEFT + SPAN
    page = Drawing(688, "", "")
    rank = DrawnRank("", one, [], [set() for _ in one.groups], [])
    draw_runs(page, 0, Reading(rank, rank, runs), 1)
    assert list(re.findall(r">([PD] 1 px: [^<]*)<", page.svg(10))) == ["P 1 px: 117 B", "D 1 px: 0 B"]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_order_can_be_drawn(order: Order, tmp_path: Path) -> None:
    sides = ("--prefill", f"tp=2,layout={order}", "--decode", f"layout={order}")
    done = cli("map", "gpt-oss-20b", *sides, "--tokens", 300, "--source", 1, "-o", tmp_path / "m.svg", "--json")
    assert done.code == 0, done.err
    assert done.form["prefill_rank"] == 1
    ET.parse(tmp_path / "m.svg")


@pytest.mark.parametrize("name", ["m.svg", "m.html"])
def test_nothing_from_elsewhere(name: str, tmp_path: Path) -> None:
    assert cli("map", NANO, "-o", tmp_path / name, "-q").out == ""
    text = (tmp_path / name).read_text()
    assert "prefers-color-scheme: dark" in text
    for words in ("src=", "href", "@import", "<script", "url(h"):
        assert words not in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}


def test_hostile_names(tmp_path: Path) -> None:
    """A layer's name is shown as text, even if it looks like markup."""
    one = tiny_hybrid(40)
    text = one.to_json().decode().replace("layers.0", "</title><script>alert(1)</script>\\u001b[31m&amp;")
    (tmp_path / "g.json").write_text(text)
    for name in ("m.svg", "m.html"):
        assert cli("map", tmp_path / "g.json", "--tokens", 50, "-o", tmp_path / name).code == 0
        drawn = (tmp_path / name).read_text()
        assert "<script" not in drawn
        assert "\x1b" not in drawn
    assert any("</title><script>" in text for text in hovers(ET.parse(tmp_path / "m.svg").getroot(), "rect"))


def test_wrong_output(tmp_path: Path) -> None:
    assert "its name must end in .svg or .html" in refused("map", NANO, "-o", tmp_path / "m.png")
    assert "No such file" in refused("map", NANO, "-o", tmp_path / "no" / "m.svg")
    assert "--rank 3: the decode engine has ranks 0 to 0" in refused("map", NANO, "--rank", 3)
    line = refused("map", NANO, "--prefill", "tp=2", "--decode", "tp=2", "--source", 1, "-o", tmp_path / "m.svg")
    assert "--source 1: rank 0 of D reads nothing from it; it reads from 0" in line
