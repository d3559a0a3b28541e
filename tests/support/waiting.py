# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do: for so long that only something that hangs is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

HANG_SECONDS = 120.0
"""What takes longer hangs, however busy the machine is."""


def until(condition: Callable[[], ResultT], step: Callable[[], object] = lambda: time.sleep(0.005)) -> ResultT:
    """Wait until something is true, and do a step whenever it is not. Returns what was true.

    Raises:
        AssertionError: it hangs.
    """
    end = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"not so after {HANG_SECONDS:.0f} s"
        step()
    return found
