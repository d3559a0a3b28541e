# SPDX-License-Identifier: Apache-2.0
"""An engine without a forward pass: vLLM's scheduler, block pool, caches and connector, without any computation.

Model classes are vLLM's own, without weights. One process has all ranks: vLLM asks its tensor-parallel group for the
rank, and the group returns each rank in turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, push_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

from audit import mooncake
from audit.mooncake import RecordingEngine
from audit.nixl import RecordingAgent
from kvhma.geometry import Geometry
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.config.engine_config import rank_info_of, writer_of
from support.vllm_grouping import get_kv_cache_config_from_groups
from support.vllm_models import allocate

CONNECTORS: dict[str, tuple[str, Any]] = {
    "pull": ("NixlConnector", NixlPullConnectorWorker),
    "push": ("NixlPushConnector", NixlPushConnectorWorker),
    "mooncake": ("MooncakeConnector", MooncakeConnectorWorker),
}
"""vLLM's connectors by a short name: the name in a configuration, and the class of their half in a worker."""

PORTS = {"kv_producer": 5601, "kv_consumer": 5602}
_SECONDS = 60
"""Timeout of a load that neither ends nor fails."""
_SAMPLED = 7
"""The token that every step samples."""


@dataclass(frozen=True)
class Shape:
    """How an engine is configured.

    Attributes:
        model: its ``config.json``, as JSON.
        tp_size: ranks.
        block_size: tokens of a block, 0 for the platform's choice.
        num_blocks: blocks of the pool.
        order: of the cache.
        caching: whether prefixes are cached.
        batch: tokens of a step.
        connector: one of :data:`CONNECTORS`.
    """

    model: str
    tp_size: int = 1
    block_size: int = 0
    num_blocks: int = 32
    order: str = "LBHNC"
    caching: bool = True
    batch: int = 2048
    connector: str = "pull"


@cache
def _made(shape: Shape, rank: int, role: str) -> tuple[Any, Any]:
    """Return vLLM's configuration of a rank, and its cache configuration."""
    name = CONNECTORS[shape.connector][0]
    transfer = KVTransferConfig(kv_connector=name, kv_role=role, engine_id=role, kv_buffer_device="cpu")
    arguments: dict[str, Any] = {"block_size": shape.block_size} if shape.block_size else {}
    found = allocate(
        msgspec.json.decode(shape.model),
        shape.tp_size,
        shape.order,
        rank,
        gpu=True,
        enable_prefix_caching=shape.caching,
        kv_transfer_config=transfer,
        max_num_batched_tokens=shape.batch,
        max_num_seqs=4,
        **arguments,
    )
    config = found.config
    config.parallel_config.rank = rank
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = shape.num_blocks
    return config, get_kv_cache_config_from_groups(config, found.groups, 1 << 40)


@contextmanager
def _as_rank(config: Any, rank: int) -> Iterator[None]:
    group = parallel_state._TP
    with (
        mock.patch.object(group, "world_size", config.parallel_config.tensor_parallel_size),
        mock.patch.object(group, "rank_in_group", rank),
        set_current_vllm_config(config),
    ):
        yield


class Rank:
    """A worker: real caches, vLLM's own half of the connector, and a recording agent.

    Args:
        shape: of the engine.
        rank: which of its ranks.
        role: ``kv_role``.
    """

    def __init__(self, shape: Shape, rank: int, role: str) -> None:
        """Allocate the caches as vLLM's worker does, and register them."""
        self.config, caches = _made(shape, rank, role)
        self.caches = deepcopy(caches)
        layers = self.config.compilation_config.static_forward_context
        groups = [
            [_AttentionGroup(layers[name].get_attn_backend(), _spec(group, name)) for name in group.layer_names]
            for group in self.caches.kv_cache_groups
        ]
        order = self.config.cache_config.get_resolved_kv_cache_layout()
        kernels = prepare_kernel_block_sizes(self.caches, groups)
        self.views = allocate_kv_cache(self.caches, torch.device("cpu"), order, kernels)
        self.geometry: Geometry = geometry_of(self.caches, self.views, rank_info_of(self.config), writer=self._writer)
        with _as_rank(self.config, rank), mock.patch.object(base_worker.os, "sched_setaffinity"):
            kind = CONNECTORS[shape.connector][1]
            self.worker: Any = kind(self.config, self.config.kv_transfer_config.engine_id, self.caches)
            self.worker.register_kv_caches(self.views)
        agent = self.worker.engine if shape.connector == "mooncake" else self.worker.nixl_wrapper
        assert isinstance(agent, RecordingAgent | RecordingEngine)
        self.agent = agent

    def _writer(self, name: str) -> Writer:
        return replace(writer_of(self.config)(name), platform="cuda", capability="9.0", cpu_kernel=None)

    def memory(self) -> list[torch.Tensor]:
        """Return the bytes of each region of the geometry."""
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in self.views.values()}
        found = []
        for region in self.geometry.regions:
            base, storage = next((b, s) for b, s in storages.items() if b <= region.base < b + s.nbytes())
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            found.append(whole[region.base - base : region.base - base + region.bytes])
        return found


