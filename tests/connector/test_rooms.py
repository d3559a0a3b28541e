# SPDX-License-Identifier: Apache-2.0
"""The connector works without the folder of any one option: its core uses the doors alone."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import kvhma
from kvhma.vllm.config import rooms
from kvhma.vllm.options.doors import Rooms, SchedulerDoor, WorkerDoor
from support.schedulers import STEP, blocks, end_read, finished_at, load, request, scheduler, tables

PACKAGE = Path(kvhma.__file__).parent
ROOT = Path(__file__).parents[2]
CORE = [
    *(f"tests/connector/test_{name}.py" for name in ("metadata", "scheduler", "engine_loop", "prompt_digests")),
    *["-k", "not sample and not secret"],
]
"""Tests that need no option, and their arguments."""
MORE = [
    *(f"tests/connector/test_{name}.py" for name in ("scheduler", "lease_table", "leases", "lease_protocol", "worker")),
    "tests/attacks/test_side_channel.py",
]


def folders() -> list[str]:
    return sorted(path.parent.name for path in (PACKAGE / "vllm" / "options").glob("*/__init__.py"))


@pytest.fixture(params=folders())
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A copy of the package without the folder of one option."""
    option: str = request.param
    shutil.copytree(PACKAGE, tmp_path / "kvhma", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "kvhma" / "vllm" / "options" / option)
    return option, tmp_path


def run_tests(option: str, path: Path, *arguments: str) -> None:
    """Run tests with the package at `path`, in which the option is absent."""
    script = f"""
import sys
import pytest
# First: pytest rewrites modules that are not imported yet. Then:
code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *{arguments!r}])
import kvhma.vllm.connector
from kvhma.errors import SettingsError
from kvhma.vllm.config.rooms import check_installed, find_rooms
assert kvhma.__file__.startswith({str(path)!r}), kvhma.__file__
assert not [room for part in ("scheduler", "worker") for room in find_rooms(part, [{option!r}])]
with pytest.raises(SettingsError, match="a setting, but kvhma was installed without the option {option!r}"):
    check_installed({option!r}, "a setting")
sys.exit(code)
"""
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_every_option_has_a_door() -> None:
    doors = {"scheduler": SchedulerDoor, "worker": WorkerDoor}
    for option in folders():
        parts = {part: list(rooms.find_rooms(part, [option])) for part in doors}
        assert any(parts.values()), option
        assert all(issubclass(room, doors[part]) for part, found in parts.items() for room in found)


@pytest.mark.timeout(900)
def test_core_works_without_an_option(without: tuple[str, Path]) -> None:
    run_tests(*without, *CORE)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_more_of_the_core_works_without_an_option(without: tuple[str, Path]) -> None:
    run_tests(*without, *MORE)


def test_a_request_for_an_absent_option_is_refused() -> None:
    with contextlib.closing(scheduler()) as d:
        d.context.rooms = Rooms(SchedulerDoor)
        asked = request(params={"do_remote_prefill": True, "kvhma_ticket": "0" * 32})
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == (1, True)
        d.on_blocks_allocated(asked, blocks(d), 1)
        failure = d.on_step(STEP).refusals["r"]
    assert (failure.cause, "without option 'tickets'" in failure.text) == ("refused", True)


def test_an_error_inside_an_option_is_not_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(rooms, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        list(rooms.find_rooms("worker", ["spans"]))
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        rooms.check_installed("spans", "a setting")


def test_an_option_that_overrides_nothing_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in list(vars(SchedulerDoor).items()):
        if inspect.isfunction(call):
            monkeypatch.setattr(SchedulerDoor, name, lambda *arguments, name=name: pytest.fail(name))

    class Steps(SchedulerDoor):
        def __init__(self) -> None:
            self.number = 0

        def on_step(self, output: Any, metadata: Any) -> bool:
            self.number += 1
            return False

    with contextlib.closing(scheduler()) as p, contextlib.closing(scheduler()) as d:
        steps = Steps()
        for engine in (p, d):
            engine.context.rooms = Rooms(SchedulerDoor, [SchedulerDoor(), steps, *engine.context.rooms])
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        load(d, asked)
        end_read(d, asked)
        assert not d.needs_step()
        assert not d.make_room()
        d.reset_cache()
        d.on_request_finished(asked, tables(d))
    assert steps.number == 1


def test_an_option_that_is_asleep_is_called_once_it_is_awake() -> None:
    class Steps(SchedulerDoor):
        asleep = True

        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_request_added(self, request: Any, params: Any) -> bool:
            self.calls.append("added")
            if params.get("wakes"):
                d.context.rooms.wake(self)
            return False

        def on_step(self, output: Any, metadata: Any) -> bool:
            self.calls.append("step")
            return False

    with contextlib.closing(scheduler()) as d:
        steps = Steps()
        d.context.rooms = Rooms(SchedulerDoor, [*d.context.rooms, steps])
        for name in ("none", "wakes", "more"):
            d.on_request_added(request(name, params={"do_remote_decode": True, name: True}))
            d.on_step(STEP)
    assert steps.calls == ["added", "added", "step", "added", "step"]
