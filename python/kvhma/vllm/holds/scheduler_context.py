# SPDX-License-Identifier: Apache-2.0
"""State that the prefill part and the decode part of the connector's scheduler share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.vllm.config.allow_list import AllowedSources
from kvhma.vllm.config.engine_facts import EngineFacts
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.options.doors import Rooms, SchedulerDoor
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.prompts.prompt_digests import PromptDigests
from kvhma.vllm.telemetry.stats import StatsCollector
from kvhma.vllm.wire.secrets import Secrets

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass
class SchedulerContext:
    """An engine, as the connector in the scheduler's process knows it.

    Attributes:
        settings: of the connector.
        engine: facts about the vLLM engine.
        leases: finished requests whose blocks this engine holds for other engines.
        secrets: that this engine shares with other engines.
        stats: counters of this process.
        geometry: caches of the first worker; None until the workers have registered them.
        manager: vLLM's block manager; None until vLLM has bound it.
        may_take: whether kvhma may take the blocks of a request that ends from the manager; None if of no request.
        partial_hits: whether a hit of its prefix cache may end inside a block.
        sources: the engines that requests may be loaded from.
        prompts: digests of prompts.
        peers: ask other engines.
        rooms: the options of the engine.
    """

    settings: Settings
    engine: EngineFacts
    leases: LeaseTable
    secrets: Secrets
    stats: StatsCollector
    geometry: Geometry | None = None
    manager: KVCacheManager | None = None
    may_take: Callable[[Request], bool] | None = None
    partial_hits: bool = False
    sources: AllowedSources = field(init=False)
    prompts: PromptDigests = field(init=False)
    peers: Peers = field(init=False)
    rooms: Rooms = field(default_factory=lambda: Rooms(SchedulerDoor))

    def __post_init__(self) -> None:
        """Start without threads."""
        self.sources = self.settings.sources(has_secret=self.secrets.enabled)
        self.prompts = PromptDigests(self.engine.applies_adapters)
        self.peers = Peers(self.settings.handshake_timeout, self.secrets, self.stats, self.sources)

    def transfer_tables(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the block tables of the groups that are transferred."""
        groups = self.engine.transfer_groups
        if groups and len(tables) <= max(groups):
            raise RequestError(f"{len(tables)} block tables, but group {max(groups)} is transferred")
        return list(map(tables.__getitem__, groups))
