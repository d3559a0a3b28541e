# SPDX-License-Identifier: Apache-2.0
"""What is checked of the packages that kvhma depends on, without a network: `make supply-chain` asks the databases."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from support.programs import program

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
wheel_test = program("tools/wheel_test.py")

TREE = """kvhma-py v0.1.0 (/somewhere/rust/py)|Apache-2.0
serde_derive v1.0.229 (proc-macro)|MIT OR Apache-2.0
rawpointer v0.2.1|MIT/Apache-2.0
serde_derive v1.0.229 (proc-macro)|MIT OR Apache-2.0
"""


def part(name: str, version: str, licence: str, scope: str = "required") -> dict[str, object]:
    return {"name": name, "version": version, "scope": scope, "licenses": [{"expression": licence}]}


def sbom(*parts: dict[str, object]) -> dict[str, object]:
    return {"metadata": {"component": part("kvhma-py", "0.1.0", "Apache-2.0")}, "components": list(parts)}


SERDE = part("serde_derive", "1.0.229", "MIT OR Apache-2.0")
RAWPOINTER = part("rawpointer", "0.2.1", "MIT OR Apache-2.0")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([SERDE, RAWPOINTER], []),
        ([SERDE, RAWPOINTER, part("cc", "1.11.1", "MIT", scope="excluded")], []),
        ([SERDE], ["the SBOM does not name rawpointer 0.2.1, which is linked"]),
        ([SERDE, RAWPOINTER | {"scope": "excluded"}], ["the SBOM does not name rawpointer 0.2.1, which is linked"]),
        ([SERDE, RAWPOINTER, part("cc", "1.11.1", "MIT")], ["the SBOM names cc 1.11.1, which is not linked"]),
        (
            [SERDE | {"version": "1.0.228"}, RAWPOINTER],
            [
                "the SBOM does not name serde_derive 1.0.229, which is linked",
                "the SBOM names serde_derive 1.0.228, which is not linked",
            ],
        ),
        (
            [SERDE, RAWPOINTER | {"licenses": []}],
            ["the SBOM has the licence '' for rawpointer 0.2.1, its manifest has 'MIT OR Apache-2.0'"],
        ),
        (
            [SERDE, part("rawpointer", "0.2.1", "GPL-3.0-only")],
            ["the SBOM has the licence 'GPL-3.0-only' for rawpointer 0.2.1, its manifest has 'MIT OR Apache-2.0'"],
        ),
    ],
)
def test_an_sbom_names_what_is_linked(parts, said):
    assert wheel_test.sbom_faults(sbom(*parts), TREE) == said


def test_a_crate_without_a_licence_is_named():
    tree = TREE.replace("|MIT/Apache-2.0", "|")
    (said,) = wheel_test.sbom_faults(sbom(SERDE, RAWPOINTER | {"licenses": []}), tree)
    assert said == "the SBOM has the licence '' for rawpointer 0.2.1, its manifest has ''"


@pytest.mark.parametrize("names", [[], ["other.cyclonedx.json"], ["kvhma-py.cyclonedx.json", "auditwheel.cdx.json"]])
def test_a_wheel_has_one_sbom(names, tmp_path):
    wheel = tmp_path / "kvhma.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in names:
            packed.writestr(f"kvhma-0.1.0.dist-info/sboms/{name}", "{}")
    with pytest.raises(AssertionError, match="has the SBOM"):
        wheel_test.read_sbom(wheel)


def test_the_sbom_of_a_wheel_is_read(tmp_path):
    wheel = tmp_path / "kvhma.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("kvhma-0.1.0.dist-info/sboms/kvhma-py.cyclonedx.json", json.dumps(sbom(SERDE)))
    assert wheel_test.read_sbom(wheel) == sbom(SERDE)


@pytest.mark.parametrize("lock", ["Cargo.lock", "fuzz/Cargo.lock"])
def test_crates_come_from_crates_io_and_have_a_hash(lock):
    packages = (ROOT / lock).read_text(encoding="utf-8").split("[[package]]")[1:]
    others = [package for package in packages if not re.search(r'^name = "kvhma-', package, re.MULTILINE)]
    assert len(others) > 10
    for package in others:
        assert 'source = "registry+https://github.com/rust-lang/crates.io-index"' in package, package
        assert re.search(r'^checksum = "[0-9a-f]{64}"$', package, re.MULTILINE), package


def test_pip_audit_fails_if_it_can_look_up_nothing():
    """Without `--strict`, and behind a pipe of a shell, it succeeds though nothing was audited."""
    (command,) = re.findall(r"^PIP_AUDIT := (.*)$", MAKEFILE, re.MULTILINE)
    assert " --strict " in command
    (recipe,) = re.findall(r"^supply-chain:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    used = [line for line in recipe.splitlines() if "PIP_AUDIT" in line or "floors.py" in line]
    assert len(used) == 3
    assert not any("|" in line for line in used)


def test_floors():
    pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    floors = program("tools/floors.py")
    extras = {"cli": ["click>=8.3.3", "rich>=13"], "nixl": ["nixl>=1.4"], "vllm": ["vllm>=0.31,<0.34"]}
    found = list(floors.floors({"dependencies": ["numpy>=1.24,<3"], "optional-dependencies": extras}))
    assert found == ["numpy==1.24.0", "click==8.3.3", "rich==13.0.0", "nixl==1.4.0"]


@pytest.mark.parametrize(
    "wanted", ["numpy", "numpy<3", "numpy==1.24", "numpy<3,>=1.24", "numpy>1.24", "numpy>=1.24rc1"]
)
def test_a_dependency_without_a_floor_is_refused(wanted):
    pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    floors = program("tools/floors.py")
    with pytest.raises(SystemExit, match=re.escape(f"{wanted!r} in pyproject.toml has no lowest version")):
        list(floors.floors({"dependencies": [wanted], "optional-dependencies": {}}))


def test_every_dependency_has_a_floor():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    floors = program("tools/floors.py")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for extra in project["optional-dependencies"].values() for name in extra]
    assert len(list(floors.floors(project))) == len(wanted) + 1 - len(floors.HOSTS)
