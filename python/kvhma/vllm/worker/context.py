# SPDX-License-Identifier: Apache-2.0
"""What the parts of the connector in a worker's process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhma.geometry import Geometry
from kvhma.nixl import Agent
from kvhma.vllm.cache_device import HOST, CacheDevice
from kvhma.vllm.identity import ModelIdentity
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.lease_board import LeaseBoard
from kvhma.vllm.wire.proofs import ProofKey
from kvhma.vllm.wire.secrets import Secrets


@dataclass(frozen=True)
class WorkerContext:
    """A worker as the connector in its process knows it.

    Attributes:
        settings: of the connector.
        secrets: that the engine shares with others.
        engine_id: name of the engine.
        identity: of the model that it runs.
        geometry: its caches.
        agent: with which they are registered.
        device: that the engine's caches are on.
        rank: of this worker among all of its engine: stage by stage its tensor-parallel ranks.
        may_wait: whether a step may wait for loads without keeping other engines or stages from theirs.
        proof_key: for questions whose answers are to be proved.
        cp_tp_size: how many neighbouring tensor-parallel ranks share the tokens of a cache.
        board: of this worker, registered with the agent; None if its scheduler shows nothing.
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
