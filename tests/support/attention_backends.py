# SPDX-License-Identifier: Apache-2.0
"""Reads every attention backend from vLLM's source without importing it: most backends need a GPU to be imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

BASE = ("vllm.v1.attention.backend", "AttentionBackend")
_COMPOSE = "create_composite_attention_backend"

Key = tuple[str, str]
"""Module and name of a class, or of the variable that a composite is assigned to."""


@dataclass
class _Class:
    """A class statement: its bases as they are written, the methods of its body, and the name that it returns."""

    bases: list[str]
    methods: set[str]
    returns: str | None


@dataclass
class Backends:
    """The attention backends that a vLLM defines.

    Attributes:
        classes: module and class of each backend, with the name that formats know it by and the class that decides it.
        composites: module and variable of each composite, with its own name and the key of the child that writes.
    """

    classes: dict[Key, tuple[str, str]] = field(default_factory=dict)
    composites: dict[Key, tuple[str, Key]] = field(default_factory=dict)

    def names(self) -> dict[str, set[str]]:
        """Return all names, each with the classes that decide what it means."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, decides in self.classes.values():
            found[name].add(decides)
        for (_, variable), (name, _) in self.composites.items():
            found[name].add(variable)
        return dict(found)


def fake_backend(name: str) -> type:
    """Return a class that is named like one of vLLM's backends."""
    return type("Backend", (), {"get_name": staticmethod(lambda: name), "__module__": "vllm.v1.attention.backends"})


def backends_of(root: Path) -> Backends:
    """Read the package in a folder that is named ``vllm``, or stands for it."""
    classes: dict[Key, _Class] = {}
    imports: dict[str, dict[str, Key]] = {}
    composed: dict[Key, tuple[str, str]] = {}
    for file in root.rglob("*.py"):
        text = file.read_text(errors="replace")
        if "Backend" not in text:
            continue
        parts = file.relative_to(root).with_suffix("").parts
        package = ["vllm", *parts[:-1]]
        module = ".".join(package if parts[-1] == "__init__" else ["vllm", *parts])
        tree = ast.parse(text)
        imports[module] = _imports(tree, package)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[module, node.name] = _class(node)
            elif isinstance(node, ast.Assign):
                call = node.value
                if isinstance(call, ast.Call) and _last(call.func) == _COMPOSE:
                    name = next(word.value for word in call.keywords if word.arg == "backend_name")
                    composed[module, _last(node.targets[0])] = (ast.literal_eval(name), _last(call.args[0]))

    def resolve(module: str, name: str) -> Key:
        key = (module, name)
        return key if key in classes or key == BASE else imports.get(module, {}).get(name, key)

    def lineage(key: Key) -> list[Key]:
        """Return a class and its first bases, as far as they are vLLM's."""
        found = [key]
        while found[-1] in classes and classes[found[-1]].bases:
            module = found[-1][0]
            known = [resolve(module, base) for base in classes[found[-1]].bases]
            found.append(next((base for base in known if base in classes), known[0]))
        return found

    result = Backends()
    for key in classes:
        line = lineage(key)
        if BASE in line[1:]:
            name = _name([classes[each] for each in line[: line.index(BASE)]], [each[1] for each in line])
            if name is not None:
                result.classes[key] = name
    for (module, variable), (name, writes) in composed.items():
        result.composites[module, variable] = (name, resolve(module, writes))
    return result


def _name(line: list[_Class], names: list[str]) -> tuple[str, str] | None:
    """Return a backend's name and the class that decides it; None for a class without a name, which no layer uses."""
    returned = next((each.returns for each in line if each.returns is not None), None)
    if returned is None:
        return None
    for each, name in zip(line, names, strict=False):
        if "get_name" in each.methods:
            return returned, name
        if each.methods & {"get_impl_cls", "customize_spec"}:
            return f"{returned}/{name}", name
    raise AssertionError(f"nothing names {names[0]}")


def _class(node: ast.ClassDef) -> _Class:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    returns = None
    if "get_name" in methods:
        values = [each.value for each in ast.walk(methods["get_name"]) if isinstance(each, ast.Return)]
        returns = next((each.value for each in values if isinstance(each, ast.Constant)), None)
    return _Class([_last(base) for base in node.bases], set(methods), returns)


def _imports(tree: ast.Module, package: list[str]) -> dict[str, Key]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                found[name.asname or name.name] = (module, name.name)
    return found


def _last(node: ast.expr) -> str:
    """The last word of a dotted name, without what stands in brackets."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
