# SPDX-License-Identifier: Apache-2.0
"""``kvhma map``: one file that needs nothing else, and whose shapes are the plan's numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import kvhma
from kvhma.cli.compare.block_tables import block_tables, sequence_blocks
from kvhma.models import model
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid

NANO = "NVIDIA-Nemotron-3-Nano-30B-A3B"
SVG = "{http://www.w3.org/2000/svg}"
LEFT, SPAN = 150, 1030


def hovers(root: ET.Element, tag: str) -> list[str]:
    """Texts that shapes of a kind show."""
    return [shape[0].text or "" for shape in root.iter(f"{SVG}{tag}") if len(shape)]


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
    bands = hovers(root, "polygon")
    assert len(bands) == done.form["runs"] > 4
    found = [re.search(r"P (0x\w+)\nD (0x\w+)\n([\d,]+) bytes", text) for text in bands]
    drawn = [(int(m[2], 16), int(m[1], 16), int(m[3].replace(",", ""))) for m in found if m]
    local, remote = (block_tables(one, 100, "used", seed) for seed in (0, 1))
    moved = kvhma.plan(one, one).transfer(100, kvhma.live_spans(one, 100, local), kvhma.live_spans(one, 100, remote))
    (read,) = moved.reads
    runs = [(a, b, n) for (a, n, _), (b, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True)]
    assert sorted(drawn) == sorted(runs)


def test_runs_lie_where_their_addresses_say(tmp_path: Path) -> None:
    _, path = tiny(tmp_path)
    cli("map", path, "--tokens", 100, "-o", tmp_path / "m.svg")
    root = ET.parse(tmp_path / "m.svg").getroot()
    ends = [text.text for text in root.iter(f"{SVG}text") if re.fullmatch(r"0x\w+", text.text or "")]
    low, high = (int(str(text), 16) for text in ends[:2])
    for shape in root.iter(f"{SVG}polygon"):
        match = re.search(r"P (0x\w+)\n.*\n([\d,]+) bytes", shape[0].text or "")
        assert match
        address, length = int(match[1], 16), int(match[2].replace(",", ""))
        if not low <= address < high:
            continue  # of another tensor
        left, right = (float(point.split(",")[0]) for point in shape.attrib["points"].split()[:2])
        assert left == pytest.approx(LEFT + (address - low) / (high - low) * SPAN, abs=0.02)
        assert right == pytest.approx(left + length / (high - low) * SPAN, abs=0.7)


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
    # Half of P's state is what a rank of D reads, all of D's is filled.
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert any(str(text).startswith("D rank 0 of 4 reads from P rank 0 of 2") for text in texts)


def test_bars_mark_what_is_read_of_a_block(tmp_path: Path) -> None:
    """A D rank of four reads half of what a P rank of two holds of a state, and all of its KV head."""
    cli("map", NANO, "--prefill", "tp=2", "--decode", "tp=4,block=64", "-o", tmp_path / "m.svg")
    bars = [
        int(match[1].replace(",", ""))
        for text in hovers(ET.parse(tmp_path / "m.svg").getroot(), "rect")
        if (match := re.fullmatch(r"read of block 1: .*, ([\d,]+) bytes", text))
    ]
    # x, B and C touch nothing of each other on P; the last channels of C and ssm do not either. On D all is one.
    ours, theirs = 2134016 // 4, [3 * 2 * n for n in (1024, 256, 256)] + [16 * 64 * 128 * 4]
    assert sorted(bars) == sorted([ours, *theirs])


def test_blocks_of_the_request(tmp_path: Path) -> None:
    cli("map", "gemma-3-4b", "--tokens", 1700, "--cached", 160, "--pool", "used", "-o", tmp_path / "m.svg")
    boxes = hovers(ET.parse(tmp_path / "m.svg").getroot(), "rect")
    one = layout(model("gemma-3-4b"), LayoutOptions(num_blocks=2))
    dead = sum(sum(block == 0 for block in table) for table in sequence_blocks(one, 1700))
    assert dead > 0
    assert sum(": dropped" in text for text in boxes) == 2 * 6 * 35  # the first 35 of 107 entries are drawn
    full = [text for text in boxes if re.search(r"entry [0-9]: block \d+, not read\ntokens", text)]
    assert len(full) == 10  # what D had: ten blocks of the full group
    assert "…" in [text.text for text in ET.parse(tmp_path / "m.svg").getroot().iter(f"{SVG}text")]


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
    """A layer's name is text, whatever it looks like."""
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


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1220,1400",
)
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
PROBE = """<pre id="answer"></pre><script>
const wrong = [], shapes = [...document.querySelectorAll("rect, polygon")].filter(s => s.querySelector("title"));
let seen = 0;
for (const shape of shapes) {
  const box = shape.getBoundingClientRect();
  if (shape.tagName != "rect" || box.width < 8 || box.bottom > innerHeight) continue;
  seen += 1;
  const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (!hit || !hit.querySelector("title")) wrong.push(shape.textContent);
}
const paper = getComputedStyle(document.querySelector("svg")).backgroundColor;
document.getElementById("answer").textContent = JSON.stringify({seen, wrong, paper});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser")
@pytest.mark.parametrize(("flags", "paper"), [((), "rgb(255, 255, 255)"), (DARK, "rgb(20, 23, 28)")])
def test_in_a_browser(flags: tuple[str, ...], paper: str, tmp_path: Path) -> None:
    """A browser without a network draws it on paper of the reader's choice, and everything shows its text."""
    page = tmp_path / "m.html"
    cli("map", NANO, "--tokens", 4000, "-o", page)
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    command = [str(BROWSER), *FLAGS, *flags, f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.partition('<pre id="answer">')[2].partition("</pre>")[0])
    assert (found["wrong"], found["paper"]) == ([], paper)
    assert found["seen"] > 60
