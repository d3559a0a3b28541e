# SPDX-License-Identifier: Apache-2.0
"""The headers that vLLM's server reads are those that the proxy passes on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from kvhma.proxy.app import PASSED, PASSED_TO_DECODE

SOURCES = Path(vllm.__file__).parent
SERVER = ("entrypoints", "tracing")
OF_THE_CONNECTION = {"content-type"}
"""The proxy sets these itself."""


def is_of_a_request(node: ast.expr) -> bool:
    """Whether an expression is called headers, and is not of an answer."""
    name = ast.unparse(node).lower()
    return name.endswith("headers") and "response" not in name


def constants(tree: ast.AST) -> dict[str, ast.expr]:
    """What names stand for: of a module, and of comprehensions over them."""
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    found = {one.id: node.value for node in assigned for one in node.targets if isinstance(one, ast.Name)}
    loops = (
        node for node in ast.walk(tree) if isinstance(node, ast.comprehension) and isinstance(node.target, ast.Name)
    )
    return found | {loop.target.id: loop.iter for loop in loops if isinstance(loop.target, ast.Name)}


def texts(node: ast.expr, named: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the texts that an expression may be."""
    if isinstance(node, ast.Name) and node.id in named:
        yield from texts(named[node.id], named)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for one in node.elts:
            yield from texts(one, named)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        yield f"what {ast.unparse(node)} is"


def read_in(source: str) -> set[str]:
    """Return the names of request headers that a module reads, in lower case."""
    tree = ast.parse(source)
    named, keys = constants(tree), []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr="get" | "getlist"), args=[key, *_]) if is_of_a_request(of):
                keys.append(key)
            case ast.Subscript(value=of, slice=key, ctx=ast.Load()) if is_of_a_request(of):
                keys.append(key)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[of]) if is_of_a_request(of):
                keys.append(key)
            case ast.Call(func=ast.Name(id="Header")):  # FastAPI's, by the parameter's name
                keys.append(node)
    return {text.lower() for key in keys for text in texts(key, named)}


def test_the_proxy_passes_on_what_vllm_reads():
    files = [file for folder in SERVER for file in (SOURCES / folder).rglob("*.py")]
    read = {name for file in files for name in read_in(file.read_text(encoding="utf-8"))}
    ours = {name.lower() for name in (*PASSED, *PASSED_TO_DECODE)}
    assert read - OF_THE_CONNECTION == ours


@pytest.mark.parametrize(
    "source",
    [
        "request.headers.get('X-New')",
        "NAME = 'X-New'\ndef f(raw_headers):\n    return raw_headers[NAME]",
        "NAMES = ['x-new']\nfound = {one: headers[one] for one in NAMES if one in headers}",
    ],
)
def test_a_header_is_found_however_it_is_read(source):
    assert read_in(source) == {"x-new"}
