# SPDX-License-Identifier: Apache-2.0
"""Processor time of threads, from /proc: read from outside, so that the measured threads do no work for it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PROC = Path("/proc")

Times = dict[tuple[int, int], float]
"""Seconds by process and thread."""


def read(pids: Iterable[int], proc: Path = PROC) -> Times:
    """Seconds that each thread of some processes has run so far. Threads and processes that have ended are left out.

    `schedstat` counts nanoseconds, `stat` ticks of 10 ms, which is longer than a hand-off.
    """
    found: Times = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in (proc / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError):
                    found[pid, int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def parent(pid: int, proc: Path = PROC) -> int:
    """Id of the process that started a process."""
    # The name in parentheses may hold anything: count from the last one. Then: state, parent.
    return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def spent(before: Times, after: Times) -> Times:
    """The time of each thread between two readings. A thread that began in between counts from its beginning."""
    return {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}


CALLS = "in calls of the connector"
"""Label of the time that the engine's own threads spend in a connector; it is part of theirs."""

ALL = "all threads"
FRONT_END = "front end"

_CONNECTOR = "NixlConnector's own"


def group(name: str, process: str) -> str:
    """The purpose of a thread, from its name: the engine's own threads, one by one those of a connector and of NIXL."""
    if name == "MainThread":
        return f"the {process}'s own thread"
    if name.startswith(("kvhma-", "NIXL", "UCX")):
        return name
    if "nixl" in name:
        return _CONNECTOR
    return "others of vLLM"


def of_connector(label: str) -> bool:
    """Whether a label of `by_group`, or that of `CALLS`, belongs to the connector."""
    what = label.partition(": ")[2]
    return what in (CALLS, _CONNECTOR) or what.startswith(("kvhma-", "NIXL", "UCX"))


def by_group(times: Times, roles: Mapping[int, str], names: Mapping[int, Mapping[int, str]]) -> dict[str, float]:
    """Add threads up by process and purpose.

    Args:
        times: of threads.
        roles: what each process is ("worker", "scheduler"); others are "front end".
        names: of threads, by process; without names the first thread of a process is distinguished from the others.
    """
    found: dict[str, float] = defaultdict(float)
    for (pid, thread), seconds in times.items():
        role = roles.get(pid, FRONT_END)
        name = names.get(pid, {pid: "MainThread"}).get(thread, "ended or new")
        found[f"{role}: {ALL if role == FRONT_END else group(name, role)}"] += seconds
    return dict(found)
