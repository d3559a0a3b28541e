# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site: the README is its first page, and benches/*.md are pages of it.

The repository is read as files too, so links in it are between files; here they become links between pages.
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
_OF_README = re.compile(r"(\]\(|src=\")docs/")
_OF_DOCS = re.compile(r"\]\(\.\./benches/")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>|<a )")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for path in sorted((ROOT / "benches").glob("*.md")):
        files.append(File.generated(config, f"benches/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links between files links between pages."""
    if page.file.src_uri == "index.md":
        return _OF_README.sub(r"\1", markdown)
    return _OF_DOCS.sub("](benches/", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings name other objects with roles, which Markdown does not know."""
    return _ROLE.sub("", html)
