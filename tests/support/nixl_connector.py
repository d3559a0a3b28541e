# SPDX-License-Identifier: Apache-2.0
"""vLLM's own NIXL connector, without NIXL and without engines: what it registers, and what it reads for a request.

Workers, their registration, the handshake between them, the scheduler's choice of blocks and the read are vLLM's. A
recording agent stands in for NIXL's, and block tables are those of :mod:`kvhma.cli.block_tables`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from audit.engine import Rank, Shape
from audit.nixl import RecordingAgent, _written_out, recorded
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

from support.nixl_requests import RECORDED, NixlRequest, requests

BlockTables = Sequence[Sequence[int]]


class RefusedByVllm(Exception):
    """vLLM's connector refuses the engines, the pair or the request."""


@dataclass(frozen=True)
class Moved:
    """What one rank of D requested from NIXL: descriptors before NIXL merges them, and bytes."""

    descriptors: int
    bytes: int


@contextmanager
def channels_first() -> Iterator[None]:
    """Set the layout of a convolution's state to the order that vLLM's connector supports. vLLM asks once a process."""
    with mock.patch.dict(os.environ, {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}):
        get_conv_state_layout.cache_clear()
        try:
            yield
        finally:
            get_conv_state_layout.cache_clear()


@channels_first()
def moved(asked: NixlRequest) -> list[Moved]:
    """Return what vLLM's connector reads for a request, by rank of D.

    Raises:
        RefusedByVllm: it raises an error, or an assertion of it fails.
    """
    tables = asked.tables()
    prefill, decode = (
        Shape(json.dumps(asked.form), tp, block, blocks, asked.order, caching=False)
        for tp, block, blocks in zip(asked.tp, asked.asked_blocks, asked.num_blocks, strict=True)
    )
    with recorded(), _refusals():
        sources = [Rank(prefill, rank, "kv_producer") for rank in range(prefill.tp_size)]
        return [_read(Rank(decode, rank, "kv_consumer"), sources, tables) for rank in range(decode.tp_size)]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        raise RefusedByVllm(f"{type(error).__name__}: {error}") from error


def _read(rank: Rank, sources: list[Rank], tables: tuple[BlockTables, BlockTables]) -> Moved:
    """Let a rank of D do the handshake with its sources, and read; `tables` are those of P and D."""
    worker, engine = rank.worker, sources[0].worker.engine_id
    for source in worker.transfer_topo.handshake_target_ranks(len(sources)):
        payload = sources[source].worker.xfer_handshake_metadata.agent_metadata_bytes
        told = msgspec.msgpack.decode(payload, type=NixlAgentMetadata)
        worker._remote_agents[engine][(0, source)] = worker.add_remote_agent(told, source, len(sources))
    exported, wanted = (_scheduler(side.caches) for side in (sources[0], rank))
    params = {
        "remote_block_ids": exported.get_exchange_clipped_blocks([list(table) for table in tables[0]]),
        "remote_engine_id": engine,
        "remote_request_id": "p",
        "remote_host": "",
        "remote_port": 0,
        "tp_size": len(sources),
    }
    live = [[block for block in table if block] for table in tables[1]]
    order = NixlConnectorMetadata()
    order.add_new_req_to_recv("d", wanted.get_exchange_clipped_blocks(live), params, (0,) * len(live), True)
    errors: list[Any] = []
    with mock.patch.object(worker, "_log_failure", lambda **more: errors.append(more.get("error"))):
        worker.start_load_kv(order)
    if errors:
        raise RuntimeError(str(errors[0]))
    rows = [posted.local for posted in rank.agent.posted]
    return Moved(sum(map(len, rows)), sum(int(row[:, 1].sum()) for row in rows))


def _scheduler(caches: Any) -> Any:
    """Return the connector's half in the scheduler, given a configuration with what its constructor reads."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1, data_parallel_index=0),
        cache_config=SimpleNamespace(block_size=caches.kv_cache_groups[0].kv_cache_spec.block_size),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda key, default: default, kv_buffer_device="cpu"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    return NixlPullConnectorScheduler(config, "scheduler", caches)


@channels_first()
def prepared(config: Any, caches: Any, views: Any) -> NDArray[np.uint64]:
    """Return the prepared list that vLLM's connector makes of the caches of any model.

    Args:
        config: vLLM's configuration, with a ``kv_transfer_config``.
        caches: vLLM's cache configuration.
        views: the tensors, whose kernel blocks are whole blocks.

    Returns:
        Rows of address, length and device, uint64 ``(n, 3)``.

    Raises:
        RefusedByVllm: it raises an error, or an assertion of it fails.
    """
    specs = [
        spec
        for group in caches.kv_cache_groups
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        if not isinstance(spec, UniformTypeKVCacheSpecs)
    ]
    heads = max((getattr(spec, "num_kv_heads", 1) for spec in specs), default=1)
    config.model_config = SimpleNamespace(
        use_mla=any(isinstance(spec, MLAAttentionSpec) for spec in specs), get_total_num_kv_heads=lambda: heads
    )
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    def whole(worker: Any) -> None:
        worker._logical_num_blocks = worker.num_blocks

    replaced = {
        "NixlWrapper": RecordingAgent,
        "nixl_agent_config": None,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_current_attn_backends": lambda config: [backend],
        "compute_nixl_compatibility_hash": lambda *_, **__: "same",
        "TransferTopology": lambda **_: SimpleNamespace(),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(base_worker, name, value))
        stack.enter_context(mock.patch.object(base_worker.os, "sched_setaffinity"))
        stack.enter_context(mock.patch.object(NixlPullConnectorWorker, "_sync_block_size_with_kernel", whole))
        stack.enter_context(_refusals())
        worker = NixlPullConnectorWorker(config, "engine", caches)
        worker.register_kv_caches(views)
        return _written_out(np.asarray(worker.src_blocks_data, np.uint64))


def answer(asked: NixlRequest) -> dict[str, Any]:
    """Return what the file has of a request: descriptors and bytes by rank of D, or the error."""
    try:
        return {"ranks": [[found.descriptors, found.bytes] for found in moved(asked)]}
    except RefusedByVllm as error:
        return {"refused": str(error).split(". ")[0]}


if __name__ == "__main__":
    lines = (f"{json.dumps(asked.name)}: {json.dumps(answer(asked))}" for asked in requests())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
