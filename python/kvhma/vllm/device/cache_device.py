# SPDX-License-Identifier: Apache-2.0
"""The device of a worker's caches, as its threads use it. This file does not need torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")


class CacheDevice:
    """Host memory, where nothing has to be chosen or ordered.

    :class:`kvhma.vllm.device.accelerator.Accelerator` chooses and orders.

    Attributes:
        is_host: whether it is host memory.
    """

    is_host = True

    def choose(self) -> None:
        """Make it the device of the calling thread, before the thread uses NIXL or torch on it."""

    def chosen(self, work: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """Return a function for a new thread that chooses the device and then does the work."""

        def run() -> ResultT:
            self.choose()
            return work()

        return run

    def launch(self, work: Callable[[], None], after: torch.Event | None) -> torch.Event | None:
        """Begin some work; return the event after it, or None if it is done."""
        work()
        return None

    def mark(self) -> torch.Event | None:
        """Return an event after all work that the calling thread has launched; None if launches complete at once."""
        return None


HOST = CacheDevice()
"""Host memory."""
