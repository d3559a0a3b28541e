# SPDX-License-Identifier: Apache-2.0
"""What the connector's parts in a worker's process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhma.geometry import Geometry
from kvhma.nixl import Agent
from kvhma.vllm.config.identity import ModelIdentity
from kvhma.vllm.config.rooms import WITHOUT_SETTING
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.device.cache_device import HOST, CacheDevice
from kvhma.vllm.options.doors import Rooms, WorkerDoor
from kvhma.vllm.wire.lease_board import LeaseBoard
from kvhma.vllm.wire.proofs import ProofKey
from kvhma.vllm.wire.secrets import Secrets


@dataclass(frozen=True)
class WorkerContext:
    """A worker as the connector in its process knows it.

    Attributes:
        settings: of the connector.
        secrets: that the engine shares with other engines.
        engine_id: name of the engine.
        identity: of the model that it runs.
        geometry: its caches.
        agent: NIXL agent with which the caches are registered.
        device: of the engine's caches.
        rank: of this worker in its engine: tensor-parallel ranks, stage by stage.
        may_wait: whether a step may wait for loads without delaying other engines or stages.
        proof_key: for questions whose answers need a proof.
        cp_tp_size: number of neighbouring tensor-parallel ranks that share the tokens of a cache.
        board: of this worker, registered with the agent; None without a lease board.
        options: that the engine has, if their folders are there.
        rooms: the options.
    """

    settings: Settings
    secrets: Secrets
    engine_id: str
    identity: ModelIdentity
    geometry: Geometry
    agent: Agent
    device: CacheDevice = HOST
    rank: int = 0
    may_wait: bool = True
    proof_key: ProofKey = field(default_factory=ProofKey)
    cp_tp_size: int = 1
    board: LeaseBoard | None = None
    options: tuple[str, ...] = WITHOUT_SETTING
    rooms: Rooms = field(default_factory=lambda: Rooms(WorkerDoor))
