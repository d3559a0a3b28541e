# SPDX-License-Identifier: Apache-2.0
"""P's worker copies finished prompts to the pool. D's loads are copied from it as their memory says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvhma.vllm.options.doors import WorkerDoor
from kvhma.vllm.options.staging.pool import StagingPool
from kvhma.vllm.options.staging.slots import NAME, staging_slots

if TYPE_CHECKING:
    import torch

    from kvhma.geometry import Geometry
    from kvhma.vllm.metadata import StepMetadata
    from kvhma.vllm.peers.worker_context import WorkerContext
    from kvhma.vllm.reads.results import LoadResults


class Room(WorkerDoor):
    """Copies to the pool."""

    @classmethod
    def memory_of(cls, geometry: Geometry, caches: Mapping[str, torch.Tensor], *configured: Any) -> StagingPool:
        """Return the pool."""
        return StagingPool(geometry, caches, staging_slots(*configured))

    def __init__(self, context: WorkerContext, memory: StagingPool, results: LoadResults) -> None:
        """Copy to this memory."""
        self._memory = memory

    def on_step_launched(self, metadata: StepMetadata) -> None:
        """Copy blocks that the step computes to slots, and wait for the copies."""
        for spans, slots in metadata.extras.get(NAME, ()):
            self._memory.copy_out(spans, slots)
