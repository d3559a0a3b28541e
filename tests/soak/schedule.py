# SPDX-License-Identifier: Apache-2.0
"""Which event hits what at what time, drawn from a seed before the run starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "kill": 4,
    "kill worker": 1,
    "stop": 3,
    "stop one": 3,
    "partition": 4,
    "rotate": 4,
    "full disk": 2,
    "full shm": 2,
}
"""Events and how often they are relative to each other.

kill: SIGKILL for all processes of an engine; another one starts in its place.
kill worker: SIGKILL for the worker alone; vLLM ends the rest, or we do a moment later.
stop: SIGSTOP for all its processes, SIGCONT after a while.
stop one: the same for one process: a scheduler without its worker, a worker without its scheduler.
partition: its cable is unplugged for a while.
rotate: engines get a new secret, in three steps; the disk may be full, or the file broken.
full disk: the disk of TMPDIR, the secret and the cases of failed loads is full for a while.
full shm: so is /dev/shm.
"""
ALL = "all"
"""The target of events that hit all engines."""
OF_ALL = ("rotate", "full disk", "full shm")


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        at: seconds after the start of the load.
        kind: a key of `KINDS`.
        target: name of an engine, or `ALL`.
        seconds: how long it lasts; for a kill, until the next engine starts there; for a rotation, that of its trouble.
        choice: 0 to 1, which of several processes it hits, or which trouble a rotation meets.
    """

    at: float
    kind: str
    target: str
    seconds: float
    choice: float


def schedule(
    seed: str, seconds: float, targets: Sequence[str], spared: Sequence[str] = (), without: Sequence[str] = ()
) -> list[Event]:
    """Events of a run, in order; the last minute or third of it, whichever is shorter, is left to recover.

    Nothing kills the `spared` engines in the second half, so that a leak has time to show.
    """
    rng = random.Random(f"{seed} events")
    kinds = {kind: weight for kind, weight in KINDS.items() if kind not in without}
    events: list[Event] = []
    at = 5.0
    end = seconds - min(60.0, seconds / 3)
    while kinds:
        at += rng.uniform(2, 14)
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        killed = kind.startswith("kill")
        lasts = rng.uniform(0, 3) if killed else rng.choice([0.2, 1, 3, 6, 12, 20]) * rng.uniform(0.7, 1)
        able = [name for name in targets if name not in spared or not (killed and at > seconds / 2)]
        target = ALL if kind in OF_ALL else rng.choice(able)
        event = Event(round(at, 2), kind, target, round(lasts, 2), rng.random())
        if at > end:
            break
        events.append(event)
    return events
