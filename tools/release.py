# SPDX-License-Identifier: Apache-2.0
"""Check whether a build may be published under a tag: one version everywhere, and a file for every machine.

python tools/release.py                 # prints the tag of this version
python tools/release.py v0.1.0 dist     # prints each error in a line; exit code 1 if there is an error
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = tuple(
    f"{abi}-{system}"
    for abi in ("cp310-abi3", "cp314-cp314t")
    for system in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_11_0_arm64", "macosx_10_12_x86_64")
)
"""Python, ABI and system of each wheel."""


def version() -> str:
    """Return the version of the workspace, which is also the version of the package."""
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def faults(tag: str, files: list[str], changelog: str, current: str) -> list[str]:
    """Return the errors in files that are to be published under a tag, one sentence each."""
    found = []
    if tag != f"v{current}":
        found.append(f"the tag is {tag}, the version in Cargo.toml {current}")
    if not re.search(rf"^## {re.escape(current)}(?: |$)", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading '## {current}'")
    wanted = {f"kvhma-{current}-{name}.whl" for name in WHEELS} | {f"kvhma-{current}.tar.gz"}
    found += [f"{name} is missing" for name in sorted(wanted - set(files))]
    found += [f"{name} is not expected" for name in sorted(set(files) - wanted)]
    return found


def main(tag: str = "", folder: str = "dist") -> None:
    """Print the errors, and exit with 1 if there is an error. Without a tag print the tag of this version."""
    if not tag:
        print(f"v{version()}")
        return
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files = [path.name for path in Path(folder).iterdir()]
    if found := faults(tag, files, changelog, version()):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
