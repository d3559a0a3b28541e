# SPDX-License-Identifier: Apache-2.0
"""Resources of every process of the engines over time, read from /proc, so that a stopped process counts too."""

from __future__ import annotations

import contextlib
import csv
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import get_type_hints

from soak.fleet import Slot, process_name
from soak.journal import Journal
from support.front import Proxy

EVERY_SECONDS = 2.0


@dataclass(frozen=True)
class Sample:
    """One process at one moment; memory in KiB.

    Attributes:
        seconds: since the start of the run.
        slot: name of its engine, or proxy.
        life: which of the engines of that name.
        process: front, core, worker or proxy.
        rss: resident memory.
    """

    seconds: float
    slot: str
    life: int
    process: str
    pid: int
    rss: int
    files: int
    threads: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.slot, self.life, self.process, self.pid


def sample(name: str, life: int, pid: int, role: str, seconds: float) -> list[Sample]:
    """A process now; nothing if it has ended."""
    with contextlib.suppress(OSError, KeyError):
        status = Path(f"/proc/{pid}/status").read_text()
        values = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return [Sample(round(seconds, 2), name, life, role, pid, values["VmRSS"], files, values["Threads"])]
    return []


def role_of(pid: int, group: int) -> str:
    name = process_name(pid)
    if pid == group:
        return "front"
    return "worker" if "Worker" in name else "core" if "EngineCore" in name else "other"


class Sampler(threading.Thread):
    """Samples the processes of all slots, and the proxy if there is one, until stopped, into a CSV file."""

    def __init__(self, slots: Iterable[Slot], proxy: Proxy | None, journal: Journal, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._slots = list(slots)
        self._proxy = proxy
        self._journal = journal
        self._over = threading.Event()
        self._file = path.open("a", newline="")

    def run(self) -> None:
        write = csv.writer(self._file).writerows
        while not self._over.wait(EVERY_SECONDS):
            now = self._journal.now()
            if self._proxy is not None:
                write(map(astuple, sample("proxy", 1, self._proxy.pid, "proxy", now)))
            for slot in self._slots:
                if slot.up.is_set():
                    for pid in slot.engine.pids():
                        role = role_of(pid, slot.engine.pid)
                        write(map(astuple, sample(slot.name, slot.life, pid, role, now)))
        self._file.close()

    def stop(self) -> None:
        self._over.set()
        self.join()


def read_samples(path: Path) -> dict[tuple[str, int, str, int], list[Sample]]:
    """Samples by process, in order."""
    kinds = get_type_hints(Sample).values()
    by_process: dict[tuple[str, int, str, int], list[Sample]] = {}
    with path.open(newline="") as file:
        for row in csv.reader(file):
            one = Sample(*(kind(text) for kind, text in zip(kinds, row, strict=True)))
            by_process.setdefault(one.key, []).append(one)
    return by_process


def growth(samples: Sequence[Sample]) -> str:
    """One line for a process: what it held first, half way and last."""
    first, half, last = samples[0], samples[len(samples) // 2], samples[-1]
    minutes = (last.seconds - first.seconds) / 60
    memory = " -> ".join(f"{one.rss / 1024:.0f}" for one in (first, half, last))
    return (
        f"{first.slot}-{first.life} {first.process:6} {minutes:5.1f} min: RSS {memory} MiB, "
        f"files {first.files} -> {last.files}, threads {first.threads} -> {last.threads}"
    )
