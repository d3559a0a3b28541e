# SPDX-License-Identifier: Apache-2.0
"""One engine without a model: vLLM's scheduler and block pool, our connector, and a worker that writes labels."""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import json
import random
import tempfile
import warnings
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import kvhma
from kvhma.errors import KvhmaError
from kvhma.vllm.failures import Failure
from kvhma.vllm.loads import load_claims
from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport
from kvhma.vllm.reads import read_steps
from kvhma.vllm.telemetry.stats import TransferStats
from kvhma.vllm.wire.messages import LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim
from support.cache.labels import STATE_ITEMS, GroupShape, Labels, Text

MAX_TOKENS = 2048
FINE_CHECKPOINTS = "cache_hit_alignment_tokens" in inspect.signature(compute_mamba_prefill_checkpoints).parameters
"""Whether this is vLLM 0.32 or later."""


class Violation(AssertionError):
    """A block or state does not hold what its readers expect."""


@dataclass(frozen=True)
class EngineShape:
    """How an engine is configured.

    Attributes:
        name: ``p`` or ``d``.
        groups: its KV cache groups, in the order of its block tables.
        num_blocks: blocks of the pool, the null block included.
        batch: tokens that a step computes at most.
        caching: whether the engine caches prefixes.
        recompute: whether the engine recomputes a failed load instead of failing the request.
        overlapped: whether the engine schedules a step before the previous step has ended (vLLM's async scheduling).
        hash_unit: tokens of a block hash, None for vLLM's choice.
        checkpoint: alignment of the states that a prefill saves inside of a chunk, None if it saves none.
        reserve_full: whether a request waits until its whole prompt fits.
        retention: scheduler blocks between the states and windows that the prefix cache keeps; 0 for the last ones
            only, None for all of them.
        ranks: workers, each with the layers of some of the groups.
        role: ``kv_role`` of the connector.
        long_prefill: most tokens of a request in one step while other requests run, 0 for no limit.
        policy: in which order requests are scheduled.
        turns: whether the engine stores answers for the next turns of their conversations, and reads them.
        threshold: tokens of an answer that the engine computes rather than reads.
    """

    name: str
    groups: tuple[GroupShape, ...]
    num_blocks: int
    batch: int
    caching: bool = True
    recompute: bool = True
    overlapped: bool = False
    hash_unit: int | None = None
    checkpoint: int | None = None
    reserve_full: bool = True
    retention: int | None = None
    ranks: int = 1
    role: str = "kv_both"
    long_prefill: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    turns: bool = False
    threshold: int = 0


# --- vLLM's objects ------------------------------------------------------------------------------------------


@functools.cache
def vllm_config_of(name: str, recompute: bool, role: str) -> VllmConfig:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "max_position_embeddings": MAX_TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "config.json").write_text(json.dumps(model))
        return VllmConfig(
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_TOKENS
            ),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=MAX_TOKENS,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            parallel_config=ParallelConfig(),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvhmaConnector",
                kv_connector_module_path="kvhma.vllm",
                kv_role=role,
                kv_load_failure_policy="recompute" if recompute else "fail",
                engine_id=name,
                # The sequence ends each lease explicitly. Each engine has its own address, as on one host.
                kv_connector_extra_config={
                    "kv_lease_duration": 86400.0,
                    "side_channel_port": 10_000 + zlib.crc32(name.encode()) % 50_000,
                },
            ),
        )


def own_config_of(name: str, recompute: bool = True, role: str = "kv_both", **extra: Any) -> VllmConfig:
    """A separate configuration, with more settings of the connector."""
    config = copy.copy(vllm_config_of(name, recompute, role))
    config.model_config = copy.copy(config.model_config)
    config.kv_transfer_config = transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | extra
    return config


