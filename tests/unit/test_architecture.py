# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md names only what exists: every file, and every function or class in the file that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.programs import program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.(?:py|rs))(?:: (\w+))?`")
BARE = re.compile(r"`([a-z_]\w*)`")


def places() -> list[tuple[str, str]]:
    """Files with the names that the page puts into them; a name alone belongs to the file named last before it."""
    found = []
    file = ""
    for match in re.finditer(r"`[^`\n]+`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)):
        if named := NAMED.fullmatch(match[0]):
            file, name = named[1], named[2] or ""
            found.append((file, name))
        elif (bare := BARE.fullmatch(match[0])) and file:
            found.append((file, bare[1]))
    return found


def defined(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        return set(re.findall(r"\b(?:fn|struct|enum|trait|type|const)\s+(\w+)", text))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = list(ast.walk(ast.parse(text)))
    constants = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return constants | {node.name for node in nodes if isinstance(node, kinds)}


@pytest.mark.parametrize(("file", "name"), sorted(set(places())))
def test_it_is_there(file, name):
    assert (ROOT / file).is_file()
    assert not name or name in defined(ROOT / file)


def test_the_page_names_much():
    assert len(places()) > 40


def test_the_picture_has_the_rooms_of_the_check():
    layers = program("tools/layers.py")
    picture = PAGE.split("```")[1]
    drawn = [name for house in ("python/kvhma", "rust/core/src") for name in layers.rows_of(layers.PICTURES[house])]
    left_out = {"__init__", "__main__", "types", "versions", "text", "lib", "digest", "finding"}
    assert {name for name in drawn if not re.search(rf"\b{name}\b", picture)} <= left_out


def test_the_page_says_which_parts_use_each_other():
    layers = program("tools/layers.py")
    folder = "python/kvhma"
    used: dict[str, set[str]] = {}
    for arrow in layers.read_python(ROOT, folder).arrows:
        user, target = layers.room_of(arrow.file, folder), layers.room_of(arrow.target, folder)
        used.setdefault(user, set()).add(target)
    rows = re.findall(
        r"^\| \*\*(\w+)\*\* \| [^|]+ \| ([^|]*)\|$",
        PAGE.partition("| upper half |")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    upper = dict(rows)
    assert upper.keys() == {"cli", "proxy", "vllm", "torch", "oracle", "nixl", "tensors", "models"}
    for name, users in rows:
        assert set(users.replace(",", "").split()) == used[name] & upper.keys() - {name}, name


def test_one_request_names_classes_that_are_there_once():
    page = (ROOT / "docs/one-request.md").read_text(encoding="utf-8")
    found: dict[str, list[ast.ClassDef]] = {}
    for file in (ROOT / "python/kvhma/vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    named = {match for match in re.findall(r"`([A-Z][A-Za-z]+)(?:\.(\w+))?`", page) if match[1] != "NAME"}
    assert len(named) > 40
    for name, member in named:
        assert len(found[name]) == 1, name
        members = {node.name for node in found[name][0].body if isinstance(node, ast.FunctionDef)}
        members |= {node.target.id for node in found[name][0].body if isinstance(node, ast.AnnAssign)}
        assert not member or member in members, f"{name}.{member}"
