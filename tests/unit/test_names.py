# SPDX-License-Identifier: Apache-2.0
"""What pages name exists: definitions, tests, metrics, settings."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DEFINED = r"\b(?:def|class|fn|struct|enum|trait|type|const) {0}\b|^ *{0}\b *[:=]"
"""A definition of a name in Python or Rust."""


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def spans(page: str) -> list[str]:
    """What is code in a page: in backticks, and each block."""
    text = text_of(page)
    return [*CODE.findall(FENCE.sub("", text)), *FENCE.findall(text)]


def defines(file: str, name: str) -> bool:
    return re.search(DEFINED.format(name), text_of(file), re.MULTILINE) is not None


@cache
def metrics() -> set[str]:
    """The metrics of the connector, read without vLLM."""
    for node in ast.parse(text_of("python/kvhma/vllm/telemetry/stats.py")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "METRICS":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("stats.py has no METRICS")


@pytest.mark.parametrize("page", PAGES)
def test_definitions_in_files(page: str) -> None:
    """`FILE: NAME`, and tests of attacks as `FOLDER/test_FILE.py::test_NAME`."""
    for file, name in re.findall(r"`([\w/]+\.(?:py|rs)): (\w+)`", text_of(page)):
        assert defines(file, name), (file, name)
    for file, name in re.findall(r"`([\w/]+/test_\w+\.py)::(test_\w+)`", text_of(page)):
        assert defines(f"tests/{file}", name), (file, name)


def test_each_file_of_attacks_has_a_row() -> None:
    files = {f"attacks/{path.name}" for path in (ROOT / "tests/attacks").glob("test_*.py")}
    assert files - set(re.findall(r"`(attacks/test_\w+\.py)::", text_of("docs/attacker.md"))) == set()


@pytest.mark.parametrize("page", PAGES)
def test_metrics(page: str) -> None:
    for name in re.findall(r"vllm:kvhma_([a-z_]+)", " ".join(spans(page))):
        assert re.sub(r"_(total|count|sum|bucket)$", "", name) in metrics() or name.endswith("_"), name


@pytest.mark.parametrize("page", PAGES)
def test_settings(page: str) -> None:
    """In tables of settings, and in what an engine gets as `kv_connector_extra_config`."""
    known = set(re.findall(r"^\| `([a-z_]+)`", text_of("docs/vllm-settings.md"), re.MULTILINE))
    assert len(known) > 20
    named = set()
    for rows in re.findall(r"^\| settings? \|.*\n\|[-| :]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE):
        named |= {name for row in rows.splitlines() for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    for extra in re.findall(r"\"kv_connector_extra_config\": \{([^{}]*)\}", " ".join(spans(page))):
        named |= set(re.findall(r"\"([a-z_]+)\":", extra))
    assert named <= known, named - known
