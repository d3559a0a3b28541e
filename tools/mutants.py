# SPDX-License-Identifier: Apache-2.0
"""Put one defect after the other into a copy of the code, and run the tests that have to find it.

    python tools/mutants.py            # all of tests/mutants.yaml; exit code 1 if one is missed
    python tools/mutants.py NAME ...   # those whose names contain one of these

A defect is a name, a file, a text that occurs once in the file, its replacement, and the arguments of pytest. The copy
and its build stay in target/mutants.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
PYTEST = "-m pytest -q -x -p no:cacheprovider --timeout 150"
LIBRARY = "python/kvhma/_kvhma.abi3.so"


@dataclass(frozen=True)
class Mutant:
    """A defect, and the tests that find it."""

    name: str
    file: str
    find: str
    replace: str
    tests: str


def mutants(path: Path) -> list[Mutant]:
    """Read a list of defects."""
    return [Mutant(**row) for row in yaml.safe_load(path.read_text(encoding="utf-8"))]


def copy_tree() -> None:
    """Make the copy equal to the working tree, and build it. A build after a defect continues from the last one's."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        source, target = ROOT / name, TREE / name
        if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    build()


def build() -> None:
    """Compile the module of the copy, for tests and not for speed."""
    command = ["cargo", "build", "-q", "-p", "kvhma-py", "--config", "profile.dev.opt-level=1"]
    environment = os.environ | {"CARGO_TARGET_DIR": str(WORK / "built"), "PYO3_BUILD_EXTENSION_MODULE": "1"}
    subprocess.run(command, cwd=TREE, check=True, env=environment)
    shutil.copy(WORK / "built" / "debug" / "lib_kvhma.so", TREE / LIBRARY)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Insert a defect into the copy.

    Raises:
        ValueError: the text does not occur exactly once in the file.
    """
    path = TREE / mutant.file
    before = path.read_text(encoding="utf-8")
    if before.count(mutant.find) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its text {before.count(mutant.find)} times")
    path.write_text(before.replace(mutant.find, mutant.replace), encoding="utf-8")
    good = (TREE / LIBRARY).read_bytes()
    try:
        if path.suffix == ".rs":
            build()
        yield
    finally:
        path.write_text(before, encoding="utf-8")
        (TREE / LIBRARY).write_bytes(good)


def is_found(mutant: Mutant) -> bool:
    """Return whether tests fail with a defect. If it does not compile, the compiler has found it."""
    command = [sys.executable, *PYTEST.split(), *shlex.split(mutant.tests)]
    environment = os.environ | {"PYTHONPATH": f"{TREE / 'python'}:{TREE / 'tests'}"}
    try:
        with applied(mutant):
            done = subprocess.run(command, cwd=TREE, env=environment, check=False, capture_output=True, text=True)
    except subprocess.CalledProcessError:
        return True
    if done.returncode not in (0, 1, 2):  # 2: a file of tests cannot even be imported
        raise ValueError(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main(asked: list[str]) -> int:
    """Print a line for each defect."""
    wanted = [one for one in mutants(ROOT / "tests" / "mutants.yaml") if not asked or any(n in one.name for n in asked)]
    copy_tree()
    missed = 0
    for mutant in wanted:
        found = is_found(mutant)
        missed += not found
        print(f"{'found' if found else 'MISSED'}  {mutant.name}", flush=True)
    print(f"{len(wanted) - missed} of {len(wanted)} are found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
