# SPDX-License-Identifier: Apache-2.0
"""Files for servers and visitors only: they parse, name what exists, and run the same as lint, test and .ci/run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.programs import program

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
RELEASE = ROOT / ".github/workflows/release.yml"
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(used) >= 2
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used)
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_a_release_needs_every_test_and_a_signature_but_no_token():
    jobs = read(RELEASE)["jobs"]
    publish = jobs.pop("publish")
    assert publish["if"] == "github.event_name == 'push'"
    assert set(read(RELEASE)[True]) == {"push", "pull_request", "workflow_dispatch"}
    assert {"build", *publish["needs"]} == set(jobs)
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert not any("permissions" in job for job in jobs.values())
    assert "secrets" not in RELEASE.read_text()
    assert steps(publish)[-1] == "uv publish --trusted-publishing always dist/*"
    attested, signed, _ = publish["steps"][-3:]
    assert attested["uses"].startswith("actions/attest@")
    assert attested["with"] == {"subject-path": "dist/*"}
    assert signed["run"] == "python -m pypi_attestations sign dist/*"


def test_a_release_tests_what_it_builds():
    jobs = read(RELEASE)["jobs"]
    built, tested = (jobs[name]["strategy"]["matrix"] for name in ("build", "test"))
    assert built["runner"] == tested["runner"]
    assert set(tested["python"]) == {*read(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]["python"], "3.14t"}
    assert set(built["python"]) <= set(tested["python"])
    assert len(WHEELS) == len(built["runner"]) * len(built["python"])


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
