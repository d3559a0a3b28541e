# SPDX-License-Identifier: Apache-2.0
"""Measure kvhma against vLLM's own functions, both in one process, and print ratios as Markdown.

Nothing of vLLM is written again here: its classes are filled with the attributes that their methods read, and
the methods are called. What both sides choose is compared byte by byte before anything is timed.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Queue
from types import SimpleNamespace
from typing import Any, TypeAlias

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# vLLM's connector refuses any other order of the convolution state.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import _region_sort_key
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_representative_spec_type
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import derive_mamba_conv_split
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import kvhma
from kvhma import Geometry, Span
from kvhma.baselines import first_token, vllm_list, vllm_selection
from kvhma.errors import UnsupportedPairError
from kvhma.hybrid import cache_groups, conv_split, hybrid_block_size, layout
from kvhma.models import ATTENTION_KINDS, Model, model, models

Tables: TypeAlias = list[list[int]]
Copies: TypeAlias = NDArray[np.int64]
"""Rows of local address, remote address, length."""

ROUNDS = 15
SECONDS = 0.15


# vLLM's objects


class Recorder:
    """In the place of NIXL: keeps prepared lists, and the ids of the last read."""

    def __init__(self) -> None:
        self.lists: list[NDArray[np.uint64]] = []
        self.reads: list[tuple[int, Any, int, Any]] = []

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, rows: Any, mem_type: str) -> NDArray[np.uint64]:
        return np.asarray(rows, dtype=np.uint64).reshape(-1, 3)

    def prep_xfer_dlist(self, agent: str, rows: NDArray[np.uint64]) -> int:
        self.lists.append(rows)
        return len(self.lists) - 1

    def make_prepped_xfer(self, kind: str, local: int, mine: Any, remote: int, theirs: Any, notif_msg: bytes) -> int:
        self.reads.append((local, mine, remote, theirs))
        return len(self.reads)

    def transfer(self, handle: int) -> str:
        return "DONE"

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        pass


def cache_config(one: Model, geometry: Geometry) -> KVCacheConfig:
    """Return vLLM's description of the groups of one rank."""
    tp = geometry.tp_size
    heads = max(1, one.kv_heads // tp)
    dtype = getattr(torch, one.dtype)
    groups = []
    for found, group in zip(cache_groups(one), geometry.groups, strict=True):
        size = group.block_size
        shape = {"num_kv_heads": heads, "head_size": one.head_dim, "dtype": dtype}
        if found.kind == "sliding":
            spec = SlidingWindowSpec(size, sliding_window=one.window, **shape)
        elif found.kind == "chunked":
            spec = ChunkedLocalAttentionSpec(size, attention_chunk_size=one.chunk, **shape)
        elif found.kind == "full":
            spec = FullAttentionSpec(size, **shape)
        elif found.kind == "mla":
            spec = MLAAttentionSpec(size, **shape)
        else:
            spec = state_spec(one, geometry, size)
        groups.append(KVCacheGroupSpec(list(found.layers), spec))
    return KVCacheConfig(geometry.layers[0].num_blocks, [], groups)


def state_spec(one: Model, geometry: Geometry, block_size: int) -> MambaSpec:
    state, tp = one.state, geometry.tp_size
    assert state is not None
    width = sum(part.length for part in conv_split(state, tp_rank=geometry.tp_rank, tp_size=tp))
    heads = state.n_heads // tp
    return MambaSpec(
        block_size,
        shapes=(
            (width, state.d_conv - 1),
            (heads, state.d_state) if state.kind == "mamba1" else (heads, state.head_dim, state.d_state),
        ),
        dtypes=(getattr(torch, state.conv_dtype), getattr(torch, state.ssm_dtype)),
        mamba_type={
            "mamba1": MambaAttentionBackendEnum.MAMBA1,
            "mamba2": MambaAttentionBackendEnum.MAMBA2,
            "gdn": MambaAttentionBackendEnum.GDN_ATTN,
        }[state.kind],
    )


class Scheduler(NixlPullConnectorScheduler):
    """vLLM's scheduler half; its own constructor, given a configuration with what that reads."""

    def __init__(self, caches: KVCacheConfig) -> None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, decode_context_parallel_size=1, data_parallel_index=0
            ),
            cache_config=SimpleNamespace(block_size=caches.kv_cache_groups[0].kv_cache_spec.block_size),
            kv_transfer_config=SimpleNamespace(
                get_from_extra_config=lambda key, default: default, kv_buffer_device="cpu"
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        )
        super().__init__(config, "scheduler", caches)


