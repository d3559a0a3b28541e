# SPDX-License-Identifier: Apache-2.0
"""Only kvhma/vllm/internals.py changes vLLM's objects, so that its page and its checks cover all such changes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "python/kvhma/vllm"
HOLDERS = {"request", "manager", "block_pool", "_vllm_config"}
"""Attributes of kvhma's objects that are vLLM's objects."""

FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if path.name != "internals.py")


def changes(source: str) -> Iterator[int]:
    """Yield the lines that assign to, or delete from, a parameter of a type of vLLM's, or what a holder holds."""
    tree = ast.parse(source)
    theirs = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            named = {given.arg for given in arguments(function) if names(given.annotation) & theirs}
            yield from (node.lineno for node in ast.walk(function) if is_change(node, named))


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def names(node: ast.expr | None) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if node else set()


def is_change(node: ast.AST, named: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return is_theirs(node.args[0], named)
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(isinstance(one, ast.Attribute | ast.Subscript) and is_theirs(one.value, named) for one in flat)


def is_theirs(value: ast.expr, named: set[str]) -> bool:
    """Whether an expression leads through an object of vLLM's."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        if isinstance(value, ast.Attribute) and value.attr in HOLDERS:
            return True
        value = value.value
    return isinstance(value, ast.Name) and value.id in named


@pytest.mark.parametrize("name", FILES)
def test_only_internals_changes_objects_of_vllm(name: str) -> None:
    assert list(changes((FOLDER / name).read_text(encoding="utf-8"))) == []


def test_changes_are_found() -> None:
    """All that internals.py does, and what another file would write."""
    assert len(list(changes((FOLDER / "internals.py").read_text(encoding="utf-8")))) >= 8
    start = "from vllm.v1.request import Request\ndef f(self, load, request: Request):\n    "
    for line in ("request.a = 1", "request.a[0] += 1", "del request.a[1:]", "load.request.a, b = 1, 2"):
        assert list(changes(start + line)) == [3], line
    for line in ("self.request = request", "load.a = request", "a = request.a"):
        assert list(changes(start + line)) == [], line
