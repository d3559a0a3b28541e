# SPDX-License-Identifier: Apache-2.0
"""Workers in separate processes, which never outlive their test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.waiting import HANG_SECONDS


class Worker:
    """The P side. `payload` is what a peer connects to."""

    def __init__(self, name: str, pages: int, seed: int, environment: dict[str, str]) -> None:
        self.seed = seed
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), name, str(pages), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        self.payload = b""

    def greet(self) -> None:
        """Wait until it is ready."""
        self.payload = bytes.fromhex(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANG_SECONDS)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise TimeoutError(f"the worker does not answer, exit code {self.process.poll()}")
        return line.decode()

    def notifications(self, count: int, seconds: float = HANG_SECONDS) -> list[list[str]]:
        """Return the worker's notifications, once there are `count`, or after `seconds`."""
        assert self.process.stdin is not None
        command = {"do": "notifications", "count": count, "seconds": seconds}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def pause(self) -> None:
        """Stop the worker's process: over TCP its memory is not served then, so transfers from it hang."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + HANG_SECONDS
        tasks = Path(f"/proc/{self.process.pid}/task")
        # The signal stops the threads one by one, and the one that serves the memory need not be the first.
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            if time.monotonic() > deadline:
                raise TimeoutError("the worker does not stop")
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker; return when it is gone."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait(HANG_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Start workers, and stop them at the end."""
    workers: list[Worker] = []

    def start(name: str = "P", pages: int = 64, seed: int = 1, **environment: str) -> Worker:
        worker = Worker(name, pages, seed, environment)
        workers.append(worker)
        worker.greet()
        return worker

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture(params=["default", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment of one transport: one that copies inline where it can, and one that never does."""
    environment = {} if request.param == "default" else {"UCX_TLS": "tcp"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment of a transport that the peer's process serves, which is therefore asynchronous."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return {"UCX_TLS": "tcp"}