def _spec(group: GroupShape, shape: EngineShape) -> KVCacheSpec:
    if group.kind == "state":
        return MambaSpec(
            block_size=group.block_size,
            shapes=((STATE_ITEMS,),),
            dtypes=(torch.float64,),
            mamba_cache_mode="align" if shape.caching else "none",
            num_prefill_checkpoint_blocks=int(shape.checkpoint is not None),
            prefill_checkpoint_alignment=shape.checkpoint,
        )
    more: dict[str, Any] = {}
    kinds: dict[str, type[Any]] = {
        "full": FullAttentionSpec,
        "mla": MLAAttentionSpec,
        "sliding": SlidingWindowSpec,
        "sliding_mla": SlidingWindowMLASpec,
        "chunked": ChunkedLocalAttentionSpec,
    }
    if group.kind in ("sliding", "sliding_mla"):
        more["sliding_window"] = group.reach
    if group.kind == "chunked":
        more["attention_chunk_size"] = group.reach
    spec: KVCacheSpec = kinds[group.kind](
        block_size=group.block_size, num_kv_heads=1, head_size=1, dtype=torch.float64, **more
    )
    return spec


class DirectRenewer:
    """Replaces the thread that renews leases: D's messages reach P's lease table at once."""

    def __init__(self, *_: Any) -> None:
        self.leases: Any = None

    def track_claim(self, address: Any, claim: LeaseClaim, every: float) -> None:
        if self.leases is not None:
            self.leases.renew([claim])

    def is_held(self, address: Any, claim: LeaseClaim) -> bool:
        return self.leases is not None and self.leases.renew([claim]) == [LeaseState.HELD]

    def release_claim(self, address: Any, claim: LeaseClaim, outcome: Outcome) -> None:
        if self.leases is not None:
            self.leases.release([claim], outcome)

    def close(self) -> None:
        pass


def _scheduler(shape: EngineShape) -> Scheduler:
    extra: dict[str, Any] = {}
    if shape.turns:
        # The sequence also ends each kept answer explicitly.
        extra = {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": 86400,
            "kv_recompute_threshold": shape.threshold,
        }
    config = own_config_of(shape.name, shape.recompute, shape.role, **extra)
    config.cache_config = cache = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    state = [group.block_size for group in shape.groups if group.kind == "state"]
    cache.block_size = state[0] if state and shape.caching else min(group.block_size for group in shape.groups)
    cache.num_gpu_blocks = shape.num_blocks
    cache.enable_prefix_caching = shape.caching
    cache.mamba_cache_mode = "align" if state and shape.caching else "none"
    cache.prefix_match_unit = shape.hash_unit
    config.scheduler_config.policy = shape.policy
    config.scheduler_config.max_num_batched_tokens = shape.batch
    config.scheduler_config.long_prefill_token_threshold = shape.long_prefill
    config.scheduler_config.scheduler_reserve_full_isl = shape.reserve_full
    # vLLM's CPU platform turns it off; the scheduler itself runs anywhere.
    config.scheduler_config.async_scheduling = shape.overlapped
    groups = [KVCacheGroupSpec([group.layer], _spec(group, shape)) for group in shape.groups]
    caches = KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    block_size, hash_size = resolve_kv_cache_block_sizes(caches, config)
    if shape.retention is not None and any(group.kind in ("sliding", "sliding_mla", "state") for group in shape.groups):
        caches.prefix_cache_retention_interval = shape.retention * block_size
    made = AsyncScheduler if shape.overlapped else Scheduler
    with mock.patch.object(load_claims, "LeaseRenewer", DirectRenewer):
        return made(config, caches, _grammars(), block_size=block_size, hash_block_size=hash_size)


@functools.cache
def _grammars() -> StructuredOutputManager:
    init_none_hash(sha256)
    return StructuredOutputManager(vllm_config_of("p", True, "kv_both"))


# --- memory --------------------------------------------------------------------------------------------------

_KINDS: dict[str, Any] = {"sliding_mla": "sliding", "state": "ssm"}


@dataclass(frozen=True, eq=False)
class Memory:
    """Pages of all layers in the same bytes, as vLLM lays groups over each other.

    Attributes:
        labels: shape (blocks, labels of the largest page).
        geometry: the same as the planner sees it.
        ranks: what each worker has of it.
    """

    labels: Labels
    geometry: kvhma.Geometry
    ranks: tuple[kvhma.Geometry, ...]


