# SPDX-License-Identifier: Apache-2.0
"""The documentation as people see it: the built site in a real browser. Skipped where either is missing."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import kvhma
from support.browser import COLUMN, Tab, needs_browser, tab

ROOT = Path(__file__).parents[2]
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs/bin"), os.environ.get("PATH", "")]))
SCROLLBAR = 15
WIDTHS = (1280, 1220, 800, 390)
"""A laptop, the documentation's column at its widest, a tablet, a telephone."""
FOR_PEOPLE = 800
"""Tables of numbers scroll in narrower windows, within the page."""

PROBE = """(() => {
  const article = document.querySelector("article"), right = article.getBoundingClientRect().right;
  const end = element => element.getBoundingClientRect().right;
  const hidden = element => element.scrollWidth - element.clientWidth;
  const tables = [...article.querySelectorAll("table")], found = [];
  const report = (kind, element, beyond) => {
    if (beyond > 1) found.push([kind, (element.innerText || element.src || "").slice(0, 60), beyond]);
  };

  for (const table of tables)
    report("table", table, Math.max(end(table) - right, hidden(table)));

  for (const block of article.querySelectorAll("pre > code"))
    report("code", block, Math.max(hidden(block), end(block) - innerWidth));

  for (const picture of article.querySelectorAll("img"))
    report("picture", picture, end(picture) - right);

  const margin = 16;  // of the article, beside the text
  for (const text of article.querySelectorAll("h1, h2, h3, h4, p, li, a, code"))
    if (!text.closest("pre, table")) report("text", text, Math.max(hidden(text) - margin, end(text) - innerWidth));

  report("page", document.body, hidden(document.documentElement));
  return {found, column: article.getBoundingClientRect().width, tables: tables.length,
          heights: tables.map(table => table.getBoundingClientRect().height)};
})()"""

SEARCH = """new Promise(done => {
  const config = JSON.parse(document.getElementById("__config").textContent), found = [], words = WORDS;

  const worker = new Worker(new URL(config.search, location));
  worker.onmessage = ({data: {type, data}}) => {
    if (type == 3) found.push(data.items.map(([page]) => page.location));
    if (found.length == words.length) done(found);
    else if (type == 1 || type == 3) worker.postMessage({type: 2, data: words[found.length]});
  };

  fetch("search/search_index.json").then(index => index.json()).then(index =>
    worker.postMessage({type: 0, data: {config: index.config, docs: index.docs, options: {suggest: false}}}));
})"""
"""The theme's own worker, and its messages."""
RESULTS = """new Promise(done => {
  const look = () => [...document.querySelectorAll(".md-search-result__item > a")].map(link => link.href);

  const seen = new MutationObserver(() => { if (look().length) done(look()); });
  if (look().length) done(look()); else seen.observe(document.body, {childList: true, subtree: true});
})"""
WORDS = {
    "timeout": "troubleshooting.html",
    "secret": "security.html",
    "lease": "leases.html",
    "block size": "tuning.html",
    "sliding window": "hybrid.html",
    "TLS": "security.html",
    "proxy": "start.html",
    "router": "routers.html",
    "prefix cache": "how-it-works.html",
}
"""A page that has to be among the first three results of each word."""
GUIDES = ("Run it", "See it")
"""Doors; the first result of each word is behind one of them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MKDOCS is None:
        pytest.skip("no mkdocs: make docs sets it up")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([MKDOCS, "build", "--strict", "-q", "-d", folder], cwd=ROOT, env=environment, check=True)
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site from a server, which its search needs."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as one:
        yield one


def look(browser: Tab, url: str) -> dict[int, Any]:
    """What a page shows in windows of these widths. It is loaded once."""
    browser.size(WIDTHS[0])
    browser.open(url)
    found = {}
    for width in WIDTHS:
        browser.size(width)
        found[width] = browser.run(PROBE)
    return found


@needs_browser
@pytest.mark.timeout(900)
def test_nothing_is_cut_off(site: Path, address: str, browser: Tab) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert len(pages) > 50
    seen = {page: look(browser, f"{address}/{page}") for page in pages}
    columns = sorted(widths[1220]["column"] for widths in seen.values())
    assert COLUMN - SCROLLBAR <= columns[len(pages) // 2] <= COLUMN
    assert sum(widths[1220]["tables"] for widths in seen.values()) > 250
    assert [
        (page, width, *found)
        for page, widths in seen.items()
        for width, measured in widths.items()
        for found in measured["found"]
        if found[0] != "table" or width >= FOR_PEOPLE
    ] == []
    supported, asked_for = seen["compatibility.html"][1220]["heights"]
    assert asked_for < supported < 1000, "on one screen of 1,080 pixels, with the header of the site above it"


@needs_browser
def test_the_browser_finds_what_is_cut_off(site: Path, address: str, browser: Tab) -> None:
    """Checks the probe: if it always succeeded it would prove nothing."""
    wide = "<table><tr>" + "".join(f"<td>{'x' * 20}{index}</td>" for index in range(12)) + "</tr></table>"
    wide += f"<pre style='overflow:hidden'><code style='white-space:pre'>{'y' * 400}</code></pre>"
    wide += f"<p style='white-space:nowrap'>{'z ' * 200}</p>"
    spoiled = (site / "start.html").read_text(encoding="utf-8").replace("</article>", f"{wide}</article>", 1)
    (site / "spoiled.html").write_text(spoiled, encoding="utf-8")
    try:
        found = look(browser, f"{address}/spoiled.html")
    finally:
        (site / "spoiled.html").unlink()
    for measured in found.values():
        assert {kind for kind, text, _ in measured["found"] if text[:2] in ("xx", "yy", "z ")} == {
            "table",
            "code",
            "text",
        }


class Links(HTMLParser):
    """The links of a page, and what links can lead to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.links.append(value or "")
            elif name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")


