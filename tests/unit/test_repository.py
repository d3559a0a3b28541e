# SPDX-License-Identifier: Apache-2.0
"""The workflow runs what .ci/run runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"


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
