# SPDX-License-Identifier: Apache-2.0
"""The documentation as people see it: the built site in a real browser. Skipped where either is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvhma
from support.browser import COLUMN, answer, needs_browser

ROOT = Path(__file__).parents[2]
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs/bin"), os.environ.get("PATH", "")]))
FRAMES = ("--disable-web-security", "--allow-file-access-from-files")  # so that a page may look into its frames
SCROLLBAR = 15
PROBE = """<pre id="answer"></pre><script>
addEventListener("load", () => {
  const cut = [], columns = [], heights = [], drawings = [], code = [];
  let tables = 0;
  for (const frame of document.querySelectorAll("iframe")) {
    const article = frame.contentDocument.querySelector("article").getBoundingClientRect();
    columns.push(article.width);

    for (const table of frame.contentDocument.querySelectorAll("article table")) {
      tables += 1;
      heights.push(table.getBoundingClientRect().height);
      const right = table.getBoundingClientRect().right;

      const beyond = Math.max(right - article.right, table.scrollWidth - table.clientWidth);
      if (beyond > 1) cut.push([frame.src.split("/").pop(), table.innerText.slice(0, 60), beyond]);
    }
  }

  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.src.split("/").pop(), article = frame.contentDocument.querySelector("article");

    for (const block of article.querySelectorAll("pre > code")) {
      const found = block.closest(".language-text") ? drawings : code;
      if (block.scrollWidth - block.clientWidth > 1) found.push([page, block.innerText.slice(0, 60)]);
    }

    for (const picture of article.querySelectorAll("img"))
      if (picture.getBoundingClientRect().right - article.getBoundingClientRect().right > 1)
        code.push([page, picture.src]);
  }

  document.getElementById("answer").textContent = JSON.stringify({tables, cut, columns, heights, drawings, code});
});
</script>"""


# The theme's worker, in the page itself: each question and each answer is a message of the window to itself.
SEARCH = """<pre id="answer"></pre><script>WORKER</script><script>
const index = INDEX, words = WORDS, found = [];
addEventListener("message", ({data: {type, data}}) => {
  if (type == 3) found.push(data.items.map(([page]) => page.location));
  if (found.length == words.length) document.getElementById("answer").textContent = JSON.stringify(found);
  else if (type == 1 || type == 3) postMessage({type: 2, data: words[found.length]});
});
postMessage({type: 0, data: {config: index.config, docs: index.docs, options: {suggest: false}}});
</script>"""
WORDS = {
    "timeout": "troubleshooting.html",
    "secret": "security.html",
    "lease": "leases.html",
    "block size": "benchmarks.html",
    "sliding window": "hybrid.html",
    "TLS": "security.html",
}
"""A page that has to be among the first four results of each word."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MKDOCS is None:
        pytest.skip("no mkdocs: make docs sets it up")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([MKDOCS, "build", "--strict", "-q", "-d", folder], cwd=ROOT, env=environment, check=True)
    return folder


def look(pages: list[Path], width: int, folder: Path) -> Any:
    """A browser's measurements of pages in windows of this width."""
    frames = "".join(f'<iframe src="{page.as_uri()}" style="width:{width}px;height:900px"></iframe>' for page in pages)
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8>{frames}{PROBE}")
    return answer(folder / "page.html", *FRAMES)


@needs_browser
@pytest.mark.parametrize("width", [1220, 800])
def test_no_table_is_cut_off(site: Path, tmp_path: Path, width: int) -> None:
    """In the width of the documentation's column, and on a tablet."""
    pages = sorted(site.rglob("*.html"))
    found = look(pages, width, tmp_path)
    assert len(found["columns"]) == len(pages) > 50
    if width == 1220:
        assert COLUMN - SCROLLBAR <= sorted(found["columns"])[len(pages) // 2] <= COLUMN
    assert found["tables"] > 250
    assert found["cut"] == []


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_command_and_no_picture_is_cut_off(site: Path, tmp_path: Path, width: int) -> None:
    """On a laptop and on a telephone, where architecture's drawing scrolls. test_docs.py measures the others."""
    found = look(sorted(site.rglob("*.html")), width, tmp_path)
    assert found["code"] == []
    assert width == 390 or found["drawings"] == []


@needs_browser
def test_supported_features_are_on_one_screen(site: Path, tmp_path: Path) -> None:
    """A window of 1,080 pixels, with the header of the site above it."""
    supported, asked_for = look([site / "compatibility.html"], 1220, tmp_path)["heights"]
    assert asked_for < supported < 1000


def test_every_page_names_version_and_repository(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.search(rf"<title>.*kvhma {re.escape(kvhma.__version__)}</title>", text), page
        assert 'href="https://github.com/kvhma/kvhma"' in text, page
    assert (site / "search/search_index.json").stat().st_size > 100_000


@needs_browser
def test_search_finds_guides_first(site: Path, tmp_path: Path) -> None:
    """Formerly the first result for "timeout" was a property of the API, and that for "block size" a bench."""
    (worker,) = (site / "assets/javascripts/workers").glob("search*.js")
    page = SEARCH.replace("WORDS", json.dumps([*WORDS])).replace("WORKER", worker.read_text(encoding="utf-8"))
    index = (site / "search/search_index.json").read_text(encoding="utf-8").replace("</", "<\\/")
    (tmp_path / "page.html").write_text(page.replace("INDEX", index, 1))
    for (word, expected), found in zip(
        WORDS.items(), answer(tmp_path / "page.html", "--virtual-time-budget=60000"), strict=True
    ):
        pages = [location.partition("#")[0] for location in found]
        assert expected in pages[:4], word
        last = [name.startswith(("api", "benches/")) for name in pages]
        assert last == sorted(last), (word, pages)


@needs_browser
def test_the_browser_finds_a_table_that_is_cut_off(site: Path, tmp_path: Path) -> None:
    """Checks the probe: if it always succeeded it would prove nothing."""
    page = site / "start.html"
    wide = "<table><tr>" + "".join(f"<td>{'x' * 20}{index}</td>" for index in range(12)) + "</tr></table></article>"
    spoiled = site / "spoiled.html"
    spoiled.write_text(page.read_text(encoding="utf-8").replace("</article>", wide, 1), encoding="utf-8")
    try:
        found = look([page, spoiled], 1220, tmp_path)
    finally:
        spoiled.unlink()
    assert [name for name, _, _ in found["cut"]] == ["spoiled.html"]
