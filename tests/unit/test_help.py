# SPDX-License-Identifier: Apache-2.0
"""`help` documents every public name: arguments, return value, and exceptions.

Public names are those on the API pages. Sources are read, not imported, so modules that need torch or NIXL are checked
everywhere. test_bindings.py checks that the compiled half has the docstrings of its stub at run time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
PAGE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
SAID = re.compile(r"\b(?:[Rr]eturns?|[Yy]ields?)\b")
RAISED = re.compile(r"^Raises:|Errors (?:are )?as|[Rr]aises", re.MULTILINE)


@cache
def parsed(module: str) -> ast.Module:
    path = ROOT / "python" / module.replace(".", "/")
    files = [path.with_suffix(".pyi"), path.with_suffix(".py"), path / "__init__.py"]
    return ast.parse(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))


def public() -> list[tuple[str, str]]:
    """The modules of the API pages, each with the names that it makes public."""
    found = []
    for page in sorted((ROOT / "docs").glob("api*.md")):
        for module, options in PAGE.findall(page.read_text(encoding="utf-8")):
            chosen = re.findall(r"- (\w+)|members: \[(.*)\]", options)
            words = [word.strip() for one, several in chosen for word in (one or several).split(",")]
            found += [(module, name) for name in words or names(module)]
    return found


def names(module: str) -> list[str]:
    """The names in `__all__`, else every name that is defined there."""
    body = parsed(module).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return [node.name for node in body if isinstance(node, Definition) and not node.name.startswith("_")]


def definition(module: str, name: str) -> Definition | None:
    """The file that defines a name, through the modules that import it; None for anything but functions and classes."""
    for node in parsed(module).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvhma"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(str(node.module), alias.name)
    return None


def described() -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
    """Every public function, class, method and property, with its class."""
    for module, name in public():
        node = definition(module, name)
        if node is None:
            continue
        yield f"{module}.{name}", node, None
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, Function) and (item.name == "__init__" or not item.name.startswith("_")):
                    yield f"{module}.{name}.{item.name}", item, node


THINGS = {name: (node, owner) for name, node, owner in described()}


def missing(node: Definition, owner: ast.ClassDef | None) -> list[str]:
    """The parts that a docstring lacks."""
    text = ast.get_docstring(node) or ""
    if not text:
        return ["a docstring"]
    if isinstance(node, ast.ClassDef):
        return [f"the attribute {name}" for name in fields(node) if not named(name, text)]
    if any(ast.unparse(item) in ("property", "cached_property", "overload") for item in node.decorator_list):
        return []
    if node.name == "__init__" and owner is not None:
        text += "\n" + (ast.get_docstring(owner) or "")
    if re.search(r"Arguments(?:, result)? and errors are as for `", text):
        return []
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    given = [one.arg for one in arguments if one is not None and one.arg not in ("self", "cls")]
    found = [f"the argument {name}" for name in given if not named(name, text)]
    returns = node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn")
    if returns and not SAID.search(text):
        found.append("what comes back")
    raised = {str(one) for one in map(error, ast.walk(node)) if one}
    # A stub has no body, so any function with arguments there may check them.
    if given and all(isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in node.body):
        raised = raised or {"something"}
    if raised and not RAISED.search(text):
        found.append(f"that it raises {', '.join(sorted(raised))}")
    return found


def named(name: str, text: str) -> bool:
    return re.search(rf"^\s*(?:\*?\*?\w+, )*\*?\*?{name}(?:, \w+)*:|`{name}`", text, re.MULTILINE) is not None


def fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, but for settings: each is a row with its meaning, of which a page is made."""
    if not any("dataclass" in ast.unparse(item) for item in node.decorator_list):
        return []
    found = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    found = [item for item in found if not is_row(item.value)]
    return [
        name
        for item in found
        if not (name := ast.unparse(item.target)).startswith("_") and "InitVar" not in ast.unparse(item.annotation)
    ]


def is_row(value: ast.expr | None) -> bool:
    """Whether a field is a row of settings, with a text of what it means."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "_row":
        return False
    meaning = value.args[2]
    return isinstance(meaning, ast.Constant) and isinstance(meaning.value, str) and len(meaning.value) > 10


def error(node: ast.AST) -> str | None:
    """The class that a statement raises, None if it re-raises."""
    if not isinstance(node, ast.Raise) or node.exc is None:
        return None
    return ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)


@pytest.mark.parametrize("name", THINGS)
def test_help_is_complete(name: str) -> None:
    assert missing(*THINGS[name]) == []
