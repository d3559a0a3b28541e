# SPDX-License-Identifier: Apache-2.0
"""What a kernel writes at the prefill engine, its reader finds at the decode engine, for every known cache format.

Writers and readers are imitated from vLLM's kernels (tests/support/writers.py); the plan runs between them, in memory
that was filled with other bytes before.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

# With its parts, since torch warns while they are imported, which is no error here.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make e2e runs it")
torch = pytest.importorskip("torch")

from support import writers
from support.writers import Cache, Places
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Page, Part
from kvhma.vllm.content import Place
from kvhma.vllm.formats import Writer
from kvhma.vllm.geometry import geometry_of

BF16, U8, I8 = torch.bfloat16, torch.uint8, torch.int8
LAYOUTS = [layout.name for layout in KVCacheLayout]
LAYERS = 3
GPU = Writer("FLASH_ATTN", "cuda", "9.0", version="0.33.0")


@dataclass(frozen=True)
class Format:
    """A cache format: vLLM's spec of it, who writes it, and where its writer and its reader have their bytes.

    Attributes:
        spec: from the tokens of a block and the heads that a rank holds.
        cell: bytes of a token and head.
        write: where the writer puts them.
        writer: what kvhma is told of it.
        heads: over all ranks; None where every rank holds the same.
        read: where the reader looks; where the writer put them if there is nothing else to imitate.
        window: tokens that a query sees with itself; None for all.
        block: tokens of a block, small enough to try every prompt length.
        kernel: tokens of a kernel block; None for a block.
        layouts: orders in which vLLM lays this format out.
        whole: whether it is not known enough to be cut: only an equal engine reads it.
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
"""Orders in which a page with several heads lies in one piece."""
HND = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
"""Orders in which tokens and content of a head lie in one piece."""
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
    "flashinfer": replace(FLASH, writer=gpu("FLASHINFER"), read=writers.flashinfer_paged_kv(16, 16), layouts=BLOCK_BY_BLOCK),
    "triton": replace(FLASH, writer=gpu("TRITON_ATTN")),
    "flex": replace(FLASH, writer=gpu("FLEX_ATTENTION")),
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
    "columns on a CPU": VEC,
    "tiles on a CPU": AMX,
}
"""Every format that is described or moved as a whole, and can be imitated."""


