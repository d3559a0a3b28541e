# SPDX-License-Identifier: Apache-2.0
"""Processes that run together on this host, and end together, however this process ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from kvhma.cli.format import printable

_STOP_SECONDS = 20.0
"""Seconds that a process has to exit after a signal."""

_KILL_SECONDS = 5.0
"""Seconds until a killed process is reported as still running, for example while a device does not let it go."""

_TELL_SECONDS = 10.0
"""Seconds between two lines that say what this process waits for."""

_POLL_SECONDS = 0.1
_LOG_LINES = 8
"""Lines shown from the log of a process that exited too early."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Processes = Mapping[str, "tuple[subprocess.Popen[bytes], Path]"]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the processes.

    Attributes:
        name: ``prefill``, ``decode`` or the front's name.
        command: its arguments.
        environment: its environment variables.
        log: where its output goes.
        address: host and port where its ``/health`` answers; None if it has none.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    address: str | None = None


class Signals:
    """Counts requests to stop: Ctrl-C, a supervisor's SIGTERM, a closed terminal.

    A handler that raised could interrupt the code that starts or ends processes, and leave some of them.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.count = 0

    def __enter__(self) -> Signals:
        """Handle the signals, except those that this process was started to ignore, for example by nohup."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"x")

    def wait(self, seconds: float) -> None:
        """Sleep for some seconds, or until the next signal."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)


def run(parts: Sequence[Part], ready: str) -> int:
    """Run processes until a signal, and print a text when all of them answer.

    Returns:
        0 if all ended on request, 1 if a process had to be killed.

    Raises:
        click.ClickException: a process has ended by itself.
    """
    killed: list[str] = []
    with Signals() as signals:
        with running(parts, signals, killed) as processes:
            _until_healthy(parts, processes, signals)
            if not signals.count:
                click.echo(ready)
            while not signals.count:
                _check(processes)
                signals.wait(0.5)
        _say(f"killed: {', '.join(killed)}" if killed else "stopped")
    return 1 if killed else 0


@contextlib.contextmanager
def running(
    parts: Sequence[Part], signals: Signals | None = None, killed: list[str] | None = None
) -> Iterator[Processes]:
    """Run processes by name, each with its children in a separate process group, and end all of them on exit.

    All groups are in one session. Linux may schedule each session as a whole, and an idle worker of vLLM only yields.
    With few cores it then keeps the other engine from running for minutes (seen with Linux 6.18 on two cores).

    Args:
        parts: what to run.
        signals: counts signals; a signal while the processes end kills them.
        killed: gets the names of the processes that did not end on request.
    """
    processes: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    heir = subprocess.Popen(
        [sys.executable, "-c", "from kvhma.cli.processes import end_orphans; end_orphans()"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        for part in parts:
            with part.log.open("wb") as log:
                process = subprocess.Popen(  # noqa: S603
                    part.command,
                    env=part.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=os.setpgrp,
                )
            processes[part.name] = process, part.log
            if heir.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # if the heir was killed, only a killed parent needs it
                    heir.stdin.write(b"%d\n" % process.pid)
                    heir.stdin.flush()
        yield processes
    finally:
        _stop(processes, signals, [] if killed is None else killed)
        heir.kill()
        heir.communicate()


def end_orphans() -> None:
    """Wait until the process at the other end of stdin is gone, and end the process groups that it has named.

    A process that is killed cannot end others, so this process does it.
    """
    groups = [int(line) for line in sys.stdin]
    _send(signal.SIGTERM, groups)
    end = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < end and any(_exists(pid) for pid in groups):
        time.sleep(_POLL_SECONDS)
    _kill_groups(groups)


def _exists(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _send(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_groups(groups: Sequence[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if all members are zombies
            os.killpg(group, signal.SIGKILL)


def _stop(processes: Processes, signals: Signals | None, killed: list[str]) -> None:
    """Ask all processes to end; kill them after some seconds, or at the next signal."""
    _send(signal.SIGTERM, [process.pid for process, _ in reversed([*processes.values()]) if process.poll() is None])
    begun, before = time.monotonic(), 0 if signals is None else signals.count
    tell = begun + _TELL_SECONDS
    while (left := _alive(processes)) and time.monotonic() - begun < _STOP_SECONDS:
        if signals is None:
            time.sleep(_POLL_SECONDS)
            continue
        signals.wait(_POLL_SECONDS)
        if signals.count > before:
            break
        if time.monotonic() > tell:
            tell += _TELL_SECONDS
            _say(f"{time.monotonic() - begun:.0f} s: waiting for {_names(left)} to end; Ctrl-C kills")
    killed += left
    _kill_groups(
        [process.pid for process, _ in processes.values()]
    )  # workers that outlive their engine are in its group
    end = time.monotonic() + _KILL_SECONDS
    for name, (process, _) in processes.items():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"the {name} process {process.pid} still runs")


def _alive(processes: Processes) -> list[str]:
    return [name for name, (process, _) in processes.items() if process.poll() is None]


def _names(names: Sequence[str]) -> str:
    return " and ".join(names)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a closed terminal
        click.echo(text, err=True)


def _last_lines(log: Path, count: int) -> list[str]:
    lines = filter(str.strip, log.read_text(errors="replace").splitlines())
    return [printable(line) for line in [*lines][-count:]]


def _check(processes: Processes) -> None:
    for name, (process, log) in processes.items():
        if (code := process.poll()) is not None:
            _say("\n".join(_last_lines(log, _LOG_LINES)))
            raise click.ClickException(f"the {name} process has ended with code {code}; its log is {log}")


def _until_healthy(parts: Sequence[Part], processes: Processes, signals: Signals) -> None:
    waiting = {part.name: part.address for part in parts if part.address is not None}
    begun = time.monotonic()
    tell = begun + _TELL_SECONDS
    while not signals.count:
        _check(processes)
        waiting = {name: address for name, address in waiting.items() if not _is_healthy(address)}
        if not waiting:
            return
        if time.monotonic() > tell:
            tell += _TELL_SECONDS
            _say(f"{time.monotonic() - begun:.0f} s: waiting for {_names([*waiting])}")
            for name in waiting:
                for line in _last_lines(processes[name][1], 1):
                    _say(f"  {name}: {line[:160]}")
        signals.wait(_POLL_SECONDS)


def _is_healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
