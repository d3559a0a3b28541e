# SPDX-License-Identifier: Apache-2.0
"""The connector works without the folder of any one option: its core uses the doors alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import kvhma
from kvhma.vllm.config import rooms
from kvhma.vllm.options.doors import SchedulerDoor, WorkerDoor

PACKAGE = Path(kvhma.__file__).parent
ROOT = Path(__file__).parents[2]
CORE = (
    "tests/connector/test_scheduler.py",
    "tests/connector/test_metadata.py",
    "--deselect=tests/connector/test_scheduler.py::test_engines_that_share_a_secret",  # it takes as long as the others
)
"""Tests that need no option."""
MORE = (
    "tests/unit/test_load_machine.py",
    "tests/connector/test_lease_table.py",
    "tests/connector/test_leases.py",
    "tests/connector/test_worker.py",
)


def folders() -> list[str]:
    return sorted(path.parent.name for path in (PACKAGE / "vllm" / "options").glob("*/__init__.py"))


@pytest.fixture(params=folders())
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A copy of the package without the folder of one option."""
    option: str = request.param
    shutil.copytree(PACKAGE, tmp_path / "kvhma", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "kvhma" / "vllm" / "options" / option)
    return option, tmp_path


def run(path: Path, *arguments: str) -> str:
    """Run Python with the package at `path`; return its output."""
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_option_has_a_door() -> None:
    doors = {"scheduler": SchedulerDoor, "worker": WorkerDoor}
    for option in folders():
        parts = {part: list(rooms.find_rooms(part, [option])) for part in doors}
        assert any(parts.values()), option
        assert all(issubclass(room, doors[part]) for part, found in parts.items() for room in found)


def test_core_works_without_an_option(without: tuple[str, Path]) -> None:
    option, path = without
    script = f"""
import kvhma.vllm.connector
from kvhma.vllm.config.rooms import check_installed, find_rooms
assert kvhma.__file__.startswith({str(path)!r}), kvhma.__file__
for part in ("scheduler", "worker"):
    assert not list(find_rooms(part, [{option!r}]))
try:
    check_installed({option!r}, "a setting")
except kvhma.errors.SettingsError as error:
    assert str(error) == "a setting, but kvhma was installed without the option {option!r}", error
else:
    raise AssertionError("not refused")
"""
    run(path, "-c", script)
    tests = run(path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *CORE)
    assert " passed" in tests


@pytest.mark.long
def test_more_of_the_core_works_without_an_option(without: tuple[str, Path]) -> None:
    _, path = without
    assert " passed" in run(path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *MORE)


def test_an_error_inside_an_option_is_not_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(rooms, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        list(rooms.find_rooms("worker", ["spans"]))
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        rooms.check_installed("spans", "a setting")
