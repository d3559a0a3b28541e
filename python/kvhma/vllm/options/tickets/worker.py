# SPDX-License-Identifier: Apache-2.0
"""Tickets in a worker: it returns the number of each step with the step's results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvhma.vllm.options.doors import WorkerDoor

if TYPE_CHECKING:
    from kvhma.vllm.device.memory import Memory
    from kvhma.vllm.metadata import StepMetadata, WorkerReport
    from kvhma.vllm.peers.worker_context import WorkerContext
    from kvhma.vllm.reads.results import LoadResults

OPTION = "tickets"
"""The name of this option."""


class Step(int):
    """The number of a step."""

    def joined(self, more: Step) -> Step:
        """Return the number: all ranks report the same step."""
        return self


class Room(WorkerDoor):
    """Returns the numbers of steps."""

    def __init__(self, context: WorkerContext, memory: Memory, results: LoadResults) -> None:
        """Start before the first step."""
        self._step: Step | None = None

    def on_step(self, metadata: StepMetadata) -> None:
        """Note the number of a step, if it has one."""
        self._step = metadata.extras.get(OPTION)

    def add_to_report(self, report: WorkerReport) -> None:
        """Add the number of the step whose results come with the report."""
        step, self._step = self._step, None
        if step is not None:
            report.extras[OPTION] = step
