# SPDX-License-Identifier: Apache-2.0
"""Geometry of live workers: vLLM's own specs and views, judged by the byte oracle."""

import itertools

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvhma
from kvhma.errors import KvhmaError, UnsupportedPairError
from kvhma.oracle import Oracle
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo

BF16 = torch.bfloat16
BLOCKS = 8
ALONE = RankInfo()


def full(heads=2, block=16, **more):
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=8, dtype=BF16, **more)


def sliding(heads=2, block=16, window=24, **more):
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=8, dtype=BF16, sliding_window=window, **more
    )


def chunked(heads=2, block=16):
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=8, dtype=BF16, attention_chunk_size=32
    )


def mla(block=16):
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=24, dtype=BF16, max_tp_shards=1)


def mamba2(tp, *, heads=4, groups=1, order="DS", padded=None, spec=0):
    held = max(1, groups // tp)
    channels, rows = heads // tp * 4 + 2 * held * 8, 3 + spec
    conv = (channels, rows) if order == "DS" else (rows, channels)
    return MambaSpec(
        block_size=64,
        shapes=(conv, (heads // tp, 4, 8)),
        dtypes=(BF16, torch.float32),
        page_size_padded=padded,
        num_speculative_blocks=spec,
    )


def gdn(tp, *, order="DS", padded=None):
    channels, rows = (2 * 2 * 8 + 4 * 4) // tp, 3
    conv = (channels, rows) if order == "DS" else (rows, channels)
    return MambaSpec(
        block_size=64,
        shapes=(conv, (4 // tp, 4, 8)),
        dtypes=(BF16, torch.float32),
        page_size_padded=padded,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )


def writer_of(specs, cpu_kernel=None):
    """The writer of layers with these specs on a GPU, or a kernel's writer on a CPU."""
    if cpu_kernel is not None:
        return Writer("CPU_ATTN", "cpu", cpu_kernel=cpu_kernel)
    latent = any("MLA" in type(spec).__name__ for spec in specs)
    return Writer("TRITON_MLA" if latent else "FLASH_ATTN", "cuda", "9.0")


def worker(specs, *, layout="LBHNC", kernel=None, rank_info=ALONE, each=2, cpu_kernel=None):
    """A worker with `each` layers of every spec, laid out by vLLM; groups share their memory."""
    page = max(spec.page_size_bytes for spec in specs)
    order = KVCacheLayout[layout]
    raw = torch.zeros(each * BLOCKS * page + 64, dtype=torch.int8)
    tensors, groups, caches = [], [], {}
    for index, spec in enumerate(specs):
        names = [f"model.layers.{index + len(specs) * at}.attn" for at in range(each)]
        strides = compute_layout_strides(spec, BLOCKS, each, order)
        tensor = KVCacheTensor(raw.numel(), names, layer_stride=strides[0], block_stride=strides[1])
        used = None if isinstance(spec, MambaSpec) else kernel
        views = create_kv_cache_views(raw, spec, BLOCKS, order, tensor, used)
        caches |= dict(zip(names, views, strict=True))
        tensors.append(tensor)
        groups.append(KVCacheGroupSpec(names, spec))
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)
    writer = writer_of(specs, cpu_kernel)
    return geometry_of(config, caches, rank_info, writer=lambda _: writer)


def tables_of(geometry, tokens):
    """Block tables from a fresh pool: groups never share a block."""
    free = itertools.count(1)
    return [
        [next(free) for _ in range(1 + group.speculative if group.kind == "ssm" else -(-tokens // group.block_size))]
        for group in geometry.groups
    ]


def moved(local, remotes, tokens=(1, 15, 16, 17, 40, 64)):
    """Let the oracle judge hand-offs of some lengths."""
    plan = kvhma.plan(local, remotes)
    for count in tokens:
        mine, theirs = (kvhma.live_spans(side, count, tables_of(side, count)) for side in (local, remotes[0]))
        Oracle(local, remotes).check(count, mine, theirs, plan.transfer(count, mine, theirs))


@pytest.mark.parametrize(("mine", "theirs"), [(16, 32), (32, 16), (16, 16)])
def test_chunks_in_blocks_of_other_sizes(mine, theirs):
    """test_formats.py has the other formats, with their bytes."""
    moved(worker([chunked(block=mine)]), [worker([chunked(block=theirs)])])


def test_a_hybrid_with_padded_pages_of_state():
    attention = full(block=64)
    state = mamba2(1, padded=attention.page_size_bytes, spec=2)
    geometry = worker([attention, state], rank_info=RankInfo(state_groups=1))
    assert geometry.groups[1].speculative == 2
    assert len(geometry.regions) == 1
    assert geometry.layers[2].block_stride == attention.page_size_bytes
    assert sum(part.nbytes for part in geometry.layers[2].page.parts) == state.state_content_size_bytes


def test_a_padded_page_of_attention():
    padded = worker([sliding(page_size_padded=2048)])
    assert padded.layers[0].block_stride == 2048
    moved(padded, [worker([sliding()])])


def test_a_group_of_layers_with_other_heads():
    specs = {"a": full(heads=2), "b": full(heads=4)}
    raw = torch.zeros(BLOCKS * sum(spec.page_size_bytes for spec in specs.values()), dtype=torch.int8)
    tensors, caches, offset = [], {}, 0
    for name, spec in specs.items():
        page = spec.page_size_bytes
        tensor = KVCacheTensor(raw.numel(), [name], layer_stride=page * BLOCKS, block_stride=page, offset=offset)
        caches[name] = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, tensor)[0]
        tensors.append(tensor)
        offset += page * BLOCKS
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])
    geometry = geometry_of(config, caches, RankInfo(), writer=lambda _: writer_of([]))
    assert [layer.page.nbytes for layer in geometry.layers] == [1024, 2048]
    moved(geometry, [geometry])


def test_layers_that_use_the_cache_of_another_are_left_out():
    spec = full()
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(raw.numel(), ["a"], layer_stride=raw.numel(), block_stride=spec.page_size_bytes)
    view = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, tensor)[0]
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(["a", "b"], spec)])
    assert [layer.name for layer in geometry_of(config, {"a": view, "b": view}, RankInfo()).layers] == ["a"]


def test_the_cpu_kernels():
    tiles, rows = (worker([full(block=32)], cpu_kernel=name) for name in ("amx", "vec"))
    other = worker([full(block=64)], cpu_kernel="amx")
    moved(tiles, [tiles])
    moved(rows, [worker([full(block=64)], cpu_kernel="vec")])
    for remote in (rows, other, worker([full(block=32)])):
        with pytest.raises(UnsupportedPairError):
            kvhma.plan(tiles, remote)


@pytest.mark.parametrize(
    "spec",
    [full(num_head_slots=4), full(state_content_bytes=40), full(tokens_per_state=4)],
    ids=["head slots", "content bytes", "tokens per state"],
)
def test_contents_that_are_not_known_pair_only_with_their_like(spec):
    alone = worker([spec])
    kvhma.plan(alone, alone)
    with pytest.raises(UnsupportedPairError):
        kvhma.plan(alone, worker([full()]))
    with pytest.raises(UnsupportedPairError, match="tp2"):
        kvhma.plan(alone, [worker([spec], rank_info=RankInfo(rank, 2)) for rank in range(2)])


def test_dtypes_are_compared():
    with pytest.raises(KvhmaError, match=r"bfloat16.*float16"):
        kvhma.plan(
            worker([full()]),
            worker([FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)]),
        )
