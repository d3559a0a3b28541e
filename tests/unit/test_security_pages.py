# SPDX-License-Identifier: Apache-2.0
"""What the pages on security say is shown by tests: those that they name exist, and no file of attacks is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["docs/attacker.md", "docs/security.md"]
TEST = re.compile(r"`([\w/]+/test_\w+\.py)::(test_\w+)`")
MOST_WORDS = 1500


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def collected(file: str) -> set[str]:
    """Names of the functions that pytest collects in a file; a file that needs vLLM cannot be imported here."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows() -> list[list[str]]:
    """The cells of all tables of the page on attackers, without their heads."""
    lines = [line for line in page("docs/attacker.md").splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [cells for cells in found if cells[0] != "place" and "---" not in cells]


@pytest.mark.parametrize("name", PAGES)
def test_each_named_test_exists(name: str) -> None:
    named = TEST.findall(page(name))
    assert len(named) > 30
    assert len(named) == page(name).count(".py::"), "each is written as FOLDER/test_FILE.py::test_NAME"
    for file, test in named:
        assert (ROOT / "tests" / file).is_file(), file
        assert test in collected(file), f"{file}::{test}"


def test_each_file_of_attacks_is_in_a_row() -> None:
    files = {f"attacks/{path.name}" for path in (ROOT / "tests/attacks").glob("test_*.py")}
    named = {file for cells in rows() for cell in cells for file, _ in TEST.findall(cell)}
    assert files - named == set()


def test_each_cell_names_a_test_or_says_why_there_is_none() -> None:
    found = rows()
    assert len(found) > 25
    for cells in found:
        _, what, without, with_secret = cells
        assert what in ("reads", "changes", "stops", "changes, stops", "all"), cells
        for cell in (without, with_secret):
            is_reference = cell in ("the same", "as the row below") or "the same test" in cell
            assert TEST.search(cell) or "no test: " in cell or is_reference, cell


def test_the_page_stays_short() -> None:
    assert len(page("docs/attacker.md").split()) <= MOST_WORDS
