# SPDX-License-Identifier: Apache-2.0
"""Measure kvhma against vLLM's own functions, both in one process, and print ratios as Markdown.

Nothing of vLLM is reimplemented here: its classes are filled with the attributes that their methods read, and the
methods are called. The selections of both sides are compared byte by byte before anything is timed.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
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
from counts import groups_of
from harness import in_turns, section
from kvhma import Geometry, Span, lowlevel
from kvhma.cli.block_tables import BlockTables, sequence_blocks
from kvhma.models import Model, model
from kvhma.models.block_size import hybrid_block_size
from kvhma.models.shards import conv_split
from kvhma.models.vllm_layout import LayoutOptions, layout

Copies: TypeAlias = NDArray[np.int64]
"""Rows of local address, remote address, length."""

Read: TypeAlias = tuple[NDArray[np.uint64], Any, NDArray[np.uint64], Any]
"""Local prepared list and ids into it, remote list and ids."""

# vLLM's objects


class Recorder:
    """Replaces NIXL: stores prepared lists, and the ids of the last read."""

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
    for layers, group in zip(groups_of(one), geometry.groups, strict=True):
        size, kind = group.block_size, next(iter(layers.values())).kind
        shape = {"num_kv_heads": heads, "head_size": one.head_dim, "dtype": dtype}
        if kind == "sliding":
            spec = SlidingWindowSpec(size, sliding_window=one.window, **shape)
        elif kind == "chunked":
            spec = ChunkedLocalAttentionSpec(size, attention_chunk_size=one.chunk, **shape)
        elif kind == "full":
            spec = FullAttentionSpec(size, **shape)
        elif kind == "mla":
            spec = MLAAttentionSpec(size, **shape)
        else:
            spec = state_spec(one, geometry, size)
        groups.append(KVCacheGroupSpec(list(layers), spec))
    return KVCacheConfig(geometry.layers[0].num_blocks, [], groups)


def state_spec(one: Model, geometry: Geometry, block_size: int) -> MambaSpec:
    state, tp = one.state, geometry.tp_size
    assert state is not None
    width = sum(part.length for part in conv_split(state, tp_rank=geometry.tp_rank, tp_size=tp).values())
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
    """vLLM's scheduler half, from its own constructor, given a configuration with what that reads."""

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

    def __init__(self, engine_id: str, one: Model, geometry: Geometry, order: str = "LBHNC") -> None:
        self.engine_id = engine_id
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
        self.nixl_memory_type, self.device_id, self.kv_cache_layout = "DRAM", 0, order
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
        """Do the handshake with the ranks that this one reads from."""
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
    remotes: Sequence[Geometry]
    order: str = "LBHNC"

    @cached_property
    def worker(self) -> Worker:
        worker = Worker("D", self.one, self.local, self.order)
        worker.connect([Worker("P", self.one, remote, self.order) for remote in self.remotes])
        return worker

    @cached_property
    def schedulers(self) -> list[Scheduler]:
        return [Scheduler(cache_config(self.one, side)) for side in (self.local, self.remotes[0])]

    @cached_property
    def plan(self) -> kvhma.Plan:
        return kvhma.plan(self.local, self.remotes)


@dataclass(frozen=True)
class Request:
    """Block tables as the two managers have them: freed blocks are the null block at the front."""

    tokens: int
    local: BlockTables
    remote: BlockTables

    @cached_property
    def unhashed(self) -> BlockTables:
        """The blocks that D's manager gives to the connector: the blocks to fill, without null blocks."""
        return [[block for block in table if block] for table in self.local]


def request(pair: Pair, tokens: int, order: str) -> Request:
    rng = random.Random(7)
    sides = []
    for geometry in (pair.local, pair.remotes[0]):
        fresh = [table.tolist() for table in sequence_blocks(geometry, tokens)]
        blocks = geometry.layers[0].num_blocks - 1
        ids = [0, *(rng.sample(range(1, blocks + 1), blocks) if order == "scattered" else range(1, blocks + 1))]
        sides.append([[ids[block] for block in table] for table in fresh])
    return Request(tokens, *sides)


def vllm_functions(pair: Pair, asked: Request) -> Callable[[], tuple[Any, Any]]:
    """Return vLLM's chain for one request and one source: only its functions on block ids."""
    worker, (d, p) = pair.worker, pair.schedulers
    info = worker.transfer_topo.get_engine_info("P")
    ratios = worker._physical_blocks_per_logical_kv_block, info.remote_physical_blocks_per_logical
    blocks = worker.dst_num_blocks
    regions, groups = worker.dst_region_num_blocks, worker.dst_region_group_ids
    mapped = worker.dst_uses_region_group_mapping

    def call() -> tuple[Any, Any]:
        mine = worker._logical_to_kernel_block_ids(d.get_exchange_clipped_blocks(asked.unhashed), ratios[0])
        theirs = worker._logical_to_kernel_block_ids(p.get_exchange_clipped_blocks(asked.remote), ratios[1])
        mine, theirs = worker._apply_prefix_caching(mine, theirs, *ratios)
        remote = worker._compute_desc_ids(theirs, blocks["P"], None, ratios[1], regions["P"], groups["P"], mapped["P"])
        local = worker._compute_desc_ids(mine, blocks["D"], 1, ratios[0], regions["D"], groups["D"], mapped["D"])
        return local, remote

    return call


