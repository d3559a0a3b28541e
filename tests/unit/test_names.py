# SPDX-License-Identifier: Apache-2.0
"""What pages name exists: targets of make, options, files, metrics, settings, extras, modules and their names."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if not path.name.startswith("changes-"))
"""Without the changes of a release, which name what it removed."""

OTHERS_OPTIONS = {
    "--admin-api-key": "vllm-router",
    "--api-key": "vllm-router",
    "--connector": "llm-d's sidecar, Dynamo",
    "--decode-chunk-size": "llm-d's sidecar",
    "--disaggregation-mode": "Dynamo",
    "--dry-run": "kubectl",
    "--enforce-eager": "vLLM",
    "--enable-ssrf-protection": "llm-d's sidecar",
    "--kv-cache-memory-bytes": "vLLM",
    "--next-turn": "proposed to vllm-router",
    "--no-install-recommends": "apt-get",
    "--otlp-traces-endpoint": "vLLM",
    "--prefill-max-retries": "llm-d's sidecar",
    "--repo": "gh",
    "--set": "helm",
    "--storage": "Prometheus",
    "--vllm-port": "llm-d's sidecar",
}
"""Options of programs of others that no file of the repository uses."""
TOP = ("tests", "tools", "docs", "python", "rust", "benches", "examples", "conformance", "fuzz")
MADE = re.compile(r"\bmake ([a-z][a-z0-9-]*)\b")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def spans(page: str) -> list[str]:
    """What is code in a page: in backticks, and each block."""
    text = text_of(page)
    return [*CODE.findall(FENCE.sub("", text)), *FENCE.findall(text)]


@cache
def sources() -> str:
    """All programs of the repository but its tests: Python, shell, Makefile and configuration."""
    kinds = ["*.py", "*.sh", "*.y*ml", "*.toml", "*.rs", "*.env", "*.service", "*Dockerfile*", "Makefile"]
    listed = subprocess.run(["git", "ls-files", "--", *kinds], cwd=ROOT, capture_output=True, text=True, check=True)
    return "\n".join(
        (ROOT / file).read_text(encoding="utf-8") for file in listed.stdout.split() if not file.startswith("tests/")
    )


@cache
def metrics() -> set[str]:
    """The metrics of the connector, read without vLLM."""
    path = ROOT / "python/kvhma/vllm/telemetry/stats.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "METRICS":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("stats.py has no METRICS")


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make(page: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), re.MULTILINE))
    named = {name for span in spans(page) for name in MADE.findall(span)}
    assert named <= targets, named - targets


@pytest.mark.parametrize("page", PAGES)
def test_options(page: str) -> None:
    """test_docs.py gives those of `kvhma` commands to their parsers; these are named alone, or of other programs."""
    named = {option for span in spans(page) for option in re.findall(r"(?<![\w+-])--[a-z][a-z0-9-]+[a-z0-9]", span)}
    missing = {option for option in named - OTHERS_OPTIONS.keys() if not re.search(rf"{option}\b", sources())}
    assert missing == set()


def test_options_of_others_are_named() -> None:
    named = " ".join(span for page in PAGES for span in spans(page))
    assert [option for option in OTHERS_OPTIONS if option not in named] == []


@pytest.mark.parametrize("page", PAGES)
def test_files(page: str) -> None:
    for span in spans(page):
        for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w/.*-]*\w)", span):
            assert list(ROOT.glob(path)) or "NAME" in path, path


@pytest.mark.parametrize("page", PAGES)
def test_names_in_files(page: str) -> None:
    """`FILE: NAME`."""
    for file, name in re.findall(r"`([\w/]+\.(?:py|rs)): (\w+)`", text_of(page)):
        kinds = rf"\b(?:def|class|fn|struct|enum|trait|type|const) {name}\b|^{name}\b"
        assert re.search(kinds, text_of(file), re.MULTILINE), (file, name)


@pytest.mark.parametrize("page", PAGES)
def test_metrics(page: str) -> None:
    for name in re.findall(r"vllm:kvhma_([a-z_]+)", " ".join(spans(page))):
        ends = ("", "_total", "_count", "_sum", "_bucket")
        assert any(name.removesuffix(end) in metrics() for end in ends if name.endswith(end)) or name.endswith("_"), (
            name
        )


@pytest.mark.parametrize("page", PAGES)
def test_settings(page: str) -> None:
    """In tables of settings, and in what an engine gets as `kv_connector_extra_config`."""
    table = text_of("docs/vllm-settings.md")
    known = set(re.findall(r"^\| `([a-z_]+)`", table, re.MULTILINE))
    assert len(known) > 20
    named = set()
    for rows in re.findall(r"^\| settings? \|.*\n\|[-| :]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE):
        named |= {name for row in rows.splitlines() for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    for extra in re.findall(r"\"kv_connector_extra_config\": \{([^{}]*)\}", " ".join(spans(page))):
        named |= set(re.findall(r"\"([a-z_]+)\":", extra))
    assert named <= known, named - known


@pytest.mark.parametrize("page", PAGES)
def test_extras(page: str) -> None:
    extras = set(
        re.findall(r"^([a-z]+) = \[", text_of("pyproject.toml").partition("optional-dependencies]")[2], re.MULTILINE)
    )
    for named in re.findall(r"(?:'\.|kvhma)\[([a-z,]+)\]", " ".join(spans(page))):
        assert set(named.split(",")) <= extras, named


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_their_names(page: str) -> None:
    for span in CODE.findall(FENCE.sub("", text_of(page))):
        for dotted in re.findall(r"(?<![\w.\"/-])kvhma(?:\.\w+)+", span):
            parts = dotted.split(".")
            place = ROOT / "python/kvhma"
            names = parts[1:]
            while names and ((place / names[0]).is_dir() or (place / f"{names[0]}.py").is_file()):
                place = place / names.pop(0)
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            for name in names[:1]:
                code = file.read_text(encoding="utf-8")
                # Some are names of parameters, spans or loggers.
                assert re.search(rf"\b{name}\b", code) or dotted in sources(), dotted


def test_variables_of_the_examples() -> None:
    """A command that sets a variable for a script: the script reads it."""
    lines = "\n".join(block for page in PAGES for block in FENCE.findall(text_of(page)))
    commands = re.findall(r"^((?:[A-Z_]+=\S+ )+)(examples/[\w.-]+)", lines, re.MULTILINE)
    assert len(commands) >= 4
    for variables, script in commands:
        for name in re.findall(r"([A-Z_]+)=", variables):
            assert name in text_of(script) or name.startswith("CUDA_"), (name, script)