class Worker(NixlPullConnectorWorker):
    """vLLM's worker half for one rank: the attributes that `register_kv_caches` would have set, without tensors."""

    def __init__(self, engine_id: str, one: Model, geometry: Geometry) -> None:
        self.geometry, self.engine_id = geometry, engine_id
        self.kv_cache_config = caches = cache_config(one, geometry)
        specs = [group.kv_cache_spec for group in caches.transfer_groups]
        self._group_spec_types = tuple(get_representative_spec_type(spec) for spec in specs)
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        self._has_mamba = bool(states)
        self._conv_decomp = derive_mamba_conv_split(states[0], geometry.tp_size) if states else None
        self._mamba_ssm_size = self._conv_decomp.ssm_sizes if self._conv_decomp else (0, 0)
        self._is_hma_required = any(not isinstance(spec, FullAttentionSpec) for spec in specs)
        self.use_mla = "mla" in one.layers
        self.use_host_buffer = self._mixed_mem_types = self._is_csa_linear = False
        self._bidirectional_kv_xfer_enabled = self.pcp_dcp_sharded = False
        self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self.nixl_memory_type, self.device_id, self.kv_cache_layout = "DRAM", 0, "LBHNC"
        self.backend_name = "FLASHINFER"
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))
        self.kv_transfer_config = SimpleNamespace(enable_permute_local_kv=False)
        self.nixl_wrapper = Recorder()
        self.tp_rank, self.world_size = geometry.tp_rank, geometry.tp_size
        self.dcp_size = self.pp_size = 1
        self.dcp_rank = self.pcp_rank = self._remote_region_offset = 0

        attention = next(group for group in geometry.groups if group.kind != "ssm")
        ratio = attention.ratio
        self._physical_blocks_per_logical_kv_block = ratio
        self.block_size = attention.block_size // ratio
        self._logical_num_blocks = caches.num_blocks
        self.num_blocks = caches.num_blocks * ratio
        users: dict[int, set[int]] = {}
        names: dict[int, str] = {}
        for layer in sorted(geometry.layers, key=lambda layer: _region_sort_key(layer.name)):
            base = geometry.regions[layer.region].base + layer.offset
            users.setdefault(base, set()).add(layer.group)
            names.setdefault(base, layer.name)
        page = geometry.layers[0].block_stride // ratio
        self.num_regions = len(users)
        self.block_len_per_layer = [page] * self.num_regions
        self.block_stride_per_layer = [page] * self.num_regions
        self.region_num_blocks = [self.num_blocks] * self.num_regions
        self.region_group_ids = [min(groups) if len(groups) == 1 else -1 for groups in users.values()]
        self.region_names = list(names.values())
        self.region_mem_types = ["DRAM"] * self.num_regions
        self._uses_region_group_mapping = len(set(self.region_group_ids)) > 1
        self._region_is_mla = [self.use_mla] * self.num_regions
        self._ssm_region_indices = [
            index
            for index, groups in enumerate(users.values())
            if any(geometry.groups[group].kind == "ssm" for group in groups)
        ]
        self._scratch_region_indices: list[int] = []
        self._ple_group_index = self._ple_region_index = None
        self._transfer_layer_names = self._transfer_layer_region_indices = self._transfer_layer_group_ids = ()
        self.num_descs = sum(self.region_num_blocks)
        self.kv_caches_base_addr = defaultdict(dict, {engine_id: {self.tp_rank: list(users)}})

        self.transfer_topo = TransferTopology(
            tp_rank=self.tp_rank,
            tp_size=self.world_size,
            block_size=self.block_size,
            engine_id=engine_id,
            is_mla=self.use_mla,
            is_mamba=self._has_mamba,
            total_num_kv_heads=1 if self.use_mla else one.kv_heads,
            attn_backends=[],
        )
        self._remote_agents = defaultdict(dict)
        self.tp_mappings: dict[str, Any] = {}
        self.dst_num_blocks = {engine_id: self.num_blocks}
        self.dst_region_num_blocks = {engine_id: self.region_num_blocks}
        self.dst_region_group_ids = {engine_id: self.region_group_ids}
        self.dst_uses_region_group_mapping = {engine_id: self._uses_region_group_mapping}
        self.dst_region_mem_types: dict[str, list[str]] = {}
        self.dst_xfer_side_handles = defaultdict(dict)
        self.src_xfer_handles_by_block_size: dict[int, int] = {}
        self.src_blocks_data_by_block_size: dict[int, Any] = {}
        self.src_xfer_handles_by_tp_ratio: dict[tuple[int, int], list[int]] = {}
        self._invalid_remote_engines: set[str] = set()
        self._engine_last_active: dict[str, float] = {}
        self._recving_metadata: dict[str, Any] = {}
        self._recving_transfers = defaultdict(list)
        self._ready_requests: Queue[Any] = Queue()
        self._reqs_to_process: set[str] = set()
        self._reqs_to_send: dict[str, float] = {}

    def prepare(self) -> None:
        """Make the local list, as the end of `register_kv_caches` does."""
        handle, rows = self.register_local_xfer_handler(self.block_size)
        self.src_xfer_handles_by_block_size[self.block_size], self.src_blocks_data = handle, rows

    def hello(self) -> NixlAgentMetadata:
        return NixlAgentMetadata(
            engine_id=self.engine_id,
            agent_metadata=f"{self.engine_id}-{self.tp_rank}".encode(),
            kv_caches_base_addr=self.kv_caches_base_addr[self.engine_id][self.tp_rank],
            device_id=0,
            num_blocks=self.num_blocks,
            block_lens=self.block_len_per_layer,
            block_strides=self.block_stride_per_layer,
            kv_cache_layout=self.kv_cache_layout,
            block_size=self.block_size,
            ssm_sizes=self._mamba_ssm_size,
            attn_backend_name=self.backend_name,
            physical_blocks_per_logical_kv_block=self._physical_blocks_per_logical_kv_block,
            region_num_blocks=self.region_num_blocks,
            region_group_ids=self.region_group_ids,
            region_names=self.region_names,
            region_mem_types=self.region_mem_types,
        )

    def connect(self, remotes: Sequence[Worker]) -> None:
        """Shake hands with the ranks that this one reads from."""
        self.prepare()
        size = remotes[0].world_size
        for rank in self.transfer_topo.handshake_target_ranks(size):
            name = self.add_remote_agent(remotes[rank].hello(), rank, size)
            self._remote_agents[remotes[0].engine_id][(0, rank)] = name