@functools.lru_cache(256)
def memory_of(name: str, groups: tuple[GroupShape, ...], num_blocks: int, ranks: int) -> Memory:
    """Memory of an engine; `name` keeps the two sides apart."""
    items = max(group.items for group in groups)
    labels = np.zeros((num_blocks, items), np.uint64)
    layers = []
    for index, group in enumerate(groups):
        axis = kvhma.Axis("items" if group.kind == "state" else "tokens", group.items, 8)
        part = kvhma.Part("state" if group.kind == "state" else "kv", "uint64", 8, 0, (axis,))
        layers.append(kvhma.Layer(group.layer, index, 0, 0, num_blocks, items * 8, kvhma.Page((part,))))
    described = tuple(
        kvhma.Group(
            _KINDS.get(group.kind, group.kind),
            group.block_size,
            window=group.reach if group.kind in ("sliding", "sliding_mla") else None,
            chunk=group.reach if group.kind == "chunked" else None,
        )
        for group in groups
    )
    region = kvhma.Region(labels.ctypes.data, labels.nbytes)
    parts = [kvhma.Geometry((region,), described, tuple(layers[rank::ranks])) for rank in range(ranks)]
    return Memory(labels, kvhma.Geometry((region,), described, tuple(layers)), tuple(parts))


@functools.lru_cache(4096)
def _plan(local: Memory, remote: Memory, rank: int) -> Any:
    return kvhma.plan(local.ranks[rank], remote.geometry)


# --- the engine ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """One rank's share of a load: its plan, the rows that are still to be copied, and its steps."""

    planned: Any
    rows: list[tuple[int, int, int]]
    steps: int


@dataclass(eq=False)
class Loading:
    """A load under way in the simulated workers.

    Attributes:
        load: the load that the scheduler requested.
        parts: one for each rank, None for those that have ended.
        outcome: ``ok``; ``nothing``, ``part`` or ``garbage`` is written before it fails.
        transient: whether the failure may pass.
    """

    load: ReadCommand
    parts: list[Part | None]
    outcome: str
    transient: bool
    failure: Failure | None = None


@dataclass
class Counts:
    """Counts for reports.

    hits: requests that began with blocks of the prefix cache.
        hits: requests that began with blocks of the prefix cache.
        loads: loads that the scheduler requested.
        failed: loads that failed or were refused.
        preempted: preemptions.
    """

    hits: int = 0
    loads: int = 0
    failed: int = 0
    preempted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


