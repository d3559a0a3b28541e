# SPDX-License-Identifier: Apache-2.0
"""What all engines of a run share: a disk and a /dev/shm of limited size, and the file with their secrets."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from soak.hosts import mount_memory
from soak.journal import Journal
from soak.schedule import Event

DISK_MIB, SHM_MIB = 64, 2048
BROKEN = (b"", b"short\n", b"\n".join([b"s" * 20] * 17), b"x" * 100_000, None)
"""Contents that are no secrets; None for no file."""


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the file system of a folder, and empty it again."""
    ballast = folder / "ballast"
    try:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        yield
    finally:
        ballast.unlink(missing_ok=True)


class Reader(Protocol):
    """An engine that reads the file."""

    name: str

    def has_read(self, number: int) -> Callable[[], bool]:
        """Return a function that tells whether the engine has read so many secrets since, or has ended."""


class Site:
    """The disk and the secret. An engine starts only while `starting` is free: never on a full disk."""

    name = "all"

    def __init__(self, folder: Path, journal: Journal, lease: float, *, mounted: bool) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir(exist_ok=True)
        if mounted:
            mount_memory(self.disk, DISK_MIB)
            mount_memory(Path("/dev/shm"), SHM_MIB)
        self.file = self.disk / "secret"
        self.starting = threading.Lock()
        self.busy = threading.Lock()
        self._journal = journal
        self._lease = lease
        self.mounted = mounted
        self._secret = secrets.token_hex(32).encode()
        self._beside(self._secret).replace(self.file)

    def do(self, event: Event, readers: list[Reader], stop: threading.Event) -> None:
        """Do an event, and undo it. One event at a time."""
        self._journal.note("event", kind=event.kind, engine=self.name, life=0, seconds=event.seconds)
        if event.kind == "rotate":
            self._rotate(event, readers, stop)
        elif self.mounted:
            with self.starting, full(self.disk if event.kind == "full disk" else Path("/dev/shm")):
                stop.wait(event.seconds)
        self._journal.note("event over", kind=event.kind, engine=self.name, life=0)

    def _rotate(self, event: Event, readers: list[Reader], stop: threading.Event) -> None:
        """The three steps of docs/security.md; one of them meets a full disk, another a broken file, or none does."""
        old, new = self._secret, secrets.token_hex(32).encode()
        trouble = int(event.choice * 9)
        for step, lines in enumerate(([old, new], [new, old], [new])):
            if step == 2:
                stop.wait(self._lease)  # until nothing is held that the old secret signed
                if stop.is_set():
                    return
            if trouble == step:
                self._break(BROKEN[int(event.choice * 1000) % len(BROKEN)], min(event.seconds, 4.0), stop)
            with self.starting:
                beside = self._beside(*lines)  # before the disk is full
                with full(self.disk) if trouble == 3 + step and self.mounted else contextlib.nullcontext():
                    waits = {reader.name: reader.has_read(len(lines)) for reader in readers}
                    beside.replace(self.file)
                    self._wait(waits, step)
            self._secret = lines[0]
            self._journal.note("rotated", step=step, trouble=trouble)

    def _beside(self, *lines: bytes) -> Path:
        """Write a new file beside the old one."""
        beside = self.file.with_suffix(".next")
        beside.write_bytes(b"\n".join(lines))
        beside.chmod(0o600)
        return beside

    def _break(self, content: bytes | None, seconds: float, stop: threading.Event) -> None:
        with self.starting:
            good = self.file.read_bytes()
            self.file.unlink() if content is None else self.file.write_bytes(content)
            stop.wait(seconds)
            self._beside(*good.splitlines()).replace(self.file)

    def _wait(self, waits: dict[str, Callable[[], bool]], step: int) -> None:
        """Wait until the log of each engine says that it has read the file."""
        end = time.monotonic() + 120
        while waits:
            waits = {name: done for name, done in waits.items() if not done()}
            if time.monotonic() > end:
                raise TimeoutError(f"step {step} of a rotation: {sorted(waits)} have not read the secrets")
            time.sleep(0.05)
