# SPDX-License-Identifier: Apache-2.0
"""SGLang's real pools on a CPU: what one engine's own setters write, the other's own getters read after a hand-off.

Ranks and page sizes of the two engines differ. Expected are the values that were written.
"""

from __future__ import annotations

import ctypes
import random
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

import kvhma
from kvhma import Geometry, Span, plan
from kvhma.errors import BlockIdError, GeometryError, UnsupportedPairError
from kvhma.geometry import Shard
from kvhma.models import Model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.tensors.sglang import geometry_of_pool
from support.sglang_pools import (
    FP8,
    TP_PAIRS,
    X_B_C,
    cut,
    dsa,
    hand_off,
    hybrid,
    layer,
    mamba2,
    mha,
    mla,
    mp,
    raw,
    share,
    slots_of,
    swa,
    torch,
)  # fmt: skip

ROOT = Path(__file__).parents[2]
PAGES = (1, 16, 64)
HEADS, TOKENS = 4, 70
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({}, {}),
    "fp8": ({"dtype": FP8}, {"dtype": FP8}),
    "hnd": ({"layout": "hnd"}, {"layout": "hnd"}),
    "nhd to hnd": ({}, {"layout": "hnd"}),
    "other sizes of V": ({"v_head_dim": 24}, {"v_head_dim": 24}),
}


def ids_for(pages: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1, pages + 3), pages)