class Engine:
    """Drives one scheduler, one step at a time.

    Args:
        shape: the engine's configuration.
        rng: source of all randomness.
    """

    def __init__(self, shape: EngineShape, rng: random.Random) -> None:
        self.shape = shape
        self.rng = rng
        self.scheduler = _scheduler(shape)
        self.connector: Any = self.scheduler.connector
        self.kvhma = self.connector._scheduler
        self.memory = memory_of(shape.name, shape.groups, shape.num_blocks, shape.ranks)
        self.kvhma.context.geometry = self.memory.geometry
        self.kvhma.context.engine = replace(self.kvhma.context.engine, tp_size=shape.ranks)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.labels = self.memory.labels
        self.garbage(slice(None))
        self.source: Engine | None = None
        self.texts: dict[str, Text] = {}
        self.greedy: dict[str, bool] = {}
        self.counts = Counts()
        self.load_odds = {"ok": 1.0}
        self.finished: dict[str, Any] = {}
        self.refused: list[str] = []
        """Loads that the planner has refused: no request here gives it a reason to."""
        self._hasher = get_request_block_hasher(self.scheduler.hash_block_size, sha256)
        self._meaning: dict[bytes, tuple[Text, int]] = {}
        self._registered: dict[str, int] = {}
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._state_column: dict[str, int] = {}
        self._loading: list[Loading] = []
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._known: set[tuple[bytes, int]] = set()
        self._expected = np.zeros_like(self.labels)
        self._checked = np.zeros(self.labels.shape, bool)
        self._hit_requests: set[str] = set()
        self.stats = TransferStats()
        """What the connector's scheduler has reported to vLLM."""
        self._watch_hits()
        self._watch_stats()

    # --- from outside -----------------------------------------------------------------------------------------

    def read_from(self, other: Engine) -> None:
        """Read from another engine, and notify its lease table."""
        self.source = other
        self.kvhma.decode.claims.renewer.leases = other.kvhma.context.leases

    def add(
        self, name: str, tokens: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **more: int
    ) -> None:
        """Give the engine a request.

        Args:
            name: its id.
            tokens: its prompt.
            max_tokens: how many tokens it generates.
            params: ``kv_transfer_params``.
            more: `greedy`, whether the request generates the same tokens as other requests do after the same prompt.
                `unread`, whether it must not begin with blocks of the prefix cache.
                `stop`, a token that ends its answer.
                `priority`, lower first where the policy uses it.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            stop_token_ids=[more["stop"]] if "stop" in more else None,
            skip_reading_prefix_cache=bool(more.get("unread")),
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        priority = more.get("priority", 0)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, priority=priority)
        text = Text(tokens)
        self._learn(request, text)
        self.scheduler.add_request(request)
        if request.num_prompt_tokens < len(tokens):
            # The connector of P leaves the last token to D; the hashes above still are of the whole prompt.
            text = Text(tokens[: request.num_prompt_tokens])
        self.texts[name] = text
        self.greedy[name] = bool(more.get("greedy", True))
        self._requests[name] = request

    def abort(self, name: str) -> None:
        """End a request in any state."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name, request in self._requests.items() if not request.is_finished()]

    @property
    def idle(self) -> bool:
        """Whether no work is left, and no blocks are held for a peer."""
        return not (self.scheduler.requests or self.kvhma.needs_step() or self._loading or self._in_flight)

    def garbage(self, blocks: Any) -> None:
        """Overwrite blocks."""
        shape = self.labels[blocks].shape
        self.labels[blocks] = np.random.default_rng(self.rng.getrandbits(32)).integers(
            1 << 62, size=shape, dtype=np.uint64
        )

    def scribble(self) -> None:
        """Overwrite the bytes that no reader may rely on."""
        free = [block.block_id for block in self.pool.blocks if not block.ref_cnt and block.block_hash is None]
        self.garbage([*(block for block in free if self.rng.random() < 0.5), 0])

    def forget(self) -> None:
        """Reset the prefix cache. vLLM preempts running requests for it; it refuses while blocks are loaded or held."""
        kept = self.kvhma.needs_step() or any(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens
            for request in self.scheduler.requests.values()
            if request not in self.scheduler.running
        )
        if not kept and not self._in_flight:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> int:
        """Schedule and compute one step, check everything, and give the results to the scheduler.

        Returns:
            Tokens computed.
        """
        output = self.scheduler.schedule()
        self.counts.preempted += len(output.preempted_req_ids or ())
        self._in_flight.append((output, self._execute(output)))
        self.check_cache()
        if not self.shape.overlapped or len(self._in_flight) > 1 or not output.total_num_scheduled_tokens:
            while self._in_flight:
                self._settle(*self._in_flight.popleft())
                if self.shape.overlapped and output.total_num_scheduled_tokens:
                    break
        return int(output.total_num_scheduled_tokens)

    # --- the worker -------------------------------------------------------------------------------------------

    def _settle(self, output: Any, results: ModelRunnerOutput) -> None:
        for answer in self.scheduler.update_from_output(output, results).values():
            for one in answer.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one
        for name in results.req_ids:
            self._learn(self._requests[name], self.texts[name])

    def _execute(self, output: Any) -> ModelRunnerOutput:
        labels = self.labels
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
        if output.new_block_ids_to_zero:
            labels[output.new_block_ids_to_zero] = 0
        # Row by row: a copy may begin where an earlier copy of the same step has ended. (vLLM's runner: all at once.)
        for pair in output.kv_cache_block_copies or ():
            labels[pair.dst_block_id] = labels[pair.src_block_id]
        computed = self._update_tables(output)
        metadata = output.kv_connector_metadata
        self._order(metadata)
        self._forward(output, computed)
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(name, computed[name] + output.num_scheduled_tokens[name]) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._collect(metadata),
        )

    def _update_tables(self, output: Any) -> dict[str, int]:
        """Maintain block tables as vLLM's model runner does; return how many tokens each request had."""
        computed: dict[str, int] = {}
        cached = output.scheduled_cached_reqs
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self._state_column.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(ids) for ids in blocks]
                if len(self.texts[name]) != len(self._requests[name].all_token_ids):
                    # vLLM has dropped tokens that were sampled when the request was preempted.
                    self.texts[name] = Text(self._requests[name].all_token_ids)
            elif blocks is not None:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table.extend(more)
        return computed

    def _forward(self, output: Any, computed: dict[str, int]) -> None:
        work = [(name, computed[name], computed[name] + count) for name, count in output.num_scheduled_tokens.items()]
        self._move_states(work)
        for index, group in enumerate(self.shape.groups):
            if group.kind == "state":
                self._run_states(index, group, work)
                continue
            size = group.block_size
            for name, start, stop in work:
                table = self._tables[name][index]
                want = self.texts[name].labels(group, start, stop)
                for block in range(start // size, (stop - 1) // size + 1):
                    first, last = max(start, block * size), min(stop, (block + 1) * size)
                    self.labels[table[block], first - block * size : last - block * size] = want[
                        first - start : last - start
                    ]
            for name, start, stop in work:
                self._check_read(name, index, group, group.first_seen(start), stop)

    def _move_states(self, work: list[tuple[str, int, int]]) -> None:
        """Copy states into the blocks where this step continues from them, as the model runner does for ``align``."""
        sizes = {group.block_size for group in self.shape.groups if group.kind == "state"}
        if not sizes or not self.shape.caching:
            return
        (size,) = sizes
        pairs = []
        for name, start, stop in work:
            before = self._state_column.get(name, (start - 1) // size if start else -1)
            column = self._state_column[name] = (stop - 1) // size
            if before not in (-1, column):
                pairs += [
                    (table[before], table[column])
                    for table, group in zip(self._tables[name], self.shape.groups, strict=True)
                    if group.kind == "state"
                ]
        if pairs:
            moved = np.array(pairs)
            self.labels[moved[:, 1]] = self.labels[moved[:, 0]]

    def _run_states(self, index: int, group: GroupShape, work: list[tuple[str, int, int]]) -> None:
        size = group.block_size
        aligned = getattr(self.scheduler.kv_cache_manager.coordinator, "_cache_hit_alignment_tokens", size)
        last = (aligned,) if FINE_CHECKPOINTS else ()
        for name, start, stop in work:
            text, table = self.texts[name], self._tables[name][index]
            slot = table[(stop - 1) // size if self.shape.caching else 0]
            if start and not np.array_equal(self.labels[slot, :STATE_ITEMS], text.state(group, start)):
                self._wrong_read(name, group, f"state after {start} tokens in block {slot}")
            self.labels[slot, :STATE_ITEMS] = text.state(group, stop)
            if self.shape.caching and self.shape.checkpoint is not None:
                (offset,), (column,) = compute_mamba_prefill_checkpoints(
                    [stop], [stop - start], self.scheduler.hash_block_size, size, self.shape.checkpoint, False, *last
                )
                if offset and stop - start > 1:
                    self.labels[table[column], :STATE_ITEMS] = text.state(group, start + offset)

    def _sample(self, name: str, computed: int) -> list[int]:
        text = self.texts[name]
        if computed < len(text):
            return []
        token = text.hashes[-1] % 3 if self.greedy[name] else self.rng.randrange(3)
        text.extend([token])
        return [token]

    # --- loads ------------------------------------------------------------------------------------------------

    def _order(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            assert self.source is not None
            self.counts.loads += 1
            (outcome,) = self.rng.choices(list(self.load_odds), list(self.load_odds.values()))
            loading = Loading(load, [], outcome, self.rng.random() < 0.5)
            try:
                loading.parts += [self._part(load, rank) for rank in range(self.shape.ranks)]
            except KvhmaError as error:
                loading.parts = []
                loading.failure = Failure("request", str(error), transient=False)
                self.refused.append(str(error))
            self._loading.append(loading)

    def _part(self, load: ReadCommand, rank: int) -> Part:
        assert self.source is not None
        plan = _plan(self.memory, self.source.memory, rank)
        planned = plan.transfer(load.num_tokens, list(load.spans), list(load.remote.spans))
        for address, count, _ in planned.zero.tolist():
            ctypes.memset(address, 0, count)
        rows = [
            (to, source, count)
            for read in planned.reads
            for (to, count, _), (source, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True)
        ]
        self.rng.shuffle(rows)
        return Part(planned, rows, self.rng.choice((0, 0, 0, 1, 2, 5)))

    def _collect(self, metadata: StepMetadata) -> KVConnectorOutput:
        """Continue the loads, and return the combined output of all ranks for this step."""
        received: set[str] = set()
        failed: set[str] = set()
        report = WorkerReport()
        for name, failure in metadata.refusals.items():
            received.add(name)
            failed.add(name)
            report.failures[name] = failure
        for loading in list(self._loading):
            name = loading.load.request_id
            for rank, part in enumerate(loading.parts):
                if part is not None and self._advance(loading, part):
                    loading.parts[rank] = None
                    told = self._report(loading, part, rank)
                    loading.failure = loading.failure or told.failures.get(name)
                    report = report.aggregate(told)
            if not any(loading.parts):
                self._loading.remove(loading)
                received.add(name)
                self.counts.failed += loading.failure is not None and loading.load.optional
                if loading.failure is not None:
                    if not loading.load.optional:
                        failed.add(name)
                    report = report.aggregate(WorkerReport({name: loading.failure}))
        self.counts.failed += len(failed)
        return KVConnectorOutput(
            finished_recving=received,
            failed_recving=failed,
            kv_connector_worker_meta=report if report.failures or report.first_tokens else None,
        )

    def _advance(self, loading: Loading, part: Part) -> bool:
        """Copy some rows, in the last round all that are left; return whether this was the last round."""
        now = len(part.rows) if not part.steps else self.rng.randint(0, len(part.rows))
        for to, source, count in part.rows[:now]:
            if loading.outcome == "garbage":
                ctypes.memset(to, 0xA5, count)
            elif loading.outcome == "ok" or (loading.outcome == "part" and self.rng.random() < 0.5):
                ctypes.memmove(to, source, count)
        del part.rows[:now]
        part.steps -= 1
        return part.steps < 0

    def _report(self, loading: Loading, part: Part, rank: int) -> WorkerReport:
        """What the worker of one rank reports to the connector's scheduler at the end of a load."""
        load = loading.load
        assert self.source is not None
        leases, claims = self.source.kvhma.context.leases, [load.remote.claim(load.reader)]
        (state,) = leases.renew(claims) if load.outcome is None else leases.check_and_release(claims, [load.outcome])
        if state is not LeaseState.HELD:
            return WorkerReport({load.request_id: Failure("expired", state.value, transient=False)})
        if loading.outcome != "ok":
            return WorkerReport({load.request_id: Failure("transfer", loading.outcome, loading.transient)})
        geometry = self.memory.ranks[rank]
        first = read_steps.first_filled_tokens(geometry, load.spans, part.planned.first_tokens)
        return WorkerReport({}, {load.request_id: first} if first else {})

    # --- the oracle -------------------------------------------------------------------------------------------

    def check_cache(self) -> None:
        """Check every block that a request could hit."""
        now = {
            (key, block_id)
            for key, found in self.pool.cached_block_hash_to_block._cache.items()
            for block_id in (found if isinstance(found, dict) else (found.block_id,))
        }
        for _, block_id in self._known - now:
            self._checked[block_id] = False
        gone = {block_id for _, block_id in self._known - now}
        fresh = {item for item in now if item not in self._known or item[1] in gone}
        for key, block_id in fresh:
            group = self.shape.groups[get_group_id(key)]
            text, tokens = self._meaning[get_block_hash(key)]
            start = 0 if group.kind == "state" else (tokens - 1) // group.block_size * group.block_size
            labels = text.state(group, tokens) if group.kind == "state" else text.labels(group, start, tokens)
            self._expected[block_id, : len(labels)] = labels
            self._checked[block_id, : len(labels)] = True
        self._known = now
        wrong = ((self.labels != self._expected) & self._checked).any(axis=1)
        if wrong.any():
            self._wrong_cache(np.flatnonzero(wrong).tolist())

    def _wrong_cache(self, blocks: list[int]) -> None:
        texts = []
        for key, block_id in self._known:
            if block_id in blocks:
                group = self.shape.groups[get_group_id(key)]
                _, tokens = self._meaning[get_block_hash(key)]
                where = np.flatnonzero((self.labels[block_id] != self._expected[block_id]) & self._checked[block_id])
                zeros = self.labels[block_id][where] == 0
                texts.append(
                    f"block {block_id}, which stands for {tokens} tokens of {group}, is wrong at items "
                    f"{where.tolist()}{' (zeros)' if zeros.all() else ''}"
                )
        raise Violation(f"{self.shape.name}: cached: " + "; ".join(texts))

    def _check_read(self, name: str, index: int, group: GroupShape, start: int, stop: int) -> None:
        size = group.block_size
        first = start // size
        table = self._tables[name][index][first : (stop - 1) // size + 1]
        found = self.labels[table, :size].ravel()[start - first * size : stop - first * size]
        want = self.texts[name].labels(group, start, stop)
        if not np.array_equal(found, want):
            where = (np.flatnonzero(found != want) + start).tolist()
            self._wrong_read(name, group, f"tokens {where} of {start}..{stop}, table {table}")

    def _wrong_read(self, name: str, group: GroupShape, text: str) -> None:
        raise Violation(f"{self.shape.name}: request {name} reads of {group}: {text}")

    def _learn(self, request: Request, text: Text) -> None:
        """Record the tokens that new block hashes stand for."""
        known = self._registered.get(request.request_id, 0)
        hashes = request.block_hashes
        for index in range(known, len(hashes)):
            self._meaning.setdefault(hashes[index], (text, (index + 1) * self.scheduler.hash_block_size))
        self._registered[request.request_id] = len(hashes)

    def counted(self, name: str) -> dict[str, float]:
        """What the connector's scheduler has counted by a label."""
        found: dict[str, float] = self.stats.data.get(name, {})
        return found

    def _watch_stats(self) -> None:
        asked = self.connector.get_kv_connector_stats

        def take() -> TransferStats | None:
            told: TransferStats | None = asked()
            if told is not None:
                self.stats.aggregate(told)
            return told

        self.connector.get_kv_connector_stats = take

    def _watch_hits(self) -> None:
        asked = self.scheduler._get_local_prefix_cache_hit
        allocated = self.connector.update_state_after_alloc
        local: dict[str, list[int]] = {}

        def ask(request: Request, *more: Any) -> Any:
            found = asked(request, *more)
            blocks = [block for group in found[0].blocks for block in group if not block.is_null]
            local[request.request_id] = [block.block_id for block in blocks]
            return found

        def take(request: Request, blocks: Any, external: int) -> None:
            hit = local.pop(request.request_id, [])
            if hit and request.request_id not in self._hit_requests:
                self._hit_requests.add(request.request_id)
                self.counts.hits += 1
            allocated(request, blocks, external)

        self.scheduler._get_local_prefix_cache_hit = ask
        self.connector.update_state_after_alloc = take
