# SPDX-License-Identifier: Apache-2.0
"""Log lines that other engines or unknown peers cause: only a few of each kind."""

from __future__ import annotations

import logging
import threading
import time

_BURST = 10
"""Lines of a kind that may follow each other at once, ..."""

_SECONDS = 6.0
"""... and seconds after which one more line is allowed."""

_MAX_KINDS = 1024


class _Sparing(logging.Filter):
    """Lets a few records of each kind pass. A kind is the text of a line without its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, float, int]] = {}
        """For each kind: lines that may be written, when that was counted, and lines left out since the last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written. The first record after a gap says how many are missing."""
        kind, now = str(record.msg), time.monotonic()
        with self._lock:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            room, counted, missing = self._kinds.get(kind, (float(_BURST), now, 0))
            room = min(float(_BURST), room + (now - counted) / _SECONDS)
            passes = room >= 1
            self._kinds[kind] = (room - 1, now, 0) if passes else (room, now, missing + 1)
        if passes and missing:
            record.msg = f"{kind} (and {missing} like it)"
        return passes


logger = logging.getLogger("vllm.kvhma.peers")
"""For every line that a peer can cause. The text has to be constant; pass values as arguments."""

logger.addFilter(_Sparing())
