# SPDX-License-Identifier: Apache-2.0
"""An engine of several workers without a model: pipeline stages, tensor-parallel and context-parallel ranks.

From vLLM come the scheduler, the grouping of all workers' layers, the allocation and the aggregation of outputs. The
connector's two halves run as vLLM makes them, with real agents. Labels stand for bytes, and each is written where
vLLM's slot mapping puts its token. That place comes from vLLM's kernel (see `slots` and the test that runs it), never
from kvhma's geometry.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.utils import get_pp_indices
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

from kvhma.vllm import KvhmaConnector
from support.attention_backends import fake_backend
from support.cache.engine import _grammars, own_config_of
from support.cache.labels import Text
from support.engines.engine import free_port
from support.vllm_grouping import get_kv_cache_configs
from support.waiting import until

WINDOW = 40
HEAD = 8
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_BACKENDS = {"full": "FLASH_ATTN", "sliding": "FLASH_ATTN", "mla": "TRITON_MLA", "state": "", "window": "FLASH_ATTN"}
_BACKENDS |= {"draft": "FLASH_ATTN", "draft window": "FLASH_ATTN", "draft mla": "TRITON_MLA"}
SHARED = ("full", "mla")
"""Kinds of layers whose tokens context-parallel ranks share; in all other layers each rank has every token."""


class OfRunnerV2(VllmConfig):
    """A configuration of an engine with Model Runner V2, which vLLM runs with Triton only."""

    use_v2_model_runner = True


@dataclass(frozen=True)
class Model:
    """Layers by their kind: ``full``, ``sliding``, ``mla`` or ``state``; all attention has this many heads.

    ``draft``, ``draft window`` and ``draft mla`` are those of a draft model that runs without context parallelism.
    """

    layers: tuple[str, ...]
    heads: int = 2

    def spec(self, kind: str, split: Split) -> KVCacheSpec:
        """vLLM's spec of a layer on one rank."""
        if kind.startswith("draft"):  # as vLLM's runner marks them
            of = {"draft": "full", "draft window": "sliding", "draft mla": "mla"}[kind]
            return replace(self.spec(of, split), dcp_sharded=False)
        if kind == "state":
            page = self.spec("full", split).page_size_bytes
            return MambaSpec(block_size=1024, shapes=((16, 4),), dtypes=(torch.float32,), page_size_padded=page)
        if kind == "mla":
            return MLAAttentionSpec(
                block_size=split.block, num_kv_heads=1, head_size=HEAD, dtype=torch.float32, max_tp_shards=1
            )
        held = max(1, self.heads // split.tp)
        more: dict[str, Any] = {"block_size": split.block, "num_kv_heads": held, "head_size": HEAD}
        if kind == "sliding":
            return SlidingWindowSpec(**more, dtype=torch.float32, sliding_window=WINDOW)
        return FullAttentionSpec(**more, dtype=torch.float32)


@dataclass(frozen=True)
class Split:
    """How an engine is divided.

    Attributes:
        pp: pipeline stages.
        tp: tensor-parallel ranks.
        dcp: decode context-parallel ranks.
        pcp: prefill context-parallel ranks.
        interleave: ``cp_kv_cache_interleave_size``.
        layers: of each stage; None for vLLM's choice.
        block: tokens of a block on one rank.
        kernel: tokens of a kernel block.
        order: vLLM's layout.
    """

    pp: int = 1
    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    layers: tuple[int, ...] | None = None
    block: int = 16
    kernel: int = 16
    order: str = "LBHNC"

    def ranks(self) -> Iterator[Rank]:
        """All workers, as vLLM numbers them: stages outermost, then prefill context-parallel, then tensor-parallel."""
        for pp in range(self.pp):
            for pcp in range(self.pcp):
                for tp in range(self.tp):
                    # vLLM's groups of context-parallel ranks run over the prefill ones first.
                    cp = (tp * self.pcp + pcp) % self.dcp
                    yield Rank(pp, pcp, tp, cp)

    def stage(self, count: int, pp_rank: int) -> range:
        """Layers of a stage, as vLLM divides so many."""
        given = {} if self.layers is None else {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.layers))}
        with mock.patch.dict(os.environ, given):
            return range(*get_pp_indices(count, pp_rank, self.pp))


@dataclass(frozen=True)
class Rank:
    pp: int
    pcp: int
    tp: int
    cp: int


