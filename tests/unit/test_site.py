# SPDX-License-Identifier: Apache-2.0
"""The built documentation: no warning of mkdocs, and no link that leads nowhere. Skipped without mkdocs."""

from __future__ import annotations

import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/kvhma/kvhma/"
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs/bin"), os.environ.get("PATH", "")]))


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


@pytest.mark.skipif(MKDOCS is None, reason="no mkdocs: make docs sets it up")
def test_no_link_is_broken(tmp_path: Path) -> None:
    """In the pages as they are built: hooks have changed links between files of the repository."""
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "-q", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    pages = {path: Links(path) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if link.startswith((f"{REPOSITORY}blob/main/", f"{REPOSITORY}tree/main/")):
                is_right = (ROOT / parts.path.split("/main/", 1)[1]).exists()
            elif parts.scheme or parts.netloc:
                continue
            else:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                is_right = unquote(parts.fragment) in pages[target].anchors if target in pages else target.is_file()
            broken += [] if is_right else [(path.name, link)]
    assert len(pages) > 50
    assert broken == []