def made(monkeypatch: pytest.MonkeyPatch, page_size: int, heads: int, layout: str = "nhd", **more: Any) -> Any:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", str(int(layout == "hnd")))
    return mha(page_size, -(-TOKENS // page_size) + 2, head_num=heads, **more)


def read(pool: Any, number: int, slots: Any) -> tuple[Any, Any]:
    """K and V of slots, from SGLang's getters."""
    found = pool.get_key_buffer(number), pool.get_value_buffer(number)
    if getattr(pool, "kv_cache_layout", "nhd") == "hnd":
        return tuple(raw(one)[slots // pool.page_size, :, slots % pool.page_size] for one in found)
    return tuple(raw(one[slots]) if one.dtype != FP8 else raw(one)[slots] for one in found)


@pytest.mark.parametrize("name", FORMATS)
def test_mha_of_unequal_ranks_and_pages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Three layers of 21 ranks for each pair of page sizes."""
    k, v = torch.randn(3, TOKENS, HEADS, 16).bfloat16(), torch.randn(3, TOKENS, HEADS, 24).bfloat16()
    of_p, of_d = FORMATS[name]
    pages = list(product(PAGES, PAGES)) if name == "bfloat16" else [(1, 16), (16, 64), (64, 1)]
    right = 0
    for (tp_p, tp_d), (page_p, page_d) in product(TP_PAIRS, pages):
        ids = [ids_for(-(-TOKENS // size), seed) for seed, size in enumerate((page_p, page_d))]
        remote, keep = [], []
        for rank in range(tp_p):
            pool = made(monkeypatch, page_p, HEADS // tp_p, **of_p)
            for n in range(3):
                values = [cut(one[n], rank, tp_p).clone() for one in (k, v[..., : pool.v_head_dim])]
                pool.set_kv_buffer(layer(n), slots_of(ids[0], page_p, TOKENS), *values)
            keep.append(pool)
            remote.append(geometry_of_pool(pool, heads=share(HEADS, rank, tp_p), tp_rank=rank, tp_size=tp_p))
        for rank in range(tp_d):
            pool = made(monkeypatch, page_d, HEADS // tp_d, **of_d)
            local = geometry_of_pool(pool, heads=share(HEADS, rank, tp_d), tp_rank=rank, tp_size=tp_d)
            hand_off(local, remote, TOKENS, [ids[1]], [ids[0]])
            for n in range(3):
                found = read(pool, n, slots_of(ids[1], page_d, TOKENS))
                expected = [raw(cut(one[n], rank, tp_d).to(pool.dtype)) for one in (k, v[..., : pool.v_head_dim])]
                right += all(map(torch.equal, found, expected))
    assert right == 3 * 21 * len(pages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_latents_of_unequal_pages(dtype: Any) -> None:
    for page_p, page_d in product(PAGES, PAGES):
        p, d = (mla(size, -(-TOKENS // size) + 2, dtype=dtype) for size in (page_p, page_d))
        ids = [ids_for(-(-TOKENS // size), seed) for seed, size in enumerate((page_p, page_d))]
        latent = torch.randn(2, TOKENS, 1, 32).bfloat16()
        for n in range(2):
            p.set_kv_buffer(layer(n), slots_of(ids[0], page_p, TOKENS), latent[n], None)
        hand_off(geometry_of_pool(d), [geometry_of_pool(p)], TOKENS, [ids[1]], [ids[0]])
        for n in range(2):
            found = raw(d.get_key_buffer(n))[slots_of(ids[1], page_d, TOKENS)]
            assert torch.equal(found, raw(latent[n].to(dtype)))


def write_swa(pool: Any, number: int, full: Any, windows: Any, *values: Any) -> None:
    pool.set_kv_buffer(layer(number), mp.KVWriteLoc(full, windows), *values)


def test_windows_with_other_heads_of_unequal_ranks_and_pages() -> None:
    """As in MiMo-V2: 4 heads of 24 in full attention, 8 of 16 in windows, and V is smaller than K."""
    window, right = 9, 0
    sizes = {"head_dim": 24, "v_head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 8}
    for (tp_p, tp_d), (page_p, page_d) in product(TP_PAIRS, ((1, 16), (16, 1), (16, 64))):
        values = {
            n: (torch.randn(TOKENS, heads, k).bfloat16(), torch.randn(TOKENS, heads, v).bfloat16())
            for n, (heads, k, v) in enumerate([(8, 16, 8), (4, 24, 16)] * 2)
        }

        def engine(tp: int, page: int) -> tuple[list[Any], list[Geometry], list[Any], list[Any]]:
            pages = -(-TOKENS // page)
            made = [swa(page, pages + 2, head_num=4 // tp, swa_head_num=8 // tp, **sizes) for _ in range(tp)]
            described = [
                geometry_of_pool(
                    pool, heads=share(4, rank, tp), swa_heads=share(8, rank, tp), sliding_window_size=window - 1,
                    tp_rank=rank, tp_size=tp,
                )
                for rank, pool in enumerate(made)
            ]  # fmt: skip
            ids = [ids_for(pages, seed) for seed in (page, page + 1)]
            return made, described, ids, [slots_of(one, page, TOKENS) for one in ids]

        p, remote, of, slots_p = engine(tp_p, page_p)
        for (rank, pool), n in product(enumerate(p), values):
            write_swa(pool, n, *slots_p, *(cut(one, rank, tp_p).clone() for one in values[n]))
        d, local, to, slots_d = engine(tp_d, page_d)
        for rank, pool in enumerate(d):
            hand_off(local[rank], remote, TOKENS, to, of)
            for n in values:
                first = TOKENS - window + 1 if n % 2 == 0 else 0
                slots = slots_d[n % 2 == 0][first:]
                expected = [cut(one, rank, tp_d)[first:] for one in values[n]]
                found = pool.get_key_buffer(n)[slots], pool.get_value_buffer(n)[slots]
                right += all(map(torch.equal, found, expected))
    assert right == 4 * 21 * 3


def test_windows_of_latents() -> None:
    sizes = {"enable_memory_saver": False, "device": "cpu", "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    p, d = (
        swa(page, 80 // page + 2, token_to_kv_pool_class=mp.MLATokenToKVPool, **{
            f"{name}_kv_pool_kwargs": {**sizes, "page_size": page} for name in ("full", "swa")
        })
        for page in (4, 16)
    )  # fmt: skip
    ids = [[ids_for(-(-TOKENS // pool.page_size), n) for n in range(2)] for pool in (p, d)]
    latent = torch.randn(4, TOKENS, 1, 32).bfloat16()
    for n in range(4):
        write_swa(p, n, *(slots_of(one, 4, TOKENS) for one in ids[0]), latent[n], None)
    local, remote = (geometry_of_pool(one, sliding_window_size=8) for one in (d, p))
    hand_off(local, [remote], TOKENS, ids[1], ids[0])
    for n in range(4):
        first = TOKENS - 8 if n % 2 == 0 else 0
        slots = slots_of(ids[1][n % 2 == 0], 16, TOKENS)[first:]
        assert torch.equal(d.get_key_buffer(n)[slots], latent[n, first:])


def test_ids_of_windows_from_sglangs_own_allocator() -> None:
    """They come from `translate_loc_from_full_to_swa`. Tokens whose slots were freed have slot 0, which is cut off."""
    allocators = pytest.importorskip("sglang.srt.mem_cache.allocator.swa")
    window, tokens, freed = 9, 38, 24
    values, full, windows, pools = torch.randn(4, tokens, 2, 16).bfloat16(), [], [], []
    for used in (3, 5):
        pool = swa(1, 80)
        # Without a GPU it hands out pages of one token only.
        allocator = allocators.SWATokenToKVPoolAllocator(80, 83, 1, torch.bfloat16, "cpu", pool, need_sort=False)
        allocator.swa_attn_allocator.alloc(used)
        full.append(allocator.alloc(tokens))
        windows.append(pool.translate_loc_from_full_to_swa(full[-1]))
        assert not torch.equal(full[-1], windows[-1])
        pools.append(pool)
    p, d = pools
    for n in range(4):
        write_swa(p, n, full[0], windows[0], values[n].clone(), values[n].clone())
    allocator.free_swa(full[1][:freed])
    windows[1] = d.translate_loc_from_full_to_swa(full[1])
    assert (windows[1] == 0).sum() == freed
    local, remote = (geometry_of_pool(pool, sliding_window_size=window - 1) for pool in (d, p))
    of = [full[0].tolist(), windows[0].tolist()]
    with pytest.raises(BlockIdError):
        hand_off(local, [remote], tokens, [full[1].tolist(), windows[1].tolist()], of)
    hand_off(local, [remote], tokens, [full[1].tolist(), Span(freed, windows[1][freed:].tolist())], of)
    for n, slots in enumerate([windows[1], full[1]] * 2):
        first = tokens - window + 1 if n % 2 == 0 else 0
        assert torch.equal(d.get_key_buffer(n)[slots[first:]], values[n, first:])


def test_the_page_says_what_runs() -> None:
    """docs/other-engines.md: imports, ids of windows, of a state and of LMCache, names that vLLM shares."""
    page = (ROOT / "docs/other-engines.md").read_text().partition("## SGLang\n")[2]
    first, second, crossing, chunks = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    of_windows, of_state = second.split("\n\n")
    slots = torch.arange(32, 64)
    names: dict[str, Any] = {"pool": mha(), "slots": slots, "req": SimpleNamespace(kv=SimpleNamespace())}
    exec(first, names)
    assert names["spans"] == [Span(0, [2, 3])]
    assert names["geometry"] == geometry_of_pool(names["pool"], heads=Shard(8, 4, 2), tp_rank=2, tp_size=4)
    names["pool"] = swa()
    names["pool"].register_mapping(torch.cat([torch.zeros(48, dtype=torch.int64), torch.arange(16, 33)]))
    exec(of_windows, names)
    assert names["spans"] == [Span(0, [2, 3]), Span(1, [1])]
    assert geometry_of_pool(names["pool"], sliding_window_size=7).groups[1].window == 8
    names["req"].kv.mamba_pool_idx = torch.tensor(4)
    exec(of_state, names)
    assert names["spans"] == [Span(0, [2, 3]), Span(0, [4])]
    served = Model(name="served", layers=("full",) * 3, kv_heads=2, head_dim=16, dtype="bfloat16")
    vllm = layout(served, LayoutOptions(num_blocks=9, kv="packed")).to_json()
    exec(crossing, names | {"kvhma": kvhma, "exported": vllm}, names)
    assert [one.name for one in names["remote"].layers] == [one.name for one in geometry_of_pool(mha()).layers]
    meta = SimpleNamespace(fmt=SimpleNamespace(name="KV_2LTD"), shape=(2, 3, 8, 32), shapes=None, dtype=torch.bfloat16)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    objects = [SimpleNamespace(metadata=meta, data_ptr=memory.data_ptr() + at) for at in (8192, 0)]
    names |= {"memory": memory, "chunks": objects}
    exec(chunks, names)
    assert names["spans"] == [Span(0, [2, 0])]
    assert names["store"].groups[0].block_size == 8


def test_rows_and_index_of_dsa_move_by_page() -> None:
    """SGLang's writers need a GPU; `move_kv_cache` is its own writer of one token, and knows the parts of a page."""
    p, d = dsa(skip_topk_layers=[False, True]), dsa(skip_topk_layers=[False, True])
    names = ["layers.0.kv", "layers.0.index", "layers.1.kv"]
    geometries = [geometry_of_pool(one) for one in (d, p)]
    assert [one.name for one in geometries[0].layers] == names
    for buffer in (*p.kv_buffer, p.get_index_k_with_scale_buffer(0)):
        buffer.random_(256)
    hand_off(geometries[0], [geometries[1]], 100, [[3, 1]], [[1, 2]])
    source, target = slots_of([1, 2], 64, 100), slots_of([3, 1], 64, 100)
    for n in range(2):
        assert torch.equal(raw(d.get_key_buffer(n))[target], raw(p.get_key_buffer(n))[source])
    p.move_kv_cache(target, source)
    for begin, end in ((0, 64 * 128), (64 * 128, 64 * 132)):  # of a page: keys, then scales
        found, expected = (
            pool.get_index_k_with_scale_buffer(0)[:, begin:end].unflatten(1, (64, -1)).flatten(0, 1)[target]
            for pool in (d, p)
        )
        assert torch.equal(found, expected)


def test_layers_have_the_name_that_is_asked_for() -> None:
    draft = mha(start_layer=8)
    names = [one.name for one in geometry_of_pool(draft, layer_name="draft.{}".format).layers]
    assert names[:3] == ["draft.8.k", "draft.8.v", "draft.9.k"]


def test_slots_that_fill_no_page_belong_to_none() -> None:
    described = geometry_of_pool(mha(size=70))
    assert {one.num_blocks for one in described.layers} == {5}, "page 0 and 4 that SGLang hands out"


def value_at(geometry: Geometry, name: str, page: int, index: dict[str, int]) -> int:
    """The two bytes of an item, by the definition of docs/geometry.md."""
    found = geometry.layer_by_name[name]
    (part,) = found.page.parts
    at = geometry.regions[found.region].base + found.offset + page * found.block_stride + part.offset
    at += sum(index[axis.name] * axis.stride for axis in part.axes)
    return int(ctypes.c_uint16.from_address(at).value)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_each_value_lies_where_the_geometry_says(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    pool, rng = made(monkeypatch, 16, 2, layout), random.Random(layout)
    written = torch.randn(32, 2, 16).bfloat16()
    pool.set_kv_buffer(layer(1), torch.arange(16, 48), written, written.clone())
    described = geometry_of_pool(pool, heads=Shard(8, 4, 2))
    for _ in range(40):
        slot, head, channel = (rng.randrange(size) for size in written.shape)
        index = {"tokens": slot % 16, "heads": head, "content": channel}
        found = value_at(described, f"layers.1.{rng.choice('kv')}", 1 + slot // 16, index)
        assert found == int(written[slot, head, channel].view(torch.int16)) & 0xFFFF


REFUSED = {
    "other tensors than the class it derives from": {
        "DSV4NPUTokenToKVPool", "NPUDeepSeekV4IndexerPool", "NPUDeepSeekV4SingleKVPool", "NPUMHATokenToKOnlyPool",
        "NPUMHATokenToKVPool", "NPUMLATokenToKVPool", "NPUMiniMaxSparseKVPool", "NoOpMHATokenToKVPool",
    },
    "states of compression and rings of requests beside its pages": {
        "DeepSeekV4IndexerPool", "DeepSeekV4SingleKVPool", "DeepSeekV4TokenToKVPool", "DeepSeekV4UniformFP8KVPool",
        "HiSparseC4DevicePool",
    },
    "its slots are not the numbers that the scheduler has": {"HiSparseDSATokenToKVPool", "HiSparseMHAMainPool"},
    "scales in separate tensors": {
        "MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8", "MLATokenToKVPoolFP4", "MiniMaxM3Nvfp4IndexKPool",
        "MiniMaxM3Nvfp4KVPool", "MiniMaxM3Nvfp4MainKVPool",
    },
    "layers of several pools in one buffer, whose ids are virtual": {
        "UnifiedDraftKVPool", "UnifiedDraftMambaPool", "UnifiedDraftSWAKVPool", "UnifiedHybridLinearKVPool",
        "UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedMambaPool", "UnifiedSWAKVPool",
    },
    "its pages or layers are spread over ranks": {
        "LayerSplitDSATokenToKVPool", "PageInterleaveDSATokenToKVPool", "PageInterleaveMHATokenToKVPool",
        "PageInterleaveMLATokenToKVPool",
    },
    "an index with separate slots": {"MHATokenToKOnlyPool", "MiniMaxSparseKVPool", "QSATokenToKVPool"},
    "its bytes are not known": {
        "BaseSWAKVPool", "KVCache", "PageMajorMHATokenToKVPool", "_DummyKVCache",  # none of them can be made
    },
}  # fmt: skip
"""SGLang's classes that are refused, by reason."""


def test_each_class_of_the_wheel_is_described_or_refused() -> None:
    """A class that is new in the wheel, or gone, fails."""
    bases: dict[str, set[str]] = {}
    for file in Path(mp.__file__).parents[1].rglob("*.py"):
        for name, listed in re.findall(r"^class (\w+)\(([^)]*)\)", file.read_text(), re.MULTILINE):
            bases.setdefault(name, set()).update(one.strip().rpartition(".")[2] for one in listed.split(","))
    found = {"KVCache", "MambaPool"}
    while derived := {name for name, of in bases.items() if of & found} - found:
        found |= derived
    made = {
        type(pool).__name__: geometry_of_pool(pool, **more)
        for pool, more in (
            (mha(), {}), (mla(), {}), (dsa(), {}), (swa(), {"sliding_window_size": 7}),
            (hybrid((3,), mamba2((0, 1))), {"conv": X_B_C}), (mamba2((0, 1)), {"conv": X_B_C}),
        )
    }  # fmt: skip
    assert found == set(made).union(*REFUSED.values())
    for reason, names in REFUSED.items():
        for name in names:
            pool = type(name, (), {"__module__": "sglang.srt.mem_cache.memory_pool"})()
            with pytest.raises(GeometryError, match=f"{name}: {reason}; known here are"):
                geometry_of_pool(pool)


class Derived(mp.MHATokenToKVPool):
    """It may hold anything."""


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    derived = mha()
    derived.__class__ = Derived
    no_numbers = mla(end_layer=None)
    other = mha()
    other.kv_cache_layout = "vectorized_5d"
    late = mha()
    late.post_capture_active = True
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (object(), {}, "builtins.object: its bytes are not known; known here are"),
        (derived, {}, "Derived: its bytes are not known"),
        (mha(), {"sliding_window_size": 7}, "sliding_window_size is 7, and the pool is a MHATokenToKVPool"),
        (swa(), {}, "sliding_window_size is None, and the pool is a SWAKVPool"),
        (mha(), {"swa_heads": Shard(8)}, "swa_heads is .*, and the pool is a MHATokenToKVPool"),
        (mha(), {"conv": {"x": 1}}, "conv is .*: it is for HybridLinearKVPool or MambaPool"),
        (other, {}, "kv_cache_layout 'vectorized_5d'"),
        (late, {}, "post_capture_active"),
        (no_numbers, {}, "does not know which layers of the model it has, as within a HybridLinearKVPool"),
        (dsa(page_size=128, index_kpool=2, index_kpool_compress=True, max_running_requests=2), {}, "kpool_use_comp"),
        (mamba2(), {}, "conv_shard_groups is None, and conv is None"),
        (mamba2(), {"conv": {"x": 128, "B": 24, "C": 24}}, "224 channels, and .* gives rank 0 of 1 176"),
        (mamba2(), {"conv": {"x": 128, "C": 48, "B": 48}}, "parts x, C, B are not those of a pool"),
        (mamba2(tp=2), {"conv": {"x": 128, "B": 48, "C": 48}}, "112 channels, and .* gives rank 0 of 1 224"),
        (mamba2(), {"conv": {"x": 129, "B": 48, "C": 47}, "tp_size": 2}, "129 channels of x cannot be cut for 2"),
        (mamba2(), {"conv": X_B_C, "tp_size": 0}, "128 channels of x cannot be cut for 0"),
        (mamba2(), {"conv": {"x": 224}}, "a state of 8 heads of 16, and .* gives rank 0 of 1 224, 224 of x or v"),
        (mamba2(), {"conv": {"x": 48, "B": 128, "C": 48}}, "a state of 8 heads of 16, .* 48 of x or v"),
        (mamba2(), {"conv": {"x": 128, "B": 40, "C": 56}}, "a state of 8 heads of 16, .* 128 of x or v"),
        (mha(), {"layer_name": "draft".format}, "layer 'draft.k': is the name of another layer too"),
    ]
    for pool, arguments, message in cases:
        with pytest.raises(GeometryError, match=message):
            geometry_of_pool(pool, **arguments)


def test_pools_that_differ_do_not_pair() -> None:
    pairs = [
        (mha(), mha(head_dim=8), "content"),
        (mha(), mha(dtype=FP8), "bfloat16 with float8_e4m3fn"),
        (mha(dtype=torch.float8_e5m2), mha(dtype=FP8), "float8_e4m3fn with float8_e5m2"),
        (mla(), mla(dtype=FP8), "bfloat16 with float8_e4m3fn"),
        (dsa(), dsa(kv_cache_dim=576, dtype=torch.bfloat16), "bfloat16 with fp8_ds_mla"),
        (dsa(), dsa(page_size=128, index_kpool=2, size=384), "index"),
    ]
    for local, remote, message in pairs:
        with pytest.raises(UnsupportedPairError, match=message):
            plan(geometry_of_pool(local), geometry_of_pool(remote))
    # The halves of what vLLM packs for K of 24 and V of 16.
    packed = Model(name="packed", layers=("full",), kv_heads=2, head_dim=20, dtype="bfloat16")
    remote = layout(packed, LayoutOptions(num_blocks=9, kv="packed")).by_parts(lambda _: "layers.0")
    with pytest.raises(UnsupportedPairError, match=r'"content".* 20 with 24'):
        plan(geometry_of_pool(mha(head_dim=24, v_head_dim=16, layer_num=1)), remote)
