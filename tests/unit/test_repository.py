# SPDX-License-Identifier: Apache-2.0
"""Files for servers and visitors only: they parse, name what exists, and run the same as lint, test and .ci/run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvhma.versions import VLLM
from support.programs import program

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
RELEASE = ROOT / ".github/workflows/release.yml"
SUPPLY_CHAIN = ROOT / ".github/workflows/supply-chain.yml"
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
release = program("tools/release.py")
WHEELS = release.WHEELS
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = ["CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")


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


def test_the_workflow_has_every_version():
    jobs = read(WORKFLOW)["jobs"]
    assert tuple(jobs["engines"]["strategy"]["matrix"]["vllm"]) == VLLM
    least = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert least is not None
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons[0] == least[1]
    assert pythons == [f"3.{number}" for number in range(int(least[1][2:]), int(least[1][2:]) + len(pythons))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(used) >= 2
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used)
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_a_release_needs_every_test_and_no_token():
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


def test_a_release_says_who_built_its_files():
    """GitHub's attestation and that of the package index, for every file, after all checks and before the upload."""
    done = read(RELEASE)["jobs"]["publish"]["steps"][-4:]
    assert done[0]["run"].startswith("python -m twine check")
    assert done[1]["uses"].startswith("actions/attest@")
    assert done[1]["with"] == {"subject-path": "dist/*"}
    assert done[2]["run"] == "python -m pypi_attestations sign dist/*"
    assert done[3]["run"].startswith("uv publish ")
    assert "--no-attestations" not in done[3]["run"]


def test_dependencies_are_checked_also_if_nothing_changes():
    workflow = read(SUPPLY_CHAIN)
    (job,) = workflow["jobs"].values()
    assert steps(job)[-1] == "make supply-chain"
    assert "supply-chain" in targets()
    when = workflow[True]  # YAML 1.1 reads the key `on` so
    assert {"push", "pull_request", "schedule"} == set(when)


def test_a_dry_run_checks_what_a_release_checks(capsys):
    """All but the signatures and the upload, which need the trust of the package index."""
    jobs = read(RELEASE)["jobs"]
    dry, wet = (steps(jobs[name]) for name in ("check", "publish"))
    assert [line for line in dry if "twine check" in line] == [line for line in wet if "twine check" in line] != []
    assert sum("tools/release.py" in line for line in dry) == sum("tools/release.py" in line for line in wet) == 1
    release.main()
    assert capsys.readouterr().out == f"v{release.version()}\n"
    for path in read(RELEASE)[True]["pull_request"]["paths"]:
        assert list(ROOT.glob(path)), path


def test_a_release_tests_what_it_builds():
    jobs = read(RELEASE)["jobs"]
    built, tested = (jobs[name]["strategy"]["matrix"] for name in ("build", "test"))
    assert built["runner"] == tested["runner"]
    assert set(tested["python"]) == {*read(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]["python"], "3.14t"}
    assert set(built["python"]) <= set(tested["python"])
    assert len(WHEELS) == len(built["runner"]) * len(built["python"])


def test_every_pinned_kind_is_renewed():
    updates = {row["package-ecosystem"]: row for row in read(ROOT / ".github/dependabot.yml")["updates"]}
    assert set(updates) == {"github-actions", "cargo", "pip"}
    for folder in updates["cargo"]["directories"]:
        assert (ROOT / folder.lstrip("/") / "Cargo.toml").is_file()
    assert {row["dependency-name"] for row in updates["pip"]["ignore"]} == {"vllm", "nixl"}, "versions.py has these"


def test_every_path_has_an_owner():
    lines = [line.split() for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines() if line[:1] not in "#"]
    assert lines[0][0] == "*"
    for path, *owners in lines:
        assert path == "*" or (ROOT / path.strip("/")).exists(), path
        assert owners
        assert all(re.fullmatch(r"@[\w-]+/[\w-]+", owner) for owner in owners)


def test_the_citation_is_of_this_version():
    cited = read(ROOT / "CITATION.cff")
    assert cited["version"] == release.version()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'Repository = "{cited["repository-code"]}"' in project
    assert f'license = "{cited["license"]}"' in project


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


def test_hooks_are_parts_of_lint():
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        program, *words = shlex.split(hook["entry"])
        assert hook["language"] == "system"
        assert program in {".venv/bin/ruff", ".venv/bin/python", "cargo", "make"}
        if program == ".venv/bin/python":
            assert (ROOT / words[0]).is_file()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms(form):
    """What GitHub asks of a form."""
    found = read(form)
    assert {"name", "description", "body"} <= found.keys()
    asked = [part for part in found["body"] if part["type"] != "markdown"]
    assert asked
    assert len({part["id"] for part in asked}) == len(asked)
    for part in asked:
        assert part["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert part["attributes"]["label"]
        assert set(part) <= {"type", "id", "attributes", "validations"}


def test_there_is_a_form_for_each_kind():
    assert {path.stem for path in FORMS} == {"wrong-bytes", "unsupported", "question"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, heading in LINK.findall(text):
        assert (ROOT / target).is_file(), target
        names = re.findall(r"^#+ (.*)$", (ROOT / target).read_text(encoding="utf-8"), re.MULTILINE)
        assert not heading or heading in {name.lower().replace(" ", "-") for name in names}, heading
