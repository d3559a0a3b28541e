# SPDX-License-Identifier: Apache-2.0
"""What happened when: one line of JSON for each request and each event, so that an incident can be traced."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


class Journal:
    """A file of `{"t": seconds since the start, "what": ..., ...}`. Safe to use from several threads.

    The first line has the time of day of the start; logs of engines have the time of day.
    """

    def __init__(self, path: Path) -> None:
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._file = path.open("w", buffering=1)
        self.note("start", utc=datetime.now(timezone.utc).isoformat())

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def note(self, what: str, **facts: Any) -> None:
        line = json.dumps({"t": round(self.now(), 3), "what": what} | facts, default=repr)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()
