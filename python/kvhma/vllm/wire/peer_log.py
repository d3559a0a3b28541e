# SPDX-License-Identifier: Apache-2.0
"""What protects the log: texts of clients and peers are one line, and peers can cause only a few lines of each kind."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from numbers import Number

from kvhma.text import one_line

_BURST = 10
"""Lines of a kind that may follow each other at once, ..."""

_SECONDS = 6.0
"""... and seconds after which one more line is allowed."""

_MAX_KINDS = 1024

_MAX_TRACEBACK_LINES = 200
_FIRST_TRACEBACK_LINES = 50
"""Most lines of a traceback, and how many of them are its first: its last lines say what the error was."""


class _Plain:
    """A value whose text is one line and bounded. The text is made when the record is written."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(str(self._value))

    def __repr__(self) -> str:
        return one_line(repr(self._value))

    def __getitem__(self, key: str) -> object:  # of the dictionary that may be the only argument of a line
        return _plain(self._value[key])  # type: ignore[index]


def _plain(value: object) -> object:
    return value if isinstance(value, Number) else _Plain(value)


class _OneLine(logging.Filter):
    """Makes every value in a record plain, also those of this engine: clients choose the ids of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return that the record is written."""
        args = record.args or ()
        # logging unpacks a single dictionary, for `%(name)s` or for `%s`
        record.args = tuple(map(_plain, args)) if isinstance(args, tuple) else _Plain(args)  # type: ignore[assignment]
        if record.exc_info and not record.exc_text:
            # Each line begins with a mark, so no text of an error looks like a line of the log.
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            if (left_out := len(lines) - _MAX_TRACEBACK_LINES) > 0:
                first = lines[:_FIRST_TRACEBACK_LINES]
                lines = [*first, f"... {left_out} lines left out", *lines[len(first) + left_out :]]
            record.exc_text = "\n".join(f"| {one_line(line)}" for line in lines)
        return True


class _Sparing(_OneLine):
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
        return passes and super().filter(record)


logger = logging.getLogger("vllm.kvhma.peers")
"""For every line that a peer can cause. The text has to be constant; pass values as arguments."""

logger.addFilter(_Sparing())
logging.getLogger("vllm.kvhma").addFilter(_OneLine())
