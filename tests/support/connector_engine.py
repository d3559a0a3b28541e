# SPDX-License-Identifier: Apache-2.0
"""Both halves of the connector as vLLM makes them, with real agents and a real listener; calls are made by hand."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvhma.vllm import KvhmaConnector
from kvhma.vllm.holds.held_blocks import hold_blocks
from kvhma.vllm.metadata import StepMetadata
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, random_id
from support.cache.engine import own_config_of
from support.engines.engine import free_port
from support.schedulers import manager
from support.waiting import until
from support.workers import DIGEST, load, params

BLOCKS, TOKENS = 16, 32
WORKER, SCHEDULER = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER


class Engine:
    """One engine of one rank and one layer, without a model."""

    def __init__(self, name: str, **settings: object) -> None:
        self.address = Address("127.0.0.1", free_port())
        place = {"side_channel_host": self.address.host, "side_channel_port": self.address.port}
        config = own_config_of(name, **{"handshake_timeout": 2, "model_id": "m", **place, **settings})
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float32)
        layout = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.cache = torch.zeros(BLOCKS, 2, TOKENS, 32)
        self.worker = KvhmaConnector(config, WORKER, layout)
        self.scheduler = KvhmaConnector(config, SCHEDULER, layout)
        self.worker.register_kv_caches({"layer": self.cache})
        self.scheduler._scheduler.context.manager = manager(BLOCKS)
        self.publish()

    def publish(self) -> None:
        """What vLLM does when the caches are there, and again after a wake-up."""
        hello = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): hello})

    @property
    def leases(self):
        return self.scheduler._scheduler.context.leases

    def wake(self, *, other_bytes: bool = True) -> None:
        if other_bytes:
            self.cache.normal_()
        self.worker.restore_kv_caches()
        self.publish()

    def hold(self, name: str, blocks: list[int]) -> PrefillParams:
        """Parameters of a request whose blocks P holds."""
        key = LeaseKey(name, random_id())
        scheduler = self.scheduler._scheduler
        self.leases.hold(key, DIGEST, *hold_blocks(scheduler.context.manager, None, [blocks], 0))
        found = params(self.address, key, blocks, instance=scheduler.prefill._incarnation_id)
        return found._replace(engine_id=self.scheduler._engine_id, num_tokens=TOKENS * len(blocks))

    def order(self, name: str, remote: PrefillParams, blocks: list[int]) -> None:
        self.worker.bind_connector_metadata(StepMetadata([load(name, remote, blocks)]))
        self.worker.start_load_kv(None)

    def ended(self) -> str | None:
        """Wait until one load has ended; return why it failed, None if it did not."""

        def collected() -> tuple[Any, Any] | None:
            results = self.worker.get_transfer_results(set())
            report = self.worker.build_connector_worker_meta()
            return (results, report) if results.finished_recving else None

        results, report = until(collected)
        (name,) = results.finished_recving
        return report.failures[name].cause if results.failed_recving else None

    def load(self, name: str, remote: PrefillParams, blocks: list[int]) -> str | None:
        self.order(name, remote, blocks)
        return self.ended()

    def sleep(self) -> None:
        self.worker.unregister_kv_caches()

    def bytes(self, blocks: list[int]) -> bytes:
        return self.cache[blocks].numpy().tobytes()

    def at(self) -> Address:
        return self.address

    def inode(self) -> int:
        """Of the shared memory in which the cache is."""
        descriptor, _ = self.cache.untyped_storage()._share_fd_cpu_()
        return os.fstat(descriptor).st_ino

    def counted(self) -> dict[str, Any]:
        """What D's worker has counted since the last call."""
        stats = self.worker.get_kv_connector_stats()
        return {} if stats is None else stats.data

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class SpawnedEngine:
    """An engine in a separate process; each call of a method is made there."""

    def __init__(self, *arguments: Any, before: str = "", **settings: object) -> None:
        """Start it; `before` is run there first."""
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, before, arguments, settings), daemon=True)
        self.process.start()
        there.close()
        assert self._connection.recv() is None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._connection.send((name, arguments, options))
            return self._connection.recv()

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, before: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
    exec(before, {})
    engine = Engine(*arguments, **settings)
    engine.cache.normal_()
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, args, options = connection.recv()
            connection.send(getattr(engine, name)(*args, **options))