# One request on both sides


@dataclass(frozen=True)
class Pair:
    """A decode rank and the ranks of the prefill engine, for both implementations."""

    one: Model
    local: Geometry
    remotes: tuple[Geometry, ...]

    @cached_property
    def worker(self) -> Worker:
        worker = Worker("D", self.one, self.local)
        worker.connect([Worker("P", self.one, remote) for remote in self.remotes])
        return worker

    @cached_property
    def schedulers(self) -> tuple[Scheduler, Scheduler]:
        sides = (self.local, self.remotes[0])
        return tuple(Scheduler(cache_config(self.one, side)) for side in sides)  # type: ignore[return-value]

    @cached_property
    def plan(self) -> kvhma.Plan:
        return kvhma.plan(self.local, self.remotes)


@dataclass(frozen=True)
class Request:
    """Block tables as the two managers keep them: blocks that are dropped are the null block at the front."""

    tokens: int
    local: Tables
    remote: Tables

    @cached_property
    def unhashed(self) -> Tables:
        """What D's manager hands to the connector: the blocks to fill, without null blocks."""
        return [[block for block in table if block] for table in self.local]


def request(pair: Pair, tokens: int, order: str) -> Request:
    rng = random.Random(7)
    sides = []
    for geometry in (pair.local, pair.remotes[0]):
        counts = []
        for group in geometry.groups:
            if group.kind == "ssm":
                counts.append((0, 1))
            else:
                dead = first_token(group, tokens) // group.block_size
                counts.append((dead, -(-tokens // group.block_size) - dead))
        total = sum(live for _, live in counts)
        pool = list(range(1, total + 1))
        if order == "scattered":
            pool = rng.sample(range(1, geometry.layers[0].num_blocks), total)
        sides.append([[0] * dead + [pool.pop(0) for _ in range(live)] for dead, live in counts])
    return Request(tokens, *sides)


def vllm_request(pair: Pair, asked: Request) -> Callable[[], list[tuple[Any, Any]]]:
    """Return vLLM's chain for one request and one source, only the functions on block ids."""
    worker, (d, p) = pair.worker, pair.schedulers
    info = worker.transfer_topo.get_engine_info("P")
    ratios = worker._physical_blocks_per_logical_kv_block, info.remote_physical_blocks_per_logical
    blocks = worker.dst_num_blocks
    regions, groups = worker.dst_region_num_blocks, worker.dst_region_group_ids
    mapping = worker.dst_uses_region_group_mapping

    def call() -> list[tuple[Any, Any]]:
        mine = worker._logical_to_kernel_block_ids(d.get_exchange_clipped_blocks(asked.unhashed), ratios[0])
        theirs = worker._logical_to_kernel_block_ids(p.get_exchange_clipped_blocks(asked.remote), ratios[1])
        mine, theirs = worker._apply_prefix_caching(mine, theirs, *ratios)
        remote = worker._compute_desc_ids(theirs, blocks["P"], None, ratios[1], regions["P"], groups["P"], mapping["P"])
        local = worker._compute_desc_ids(mine, blocks["D"], 1, ratios[0], regions["D"], groups["D"], mapping["D"])
        return [(local, remote)]

    return call


def vllm_whole(pair: Pair, asked: Request) -> Callable[[], list[tuple[int, Any, int, Any]]]:
    """Return the same through the methods that vLLM's engine calls, from request to NIXL."""
    worker, (d, p) = pair.worker, pair.schedulers
    recorder = worker.nixl_wrapper

    def call() -> list[tuple[int, Any, int, Any]]:
        recorder.reads.clear()
        params = {
            "remote_block_ids": p.get_exchange_clipped_blocks(asked.remote),
            "remote_engine_id": "P",
            "remote_request_id": "p",
            "remote_host": "",
            "remote_port": 0,
            "tp_size": len(pair.remotes),
        }
        metadata = NixlConnectorMetadata()
        cached = (0,) * len(asked.local)
        metadata.add_new_req_to_recv("d", d.get_exchange_clipped_blocks(asked.unhashed), params, cached, True)
        worker.start_load_kv(metadata)
        return recorder.reads

    return call


def kvhma_request(pair: Pair, asked: Request) -> Callable[[], kvhma.IdTransfer]:
    """Return kvhma's chain from the same tables: live blocks of both sides, then the ids of both sides."""
    plan, local, remote = pair.plan, pair.local, pair.remotes[0]

    def call() -> kvhma.IdTransfer:
        mine = kvhma.live_spans(local, asked.tokens, asked.local)
        theirs = kvhma.live_spans(remote, asked.tokens, asked.remote)
        return plan.ids(asked.tokens, mine, theirs)

    return call


# What both chose, byte by byte


def joined(local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> Copies:
    """Return the one smallest set of contiguous copies for pairs of descriptors."""
    rows = np.stack([local[:, 0], remote[:, 0], local[:, 1]], axis=1).astype(np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    ends = rows[:, :2] + rows[:, 2:]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (rows[1:, :2] != ends[:-1]).any(axis=1)
    first = np.flatnonzero(fresh)
    rows[first, 2] = np.add.reduceat(rows[:, 2], first)
    return rows[first]


def copies_of(reads: Iterable[tuple[NDArray[np.uint64], Any, NDArray[np.uint64], Any]]) -> Copies:
    pairs = [(mine[local], theirs[remote]) for mine, local, theirs, remote in reads]
    for mine, theirs in pairs:
        assert np.array_equal(mine[:, 1], theirs[:, 1])
    return joined(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def cut(copies: Copies, bounds: NDArray[np.int64]) -> Copies:
    """Cut copies at local addresses."""
    first = np.searchsorted(bounds, copies[:, 0], side="right")
    last = np.searchsorted(bounds, copies[:, 0] + copies[:, 2], side="left")
    index = np.repeat(np.arange(len(copies)), last - first + 1)
    step = np.arange(len(index)) - np.repeat(np.cumsum(last - first + 1) - (last - first + 1), last - first + 1)
    edges = np.append(bounds, 0)
    start = np.where(step == 0, copies[index, 0], edges[first[index] + step - 1])
    stop = np.where(step == (last - first)[index], copies[index, 0] + copies[index, 2], edges[first[index] + step])
    return np.stack([start, copies[index, 1] + start - copies[index, 0], stop - start], axis=1)


def difference(ours: Copies, theirs: Copies) -> tuple[Copies, Copies]:
    """Return the copies that only `ours` has, and those that only `theirs` has."""
    bounds = np.unique(
        np.concatenate([edge for rows in (ours, theirs) for edge in (rows[:, 0], rows[:, 0] + rows[:, 2])])
    )
    sets = [set(map(tuple, cut(rows, bounds).tolist())) for rows in (ours, theirs)]
    return tuple(  # type: ignore[return-value]
        np.array(sorted(one - other), dtype=np.int64).reshape(-1, 3) for one, other in (sets, sets[::-1])
    )


def why(pair: Pair, asked: Request, extra: Copies) -> dict[str, int]:
    """Say of every byte that only vLLM moves why kvhma does not."""
    geometry = pair.local
    stride = geometry.layers[0].block_stride
    owner = {
        block: (group, entry) for group, table in enumerate(asked.local) for entry, block in enumerate(table) if block
    }
    present = {(layer.group, layer.region) for layer in geometry.layers}
    bases = np.array([region.base for region in geometry.regions], dtype=np.int64)
    found: dict[str, int] = defaultdict(int)
    for address, _, length in extra.tolist():
        region = int(np.searchsorted(bases, address, side="right")) - 1
        at = address - int(bases[region])
        while length:
            block, inside = divmod(at, stride)
            piece = min(length, stride - inside)
            group, entry = owner[block]
            kind = geometry.groups[group]
            tokens = kind.block_size
            if (group, region) not in present:
                reason = "layers that do not exist"
            elif kind.kind == "ssm":
                reason = "padding of states"
            elif (entry + 1) * tokens <= first_token(kind, asked.tokens):
                reason = "blocks before the window"
            else:
                kernel = stride // kind.ratio
                start = entry * tokens + inside // kernel * (tokens // kind.ratio)
                reason = "kernel blocks behind the last token" if start >= asked.tokens else "unexplained"
            found[reason] += piece
            at, length = at + piece, length - piece
    return dict(found)


# Times


def interleaved(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the fastest mean time of each call in seconds: the calls take turns, so noise meets all of them."""
    counts = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(SECONDS / ROUNDS / max(time.perf_counter() - start, 1e-7)))
    found = dict.fromkeys(calls, float("inf"))
    gc.collect()
    gc.disable()  # as engines do with what lives long; it favours the side that makes more objects
    try:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                found[name] = min(found[name], (time.perf_counter() - start) / counts[name])
            gc.collect()
    finally:
        gc.enable()
    return found


def table(title: str, head: Iterable[str], rows: Iterable[Iterable[Any]], note: str = "") -> None:
    head = list(head)
    print(f"## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |")
    print(f"\n{note}\n" if note else "")


def verdict(ratio: float, target: float) -> str:
    return f"≥ {target:g}×: {'met' if ratio >= target else 'missed'}"


REQUESTS = (
    ("gemma-3-27b", 8192, 2.5),
    ("gpt-oss-120b", 131_072, 2.5),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B", 131_072, 8.0),
)
"""Model, tokens, and how many times faster kvhma should be."""


def pair_of(name: str, tokens: int, sizes: tuple[int, int] = (1, 1)) -> Pair:
    one = model(name)
    blocks = len(cache_groups(one)) * (tokens // hybrid_block_size(one) + 2) + 1

    def rank(rank: int, size: int, base: int) -> Geometry:
        return layout(
            one, num_blocks=blocks, tp_rank=rank, tp_size=size, kernel_block="flashinfer", base=base + (rank << 50)
        )

    d, p = sizes
    return Pair(one, rank(0, d, 1 << 40), tuple(rank(index, p, 1 << 56) for index in range(p)))


def requests() -> None:
    rows, parts, apart = [], [], []
    for name, tokens, target in REQUESTS:
        for order in ("scattered", "ascending"):
            pair = pair_of(name, tokens)
            asked = request(pair, tokens, order)
            ours, theirs, whole = kvhma_request(pair, asked), vllm_request(pair, asked), vllm_whole(pair, asked)
            local, remote = pair.plan.views(0)
            mine, others = kvhma.expand_views(local), kvhma.expand_views(remote)
            got = ours().reads[0]
            lists = pair.worker.nixl_wrapper.lists
            chosen = copies_of([(mine, got.local, others, got.remote)])
            handles = [(lists[read[0]], read[1], lists[read[2]], read[3]) for read in whole()]
            [(local_ids, remote_ids)] = theirs()
            assert np.array_equal(local_ids, handles[0][1])
            assert np.array_equal(remote_ids, handles[0][3])
            only_ours, only_theirs = difference(chosen, copies_of(handles))
            assert not len(only_ours), only_ours[:5]
            reasons = why(pair, asked, only_theirs)
            assert "unexplained" not in reasons, reasons

            spans = [
                kvhma.live_spans(side, tokens, tables)
                for side, tables in ((pair.local, asked.local), (pair.remotes[0], asked.remote))
            ]
            flat = [block for side in (asked.local, asked.remote) for table in side for block in table]
            times = interleaved(
                {
                    "ours": ours,
                    "vllm": theirs,
                    "whole": whole,
                    "spans": lambda: plan_ids(pair, tokens, spans),
                    "arrays": lambda: plan_ids(pair, tokens, arrays),
                    "live": lambda: (
                        kvhma.live_spans(pair.local, tokens, asked.local),
                        kvhma.live_spans(pair.remotes[0], tokens, asked.remote),
                    ),
                    "floor": lambda: kvhma.expand_blocks(flat, 1),
                    "numpy floor": lambda: np.asarray(flat, dtype=np.int32),
                }
                if (arrays := [[Span(s.first, np.asarray(s.ids, dtype=np.int32)) for s in side] for side in spans])
                else {}
            )
            us = {key: f"{value * 1e6:.1f}" for key, value in times.items()}
            ratio = times["vllm"] / times["ours"]
            rows.append(
                (
                    f"{name}, {tokens:,} tokens, {order}",
                    f"{us['ours']} µs",
                    f"{us['vllm']} µs",
                    f"**{ratio:.1f}×**",
                    verdict(ratio, target),
                    f"{times['whole'] / times['ours']:.1f}×",
                    f"{times['vllm'] / times['spans']:.1f}×",
                )
            )
            parts.append(
                (
                    f"{name}, {order}",
                    f"{len(flat):,}",
                    us["floor"],
                    us["numpy floor"],
                    us["live"],
                    us["spans"],
                    us["arrays"],
                    f"{len(got.local):,}",
                    us["ours"],
                    us["vllm"],
                )
            )
            if order == "scattered":
                moved = int(chosen[:, 2].sum())
                extra = ", ".join(f"{reason}: {size:,} B" for reason, size in sorted(reasons.items())) or "nothing"
                apart.append((name, f"{moved:,} B", f"{len(got.local):,}", f"{len(local_ids):,}", extra))
    table(
        "One request: Python lists in, both id arrays out",
        ("", "kvhma", "vLLM, functions alone", "ratio", "target", "vLLM, whole path", "from spans"),
        rows,
        "Both start from the block tables of the two managers. kvhma: `live_spans` of both sides and `Plan.ids`. vLLM: "
        "`get_exchange_clipped_blocks` of both schedulers, `_logical_to_kernel_block_ids`, `_apply_prefix_caching` and "
        "`_compute_desc_ids`, each called by itself; *whole path* is `start_load_kv` down to the call of NIXL, with vLLM's "
        "own copies and checks between. *From spans* is the ratio when the caller keeps spans and not tables.",
    )
    table(
        "The same in parts (µs)",
        (
            "",
            "integers in tables",
            "kvhma only reads them",
            "numpy only reads them",
            "`live_spans` × 2",
            "`ids` from spans",
            "`ids` from int32 arrays",
            "ids out, a side",
            "all",
            "vLLM",
        ),
        parts,
    )
    table(
        "What both choose, byte by byte",
        ("", "both move", "kvhma ids", "vLLM ids", "vLLM moves besides"),
        apart,
        "kvhma moves no byte from or to another address than vLLM does. vLLM has four ids for a state where kvhma has one.",
    )


def plan_ids(pair: Pair, tokens: int, spans: Any) -> kvhma.IdTransfer:
    return pair.plan.ids(tokens, *spans)


# Local cuts


def cuts() -> None:
    rows = []
    for sources, regions, blocks in ((2, 64, 20_000), (8, 64, 20_000)):
        one = Model("full", ("full",) * regions, 8, 128)
        geometry = layout(one, num_blocks=blocks, base=1 << 40)
        remotes = tuple(
            layout(one, num_blocks=blocks, tp_rank=rank, tp_size=sources, base=(rank + 1) << 50)
            for rank in range(sources)
        )
        worker = Worker("D", one, geometry)
        worker.prepare()
        worker.add_remote_agent_plan = None
        worker.tp_mappings["P"] = mapping(worker, sources)

        def theirs(worker: Worker = worker) -> list[list[tuple[int, int, int]]]:
            rows, descs = worker.src_blocks_data, worker.num_descs
            return list(worker._build_local_splits_from_plan(worker.tp_mappings["P"], rows, descs))

        def ours(geometry: Geometry = geometry, remotes: tuple[Geometry, ...] = remotes) -> list[Any]:
            plan = kvhma.plan(geometry, remotes)
            return [plan.views(source) for source in range(len(remotes))]

        gc.disable()
        start = time.perf_counter()
        listed = theirs()
        slow = time.perf_counter() - start
        for (views, _), handle in zip(ours(), listed, strict=True):
            assert np.array_equal(kvhma.expand_views(views), np.array(handle, dtype=np.uint64))
        del listed, handle
        gc.collect()
        for _ in range(2):
            start = time.perf_counter()
            theirs()
            slow = min(slow, time.perf_counter() - start)
        gc.enable()
        fast = interleaved({"ours": ours})["ours"]
        rows.append(
            (
                f"P TP {sources} → D TP 1, {regions} regions × {blocks:,} = {regions * blocks:,} blocks",
                f"{fast * 1e6:.0f} µs",
                f"{slow:.2f} s",
                f"**{slow / fast:,.0f}×**",
                verdict(slow / fast, 1000),
            )
        )
    table(
        "Local cuts where P has more ranks than D",
        ("", "kvhma: plan and all views", "vLLM: `_build_local_splits_from_plan`", "ratio", "target"),
        rows,
        "Every row of vLLM's lists is a row of the expanded views, in the same order. vLLM's time is the lists alone: NIXL's "
        "own reading and preparing of them comes behind, where kvhma hands over 64 rows a source.",
    )


def mapping(worker: Worker, sources: int) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping

    return compute_tp_mapping(worker.transfer_topo, sources, worker._group_spec_types)


# Plans


def plans() -> None:
    rows = []
    state = model("NVIDIA-Nemotron-3-Nano-30B-A3B").state
    kinds = (
        Model("100 full layers", ("full",) * 100, 8, 128),
        Model(
            "100 layers, 5 sliding to 1 full",
            (("sliding",) * 5 + ("full",)) * 16 + ("sliding",) * 4,
            8,
            128,
            window=1024,
        ),
        Model("100 layers, 4 Mamba2 to 1 full", (("mamba2",) * 4 + ("full",)) * 20, 8, 128, state=state),
    )
    for one in kinds:
        calls = {}
        for blocks in (100, 10_000, 1_000_000):
            sides = [
                [
                    layout(
                        one,
                        num_blocks=blocks,
                        tp_rank=rank,
                        tp_size=8,
                        kernel_block="flashinfer",
                        base=base + (rank << 52),
                    )
                    for rank in ranks
                ]
                for ranks, base in (([3], 1 << 40), (range(8), 1 << 56))
            ]
            calls[f"{blocks:,}"] = lambda sides=sides: kvhma.plan(sides[0][0], sides[1])
        times = interleaved(calls)
        rows.append((one.name, *(f"{value * 1e3:.2f} ms" for value in times.values()), spread(times.values())))
    table(
        "Plan of a 100-layer model, D rank 3 of 8 with 8 P ranks",
        ("", *(f"{blocks} blocks" for blocks in calls), "target"),
        rows,
    )


def spread(values: Iterable[float]) -> str:
    worst = max(values)
    return f"≤ 10 ms: {'met' if worst <= 0.010 else 'missed'}"


def main() -> None:
    print("# kvhma against vLLM's own functions\n")
    print(
        "Made by `make bench-vllm`. Both sides in one process, taking turns, the best of several rounds; the machine is"
    )
    print("shared and noisy, so only ratios and counts mean something.\n")
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, vLLM {vllm.__version__}, "
        f"kvhma {kvhma.__version__}\n"
    )
    for section in (requests, cuts, plans):
        print(f"{section.__name__} ...", file=sys.stderr)
        section()


if __name__ == "__main__":
    main()
