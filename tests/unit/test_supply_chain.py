# SPDX-License-Identifier: Apache-2.0
"""What is checked of the packages that kvhma depends on, without a network."""

from __future__ import annotations

import json
import zipfile

import pytest

from support.programs import program

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