@dataclass(frozen=True)
class _AttentionGroup:
    """The fields that vLLM reads when it chooses kernel blocks."""

    backend: Any
    kv_cache_spec: Any


def _spec(group: Any, name: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


class Engine:
    """vLLM's scheduler with its half of the connector, and all ranks.

    Args:
        shape: the engine's configuration.
        role: ``kv_role``.
    """

    def __init__(self, shape: Shape, role: str) -> None:
        """Make the scheduler and every rank."""
        self.shape = shape
        self.ranks = [Rank(shape, rank, role) for rank in range(shape.tp_size)]
        config = self.ranks[0].config
        config.cache_config.num_gpu_blocks = shape.num_blocks
        self.caches = generate_scheduler_kv_cache_config([deepcopy(self.ranks[0].caches)])
        block_size, hash_size = resolve_kv_cache_block_sizes(self.caches, config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.scheduler = Scheduler(
            config, self.caches, StructuredOutputManager(config), block_size=block_size, hash_block_size=hash_size
        )
        self.connector: Any = self.scheduler.connector
        # It distinguishes the engines of one process.
        self.port = self.connector.connector_scheduler.side_channel_port = PORTS[role]
        self.done: list[Any] = []

    def add(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Request:
        """Give it a request."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra)
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def settle(self, output: Any, received: set[str] = frozenset(), failed: set[str] = frozenset()) -> list[Any]:  # type: ignore[assignment]
        """Report a step as computed; return its answers."""
        names = list(output.num_scheduled_tokens)
        known = self.scheduler.requests
        sampled = [[_SAMPLED] if known[name].num_computed_tokens >= known[name].num_tokens else [] for name in names]
        told = KVConnectorOutput(finished_recving=set(received) or None, failed_recving=set(failed) or None)
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )
        return [one for found in self.scheduler.update_from_output(output, done).values() for one in found.outputs]

    def run(self, name: str) -> Any:
        """Compute until a request has ended; return its last answer."""
        for _ in range(1000):
            output = self.scheduler.schedule()
            self.done.append(output.kv_connector_metadata)
            for answer in self.settle(output):
                if answer.request_id == name and answer.finish_reason is not None:
                    return answer
        raise AssertionError(f"{name} does not end")

    def tables(self, name: str) -> list[list[int]]:
        """Return the block table of a request, by group."""
        return [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]

    def close(self) -> None:
        """Let its workers' threads end."""
        for rank in self.ranks:
            if self.shape.connector == "mooncake":
                mooncake.close(rank.worker)
                continue
            rank.worker._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)
            if self.shape.connector == "push":
                rank.worker._push_writer_stop.set()
                rank.worker._push_writer_wake.set()

    def hellos(self) -> dict[tuple[int, int], bytes]:
        """Return the answer of the connector's scheduler to a handshake, by pipeline stage and rank."""
        encoder = msgspec.msgpack.Encoder()
        return {(0, at): encoder.encode(rank.worker.xfer_handshake_metadata) for at, rank in enumerate(self.ranks)}


class _Socket:
    """Answers handshakes in this process, as the listener of P's scheduler does."""

    def __init__(self, hellos: dict[tuple[int, int], bytes]) -> None:
        self._hellos, self._asked = hellos, (0, 0)

    def setsockopt(self, *_: Any) -> None:
        pass

    def send(self, message: bytes) -> None:
        _, stage, rank = msgspec.msgpack.decode(message)
        self._asked = (stage, rank)

    def recv_multipart(self) -> tuple[bytes, bytes]:
        return self._hellos[self._asked], msgspec.msgpack.encode(time.perf_counter())


@contextmanager
def answering(*engines: Engine) -> Iterator[None]:
    """Let workers do the handshake with the ranks of some engines."""
    by_port = {str(engine.port): engine for engine in engines}

    @contextmanager
    def asked(_: Any, path: str) -> Iterator[_Socket]:
        yield _Socket(by_port[path.rsplit(":", 1)[1]].hellos())

    with mock.patch.object(base_worker, "zmq_ctx", asked):
        yield


@contextmanager
def _errors_of(ranks: Sequence[Rank]) -> Iterator[list[BaseException]]:
    """Collect why loads fail: workers log it."""
    errors: list[BaseException] = []
    with ExitStack() as stack:
        for worker in (rank.worker for rank in ranks):
            name = "_handle_failed_recv" if isinstance(worker, MooncakeConnectorWorker) else "_log_failure"
            watch = partial(_watched, errors, getattr(worker, name))
            stack.enter_context(mock.patch.object(worker, name, watch))
        yield errors


def _watched(errors: list[BaseException], logged: Callable[..., None], *arguments: Any, **more: Any) -> None:
    error = more.get("error")
    if error is None:
        # Mooncake's result has the requests, those that failed, and why.
        error = RuntimeError(arguments[2] if len(arguments) == 3 else f"{arguments} {more}")
    errors.append(error)
    logged(*arguments, **more)


def load(decode: Engine, prefill: Engine, metadata: Any) -> dict[int, BaseException]:
    """Let all ranks of D load what a step requests; with connectors by which P writes, P's ranks step too.

    Returns:
        By rank of D, why a load failed. A failure on P fails on all ranks.
    """
    if decode.shape.connector != "pull":
        return _pushed(decode, prefill, metadata)
    failed: dict[int, BaseException] = {}
    for index, rank in enumerate(decode.ranks):
        with _errors_of([rank]) as errors:
            _do(errors, rank.worker.start_load_kv, deepcopy(metadata))
            _poll([rank], type(metadata), errors)
        if errors:
            failed[index] = errors[0]
            rank.worker._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)
    return failed


def _pushed(decode: Engine, prefill: Engine, metadata: Any) -> dict[int, BaseException]:
    ranks = [*decode.ranks, *prefill.ranks]
    with _errors_of(ranks) as errors, mock.patch.object(push_worker.logger, "exception", _raised(errors)):
        for engine, orders in ((decode, [metadata]), (prefill, prefill.done)):
            for rank in engine.ranks:
                for order in orders:
                    _do(errors, rank.worker.start_load_kv, deepcopy(order))
        _poll(decode.ranks, type(metadata), errors, prefill.ranks)
    return dict.fromkeys(range(len(decode.ranks)), errors[0]) if errors else {}


def _raised(errors: list[BaseException]) -> Callable[..., None]:
    """Return a context that collects an exception where a thread continues after it."""

    def watch(*_: Any) -> None:
        error = sys.exc_info()[1]
        errors.append(error if error is not None else RuntimeError("unknown"))

    return watch


def _do(errors: list[BaseException], what: Callable[..., Any], *arguments: Any) -> Any:
    """Return a worker's answer. An exception is the cause of the load's failure."""
    try:
        return what(*arguments)
    except Exception as error:
        errors.append(error)
        return None


def _poll(
    waiting: Sequence[Rank], nothing: Callable[[], Any], errors: list[BaseException], others: Sequence[Rank] = ()
) -> None:
    """Continue with empty steps until some ranks have received, or one has failed."""
    left = list(waiting)
    ends = time.monotonic() + _SECONDS
    while left and not errors:
        for rank in [*left, *others]:
            _do(errors, rank.worker.start_load_kv, nothing())
            found = _do(errors, rank.worker.get_transfer_results)
            if found is not None and found.finished_recving and rank in left:
                left.remove(rank)
        if time.monotonic() > ends:
            errors.append(TimeoutError("the load does not end"))
        time.sleep(0.002)
