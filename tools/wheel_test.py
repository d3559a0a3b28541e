# SPDX-License-Identifier: Apache-2.0
"""Install a wheel into a fresh environment and use it as a user without a checkout does.

    python tools/wheel_test.py dist/kvhma-*.whl

First the SBOM: it has to name every crate that cargo links, with its licence, and no other. Next with the declared
dependencies only: the version, a plan, the import. Then with NIXL without its dependencies, by the command of the
README: the demo. Last every code block and command of README and docs, by tests/unit/test_docs.py. Needs only Python
and cargo. NIXL is left out where it has no wheels: macOS and free-threaded Python.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
NIXL = sys.platform == "linux" and not FREE_THREADED
BLOCKS = "test_code_prints_what_it_says or test_commands_end_well_and_print_what_it_says"
WHERE = "import kvhma, sysconfig; assert kvhma.__file__.startswith(sysconfig.get_path('platlib')), kvhma.__file__"
SBOM = "/sboms/kvhma-py.cyclonedx.json"
# For every system, as in the SBOM.
CARGO_TREE = ("cargo", "tree", "--locked", "--manifest-path", ROOT / "rust/py/Cargo.toml", "--edges", "normal")
CARGO_TREE += ("--target", "all", "--prefix", "none", "--no-dedupe", "--format", "{p}|{l}")


def run(folder: Path, *command: object, **variables: str) -> str:
    """Run a command outside of the checkout, end if it fails, and return what it prints."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    started = time.monotonic()
    ended = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(f"{time.monotonic() - started:6.1f} s  {' '.join(words)}", flush=True)
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nended with {ended.returncode}")
    return ended.stdout


def read_sbom(wheel: Path) -> dict[str, Any]:
    """Return the SBOM that maturin wrote into a wheel; a second one would list libraries that it copied there."""
    with zipfile.ZipFile(wheel) as packed:
        found = [name for name in packed.namelist() if "/sboms/" in name]
        assert len(found) == 1, f"{wheel.name} has the SBOMs {found}, not only {SBOM}"
        assert found[0].endswith(SBOM), f"{wheel.name} has the SBOM {found[0]}, not {SBOM}"
        sbom: dict[str, Any] = json.loads(packed.read(found[0]))
        return sbom


def sbom_faults(sbom: dict[str, Any], tree: str) -> list[str]:
    """Return the differences between an SBOM and the crates that ``cargo tree`` printed, one sentence each."""
    linked, named = {}, {}
    for line in tree.splitlines():
        crate, _, licence = line.partition("|")
        name, version = crate.split()[:2]
        linked[f"{name} {version[1:]}"] = licence.replace("/", " OR ")  # what cargo wrote before SPDX
    for part in [sbom["metadata"]["component"], *sbom["components"]]:
        if part["scope"] == "required":  # the others only build
            licences = [licence.get("expression", "") for licence in part.get("licenses", [])]
            named[f"{part['name']} {part['version']}"] = " AND ".join(licences)
    found = [f"the SBOM does not name {crate}, which is linked" for crate in sorted(linked.keys() - named)]
    found += [f"the SBOM names {crate}, which is not linked" for crate in sorted(named.keys() - linked)]
    found += [
        f"the SBOM has the licence {named[crate]!r} for {crate}, its manifest has {linked[crate]!r}"
        for crate in sorted(linked.keys() & named)
        if not linked[crate] or linked[crate] != named[crate]
    ]
    return found


def main(wheel: Path) -> None:
    """Test one wheel with the Python that runs this."""
    versions = runpy.run_path(str(ROOT / "python/kvhma/versions.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if found := sbom_faults(read_sbom(wheel), run(folder, *CARGO_TREE)):
            sys.exit("\n".join(found))
        venv.create(folder / "env", with_pip=True)
        programs = folder / "env/bin"
        pip = (programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")

        # By name, from a folder in place of the package index: what a user types once the release is there.
        run(folder, programs / "python", "-m", "pip", "download", "-q", "-d", folder / "index", f"{wheel}[cli]")
        run(folder, *pip, "--no-index", "--find-links", folder / "index", "kvhma[cli]")
        run(folder, programs / "python", "-m", "pip", "check")
        run(folder, programs / "python", "-c", WHERE)
        printed = run(folder, programs / "kvhma", "--version")
        assert printed.split()[-1] == wheel.name.split("-")[1], printed
        printed = run(folder, programs / "kvhma", "plan", "gemma-3-4b", "--tokens", "8192")
        assert "what is read" in printed, printed

        if NIXL:
            run(folder, *pip, "--no-deps", f"nixl=={versions['NIXL']}", f"nixl-cu12=={versions['NIXL']}")
            run(folder, programs / "kvhma", "demo")
            absent = "import importlib.util; assert not importlib.util.find_spec('torch')"
            run(folder, programs / "python", "-c", absent)

        run(folder, *pip, "pip>=25.1")
        run(folder, *pip, "--group", f"{ROOT / 'pyproject.toml'}:test")
        # The extension asks for the GIL. If its import starts the GIL, Python warns, and a warning is an error here.
        gil = {"PYTHON_GIL": "1"} if FREE_THREADED else {}
        test = (programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT)
        print(run(folder, *test, "-c", ROOT / "pyproject.toml", ROOT / "tests/unit/test_docs.py", "-k", BLOCKS, **gil))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
