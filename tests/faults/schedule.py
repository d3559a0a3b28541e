# SPDX-License-Identifier: Apache-2.0
"""Which fault the link has at what time, drawn from a seed before the run starts."""

from __future__ import annotations

import random
from collections.abc import Callable

from soak.schedule import ALL, Event
from support.link import Fault

KINDS: dict[str, Callable[[float], Fault]] = {
    "loss": lambda choice: Fault(loss=0.01 + 0.19 * choice),
    "delay": lambda _: Fault(delay=0.2),
    "reorder": lambda choice: Fault(reorder=0.05 + 0.45 * choice),
    "duplicate": lambda choice: Fault(duplicate=0.05 + 0.45 * choice),
    "rate": lambda choice: Fault(rate=50_000 * 20**choice),
    "reset": lambda choice: Fault(reset=0.001 + 0.02 * choice),
    "partition": lambda _: Fault(loss=1),
    "one way": lambda _: Fault(loss=1),
    "mixed": lambda _: Fault(loss=0.05, reorder=0.1, duplicate=0.05, delay=0.05, rate=1_000_000),
}
"""The fault of each kind, of a strength from 0 to 1."""
PARTITION_SECONDS = (1, 3, 5, 10, 20, 40, 60)
REST_SECONDS = 130.0
"""At the end there is no fault: TCP sends again after 120 s at most."""


def schedule(seed: int, seconds: float) -> list[Event]:
    """Events of a run, one after the other: each kind, and each length of a partition, once before any
    comes again."""
    rng = random.Random(f"{seed} faults")
    events: list[Event] = []
    cuts: list[int] = []
    at = 5.0
    end = seconds - min(REST_SECONDS, seconds / 3)
    while True:
        for kind in rng.sample(list(KINDS), len(KINDS)):
            lasts = rng.uniform(5, 25)
            if kind in ("partition", "one way"):
                cuts = cuts or rng.sample(PARTITION_SECONDS, len(PARTITION_SECONDS))
                lasts = cuts.pop()
            at += rng.uniform(2, 10)
            if at > end:
                return events
            lasts = round(min(lasts, end - at), 2)
            events.append(Event(round(at, 2), kind, ALL, lasts, rng.random()))
            at += lasts


def fault_of(event: Event) -> tuple[Fault, tuple[int, ...]]:
    """An event's fault and the directions that have it."""
    directions = (int(2 * event.choice),) if event.kind == "one way" else (0, 1)
    return KINDS[event.kind](event.choice), directions