class Engine:
    """The ranks of an engine with `LAYERS` layers of one format, each with memory of its own."""

    def __init__(self, format: Format, *, seed: int, layout="LBHNC", block=None, kernel=None, tp=1, blocks=8) -> None:
        self.format = format
        self.block = block or format.block
        self.random = np.random.default_rng(seed)
        self.held = 1 if format.heads is None else max(1, format.heads // tp)
        spec = format.spec(self.block, self.held)
        order = KVCacheLayout[layout]
        names = [f"model.layers.{index}.attn" for index in range(LAYERS)]
        self.raws, self.caches, self.geometries, self.firsts = [], [], [], []
        for rank in range(tp):
            raw = torch.zeros(LAYERS * blocks * spec.page_size_bytes, dtype=torch.int8)
            strides = compute_layout_strides(spec, blocks, LAYERS, order)
            tensor = KVCacheTensor(raw.numel(), names, layer_stride=strides[0], block_stride=strides[1])
            views = create_kv_cache_views(raw, spec, blocks, order, tensor, kernel or format.kernel)
            config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])
            place = Place(rank, tp, kv_heads=format.heads or 1)
            named = dict(zip(names, views, strict=True))
            self.geometries.append(geometry_of(config, named, place, writer=lambda _: format.writer))
            self.caches.append([Cache.of(raw, view, order) for view in views])
            self.firsts.append(0 if format.heads is None else rank * format.heads // tp)
            self.raws.append(raw)
        self.table = self.random.permutation(np.arange(1, blocks))
        self.fill()

    def fill(self) -> None:
        """Fill the memory with bytes that nobody expects."""
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
                writers.write(cache, self.format.write, slots, rows)

    def wrong(self, rank: int, cells: np.ndarray) -> int:
        """Count the tokens and layers of which a rank's reader finds something else than `cells`."""
        count = cells.shape[1]
        tokens = np.arange(0 if self.format.window is None else max(0, count - self.format.window + 1), count)
        slots, first = self.slots(tokens), self.firsts[rank]
        read = self.format.read or self.format.write
        found = [cache.memory[read(cache, slots)] for cache in self.caches[rank]]
        expected = cells[:, tokens, first : first + self.held]
        return sum(int((rows != right).any(axis=(1, 2)).sum()) for rows, right in zip(found, expected, strict=True))

    def tables(self, tokens: int) -> list[list[int]]:
        return [self.table[: -(-tokens // self.block)].tolist()]


def execute(transfer: Any, local: Geometry, mine: np.ndarray, remotes: list[Geometry], theirs: list[np.ndarray]) -> None:
    """Do what a transfer says, row by row."""
    base = local.regions[0].base
    for address, size, _ in transfer.zero.tolist():
        mine[address - base : address - base + size] = 0
    for read in transfer.reads:
        source, start = theirs[read.source], remotes[read.source].regions[0].base
        for (here, size, _), (there, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            mine[here - base : here - base + size] = source[there - start : there - start + size]


Mutation = Callable[[Geometry], Geometry]


def wrong_after(decode: Engine, prefill: Engine, lengths, *, here: Mutation = lambda g: g, there: Mutation = lambda g: g):
    """Hand prompts of these lengths over; return how many tokens, of all layers, each rank's readers find wrong."""
    remotes = [there(geometry) for geometry in prefill.geometries]
    theirs = [raw.numpy().view(np.uint8) for raw in prefill.raws]
    locals_ = [here(geometry) for geometry in decode.geometries]
    plans = [kvhma.plan(local, remotes) for local in locals_]
    heads = decode.format.heads or 1
    found = {}
    for count in lengths:
        cells = prefill.random.integers(0, 256, (LAYERS, count, heads, decode.format.cell), dtype=np.uint8)
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


@pytest.mark.parametrize(
    ("format", "layout", "as_it_was"),
    [
        (INDEXER, "LBNHC", {192: 0, 202: 30, 242: 150, 255: 96}),
        # The pages of three layers lie behind each other and are moved as one piece, which was right by luck.
        (INDEXER, "BLHNC", {192: 0, 202: 0, 242: 0, 255: 0}),
        (WINDOW, "LBNHC", {192: 0, 202: 30, 255: 189}),
        (WINDOW, "BLHNC", {192: 0, 202: 30, 255: 189}),
    ],
    ids=["indexer", "indexer, blocks first", "V4 window", "V4 window, blocks first"],
)
def test_scales_behind_the_tokens_of_a_block(format, layout, as_it_was):
    """Wrong (token, layer) with blocks of 64 and three layers: none; and as it was, with every token cut as a row."""
    decode, prefill = (Engine(format, seed=seed, layout=layout, block=64) for seed in (1, 2))
    assert set(wrong_after(decode, prefill, as_it_was).values()) == {0}
    assert wrong_after(decode, prefill, as_it_was, here=as_rows, there=as_rows) == as_it_was


def pairs_of_layouts(format: Format) -> list[tuple[str, str]]:
    """Every layout at each side at least once, equal and unequal."""
    mine = format.layouts
    return [(one, one) for one in mine] + list(zip(mine, (*mine[1:], mine[0]), strict=True)) * (len(mine) > 1)


def cases() -> list[Any]:
    return [
        pytest.param(name, here, there, id=f"{name}: {here} from {there}")
        for name, format in FORMATS.items()
        for here, there in pairs_of_layouts(format)
    ]


@pytest.mark.parametrize(("name", "here", "there"), cases())
def test_every_prompt_of_two_blocks(name, here, there):
    format = FORMATS[name]
    decode, prefill = Engine(format, seed=1, layout=here), Engine(format, seed=2, layout=there)
    found = wrong_after(decode, prefill, range(1, 2 * format.block + 1))
    assert {count: wrong for count, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (3, 2)])
def test_blocks_of_other_sizes(name, mine, theirs):
    format = FORMATS[name]
    decode, prefill = (Engine(format, seed=n, block=n * format.block) for n in (mine, theirs))
    if format.whole or format is AMX:
        with pytest.raises(UnsupportedPairError, match=r"kernel block|dtype"):
            kvhma.plan(decode.geometries[0], prefill.geometries)
        return
    assert set(wrong_after(decode, prefill, range(1, 2 * max(mine, theirs) * format.block + 1)).values()) == {0}


@pytest.mark.parametrize("name", FORMATS)
def test_kernel_blocks(name):
    """Data then scales is said of a kernel's block, not of a manager's; blocks of tiles may then differ as well."""
    format = FORMATS[name]
    if "alignment" in repr(format.spec(8, 1)) and format.spec(8, 1).page_size_padded is not None:
        pytest.skip("vLLM does not split padded pages")
    decode = Engine(format, seed=1, block=2 * format.block, kernel=format.block)
    prefill = Engine(format, seed=2, block=format.block)
    assert set(wrong_after(decode, prefill, range(1, 4 * format.block + 1)).values()) == {0}
    assert set(wrong_after(prefill, decode, range(1, 4 * format.block + 1)).values()) == {0}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 1)])
def test_ranks(name, mine, theirs):
    format = FORMATS[name]
    decode, prefill = Engine(format, seed=1, tp=mine), Engine(format, seed=2, tp=theirs)
    if format.whole and mine != theirs:
        with pytest.raises(UnsupportedPairError, match="dtype"):
            kvhma.plan(decode.geometries[0], prefill.geometries)
        return
    assert set(wrong_after(decode, prefill, range(1, 2 * format.block + 1)).values()) == {0}


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
