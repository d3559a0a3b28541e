# SPDX-License-Identifier: Apache-2.0
"""What happened when: one line of JSON for each request and each event. The report is made of it, and a run that was
cut continues after its last line."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a journal; a run that is killed leaves half of a last line."""
    return list(_whole(path.read_text(errors="replace").splitlines())) if path.exists() else []


def _whole(lines: Iterable[str]) -> Iterator[Line]:
    for line in lines:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and {"t", "what"} <= found.keys():
            yield found


class Journal:
    """A file of `{"t": seconds of the run, "what": ..., ...}`. Safe to use from several threads.

    The time between two parts of a run does not count. Each part begins with a line that has the time of day, as the
    logs of engines have it.
    """

    def __init__(self, path: Path) -> None:
        before = read_lines(path)
        self._started = time.monotonic() - (before[-1]["t"] if before else 0.0)
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1)
        if self._file.tell():
            self._file.write("\n")  # ends the half of a line
        self.note("part", utc=datetime.now(timezone.utc).isoformat())

    def now(self) -> float:
        """Seconds of the run so far."""
        return time.monotonic() - self._started

    def note(self, what: str, **facts: Any) -> None:
        line = json.dumps({"t": round(self.now(), 3), "what": what} | facts, default=repr)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


@dataclass
class Past:
    """How far a run has come.

    Attributes:
        parts: number of times that it was started.
        loaded: seconds under load, by model.
        ended: models whose load and checks are over.
        lives: the last life of each engine.
    """

    parts: int = 0
    loaded: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: list[str] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Past:
        past = cls()
        since: tuple[str, float] | None = None
        last = 0.0
        for line in lines:
            what = line["what"]
            if since is not None and what in ("part", "load over"):
                # After a cut the load lasted until the last line before it.
                past.loaded[since[0]] += (line["t"] if what == "load over" else last) - since[1]
                since = None
            if what == "part":
                past.parts += 1
            elif what == "load":
                since = line["model"], line["t"]
            elif what == "model over":
                past.ended.append(line["model"])
            elif what == "starts":
                past.lives[line["engine"]] = line["life"]
            last = line["t"]
        if since is not None:
            past.loaded[since[0]] += last - since[1]
        return past
