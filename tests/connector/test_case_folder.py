# SPDX-License-Identifier: Apache-2.0
"""The setting ``case_folder``: a failed load can be inspected afterwards, and writing the case never harms the
engine."""

from __future__ import annotations

import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvhma import Span, plan
from kvhma.oracle import cases
from kvhma.vllm.reads import case_folder
from kvhma.vllm.reads.case_folder import CaseFolder
from support.cli_run import cli
from support.tiny import tiny_hybrid
from support.waiting import HANG_SECONDS, until

LOCAL = tiny_hybrid(10)
REMOTE = tiny_hybrid(10, base=1 << 40)
SPANS = tuple(Span(0, [1 + index]) for index in range(len(LOCAL.groups)))
TOKENS = 1


def a_load(name: str = "cmpl-1") -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=TOKENS, remote=SimpleNamespace(spans=SPANS))


def written(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json")) if folder.exists() else []


def test_a_case_is_what_was_planned(tmp_path: Path) -> None:
    """The case that is read back has the same geometries and spans, moves the same bytes, and every byte is right."""
    planned = plan(LOCAL, [REMOTE], descriptor_bytes=7)
    folder = CaseFolder(str(tmp_path / "new" / "cases"))
    folder.save_failed_load(a_load("a/../b c"), planned, SPANS)
    folder.wait(10)
    (path,) = written(tmp_path / "new" / "cases")
    assert path.name.endswith("-01-a____b_c.json")
    assert path.stat().st_mode & 0o077 == 0
    case = cases.load(path)
    assert (case.local, case.remotes, case.num_tokens, case.descriptor_bytes) == (LOCAL, (REMOTE,), TOKENS, 7)
    assert case.local_spans == case.remote_spans == SPANS
    assert cases.check(case).outcome == "right"
    done = cli("export", "--case", path, "-o", tmp_path / "x.json", "-q")
    assert done.code == 0
    assert len(done.out.splitlines()) == 3


def test_what_is_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_folder, "_MAX_CASES", 3)
    planned, folder = plan(LOCAL, [REMOTE]), CaseFolder(str(tmp_path))
    for _ in range(10):
        folder.save_failed_load(a_load(), planned, SPANS)
        folder.wait(10)
    assert len(written(tmp_path)) == 3
    monkeypatch.setattr(case_folder, "_MAX_BYTES", 100)
    other = CaseFolder(str(tmp_path / "other"))
    other.save_failed_load(a_load(), planned, SPANS)
    other.wait(10)
    assert written(tmp_path / "other") == []


def test_a_slow_disk_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case is written at a time; loads that fail meanwhile are not written."""
    write, calls, go_on = case_folder._write, [], threading.Event()

    def slow(*arguments: object) -> None:
        calls.append(arguments)
        assert go_on.wait(HANG_SECONDS)
        write(*arguments)

    monkeypatch.setattr(case_folder, "_write", slow)
    planned, folder = plan(LOCAL, [REMOTE]), CaseFolder(str(tmp_path))
    for _ in range(5):
        folder.save_failed_load(a_load(), planned, SPANS)
    go_on.set()
    folder.wait(10)
    assert len(calls) == len(written(tmp_path)) == 1


@pytest.mark.parametrize("what", ["no folder", "no plan", "no blocks", "a file", "a full disk"])
def test_what_cannot_be_written_harms_nobody(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = CaseFolder({"no folder": None, "a file": str(tmp_path / "file")}.get(what, str(tmp_path)))
    if what == "a full disk":
        monkeypatch.setattr(case_folder.os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    folder.save_failed_load(
        a_load(), None if what == "no plan" else plan(LOCAL, [REMOTE]), None if what == "no blocks" else SPANS
    )
    folder.wait(10)
    assert written(tmp_path) == []
    if what in ("a file", "a full disk"):
        until(lambda: "did not save failed load cmpl-1" in caplog.text)


@pytest.mark.parametrize("name", ["write", "rename"])
def test_a_disk_that_gets_full_keeps_no_part_of_a_case(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "rename":
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if name == "write":  # the system writes a part of the file, and then refuses
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        folder = CaseFolder(str(tmp_path))
        folder.save_failed_load(a_load(), plan(LOCAL, [REMOTE]), SPANS)
        folder.wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
    assert "did not save failed load cmpl-1" in caplog.text
