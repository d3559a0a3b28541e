# SPDX-License-Identifier: Apache-2.0
"""The device that a worker's caches are on, as its threads have to know it. This file does without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")


class CacheDevice:
    """Host memory: there is nothing to choose and nothing to order. :class:`kvhma.vllm.accelerator.Accelerator` has.

    Attributes:
        is_host: whether it is host memory.
    """

    is_host = True

    def choose(self) -> None:
        """Make it the device of the calling thread, which comes before the thread uses NIXL, or torch, on it."""

    def chosen(self, work: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """Return what chooses the device and then does the work, for a thread to begin with."""

        def run() -> ResultT:
            self.choose()
            return work()

        return run

    def launch(self, work: Callable[[], None], after: torch.Event | None) -> torch.Event | None:
        """Begin some work; return the event after it, None if it is done."""
        work()
        return None

    def mark(self) -> torch.Event | None:
        """Return an event after all that the calling thread has launched; None if nothing runs on after a launch."""
        return None


HOST = CacheDevice()
"""Host memory."""
