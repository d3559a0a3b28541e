# SPDX-License-Identifier: Apache-2.0
"""The processes of ``kvhma serve-pair`` end with it, however it ends: a signal, two signals, a closed terminal, a kill.

The engines are small servers. Each has a worker, which ignores all signals.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from kvhma.cli import processes
from support.waiting import runs, until

ENGINE = """
import http.server, os, signal, sys, threading, time
from pathlib import Path

name, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = os.fork()
if worker == 0:
    while True:
        time.sleep(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if (folder / "healthy").exists() else 503)
        self.end_headers()

    def log_message(self, *_):
        pass

def end():
    (folder / (name + ".asked")).touch()
    while not (folder / "may-end").exists():
        time.sleep(0.01)
    os._exit(0)

signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end).start())
(folder / (name + ".tmp")).write_text(f"{os.getpid()} {worker}")
(folder / (name + ".tmp")).rename(folder / (name + ".pids"))
print("loading", name, end="\\n\\n", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

PARENT = """
import os, sys
from pathlib import Path
from kvhma.cli import processes
from kvhma.cli.serve_pair import free_ports

engine, folder = sys.argv[1], Path(sys.argv[2])
processes._TELL_SECONDS = 0.05
processes._STOP_SECONDS = 600

parts = [
    processes.Part(
        name,
        [sys.executable, "-c", engine, name, str(port), str(folder)],
        os.environ,
        folder / f"{name}.log",
        f"127.0.0.1:{port}",
    )
    for name, port in zip(("prefill", "decode"), free_ports(2))
]
raise SystemExit(processes.run(parts, "ready"))
"""

NAMES = ("prefill", "decode")


class Pair:
    """A process that runs two engines, and the processes that must not outlive it."""

    def __init__(self, folder: Path, *, begin=lambda: None, **given):
        def with_default_signals():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)  # a program of the background inherits that SIGINT is ignored
            begin()

        self.folder = folder
        command = [sys.executable, "-c", PARENT, ENGINE, str(folder)]
        self.process = subprocess.Popen(command, text=True, preexec_fn=with_default_signals, **given)
        self.pids = []

    def __enter__(self):
        until(lambda: all((self.folder / f"{name}.pids").exists() for name in NAMES))
        self.pids = [int(pid) for name in NAMES for pid in (self.folder / f"{name}.pids").read_text().split()]
        return self

    def __exit__(self, *error):
        for pid in [self.process.pid, *self.pids]:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def allow(self, what: str) -> None:
        (self.folder / what).touch()

    def until_asked_to_end(self) -> None:
        until(lambda: all((self.folder / f"{name}.asked").exists() for name in NAMES))

    @property
    def left(self) -> list[int]:
        return [pid for pid in self.pids if runs(pid)]


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_of_them(tmp_path, number):
    with Pair(tmp_path, **PIPES) as pair:
        pair.process.send_signal(number)
        pair.until_asked_to_end()
        pair.allow("may-end")
        _, said = pair.process.communicate(timeout=60)
        assert (pair.process.returncode, pair.left) == (0, [])
        assert said.splitlines()[-1] == "stopped"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_kills_them(tmp_path, second):
    with Pair(tmp_path, **PIPES) as pair:
        pair.process.send_signal(signal.SIGINT)
        pair.until_asked_to_end()
        pair.process.send_signal(second)
        _, said = pair.process.communicate(timeout=60)
        assert (pair.process.returncode, pair.left) == (1, [])
        assert said.splitlines()[-1] == "killed: prefill, decode"


def test_what_does_not_end_is_killed_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_STOP_SECONDS", 0.2)
    part = processes.Part("a", [sys.executable, "-c", ENGINE, "a", "0", str(tmp_path)], os.environ, tmp_path / "log")
    killed = []
    with processes.running([part], killed=killed):
        until(lambda: (tmp_path / "a.pids").exists())
        pids = [int(pid) for pid in (tmp_path / "a.pids").read_text().split()]
    assert killed == ["a"]
    until(lambda: not any(map(runs, pids)))


def test_a_closed_terminal_ends_them(tmp_path):
    """The kernel sends SIGHUP, and no line can be written any more."""
    ours, theirs = pty.openpty()
    given = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with Pair(tmp_path, begin=take_terminal, **given) as pair:
        os.close(theirs)
        os.close(ours)
        pair.until_asked_to_end()
        pair.allow("may-end")
        assert pair.process.wait(60) == 0
        assert pair.left == []


def take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_killed_parent_leaves_nothing(tmp_path):
    with Pair(tmp_path, **PIPES) as pair:
        pair.process.kill()
        pair.until_asked_to_end()
        assert len(pair.left) == 4, "the engines may finish what they do"
        pair.allow("may-end")
        until(lambda: not pair.left)


def test_what_it_waits_for_is_said(tmp_path):
    with Pair(tmp_path, **PIPES) as pair:
        lines = iter(pair.process.stderr.readline, "")
        assert any("s: waiting for prefill and decode" in line for line in lines)
        wanted = {f"  {name}: loading {name}\n" for name in NAMES}
        while wanted:
            line = next(lines)
            assert line.strip(), "an empty log has no line here"
            wanted.discard(line)
        pair.allow("healthy")
        assert pair.process.stdout.readline() == "ready\n"
        pair.process.send_signal(signal.SIGTERM)
        assert any("waiting for prefill and decode to end; Ctrl-C kills" in line for line in lines)
        pair.allow("may-end")
        pair.process.communicate(timeout=60)
        assert pair.process.returncode == 0


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path):
    with Pair(tmp_path, begin=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), **PIPES) as pair:
        pair.process.send_signal(signal.SIGHUP)
        pair.allow("healthy")
        assert pair.process.stdout.readline() == "ready\n"
        pair.allow("may-end")
        pair.process.send_signal(signal.SIGTERM)
        pair.process.communicate(timeout=60)
        assert pair.process.returncode == 0


def part(tmp_path: Path, name: str, code: str) -> processes.Part:
    return processes.Part(name, [sys.executable, "-c", code], os.environ, tmp_path / f"{name}.log")


SLEEPS_WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_children_of_a_process_end_with_it(tmp_path):
    log = tmp_path / "a.log"
    with processes.running([part(tmp_path, "a", SLEEPS_WITH_A_CHILD)]) as started:
        (process, _) = started["a"]
        until(lambda: log.read_text())
        child = int(log.read_text())
        assert os.getpgid(child) == process.pid
        assert os.getsid(child) == os.getsid(0), "Linux would give each of two engines its time as a whole"
        processes._check(started)
    assert process.returncode is not None
    until(lambda: not runs(child))


def test_processes_run_without_the_heir(tmp_path, monkeypatch):

    def parts():
        for name in NAMES:
            time.sleep(0.5)  # the heir has ended
            yield given[name]

    given = {name: part(tmp_path, name, "import time; time.sleep(600)") for name in NAMES}
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with processes.running(parts()) as started:
        processes._check(started)
        assert [*started] == [*NAMES]
    assert all(process.returncode is not None for process, _ in started.values())


def test_a_process_that_ends_early_shows_its_log(tmp_path, capsys):
    said = "; ".join(f"print({number})" for number in range(20))
    with processes.running([part(tmp_path, "decode", f"{said}; raise SystemExit(3)")]) as started:
        started["decode"][0].wait(30)
        with pytest.raises(
            click.ClickException, match=r"the decode process has ended with code 3; its log is .*decode"
        ):
            processes._check(started)
    assert capsys.readouterr().err.split() == [str(number) for number in range(12, 20)]
