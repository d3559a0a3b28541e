# SPDX-License-Identifier: Apache-2.0
"""Resources of every process of the engines over time, read from /proc, so that a stopped process counts too."""

from __future__ import annotations

import contextlib
import csv
import re
import threading
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from soak.fleet import Slot, process_name
from soak.journal import Journal
from soak.judge import Census

EVERY_SECONDS = 2.0


@dataclass(frozen=True)
class Sample:
    """One process at one moment; memory in KiB.

    Attributes:
        seconds: since the start of the run.
        slot: name of its engine.
        life: which of the engines of that name.
        process: front, core or worker.
        rss: all resident memory.
        anon: of it the memory of malloc and Python, whether or not it is shared with the parent process.
        file: of it what is mapped from files; grows as code is first used.
        shmem: of it shared memory, as transports use it.
    """

    seconds: float
    slot: str
    life: int
    process: str
    pid: int
    rss: int
    anon: int
    file: int
    shmem: int
    files: int
    threads: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.slot, self.life, self.process, self.pid

    @property
    def census(self) -> Census:
        return Census(self.files, self.threads)


def sample(slot: Slot, seconds: float) -> list[Sample]:
    """All processes of an engine now."""
    found = []
    for pid in slot.engine.pids():
        with contextlib.suppress(OSError, KeyError):
            status = Path(f"/proc/{pid}/status").read_text()
            values = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
            memory = (values[name] for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"))
            files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            role = role_of(pid, slot.engine.pid)
            found.append(Sample(round(seconds, 2), slot.name, slot.life, role, pid, *memory, files, values["Threads"]))
    return found


def role_of(pid: int, group: int) -> str:
    name = process_name(pid)
    if pid == group:
        return "front"
    return "worker" if "Worker" in name else "core" if "EngineCore" in name else "other"


class Sampler(threading.Thread):
    """Samples all slots until stopped, into a CSV file and a list."""

    def __init__(self, slots: list[Slot], journal: Journal, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._slots = slots
        self._journal = journal
        self._over = threading.Event()
        self._file = path.open("w", newline="", buffering=1)
        self._csv = csv.writer(self._file)
        self._csv.writerow(field.name for field in fields(Sample))
        self.samples: list[Sample] = []

    def run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            for slot in self._slots:
                if slot.up.is_set():
                    for one in sample(slot, self._journal.now()):
                        self.samples.append(one)
                        self._csv.writerow(astuple(one))
        self._file.close()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def processes(self) -> dict[tuple[str, int, str, int], list[Sample]]:
        """Samples by process, in order."""
        by_process: dict[tuple[str, int, str, int], list[Sample]] = {}
        for one in self.samples:
            by_process.setdefault(one.key, []).append(one)
        return by_process


def growth(samples: list[Sample]) -> str:
    """One line for a process: what it held first, half way and last."""
    first, half, last = samples[0], samples[len(samples) // 2], samples[-1]
    minutes = (last.seconds - first.seconds) / 60
    memory = " -> ".join(f"{one.rss / 1024:.0f}" for one in (first, half, last))
    parts = ", ".join(
        f"{name} {(getattr(last, name) - getattr(first, name)) / 1024:+.0f}" for name in ("anon", "file", "shmem")
    )
    return (
        f"{first.slot}-{first.life} {first.process:6} {minutes:5.1f} min: RSS {memory} MiB ({parts}), "
        f"files {first.files} -> {last.files}, threads {first.threads} -> {last.threads}"
    )


def heap_growth(name: str, heaps: list[dict[str, int]]) -> str:
    """One line for a worker: the memory that malloc and Python use, first, half way and last."""
    points = heaps[0], heaps[len(heaps) // 2], heaps[-1]
    parts = (
        " -> ".join(f"{one[key] / scale:.0f}" for one in points) + f" {unit}"
        for key, scale, unit in (
            ("heap_used", 1024, "MiB of the heap in use"),
            ("heap", 1024, "MiB of heap"),
            ("mapped", 1024, "MiB mapped"),
            ("python_blocks", 1, "blocks of Python"),
        )
    )
    return f"{name}: {', '.join(parts)}"
