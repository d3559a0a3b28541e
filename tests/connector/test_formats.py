# SPDX-License-Identifier: Apache-2.0
"""A decode engine's reader finds what a kernel wrote at the prefill engine, for every known cache format.

Writers and readers are imitated from vLLM's kernels (tests/support/writers.py). The plan runs between them, in memory
that was filled with other bytes before.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Page, Part
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from support import writers
from support.vllm_caches import allocated
from support.writers import Cache, Places, execute

BF16, U8, I8 = torch.bfloat16, torch.uint8, torch.int8
LAYOUTS = [layout.name for layout in KVCacheLayout]
LAYERS = 3


@dataclass(frozen=True)
class Format:
    """A cache format: vLLM's spec, its writer, and where its writer and its reader put their bytes.

    Attributes:
        spec: from the tokens of a block and the heads that a rank holds.
        cell: bytes of a token and head.
        write: where the writer puts them.
        writer: the writer that kvhma is given.
        heads: over all ranks; None where every rank holds the same.
        read: where the reader looks; defaults to where the writer put the bytes.
        window: tokens that a query sees with itself; None for all.
        block: tokens of a block, small enough to try every prompt length.
        kernel: tokens of a kernel block; None for a block.
        layouts: orders in which vLLM lays this format out.
        whole: whether too little is known to cut it: only an equal engine reads it.
    """

    spec: Callable[[int, int], Any]
    cell: int
    write: Places
    writer: Writer
    heads: int | None = None
    read: Places | None = None
    window: int | None = None
    block: int = 8
    kernel: int | None = None
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    whole: bool = False


def full(**more: Any) -> Callable[[int, int], Any]:
    options = {"head_size": 8, "dtype": BF16} | more
    return lambda block, heads: FullAttentionSpec(block_size=block, num_kv_heads=heads, **options)


def latent(**more: Any) -> Callable[[int, int], Any]:
    return lambda block, _: MLAAttentionSpec(block_size=block, num_kv_heads=1, max_tp_shards=1, **more)


def window(**more: Any) -> Callable[[int, int], Any]:
    options = {"num_kv_heads": 1, "max_tp_shards": 1, "dtype": U8, "sliding_window": 128} | more
    return lambda block, _: SlidingWindowMLASpec(block_size=block, **options)


FP8 = "fp8_e4m3/float8_e4m3fn"
DS_MLA = "fp8_ds_mla/float8_e4m3fn"
PACKED = {"head_size": 512, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
BLOCK_BY_BLOCK = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Orders in which a page with several heads is contiguous."""
HND = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
"""Orders in which tokens and content of a head are contiguous."""
LAYER_BY_LAYER = ("LBHNC", "LBNHC", "LHBNC")


def gpu(backend: str, cache_dtype: str = "", version: str = "0.33.0") -> Writer:
    return Writer(backend, "cuda", "9.0", cache_dtype, version)


def cpu(backend: str, kernel: str | None = None) -> Writer:
    return Writer(backend, "cpu", version="0.33.0", cpu_kernel=kernel)


def sliding(**more: Any) -> Callable[[int, int], Any]:
    options = {"head_size": 8, "dtype": BF16, "sliding_window": 6} | more
    return lambda block, heads: SlidingWindowSpec(block_size=block, num_kv_heads=heads, **options)


INDEXER = Format(
    latent(head_size=132, dtype=U8, cache_role=SparseCacheRole.INDEXER),
    132,
    writers.indexer_k_quant_and_cache,
    gpu("DEEPSEEK_V32_INDEXER", "indexer-fp8/float32/float8_e4m3fn"),
    read=writers.cp_gather_indexer_k_quant_cache,
)
WINDOW = Format(
    window(**PACKED, state_content_bytes=584, alignment=576),
    584,
    writers.deepseek_v4_window,
    gpu("DEEPSEEK_SPARSE_SWA", DS_MLA),
    window=128,
)
FLASH = Format(full(), 32, writers.reshape_and_cache_flash(16, 16), gpu("FLASH_ATTN"), heads=2)
VEC = Format(full(), 32, writers.cpu_vec(8), cpu("CPU_ATTN", "vec"), heads=2, layouts=HND)
AMX = Format(full(head_size=32), 128, writers.cpu_amx(32), cpu("CPU_ATTN", "amx"), heads=2, layouts=HND, block=32)

