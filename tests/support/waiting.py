# SPDX-License-Identifier: Apache-2.0
"""Waits for other threads and processes, for so long that only a hang times out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")

HANG_SECONDS = 120.0
"""A wait that takes longer hangs, even on a busy machine."""


def until(condition: Callable[[], ResultT], step: Callable[[], object] = lambda: time.sleep(0.005)) -> ResultT:
    """Wait until something is true, and do a step whenever it is not. Returns the true value.

    Raises:
        AssertionError: the wait timed out.
    """
    end = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"not so after {HANG_SECONDS:.0f} s"
        step()
    return found


def runs(pid: int) -> bool:
    """Return whether a process exists and has not ended. It may end at any moment, also while its file is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
