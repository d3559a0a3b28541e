# SPDX-License-Identifier: Apache-2.0
"""The workflow runs what .ci/run runs, and a release has every file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.programs import program

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
release = program("tools/release.py")
WHEELS = release.WHEELS


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def made(script: str) -> list[str]:
    """The targets of the calls of make."""
    return re.findall(r"(?:^|&& )make (?:-s )?([a-z0-9-]+)", script, re.MULTILINE)


def test_the_workflow_runs_what_ci_runs():
    jobs = read(WORKFLOW)["jobs"]
    ran = {name for job in jobs.values() for command in steps(job) for name in made(command)}
    wanted = set(made((ROOT / ".ci/run").read_text()) + made((ROOT / "README.md").read_text()))
    assert {"lint", "demo", "test", "smoke", "bench-instructions"} <= wanted
    assert wanted <= ran <= targets()


COMPLETE = [f"kvhma-0.1.0-{name}.whl" for name in WHEELS] + ["kvhma-0.1.0.tar.gz"]


@pytest.mark.parametrize(
    ("tag", "files", "changelog", "said"),
    [
        ("v0.1.0", COMPLETE, "## 0.1.0 (2026-11-22)\n", []),
        ("v0.1.1", COMPLETE, "## 0.1.0\n", ["the tag is v0.1.1, the version in Cargo.toml 0.1.0"]),
        ("v0.1.0", COMPLETE, "## Unreleased\n", ["CHANGELOG.md has no heading '## 0.1.0'"]),
        ("v0.1.0", COMPLETE[:-1], "## 0.1.0\n", ["kvhma-0.1.0.tar.gz is missing"]),
        ("v0.1.0", [*COMPLETE, "kvhma-0.1.0.whl"], "## 0.1.0\n", ["kvhma-0.1.0.whl is not expected"]),
    ],
)
def test_what_may_be_published(tag, files, changelog, said):
    assert release.faults(tag, files, changelog, "0.1.0") == said