FORMATS = {
    "flash": FLASH,
    "flashinfer": replace(
        FLASH, writer=gpu("FLASHINFER"), read=writers.flashinfer_paged_kv(16, 16), layouts=BLOCK_BY_BLOCK
    ),
    "triton": replace(FLASH, writer=gpu("TRITON_ATTN")),
    "flex": replace(FLASH, writer=gpu("FLEX_ATTENTION")),
    # vLLM prefers it for models that see pictures: Triton's kernels write, and either child reads.
    "triton and flash": replace(FLASH, writer=gpu("TRITON_FLASH_ATTN")),
    "triton and flashinfer": replace(
        FLASH, writer=gpu("TRITON_FLASHINFER"), read=writers.flashinfer_paged_kv(16, 16), layouts=BLOCK_BY_BLOCK
    ),
    "K and V of other sizes": Format(
        full(head_size_v=4), 24, writers.reshape_and_cache_flash(16, 8), gpu("FLASH_ATTN_DIFFKV"), heads=2
    ),
    "8-bit floats": Format(
        full(dtype=U8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        16,
        writers.reshape_and_cache_flash(8, 8),
        gpu("TRITON_ATTN", FP8),
        heads=2,
    ),
    "int8 by token and head": Format(
        full(dtype=I8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=24),
        24,
        writers.per_token_head(8),
        gpu("TRITON_ATTN", "int8_per_token_head"),
        heads=2,
    ),
    "a window": Format(sliding(), 32, writers.reshape_and_cache_flash(16, 16), gpu("FLASH_ATTN"), heads=2, window=6),
    "NVFP4": Format(
        lambda block, heads: FullAttentionSpec(
            block_size=block,
            num_kv_heads=heads,
            head_size=64,
            dtype=U8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=2 * heads,
            state_content_bytes=36,
        ),
        72,
        writers.nvfp4(64),
        gpu("FLASHINFER", "nvfp4"),
        heads=2,
        layouts=("LBHNC", "BLHNC"),
        whole=True,
    ),
    "MLA": Format(latent(head_size=24, dtype=BF16), 48, writers.concat_and_cache_mla(32, 16), gpu("TRITON_MLA")),
    "MLA, 8-bit floats": Format(
        latent(head_size=24, dtype=U8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, cache_dtype_str="fp8"),
        24,
        writers.concat_and_cache_mla(16, 8),
        gpu("FLASHMLA", FP8),
    ),
    "MLA on a CPU": Format(
        latent(head_size=24, dtype=BF16),
        48,
        writers.concat_and_cache_mla(32, 16),
        cpu("AMX_MLA"),
        read=writers.flat_rows(48),
        layouts=LAYER_BY_LAYER,
    ),
    "fp8_ds_mla": Format(
        latent(
            head_size=576,
            dtype=U8,
            state_content_bytes=656,
            cache_dtype_str="fp8_ds_mla",
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        ),
        656,
        writers.fp8_ds_mla,
        gpu("FLASHMLA_SPARSE", DS_MLA),
    ),
    "nvfp4_ds_mla": Format(
        latent(
            head_size=576,
            dtype=U8,
            state_content_bytes=352,
            cache_dtype_str="nvfp4_ds_mla",
            kv_quant_mode=KVQuantMode.NVFP4_DS_MLA,
        ),
        352,
        writers.nvfp4_ds_mla,
        gpu("FLASHMLA_SPARSE", "nvfp4_ds_mla"),
    ),
    "indexer": INDEXER,
    "V4 window": WINDOW,
    "V4 window, short": replace(
        WINDOW, spec=window(**PACKED, state_content_bytes=584, alignment=576, sliding_window=6), window=6
    ),
    "V4.1 window of 0.32": replace(
        WINDOW,
        spec=window(**PACKED, state_content_bytes=528, alignment=512),
        cell=528,
        write=writers.deepseek_v41_window_apart,
        writer=gpu("DEEPSEEK_SPARSE_SWA", DS_MLA, "0.32.0"),
    ),
    "V4.1 window of 0.33": replace(
        WINDOW,
        spec=window(**PACKED, state_content_bytes=528, alignment=512),
        cell=528,
        write=writers.deepseek_v41_window,
    ),
    "V4 window of plain floats": Format(
        window(head_size=24, dtype=BF16, model_version="deepseek_v4", alignment=512),
        48,
        writers.strided_rows(48),
        gpu("DEEPSEEK_SPARSE_SWA"),
        window=128,
    ),
    "V4 state of a compressor": Format(
        window(head_size=16, dtype=torch.float32, sliding_window=8, alignment=512),
        64,
        writers.strided_rows(64),
        gpu("CompressorBackend"),
        window=8,
        block=4,
    ),
    "MiniMax-M3 indexer": Format(
        latent(head_size=24, dtype=BF16, cache_role=SparseCacheRole.INDEXER),
        48,
        writers.strided_rows(48),
        gpu("MINIMAX_M3_SPARSE_INDEXER"),
    ),
    # Every rank holds the same bytes, so an unknown format may be read at any number of ranks.
    "rows of an unknown format": Format(
        latent(head_size=24, dtype=BF16), 48, writers.strided_rows(48), gpu("SOMEBODY_S_OWN"), whole=True
    ),
    "columns on a CPU": VEC,
    "columns of 8-bit floats on a CPU": replace(
        VEC,
        spec=full(dtype=U8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        cell=16,
        write=writers.cpu_vec(8, item=1),
        writer=replace(VEC.writer, cache_dtype=FP8),
    ),
    "tiles on a CPU": AMX,
}
"""Every format that is described or moved as a whole, and can be imitated."""


class Engine:
    """The ranks of an engine with `LAYERS` layers of one format, each with separate memory."""

    def __init__(self, form: Format, *, seed: int, layout="LBHNC", block=None, kernel=None, tp=1, blocks=8) -> None:
        self.form = form
        self.block = block or form.block
        self.random = np.random.default_rng(seed)
        self.held = 1 if form.heads is None else max(1, form.heads // tp)
        spec = form.spec(self.block, self.held)
        names = [f"model.layers.{index}.attn" for index in range(LAYERS)]
        self.raws, self.caches, self.geometries, self.firsts = [], [], [], []
        for rank in range(tp):
            raw, views, config = allocated(spec, blocks, names, layout, kernel or form.kernel)
            self.geometries.append(geometry_of(config, views, RankInfo(rank, tp), writer=lambda _: form.writer))
            self.caches.append([Cache.of(raw, view, KVCacheLayout[layout]) for view in views.values()])
            self.firsts.append(0 if form.heads is None else rank * form.heads // tp)
            self.raws.append(raw)
        self.table = self.random.permutation(np.arange(1, blocks))
        self.fill()

    def fill(self) -> None:
        """Fill the memory with bytes that no reader expects."""
        for raw in self.raws:
            memory = raw.numpy().view(np.uint8)
            memory[:] = self.random.integers(0, 256, memory.size, dtype=np.uint8)

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        return self.table[tokens // self.block] * self.block + tokens % self.block

    def write(self, cells: np.ndarray) -> None:
        """Write cells [layers, tokens, heads, bytes] of a prompt."""
        slots = self.slots(np.arange(cells.shape[1]))
        for caches, first in zip(self.caches, self.firsts, strict=True):
            for cache, rows in zip(caches, cells[:, :, first : first + self.held], strict=True):
                writers.write(cache, self.form.write, slots, rows)

    def wrong(self, rank: int, cells: np.ndarray) -> int:
        """Count the tokens and layers where a rank's reader finds something else than `cells`."""
        count = cells.shape[1]
        tokens = np.arange(0 if self.form.window is None else max(0, count - self.form.window + 1), count)
        slots, first = self.slots(tokens), self.firsts[rank]
        read = self.form.read or self.form.write
        found = [cache.memory[read(cache, slots)] for cache in self.caches[rank]]
        expected = cells[:, tokens, first : first + self.held]
        return sum(int((rows != right).any(axis=(1, 2)).sum()) for rows, right in zip(found, expected, strict=True))

    def tables(self, tokens: int) -> list[list[int]]:
        return [self.table[: -(-tokens // self.block)].tolist()]


Mutation = Callable[[Geometry], Geometry]


def wrong_after(
    decode: Engine,
    prefill: Engine,
    lengths: Iterable[int],
    *,
    here: Mutation = lambda geometry: geometry,
    there: Mutation = lambda geometry: geometry,
    descriptor_bytes: int = 1,
) -> dict[int, int]:
    """Hand off prompts of these lengths; return how many tokens, of all layers, each rank's readers find wrong.

    Where a descriptor costs next to nothing, the plan moves no whole block that a prompt does not fill.
    """
    remotes = [there(geometry) for geometry in prefill.geometries]
    theirs = [raw.numpy().view(np.uint8) for raw in prefill.raws]
    locals_ = [here(geometry) for geometry in decode.geometries]
    plans = [kvhma.plan(local, remotes, descriptor_bytes=descriptor_bytes) for local in locals_]
    heads = decode.form.heads or 1
    found = {}
    for count in lengths:
        cells = prefill.random.integers(0, 256, (LAYERS, count, heads, decode.form.cell), dtype=np.uint8)
        prefill.fill()
        prefill.write(cells)
        decode.fill()
        found[count] = 0
        for rank, (local, plan) in enumerate(zip(locals_, plans, strict=True)):
            mine, remote = (
                kvhma.live_spans(side, count, engine.tables(count))
                for side, engine in ((local, decode), (remotes[0], prefill))
            )
            transfer = plan.transfer(count, mine, remote)
            execute(transfer, local, decode.raws[rank].numpy().view(np.uint8), remotes, theirs)
            found[count] += decode.wrong(rank, cells)
    return found


def as_rows(geometry: Geometry) -> Geometry:
    """Describe pages as kvhma did until November 2026: one row of content a token."""

    def change(part: Part, size: int) -> Part:
        tokens = part.axes[0].extent
        return Part("kv", part.dtype, 1, 0, (Axis("tokens", tokens, size), Axis("content", size, 1)))

    def page(page: Page) -> Page:
        size = sum(part.axes[1].extent for part in page.parts)
        return Page((change(page.parts[0], size),))

    return replace(geometry, layers=tuple(replace(layer, page=page(layer.page)) for layer in geometry.layers))


def pairs_of_layouts(form: Format) -> list[tuple[str, str]]:
    """Every layout at each side at least once, with equal and unequal sides."""
    mine = form.layouts
    return [(one, one) for one in mine] + list(zip(mine, (*mine[1:], mine[0]), strict=True)) * (len(mine) > 1)


def cases() -> list[Any]:
    return [
        pytest.param(name, here, there, id=f"{name}: {here} from {there}")
        for name, form in FORMATS.items()
        for here, there in pairs_of_layouts(form)
    ]


@pytest.mark.parametrize(("name", "here", "there"), cases())
def test_every_prompt_of_two_blocks(name, here, there):
    form = FORMATS[name]
    decode, prefill = Engine(form, seed=1, layout=here), Engine(form, seed=2, layout=there)
    found = wrong_after(decode, prefill, range(1, 2 * form.block + 1))
    assert {count: wrong for count, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (3, 2)])
def test_blocks_of_other_sizes(name, mine, theirs):
    form = FORMATS[name]
    decode, prefill = (Engine(form, seed=n, block=n * form.block) for n in (mine, theirs))
    if form.whole or form is AMX:
        with pytest.raises(UnsupportedPairError, match=r"kernel block|content cannot|extent"):
            kvhma.plan(decode.geometries[0], prefill.geometries)
        return
    assert set(wrong_after(decode, prefill, range(1, 2 * max(mine, theirs) * form.block + 1)).values()) == {0}


@pytest.mark.parametrize("name", FORMATS)
def test_kernel_blocks(name):
    """Data precedes scales in a kernel's block, not in a manager's; blocks of tiles may then differ as well."""
    form = FORMATS[name]
    if "alignment" in repr(form.spec(8, 1)) and form.spec(8, 1).page_size_padded is not None:
        pytest.skip("vLLM does not split padded pages")
    decode = Engine(form, seed=1, block=2 * form.block, kernel=form.block)
    prefill = Engine(form, seed=2, block=form.block)
    assert set(wrong_after(decode, prefill, range(1, 4 * form.block + 1)).values()) == {0}
    assert set(wrong_after(prefill, decode, range(1, 4 * form.block + 1)).values()) == {0}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 1)])
def test_ranks(name, mine, theirs):
    form = FORMATS[name]
    decode, prefill = Engine(form, seed=1, tp=mine), Engine(form, seed=2, tp=theirs)
    if form.whole and form.heads is not None and mine != theirs:
        with pytest.raises(UnsupportedPairError, match="content cannot be paired"):
            kvhma.plan(decode.geometries[0], prefill.geometries)
        return
    assert set(wrong_after(decode, prefill, range(1, 2 * form.block + 1)).values()) == {0}


@pytest.mark.parametrize(
    ("mine", "theirs"), list(itertools.permutations(["flash", "triton", "triton and flashinfer"], 2))
)
@pytest.mark.parametrize(("ranks", "blocks"), [((1, 2), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (1, 2)), ((2, 1), (2, 1))])
def test_one_backend_reads_what_another_one_wrote(mine, theirs, ranks, blocks):
    """For example an H100 for prefill and a B200 for decode, each with the backend that vLLM prefers there."""
    decode, prefill = (
        Engine(FORMATS[name], seed=seed, tp=tp, block=8 * times)
        for seed, (name, tp, times) in enumerate(zip((mine, theirs), ranks, blocks, strict=True))
    )
    assert set(wrong_after(decode, prefill, range(1, 33)).values()) == {0}


def test_what_is_whole_says_in_which_order_it_is():
    """Heads before tokens, or tokens before heads, are as many bytes."""
    unknown = replace(FLASH, writer=gpu("SOMEBODY_S_OWN"), layouts=BLOCK_BY_BLOCK, whole=True)
    for here, there in itertools.product(BLOCK_BY_BLOCK, BLOCK_BY_BLOCK):
        decode, prefill = Engine(unknown, seed=1, layout=here), Engine(unknown, seed=2, layout=there)
        if here[-3:] == there[-3:]:
            assert set(wrong_after(decode, prefill, range(1, 17)).values()) == {0}
        else:
            with pytest.raises(UnsupportedPairError, match=r"(N8H2|H2N8).*(N8H2|H2N8)"):
                kvhma.plan(decode.geometries[0], prefill.geometries)


COMPRESSED = {
    "DeepSeek-V4": ("FLASHMLA_SPARSE_DSV4", {**PACKED, "state_content_bytes": 584, "alignment": 576, "dtype": U8}),
    "DeepSeek-V4, floats": ("FLASHMLA_SPARSE_DSV4", {"head_size": 512, "dtype": BF16, "alignment": 512}),
    "indexer of DeepSeek-V4": ("DEEPSEEK_V4_INDEXER", {"head_size": 132, "dtype": U8, "alignment": 576}),
    "indexer of GLM-5": ("DEEPSEEK_V32_INDEXER", {"head_size": 132, "dtype": U8}),
}
"""Specs of vLLM's models whose states stand for several tokens."""


def blocks_of(spec: Any, backend: str, rank: int, tp: int, *, seed: int, **more: Any) -> tuple[Any, Any, Geometry]:
    """Return a rank's memory of six blocks, as bytes; its view and its geometry."""
    raw, views, config = allocated(spec, 6)
    memory = raw.numpy().view(np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
    geometry = geometry_of(config, views, RankInfo(rank, tp, **more), writer=lambda _: gpu(backend, DS_MLA))
    return memory, views["a"], geometry


def read_block(local: tuple[Any, Any, Geometry], sources: list[tuple[Any, Any, Geometry]], tokens: int, to, of) -> None:
    """Read the blocks `of` of all sources into the blocks `to`."""
    memory, _, geometry = local
    remotes = [remote for *_, remote in sources]
    transfer = kvhma.plan(geometry, remotes).transfer(tokens, [kvhma.Span(0, to)], [kvhma.Span(0, of)])
    execute(transfer, geometry, memory, remotes, [source for source, *_ in sources])


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize(("mine", "theirs"), [(4, 4), (4, 8), (8, 4), (1, 2)])
def test_what_every_rank_holds_is_read_at_any_number_of_ranks(name, mine, theirs):
    """In vLLM these caches have one shard over all ranks. Only blocks that are equal arrive."""
    backend, more = COMPRESSED[name]
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, max_tp_shards=1, tokens_per_state=4, **more)
    prefill = [blocks_of(spec, backend, rank, theirs, seed=5) for rank in range(theirs)]
    for rank in range(mine):
        decode = memory, view, _ = blocks_of(spec, backend, rank, mine, seed=10 + rank)
        before = memory.reshape(6, -1).copy()
        read_block(decode, prefill, 300, [4, 1], [2, 5])
        assert torch.equal(view[4].view(torch.int8), prefill[0][1][2].view(torch.int8))
        assert torch.equal(view[1].view(torch.int8), prefill[0][1][5].view(torch.int8))
        others = [0, 2, 3, 5]
        assert np.array_equal(memory.reshape(6, -1)[others], before[others])


def test_ranks_that_share_tokens_hold_no_copies():
    """With context parallelism each rank has its own tokens, also of whole caches."""
    backend, more = COMPRESSED["DeepSeek-V4"]
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, max_tp_shards=1, tokens_per_state=4, **more)
    assert spec.dcp_sharded
    shared = {"cp_size": 2, "cp_interleave": 256, "cp_tp_size": 2}
    prefill = [blocks_of(spec, backend, rank, 2, seed=5, cp_rank=rank, **shared)[2] for rank in range(2)]
    _, _, decode = blocks_of(spec, backend, 0, 1, seed=5)
    with pytest.raises(UnsupportedPairError, match="content cannot be paired"):
        kvhma.plan(decode, prefill)


def test_shards_that_several_ranks_hold():
    """With two shards over four ranks, the first two hold the first. D reads whole caches from the ranks that have
    them."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, max_tp_shards=2)
    prefill = [blocks_of(spec, "SOMEBODY_S_OWN", rank, 4, seed=rank // 2) for rank in range(4)]
    for rank in range(2):
        decode = blocks_of(spec, "SOMEBODY_S_OWN", rank, 2, seed=10)
        read_block(decode, prefill, 16, [4], [2])
        assert torch.equal(decode[1][4].view(torch.int8), prefill[2 * rank][1][2].view(torch.int8))
    with pytest.raises(UnsupportedPairError, match="content cannot be paired"):
        read_block(blocks_of(spec, "SOMEBODY_S_OWN", 0, 1, seed=10), prefill, 16, [4], [2])


# --- recurrent state -----------------------------------------------------------------------------------------------

HEADS, HEAD, SIZE, ROWS = 4, 4, 8, 3


def recurrent(kind: str, random: np.random.Generator, groups: int = 1) -> writers.State:
    """Some state of a small model; the convolution in bfloat16, the rest in float32."""

    def column(channels: int) -> np.ndarray:
        return random.integers(0, 256, (channels, ROWS, 2), dtype=np.uint8)

    size = 4 * (SIZE if kind == "mamba1" else HEAD * SIZE)
    columns = {
        "mamba1": {"x": HEADS},
        "mamba2": {"x": HEADS * HEAD, "B": groups * SIZE, "C": groups * SIZE},
        # Half as many heads of q and k as of v.
        "gdn": {"q": HEADS // 2 * SIZE, "k": HEADS // 2 * SIZE, "v": HEADS * HEAD},
        "kda": {"q": HEADS * SIZE, "k": HEADS * SIZE, "v": HEADS * SIZE},
    }[kind]
    if kind == "kda":
        size = 4 * SIZE * SIZE
    state = random.integers(0, 256, (HEADS, size), dtype=np.uint8)
    shared = {"B": groups, "C": groups} if kind == "mamba2" else {}
    return writers.State({name: column(channels) for name, channels in columns.items()}, state, shared)


def state_spec(kind: str, tp: int, order: str, groups: int) -> MambaSpec:
    """The spec as vLLM's own layers make it."""
    shapes = {
        "mamba1": lambda: MambaStateShapeCalculator.mamba1_state_shape(tp, HEADS, SIZE, ROWS + 1),
        "mamba2": lambda: MambaStateShapeCalculator.mamba2_state_shape(
            tp, HEADS * HEAD, groups, HEADS, HEAD, SIZE, ROWS + 1
        ),
        "gdn": lambda: MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, HEADS // 2, HEADS, SIZE, HEAD, ROWS + 1
        ),
        "kda": lambda: MambaStateShapeCalculator.kda_state_shape(tp, HEADS, SIZE, conv_kernel_size=ROWS + 1),
    }[kind]()
    conv, *rest = shapes
    turned = conv if (conv[1] == ROWS) == (order == "DS") else conv[::-1]
    backend = {"mamba1": "MAMBA1", "mamba2": "MAMBA2"}.get(kind, "GDN_ATTN")
    return MambaSpec(
        block_size=64,
        shapes=(turned, *rest),
        dtypes=(BF16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[backend],
    )


@pytest.mark.parametrize(
    ("kind", "groups"), [("mamba1", 1), ("mamba2", 1), ("mamba2", 2), ("mamba2", 4), ("gdn", 1), ("kda", 1)]
)
@pytest.mark.parametrize(("mine", "theirs"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize(("here", "there"), [("DS", "DS"), ("SD", "DS"), ("DS", "SD"), ("SD", "SD")])
def test_recurrent_state(kind, groups, mine, theirs, here, there):
    if kind == "mamba2" and any(groups % tp for tp in (mine, theirs)) and groups > 1:
        pytest.skip("vLLM does not start with more than one group that does not divide over the ranks")
    if kind == "gdn" and mine == 4:
        pytest.skip("two heads of keys do not divide over four ranks")
    state = recurrent(kind, np.random.default_rng(7), groups)

    def ranks(tp: int, order: str, seed: int) -> list[tuple[Any, Any, Geometry]]:
        spec = state_spec(kind, tp, order, groups)
        held = groups if kind == "mamba2" else None
        return [blocks_of(spec, "", rank, tp, seed=seed + rank, state_groups=held) for rank in range(tp)]

    sources = ranks(theirs, there, 10)
    for rank, (memory, *_) in enumerate(sources):
        page = state.page(rank, theirs, there)
        memory.reshape(6, -1)[3, : page.size] = page
    for rank, decode in enumerate(ranks(mine, here, 20)):
        read_block(decode, sources, 5, [1], [3])
        expected = state.page(rank, mine, here)
        assert (decode[0].reshape(6, -1)[1, : expected.size] == expected).all()


# --- descriptions that are wrong -----------------------------------------------------------------------------------


def with_parts(change: Callable[[Part], tuple[Part, ...]]) -> Mutation:
    """Change every part of every page."""

    def mutate(geometry: Geometry) -> Geometry:
        def page(page: Page) -> Page:
            return Page(tuple(new for part in page.parts for new in change(part)))

        return replace(geometry, layers=tuple(replace(layer, page=page(layer.page)) for layer in geometry.layers))

    return mutate


def halves(first: str, second: str) -> Mutation:
    """K and V of a page of FlashAttention as two parts, by these names."""

    def change(part: Part) -> tuple[Part, ...]:
        heads, tokens, content = part.axes
        half = replace(content, extent=content.extent // 2, length=content.extent // 2)
        axes = (heads, tokens, half)
        behind = half.extent * part.item_bytes
        return Part(first, part.dtype, part.item_bytes, 0, axes), Part(
            second, part.dtype, part.item_bytes, behind, axes
        )

    return with_parts(change)


def turned(part: Part) -> tuple[Part, ...]:
    """Exchange the strides of heads and tokens, as if the page were in the other order."""
    heads, tokens, content = part.axes
    size = content.extent * part.item_bytes
    axes = (replace(heads, stride=size), replace(tokens, stride=size * (heads.length or 0)), content)
    return (replace(part, axes=axes),)


def tiles_as_tokens(part: Part) -> tuple[Part, ...]:
    heads, packed = part.axes
    tokens = AMX.block
    size = packed.extent // tokens
    axes = (heads, Axis("tokens", tokens, size * part.item_bytes), Axis("content", size, part.item_bytes))
    return (replace(part, axes=axes),)


def columns_as_rows(part: Part) -> tuple[Part, ...]:
    """K of the CPU's vector kernel with its axes exchanged, which is as large."""
    if part.name != "k":
        return (part,)
    heads, content, tokens = part.axes
    size = content.extent * part.item_bytes
    return (replace(part, axes=(heads, replace(content, stride=part.item_bytes), replace(tokens, stride=size))),)


def scales_first(part: Part) -> tuple[Part, ...]:
    return (replace(part, offset=0 if part.name == "scales" else INDEXER.block * 4),)


def nothing(geometry: Geometry) -> Geometry:
    return geometry


WRONG = {
    "scales between the tokens": (INDEXER, as_rows, as_rows, "LBNHC", "LBNHC"),
    "scales of the window between the tokens": (WINDOW, as_rows, as_rows, "LBHNC", "LBHNC"),
    "scales before the keys at one side": (INDEXER, with_parts(scales_first), nothing, "LBHNC", "LBHNC"),
    "K and V exchanged at one side": (FLASH, halves("v", "k"), halves("k", "v"), "LBHNC", "LBHNC"),
    "stride of heads wrong at one side": (FLASH, with_parts(turned), nothing, "LBHNC", "LBHNC"),
    "stride of heads wrong at both sides": (FLASH, with_parts(turned), with_parts(turned), "LBHNC", "LBHNC"),
    "tokens of tiles": (AMX, with_parts(tiles_as_tokens), with_parts(tiles_as_tokens), "LBHNC", "LBHNC"),
    "columns as rows": (VEC, with_parts(columns_as_rows), with_parts(columns_as_rows), "LBHNC", "LBHNC"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_description_is_seen(name):
    form, here, there, mine, theirs = WRONG[name]
    decode, prefill = Engine(form, seed=1, layout=mine), Engine(form, seed=2, layout=theirs)
    lengths = range(1, 2 * form.block + 1)
    assert sum(wrong_after(decode, prefill, lengths).values()) == 0
    assert sum(wrong_after(decode, prefill, lengths, here=here, there=there).values()) > 0


def test_versions_that_store_the_same_spec_in_another_way_are_refused():
    old, new = (Engine(FORMATS[f"V4.1 window of {version}"], seed=1) for version in ("0.32", "0.33"))
    assert old.form.spec(8, 1) == new.form.spec(8, 1)
    with pytest.raises(UnsupportedPairError, match="parts"):
        kvhma.plan(old.geometries[0], new.geometries)


@pytest.mark.parametrize(
    ("form", "mine", "theirs"),
    [
        # The same spec, bytes of other meaning.
        (INDEXER, "indexer-fp8/float32/float8_e4m3fn", "indexer-fp8/mx/float8_e4m3fn"),
        (INDEXER, "indexer-fp8/float32/float8_e4m3fn", "indexer-mxfp4/mx/float8_e4m3fn"),
        (FORMATS["8-bit floats"], "fp8_e4m3/float8_e4m3fn", "fp8_e5m2/float8_e4m3fn"),
        (FORMATS["8-bit floats"], "fp8_e4m3/float8_e4m3fn", "fp8_e4m3/float8_e4m3fnuz"),
        (FORMATS["fp8_ds_mla"], "fp8_ds_mla/float8_e4m3fn", "fp8_ds_mla/float8_e4m3fnuz"),
    ],
)
def test_cache_types_that_no_spec_says_are_compared(form, mine, theirs):
    here, there = (
        Engine(replace(form, writer=replace(form.writer, cache_dtype=kind)), seed=1) for kind in (mine, theirs)
    )
    with pytest.raises(UnsupportedPairError, match=f"(?s){mine}.*{theirs}|parts"):
        kvhma.plan(here.geometries[0], there.geometries)


@pytest.mark.parametrize(
    "writer",
    [
        Writer("DEEPSEEK_V32_INDEXER", "rocm", "9.4", "indexer-fp8/float32/float8_e4m3fnuz", "0.33.0"),
        Writer("DEEPSEEK_V32_INDEXER", "cuda", "10.0", "indexer-mxfp4/mx/float8_e4m3fn", "0.33.0"),
        Writer("DEEPSEEK_V32_INDEXER", "cuda", "9.0", "indexer-fp8/float32/float8_e4m3fn", "0.34.0"),
        Writer(),
    ],
    ids=["another platform", "another cache type", "another version", "an unknown writer"],
)
def test_an_indexer_whose_writer_was_not_read_is_whole(writer):
    engine = Engine(replace(INDEXER, writer=writer), seed=1)
    assert [part.name for part in engine.geometries[0].layers[0].page.parts] == ["whole"]