def slots(positions: NDArray[Any], table: Sequence[int], block: int, of: tuple[int, int, int]) -> NDArray[Any]:
    """Slots of tokens as vLLM's kernel maps them, -1 for tokens of other ranks.

    Args:
        positions: of the tokens.
        table: the request's blocks.
        block: tokens of a block on one rank.
        of: context-parallel ranks, the rank, and the interleave size.
    """
    size, rank, interleave = of
    virtual = positions // (block * size)
    offset = positions - virtual * block * size
    local = (offset // interleave) % size == rank
    inside = offset // (size * interleave) * interleave + offset % interleave
    return np.where(local, np.asarray(table)[np.minimum(virtual, len(table) - 1)] * block + inside, -1)


def words(layer: str, hashes: NDArray[np.uint64], head: int, count: int) -> NDArray[np.int32]:
    """What is written of a layer's head for each prefix: shape (prefixes, count)."""
    salt = np.uint64(zlib.crc32(f"{layer}/{head}".encode()) | 1)
    first = (hashes * salt) >> np.uint64(33)
    return (first[:, None] + np.arange(count, dtype=np.uint64)[None, :]).astype(np.int32)


class Worker:
    """One worker: its caches, and the connector's half in its process."""

    def __init__(self, engine: Engine, rank: Rank, number: int, layout: Any) -> None:
        self.engine, self.rank, self.layout = engine, rank, layout
        split, model = engine.split, engine.model
        config = copy.copy(engine.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = number
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {
            name: SimpleNamespace(get_attn_backend=lambda of=kind: fake_backend(_BACKENDS[of]))
            for name, kind in engine.kinds.items()
        }
        kernel = [
            split.kernel if not isinstance(group.kv_cache_spec, MambaSpec) else group.kv_cache_spec.block_size
            for group in layout.kv_cache_groups
        ]
        self.caches = allocate_kv_cache(
            layout, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), kernel
        )
        for cache in self.caches.values():
            cache.untyped_storage().copy_(
                torch.full((cache.untyped_storage().nbytes(),), 0x5A).byte().untyped_storage()
            )
        self.connector = KvhmaConnector(config, KVConnectorRole.WORKER, layout)
        self.connector.register_kv_caches(self.caches)
        self.held = max(1, model.heads // split.tp)
        # vLLM makes blocks longer where a layer's pages are smaller than another layer's.
        self.blocks = {
            name: group.kv_cache_spec.block_size for group in layout.kv_cache_groups for name in group.layer_names
        }

    def heads(self) -> Iterator[tuple[int, int]]:
        """Heads of this rank, as vLLM loads them: index here, index of all."""
        model, split = self.engine.model, self.engine.split
        repeats = max(1, split.tp // model.heads)
        for index in range(self.held):
            yield index, self.rank.tp // repeats if repeats > 1 else self.rank.tp * self.held + index

    def rows(self, name: str, table: Sequence[int], start: int, stop: int) -> Iterator[tuple[Any, Any, int]]:
        """Rows of a layer's cache and the positions that are there, for each head: (rows, positions, head)."""
        split, kind = self.engine.split, self.engine.kinds[name]
        positions = np.arange(start, stop)
        of = (split.dcp, self.rank.cp, split.interleave) if kind in SHARED else (1, 0, 1)
        found = slots(positions, table, self.blocks[name], of)
        positions, found = positions[found >= 0], found[found >= 0]
        cache = self.caches[name].view(torch.int32).numpy()
        for index, head in [(0, 0)] if kind.endswith("mla") else self.heads():
            yield (cache, (found // split.kernel, index, found % split.kernel)), positions, head

    def write(self, name: str, table: Sequence[int], text: Text, start: int, stop: int) -> None:
        """Write what a forward pass would write for some tokens."""
        if self.engine.kinds[name] == "state":
            self._state(name, table)[:] = self._state_words(name, text, stop)
            return
        hashes = np.array(text.hashes, np.uint64)
        for (cache, at), positions, head in self.rows(name, table, start, stop):
            cache[at] = words(name, hashes[positions], head, cache.shape[3])

    def wrong(self, name: str, table: Sequence[int], text: Text, stop: int) -> list[int]:
        """Positions before `stop` where the token at `stop` would read something else than was computed."""
        kind = self.engine.kinds[name]
        if kind == "state":
            return [] if np.array_equal(self._state(name, table), self._state_words(name, text, stop)) else [stop]
        start = max(0, stop - WINDOW + 1) if kind in ("sliding", "draft window") else 0
        hashes = np.array(text.hashes, np.uint64)
        found: set[int] = set()
        for (cache, at), positions, head in self.rows(name, table, start, stop):
            equal = (cache[at] == words(name, hashes[positions], head, cache.shape[3])).all(axis=-1)
            found.update(positions[~equal].tolist())
            self.engine.checked += len(positions)
        return sorted(found)

    def _state(self, name: str, table: Sequence[int]) -> NDArray[np.int32]:
        return self.caches[name][table[0]].view(torch.int32).numpy().reshape(-1)[:64]

    def _state_words(self, name: str, text: Text, tokens: int) -> NDArray[np.int32]:
        return words(name, np.array(text.hashes[tokens - 1 : tokens], np.uint64), self.rank.tp, 64)[0]

    def sources(self) -> set[int]:
        """The workers of P, by their number, that this one has connected to."""
        (engine,) = self.connector._worker._engines._engines.values()
        return {number for number, peer in enumerate(engine.peers) if peer is not None}

    def step(self, metadata: Any, forward: Forward) -> KVConnectorOutput:
        """What vLLM's runner does with the connector in a step."""
        connector = self.connector
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        forward.run(self)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output


class Forward(NamedTuple):
    """The input of a forward pass.

    Attributes:
        engine: its name.
        work: requests, and their tokens from and to.
        tables: blocks of each request, by group.
        texts: the tokens of the requests so far.
    """

    engine: str
    work: list[tuple[str, int, int]]
    tables: dict[str, list[list[int]]]
    texts: dict[str, Text]

    def run(self, worker: Worker) -> None:
        """Check what a worker's caches have of the earlier tokens, and write what it computes."""
        for index, group in enumerate(worker.layout.kv_cache_groups):
            for layer in group.layer_names:
                for name, start, stop in self.work:
                    table, text = self.tables[name][index], self.texts[name]
                    if start and (wrong := worker.wrong(layer, table, text, start)):
                        raise AssertionError(
                            f"{self.engine} {worker.rank}: {name} reads other bytes of {layer} than were computed: "
                            f"tokens {wrong} of {start}, blocks {table}"
                        )
                    worker.write(layer, table, text, start, stop)


class ProcessWorker:
    """A worker in a separate process, as the scheduler of its engine sees it."""

    def __init__(self, engine: Engine, rank: Rank, number: int, layout: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        # Import them once, and not in each process. Modules that only the tests' path has are not imported here.
        context.set_forkserver_preload(["kvhma.vllm", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.utils"])
        self.rank, self.connector = rank, self
        self._pipe, other = context.Pipe()
        told = SimpleNamespace(
            split=engine.split, model=engine.model, config=engine.config, kinds=engine.kinds, checked=0
        )
        self._process = context.Process(target=_serve, args=(other, told, rank, number, layout), daemon=True)
        self._process.start()
        other.close()
        self.pid = self._process.pid

    def get_handshake_metadata(self) -> Any:
        """Wait until the worker has its caches; return its identity."""
        return self._answer()

    def step(self, metadata: Any, forward: Forward) -> KVConnectorOutput:
        """Let the worker do a step."""
        self._pipe.send((metadata, forward))
        found: KVConnectorOutput = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._pipe.poll(60), f"worker {self.rank} does not answer"
        found = self._pipe.recv()
        if isinstance(found, str):
            raise AssertionError(found)
        return found

    def shutdown(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(30)
        self._process.kill()


def _serve(pipe: Connection, engine: Any, rank: Rank, number: int, layout: Any) -> None:
    worker = Worker(engine, rank, number, layout)
    pipe.send(worker.connector.get_handshake_metadata())
    while (order := pipe.recv()) is not None:
        try:
            pipe.send(worker.step(*order))
        except BaseException:  # the test gets every exception
            pipe.send(traceback.format_exc())
    worker.connector.shutdown()


@dataclass(eq=False)
class Engine:
    """Drives one scheduler and all of its workers, one step at a time.

    Attributes:
        name: ``p`` or ``d``, and more.
        model: what it runs.
        split: how it is divided.
        blocks: of the pool.
        extra: settings of the connector.
        recompute: whether a prompt is computed if its load fails.
        worker: what its workers are: :class:`Worker`, in this process, or :class:`ProcessWorker`.
    """

    name: str
    model: Model
    split: Split
    blocks: int = 600
    extra: dict[str, Any] = field(default_factory=dict)
    recompute: bool = True
    worker: Any = Worker

    def __post_init__(self) -> None:
        self.checked = 0
        self.finished: dict[str, Any] = {}
        self.texts: dict[str, Text] = {}
        self.computed: dict[str, int] = {}
        """Tokens of each request that a step of this engine has computed."""
        self.loads: list[Any] = []
        """All loads that the scheduler has requested."""
        self.stats: Any = None
        """All that the workers have counted."""
        self._tables: dict[str, list[list[int]]] = {}
        self._requests: dict[str, Request] = {}
        self.config = self._config()
        self.kinds = {f"model.layers.{at}.attn": kind for at, kind in enumerate(self.model.layers)}
        names, split = list(self.kinds), self.split
        specs = [
            {names[at]: self.model.spec(self.kinds[names[at]], split) for at in split.stage(len(names), rank.pp)}
            for rank in split.ranks()
        ]
        self.layouts = get_kv_cache_configs(self.config, specs, [1 << 30] * len(specs))
        layout = generate_scheduler_kv_cache_config(self.layouts)
        block_size, hash_size = resolve_kv_cache_block_sizes(layout, self.config)
        self.config.cache_config.num_gpu_blocks = layout.num_blocks
        self.scheduler = Scheduler(self.config, layout, _grammars(), block_size=block_size, hash_block_size=hash_size)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        ranks = enumerate(split.ranks())
        self.workers = [self.worker(self, rank, number, self.layouts[number]) for number, rank in ranks]
        self.connector: Any = self.scheduler.connector
        self.publish(self.workers)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(self.workers))

    def publish(self, workers: Sequence[Worker]) -> None:
        """Do what vLLM does once the caches exist."""
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {self._key(worker.rank): worker.connector.get_handshake_metadata() for worker in workers}
        )

    def _key(self, rank: Rank) -> tuple[int, int]:
        """The key under which vLLM's worker returns its identity (`get_kv_connector_handshake_metadata`)."""
        beyond = rank.pcp * self.split.tp if self.split.pcp > 1 and self.split.dcp > 1 else 0
        return rank.pp, rank.tp + beyond

    def _config(self) -> Any:
        place = {"side_channel_host": "127.0.0.1", "side_channel_port": free_port()}
        config = own_config_of(self.name, **{"model_id": "m", "handshake_timeout": 5, **place, **self.extra})
        config.__class__ = OfRunnerV2
        config.kv_transfer_config.kv_load_failure_policy = "recompute" if self.recompute else "fail"
        config.parallel_config = parallel = copy.copy(config.parallel_config)
        parallel.pipeline_parallel_size = self.split.pp
        parallel.tensor_parallel_size = self.split.tp
        parallel.decode_context_parallel_size = self.split.dcp
        parallel.prefill_context_parallel_size = self.split.pcp
        parallel.cp_kv_cache_interleave_size = self.split.interleave
        config.cache_config = cache = copy.copy(config.cache_config)
        cache.block_size = self.split.block
        cache.num_gpu_blocks_override = self.blocks
        cache.kv_cache_layout = self.split.order
        cache.enable_prefix_caching = "state" not in self.model.layers
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_batched_tokens = 512
        return config

    @property
    def leases(self) -> Any:
        return self.connector._scheduler.context.leases

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, tokens: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None) -> None:
        """Give the engine a request."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        self.texts[name] = Text(tokens[: request.num_prompt_tokens])
        self.computed[name] = 0
        self._requests[name] = request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """Schedule one step, let every worker do it, and process the results; return the tokens computed."""
        output = self.scheduler.schedule()
        self.loads += output.kv_connector_metadata.loads
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
        start = self._update(output)
        work = [(name, start[name], start[name] + count) for name, count in output.num_scheduled_tokens.items()]
        names = [name for name, _, _ in work]
        forward = Forward(
            self.name, work, {name: self._tables[name] for name in names}, {name: self.texts[name] for name in names}
        )
        outputs = [worker.step(output.kv_connector_metadata, forward) for worker in self.workers]
        sampled = []
        for name, first, last in work:
            self.computed[name] += last - first
            text = self.texts[name]
            token = [] if last < len(text) else [text.hashes[-1] % 97]
            text.extend(token)
            sampled.append(token)
        results = [
            ModelRunnerOutput(
                req_ids=[name for name, _, _ in work],
                req_id_to_index={name: index for index, (name, _, _) in enumerate(work)},
                sampled_token_ids=sampled,
                kv_connector_output=one,
            )
            for one in outputs
        ]
        # The last stage samples.
        whole = self._aggregator.aggregate(results, len(results) - self.split.tp * self.split.pcp)
        found = whole.kv_connector_output.kv_connector_stats
        if found is not None:
            self.stats = found if self.stats is None else self.stats.aggregate(found)
        for answer in self.scheduler.update_from_output(output, whole).values():
            for one in answer.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one
        return int(output.total_num_scheduled_tokens)

    def _update(self, output: Any) -> dict[str, int]:
        """Maintain block tables as vLLM's model runner does; return how many tokens each request had."""
        computed: dict[str, int] = {}
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table.extend(more)
        return computed

    def run(self, *names: str) -> None:
        """Step until requests have ended."""
        self.until(lambda: all(name in self.finished for name in names))

    def until(self, done: Callable[[], object]) -> None:
        """Step until a condition holds."""
        until(done, lambda: self.step() or time.sleep(0.002))

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.connector.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def prefill(p: Engine, name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Let P compute a prompt; return the parameters for D."""
    p.add(name, tokens, 1, REMOTE_DECODE)
    p.run(name)
    params = p.finished[name].kv_transfer_params
    assert params is not None
    return dict(params)


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., Engine]]:
    """Make engines, with the arguments of `Engine`, that are closed with the block."""
    with contextlib.ExitStack() as stack:

        def make(*given: Any, **more: Any) -> Engine:
            engine = Engine(*given, **more)
            stack.callback(engine.close)
            return engine

        yield make
