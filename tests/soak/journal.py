# SPDX-License-Identifier: Apache-2.0
"""What happened when: one line of JSON for each request and each event. The report is made of it."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Journal:
    """A file of `{"t": seconds of the run, "what": ..., ...}`. Safe to use from several threads.

    It begins with a line that has the time of day, as the logs of engines have it.
    """

    def __init__(self, path: Path) -> None:
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._file = path.open("w", buffering=1)
        self.note("begins", utc=datetime.now(timezone.utc).isoformat())

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