def vllm_path(pair: Pair, asked: Request) -> Callable[[], list[Read]]:
    """Return the same through the methods that vLLM's engine calls, from request to NIXL; every source is read."""
    worker, (d, p) = pair.worker, pair.schedulers
    recorder = worker.nixl_wrapper

    def call() -> list[Read]:
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
        lists = recorder.lists
        return [(lists[local], mine, lists[remote], theirs) for local, mine, remote, theirs in recorder.reads]

    return call


def from_tables(pair: Pair, asked: Request) -> Callable[[], kvhma.Transfer[np.int32]]:
    plan, local, remote = pair.plan, pair.local, pair.remotes[0]

    def call() -> kvhma.Transfer[np.int32]:
        mine = kvhma.live_spans(local, asked.tokens, asked.local)
        return plan.ids(asked.tokens, mine, kvhma.live_spans(remote, asked.tokens, asked.remote))

    return call


@dataclass(frozen=True)
class LowLevel:
    """What an engine knows once to number its ids with kvhma's functions: the lists of both sides are equally long."""

    keep: list[int]
    counts: list[int]
    members: list[tuple[int, ...]]
    speculative: list[int | None]
    ratios: list[int]

    @classmethod
    def of(cls, pair: Pair) -> LowLevel:
        worker, groups = pair.worker, pair.local.groups
        states = tuple(index for index, group in enumerate(groups) if group.kind == "ssm")
        others = tuple(index for index, group in enumerate(groups) if group.kind != "ssm")
        ratio = worker._physical_blocks_per_logical_kv_block
        counts, members = list(worker.region_num_blocks), [others] * worker.num_regions
        if states:
            parts = len(worker._ssm_region_indices) * (len(worker._conv_decomp.local_conv_offsets) + 1)
            counts += [worker._logical_num_blocks] * parts
            members += [states] * parts
        else:
            members = [others if group < 0 else (group,) for group in worker.region_group_ids]
        return cls(
            [lowlevel.window_blocks(group.window, group.block_size) if group.window else 0 for group in groups],
            counts,
            members,
            [group.speculative if group.kind == "ssm" else None for group in groups],
            [1 if group.kind == "ssm" else ratio for group in groups],
        )

    def three(self, tables: Sequence[Any]) -> NDArray[np.int32]:
        """The ids of one side, by the three functions one after the other."""
        kept: list[Any] = lowlevel.clip_blocks(tables, self.keep, speculative=self.speculative)
        for index, ratio in enumerate(self.ratios):
            if ratio > 1:
                kept[index] = lowlevel.expand_blocks(kept[index], ratio)
        return lowlevel.descriptor_ids(kept, self.counts, self.members)

    def order(self) -> lowlevel.DescriptorOrder:
        return lowlevel.DescriptorOrder(
            self.keep, self.counts, self.members, speculative=self.speculative, ratios=self.ratios
        )


def arrays_of(sides: Sequence[BlockTables]) -> list[list[NDArray[np.int32]]]:
    return [[np.asarray(table, np.int32) for table in side] for side in sides]


