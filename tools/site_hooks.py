# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site: the README is its first page; its neighbours and benches/*.md are pages of it.

The repository is also read as files, so links in it are between files; the hooks turn them into links between pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
AT_THE_ROOT = {"index.md": "README.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
DOORS = {"Run it": 3, "See it": 3, "Trust it": 0.5, "Work on it": 0.3}
BOOSTS = {"troubleshooting.md": 9, "hybrid.md": 9, "vllm-settings.md": 6}
"""How much pages count in the search, by their door or alone. What operators look for comes first."""
LAST, LAST_BOOST = ("api", "benches/"), 1e-5
"""Pages that come after all others, and their boost. A word in a title counts 1,000 times, and names are titles."""
_OF_ROOT = re.compile(r"(\]\(|src=\")docs/")
# The README is also read on a package index, so its links are absolute.
_ABSOLUTE = re.compile(r"\]\(https://(?:github|raw\.githubusercontent)\.com/kvhma/kvhma/(?:blob/)?main/")
_ABOVE_DOCS = re.compile(r"\]\(\.\./")
_BESIDE_DOCS = re.compile(r"\]\(\.\./docs/")
_VERSION = re.compile(r'^version = "(.*)"$', re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>|<a )")


def on_config(config: MkDocsConfig) -> None:
    """Show the version of the pages in the header and in every title."""
    version = _VERSION.search((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    if version is None:
        raise ValueError("Cargo.toml has no version")
    config.site_name += f" {version[1]}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside of docs/."""
    for page, name in AT_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "benches").glob("*.md")):
        files.append(File.generated(config, f"benches/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files into links between pages, and give the widest table the whole window."""
    if page.file.src_uri == "compatibility.md":
        page.meta["hide"] = ["navigation", "toc"]
    door = page.ancestors[-1].title if page.ancestors else None
    usual = LAST_BOOST if page.file.src_uri.startswith(LAST) else DOORS.get(door, 1)
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri, usual)}
    if page.file.src_uri in AT_THE_ROOT:
        return _OF_ROOT.sub(r"\1", _ABSOLUTE.sub("](", markdown))
    if page.file.src_uri.startswith("benches/"):
        return _BESIDE_DOCS.sub("](../", markdown)
    return _ABOVE_DOCS.sub("](", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings name other objects with roles, which Markdown does not know."""
    return _ROLE.sub("", html)
