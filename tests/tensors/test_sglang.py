# SPDX-License-Identifier: Apache-2.0
"""SGLang's real pools on a CPU: each value is where the geometry puts it, and a hand-off between two pools is right.

Needs the `sglang` package and the dependencies of its pools, beside torch:
pip install --no-deps sglang orjson ipython traitlets torchvision gguf
"""

from __future__ import annotations

import ctypes
import random
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pools = pytest.importorskip(
        "sglang.srt.mem_cache.memory_pool", reason="needs SGLang: pip install --no-deps sglang", exc_type=ImportError
    )
    swa_pool = pytest.importorskip(
        "sglang.srt.mem_cache.swa_memory_pool",
        reason="needs SGLang: pip install --no-deps sglang",
        exc_type=ImportError,
    )

from kvhma import Geometry, Span, plan
from kvhma.errors import GeometryError, UnsupportedPairError
from kvhma.geometry import Shard
from kvhma.tensors.sglang import geometry_of_pool

SEEDS = range(12)


def mha(pages: int, page_size: int, heads: int, **more: Any) -> Any:
    sizes = {"size": pages * page_size, "page_size": page_size, "head_num": heads, "head_dim": 16, "layer_num": 3}
    return pools.MHATokenToKVPool(
        **{**sizes, "dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False, **more}
    )


def mla(pages: int, page_size: int, **more: Any) -> Any:
    sizes = {"size": pages * page_size, "page_size": page_size, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    return pools.MLATokenToKVPool(
        **{**sizes, "layer_num": 2, "end_layer": 2, "dtype": torch.bfloat16, "device": "cpu"},
        **{"enable_memory_saver": False, **more},
    )


def swa(pages: int, page_size: int, heads: int) -> Any:
    return swa_pool.SWAKVPool(
        size=pages * page_size,
        size_swa=(pages + 3) * page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=16,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )


def tensors(pool: Any) -> dict[str, Any]:
    """The slots of each layer, by the name that the geometry gives it, from SGLang's own getters."""
    count = 4 if type(pool) is swa_pool.SWAKVPool else pool.layer_num
    if type(pool) is pools.MLATokenToKVPool:
        return {f"layers.{layer}.kv": pool.get_key_buffer(layer) for layer in range(count)}
    both = (("k", pool.get_key_buffer), ("v", pool.get_value_buffer))
    return {f"layers.{layer}.{name}": get(layer) for layer in range(count) for name, get in both}


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())


def value_at(geometry: Geometry, layer: str, page: int, index: dict[str, int]) -> int:
    """The two bytes of an item, by the definition of docs/geometry.md."""
    (found,) = [one for one in geometry.layers if one.name == layer]
    (part,) = found.page.parts
    at = geometry.regions[found.region].base + found.offset + page * found.block_stride + part.offset
    at += sum(index[axis.name] * axis.stride for axis in part.axes)
    return int(ctypes.c_uint16.from_address(at).value)


def drawn(rng: random.Random) -> tuple[Any, Geometry]:
    kind, pages, page_size, heads = rng.choice(["mha", "mla", "swa"]), rng.randint(2, 9), rng.choice([1, 4, 16]), 2
    if kind == "mla":
        pool = mla(pages, page_size)
        return pool, geometry_of_pool(pool)
    pool = (
        mha(pages, page_size, heads, v_head_dim=rng.choice([8, 16])) if kind == "mha" else swa(pages, page_size, heads)
    )
    window = {"sliding_window_size": 7} if kind == "swa" else {}
    return pool, geometry_of_pool(pool, heads=Shard(8, 4, heads), **window)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_value_lies_where_the_geometry_says(seed: int) -> None:
    rng = random.Random(seed)
    pool, geometry = drawn(rng)
    fill(pool, seed)
    known = tensors(pool)
    assert {layer.name for layer in geometry.layers} == set(known)
    for layer in geometry.layers:
        slots = known[layer.name]
        assert layer.num_blocks * pool.page_size == len(slots)
        for _ in range(40):
            slot, head, channel = (rng.randrange(size) for size in slots.shape)
            index = {"tokens": slot % pool.page_size, "heads": head, "content": channel}
            found = value_at(geometry, layer.name, slot // pool.page_size, index)
            assert found == int(slots[slot, head, channel].view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hand_off_between_two_pools(seed: int) -> None:
    """Two ranks of P with other pages, one of D; each slot of D has afterwards what P's slot of that token has."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 8, 16]) for _ in range(2)]
    tokens = rng.randint(1, 60)
    needed = [-(-tokens // size) for size in sizes]
    d, *p = mha(needed[0] + 4, sizes[0], 4), *(mha(needed[1] + 4, sizes[1], 2) for _ in range(2))
    for index, pool in enumerate((d, *p)):
        fill(pool, 10 * seed + index)
    local = geometry_of_pool(d)
    remote = [
        geometry_of_pool(pool, heads=Shard(4, 2 * rank, 2), tp_rank=rank, tp_size=2) for rank, pool in enumerate(p)
    ]
    ids = [rng.sample(range(1, count + 5), count) for count in needed]
    moved = plan(local, remote, descriptor_bytes=0).transfer(tokens, [Span(0, ids[0])], [Span(0, ids[1])])
    for read in moved.reads:
        for (to, length, _), (start, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            ctypes.memmove(to, start, length)
    slots = [[ids[side][t // size] * size + t % size for t in range(tokens)] for side, size in enumerate(sizes)]
    for name, tensor in tensors(d).items():
        expected = torch.cat([tensors(pool)[name][slots[1]] for pool in p], dim=1)
        assert torch.equal(tensor[slots[0]], expected), name


class Derived(pools.MHATokenToKVPool):
    """It may hold anything."""


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(GeometryError, match="known are SGLang's"):
        geometry_of_pool(object())
    derived = mha(2, 4, 2)
    derived.__class__ = Derived
    with pytest.raises(GeometryError, match="Derived: known are"):
        geometry_of_pool(derived)
    with pytest.raises(GeometryError, match="sliding_window_size is 7, and the pool is a MHATokenToKVPool"):
        geometry_of_pool(mha(2, 4, 2), sliding_window_size=7)
    with pytest.raises(GeometryError, match="sliding_window_size is None, and the pool is a SWAKVPool"):
        geometry_of_pool(swa(2, 4, 2))
    with pytest.raises(GeometryError, match="is stored as"):
        geometry_of_pool(mha(2, 4, 2, dtype=torch.float8_e4m3fn))
    other = mha(2, 4, 2)
    other.kv_cache_layout = "hnd"
    with pytest.raises(GeometryError, match="kv_cache_layout 'hnd'"):
        geometry_of_pool(other)
    other = mha(2, 4, 2)
    other.page_size = 5
    with pytest.raises(GeometryError, match="pages of 5"):
        geometry_of_pool(other)


def test_pools_that_differ_do_not_pair() -> None:
    with pytest.raises(UnsupportedPairError):
        plan(geometry_of_pool(mha(2, 4, 2)), geometry_of_pool(mha(2, 4, 2, head_dim=8)))
