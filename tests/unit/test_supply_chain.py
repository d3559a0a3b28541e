# SPDX-License-Identifier: Apache-2.0
"""What is checked of the packages that kvhma depends on, without a network: `make supply-chain` asks the databases."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from support.programs import program

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("names", [[], ["other.cyclonedx.json"], ["kvhma-py.cyclonedx.json", "auditwheel.cdx.json"]])
def test_a_wheel_has_one_sbom(names, tmp_path):
    wheel = tmp_path / "kvhma.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in names:
            packed.writestr(f"kvhma-0.1.0.dist-info/sboms/{name}", "{}")
    with pytest.raises(AssertionError, match="has the SBOM"):
        wheel_test.read_sbom(wheel)


@pytest.mark.parametrize("lock", ["Cargo.lock", "fuzz/Cargo.lock"])
def test_crates_come_from_crates_io_and_have_a_hash(lock):
    packages = (ROOT / lock).read_text(encoding="utf-8").split("[[package]]")[1:]
    others = [package for package in packages if not re.search(r'^name = "kvhma-', package, re.MULTILINE)]
    assert len(others) > 10
    for package in others:
        assert 'source = "registry+https://github.com/rust-lang/crates.io-index"' in package, package
        assert re.search(r'^checksum = "[0-9a-f]{64}"$', package, re.MULTILINE), package


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