def both(ids: Callable[[Any], Any], sides: Sequence[Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (ids(sides[0]), ids(sides[1]))


# The selections of both, byte by byte


def joined(local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> Copies:
    """Return the one smallest set of contiguous copies for pairs of descriptors."""
    rows = np.stack([local[:, 0], remote[:, 0], local[:, 1]], axis=1).astype(np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (rows[1:, :2] != rows[:-1, :2] + rows[:-1, 2:]).any(axis=1)
    first = np.flatnonzero(fresh)
    rows[first, 2] = np.add.reduceat(rows[:, 2], first)
    return rows[first]


def copies_of(reads: Iterable[Read]) -> Copies:
    pairs = [(mine[local], theirs[remote]) for mine, local, theirs, remote in reads]
    for mine, theirs in pairs:
        assert np.array_equal(mine[:, 1], theirs[:, 1])
    return joined(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def cut(copies: Copies, bounds: NDArray[np.int64]) -> set[tuple[int, ...]]:
    """Cut copies at local addresses."""
    found = set()
    for local, remote, length in copies.tolist():
        inside = bounds[np.searchsorted(bounds, local, "right") : np.searchsorted(bounds, local + length, "left")]
        edges = [local, *inside.tolist(), local + length]
        found |= {(start, remote + start - local, stop - start) for start, stop in pairwise(edges)}
    return found


def missing(ours: Copies, theirs: Copies) -> list[tuple[int, ...]]:
    """Return the copies that only `ours` has."""
    edges = [edge for rows in (ours, theirs) for edge in (rows[:, 0], rows[:, 0] + rows[:, 2])]
    bounds = np.unique(np.concatenate(edges))
    return sorted(cut(ours, bounds) - cut(theirs, bounds))


REQUESTS = (("gemma-3-27b", 8192), ("gpt-oss-120b", 131_072), ("NVIDIA-Nemotron-3-Nano-30B-A3B", 131_072))


def pair_of(name: str, tokens: int) -> Pair:
    one = model(name)
    blocks = len(groups_of(one)) * (tokens // hybrid_block_size(one) + 2) + 1
    local, remote = (
        layout(one, LayoutOptions(num_blocks=blocks, kernel_block="flashinfer", base=1 << bits)) for bits in (40, 56)
    )
    return Pair(one, local, [remote])


def check_request(pair: Pair, asked: Request) -> None:
    """Fail unless all ways number the same blocks, and vLLM moves every byte that kvhma moves."""
    whole = vllm_path(pair, asked)()
    local, remote = vllm_functions(pair, asked)()
    assert np.array_equal(local, whole[0][1])
    assert np.array_equal(remote, whole[0][3])
    known, sides = LowLevel.of(pair), (asked.unhashed, asked.remote)
    for ids in (known.three, known.order().ids):
        for tables in (sides, arrays_of(sides)):
            alone = both(ids, tables)()
            assert {*zip(*(side.tolist() for side in alone), strict=True)} == {
                *zip(local.tolist(), remote.tolist(), strict=True)
            }
    way = from_tables(pair, asked)().reads[0]
    mine, theirs = (lowlevel.expand_views(views) for views in pair.plan.views(0))
    extra = missing(copies_of([(mine, way.local, theirs, way.remote)]), copies_of(whole))
    assert not extra, extra[:5]


def ways(pair: Pair, asked: Request) -> dict[str, Callable[[], Any]]:
    """Kvhma's ways from tables to ids."""
    known, lists = LowLevel.of(pair), (asked.unhashed, asked.remote)
    order, arrays = known.order(), arrays_of(lists)
    geometries = pair.local, pair.remotes[0]
    spans = [
        [Span(span.first, np.asarray(span.ids, np.int32)) for span in kvhma.live_spans(geometry, asked.tokens, tables)]
        for geometry, tables in zip(geometries, (asked.local, asked.remote), strict=True)
    ]
    return {
        "tables → `live_spans` → `Plan.ids`": from_tables(pair, asked),
        "`clip_blocks`, `expand_blocks`, `descriptor_ids`": both(known.three, lists),
        "`DescriptorOrder.ids`": both(order.ids, lists),
        "int32 arrays → `Plan.ids`": partial(pair.plan.ids, asked.tokens, *spans),
        "int32 arrays → `clip_blocks`, `expand_blocks`, `descriptor_ids`": both(known.three, arrays),
        "int32 arrays → `DescriptorOrder.ids`": both(order.ids, arrays),
    }


def rows() -> Iterator[tuple[str, ...]]:
    for name, tokens in REQUESTS:
        pair = pair_of(name, tokens)
        for order in ("scattered", "ascending"):
            print(f"{name}, {order} ...", file=sys.stderr)
            asked = request(pair, tokens, order)
            check_request(pair, asked)
            ours = ways(pair, asked)
            times = in_turns({**ours, "functions": vllm_functions(pair, asked), "path": vllm_path(pair, asked)})
            title, functions, path = f"{name}, {tokens:,} tokens, {order}", times["functions"], times["path"]
            for way in ours:
                taken = times[way]
                shown = (f"{seconds * 1e6:,.1f} µs" for seconds in (taken, functions))
                yield title, way, *shown, f"**{functions / taken:.1f}×**", f"{path / taken:.1f}×"
                title = ""


def main() -> None:
    print("# kvhma against vLLM's own functions\n")
    print(
        "Made by `make bench-vllm`. Both sides in one process, taking turns in short bursts, each at its fastest; the "
        "machine is shared and noisy, so only ratios mean something.\n"
    )
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, vLLM {vllm.__version__}, "
        f"kvhma {kvhma.__version__}\n"
    )
    section(
        "One request: the id arrays of both sides",
        ("", "kvhma", "time", "vLLM's functions", "ratio", "vLLM's whole path"),
        rows(),
        "All start from the block tables of the two managers and clip, pair, expand and number. *vLLM's functions*: "
        "`get_exchange_clipped_blocks` of both schedulers, `_logical_to_kernel_block_ids`, `_apply_prefix_caching` and "
        "`_compute_desc_ids`, one after the other. *Whole path*: what the engine calls, `start_load_kv` down to NIXL, "
        "with its copies and checks. vLLM's functions always start from lists. The three functions and `DescriptorOrder` "
        "give vLLM's own ids and, as vLLM, pair lists by their ends. Before it is timed, each request is compared: vLLM "
        "moves every byte that kvhma moves, between the same two addresses.",
    )


if __name__ == "__main__":
    main()
