# SPDX-License-Identifier: Apache-2.0
"""What the prefill and the decode part of the connector's scheduler share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.vllm.engine_facts import EngineFacts
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.scheduler.prompt_digests import PromptDigests
from kvhma.vllm.settings import Settings
from kvhma.vllm.stats import StatsCollector
from kvhma.vllm.wire.secrets import Secrets

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass
class SchedulerContext:
    """An engine as the connector in its scheduler's process knows it.

    Attributes:
        settings: of the connector.
        engine: of vLLM.
        leases: finished requests whose blocks are kept for other engines.
        secrets: that this engine shares with others.
        stats: what this process counts.
        geometry: caches of the first worker; None until the workers have registered theirs.
        manager: vLLM's manager of blocks, once it is there.
        partial_hits: whether a hit of its prefix cache may end inside of a block.
        prompts: digests of prompts.
    """

    settings: Settings
    engine: EngineFacts
    leases: LeaseTable
    secrets: Secrets
    stats: StatsCollector
    geometry: Geometry | None = None
    manager: KVCacheManager | None = None
    partial_hits: bool = False
    prompts: PromptDigests = field(init=False)

    def __post_init__(self) -> None:
        """An operator who names the model says that adapters of one name are the same too, wherever they lie."""
        self.prompts = PromptDigests(adapter_paths=self.settings.model_id is None)

    def transfer_tables(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Choose the block tables of the groups that take part."""
        groups = self.engine.transfer_groups
        if groups and len(tables) <= max(groups):
            raise RequestError(f"{len(tables)} block tables, group {max(groups)} takes part")
        return [list(tables[index]) for index in groups]