def test_no_link_is_broken(site: Path) -> None:
    """In the pages as they are built: hooks have changed links between files of the repository."""
    pages = {path: Links(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            fine = unquote(parts.fragment) in pages[target].anchors if target in pages else target.is_file()
            broken += [] if fine else [(path.name, link)]
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 5000


def test_links_to_the_repository_lead_to_files(site: Path) -> None:
    """On a page of the site a link between files leads to the repository if no page is made of the file."""
    found = set()
    for path in site.rglob("*.html"):
        found |= {
            link for link in Links(path).links if re.match(r"https://github\.com/kvhma/kvhma/(blob|tree)/main/", link)
        }
    assert len(found) > 5
    for link in found:
        assert (ROOT / urlsplit(link).path.split("/main/", 1)[1]).exists(), link


def test_every_page_names_version_and_repository(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.search(rf"<title>.*kvhma {re.escape(kvhma.__version__)}</title>", text), page
        assert 'href="https://github.com/kvhma/kvhma"' in text, page
    assert (site / "search/search_index.json").stat().st_size > 100_000


@needs_browser
def test_search_finds_guides_first(address: str, browser: Tab) -> None:
    browser.open(f"{address}/index.html")
    results = browser.run(SEARCH.replace("WORDS", json.dumps([*WORDS])))
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    doors = re.split(r"^  - ", nav, flags=re.MULTILINE)
    guides = {
        f"{name}.html" for door in doors if door.startswith(GUIDES) for name in re.findall(r"([\w.-]+)\.md", door)
    }
    for (word, expected), found in zip(WORDS.items(), results, strict=True):
        pages = [location.partition("#")[0] for location in found]
        assert expected in pages[:3], (word, pages[:6])
        assert pages[0] in guides, (word, pages[:6])
        last = [name.startswith(("api", "benches/")) for name in pages]
        assert last == sorted(last), (word, pages)


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_user_types_a_word(address: str, browser: Tab, width: int) -> None:
    browser.size(width)
    browser.open(f"{address}/start.html")
    browser.run("document.querySelector('[data-md-toggle=search]').click()")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type("timeout")
    first = browser.run(RESULTS)[0]
    assert urlsplit(first).path == "/troubleshooting.html"
