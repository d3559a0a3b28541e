# SPDX-License-Identifier: Apache-2.0
"""LMCache's real memory objects between two of SGLang's pools: full chunks, and the short last one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.errors import GeometryError
from kvhma.tensors.lmcache import block_ids, geometry_of_objects
from kvhma.tensors.sglang import geometry_of_pool
from support.sglang_pools import hand_off, layer, mha, mla, share, slots_of, torch

LAYERS, HEADS, DIM, CHUNK = 3, 2, 16, 256
TOKENS = 2 * CHUNK + 88


@pytest.fixture(scope="module")
def lmcache() -> Any:
    logging.disable(logging.CRITICAL)
    try:
        allocators = pytest.importorskip("lmcache.v1.memory_allocators.tensor_memory_allocator", exc_type=ImportError)
        management = pytest.importorskip("lmcache.v1.memory_management", exc_type=ImportError)
    finally:
        logging.disable(logging.NOTSET)
    return allocators.TensorMemoryAllocator, management.MemoryFormat


def objects(lmcache: Any, form: str, shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """Memory, and an object for each chunk; others lie between them. The last one ends where the memory ends."""
    make, formats = lmcache
    sizes = [CHUNK, 40, CHUNK, TOKENS % CHUNK]
    total = sum(-(-2 * torch.Size((*shape[:2], tokens, shape[3])).numel() // 4096) for tokens in sizes)
    memory = torch.randint(0, 255, (total * 4096,), dtype=torch.uint8)
    allocator = make(memory)
    of = [torch.Size((*shape[:2], tokens, shape[3])) for tokens in sizes]
    made = [allocator.allocate([one], [torch.bfloat16], fmt=formats[form]) for one in of]
    assert all(made)
    return memory, [made[0], made[2], made[3]]


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("tp_d", [1, 2])
def test_chunks_hold_what_other_pages_had(lmcache: Any, is_mla: bool, tp_d: int) -> None:
    form, shape = ("KV_MLA_FMT", (1, 2, CHUNK, 32)) if is_mla else ("KV_2LTD", (2, LAYERS, CHUNK, HEADS * DIM))
    memory, made = objects(lmcache, form, shape)
    before = memory.clone()
    p = mla(16, 64) if is_mla else mha(16, 64)
    of_d = {} if is_mla else {"head_num": HEADS // tp_d}
    ranks = [(mla if is_mla else mha)(64, 16, **of_d) for _ in range(tp_d)]
    values = torch.randn(*shape[:2], TOKENS, 1 if is_mla else HEADS, 32 if is_mla else DIM).bfloat16()
    pages = {16: list(range(60, 20, -1))[: -(-TOKENS // 16)], 64: list(range(2, 12))}
    for n in range(shape[1]):
        rows = (values[0, n], None) if is_mla else (values[0, n].clone(), values[1, n].clone())
        p.set_kv_buffer(layer(n), slots_of(pages[16], 16, TOKENS), *rows)

    def described(pool: Any, rank: int, tp: int) -> Any:
        heads = {} if is_mla else {"heads": share(HEADS, rank, tp)}
        return geometry_of_pool(pool, **heads, tp_rank=rank, tp_size=tp)

    for first, chunks in ((0, made[:2]), (2 * CHUNK, made[2:])):
        tokens = sum(one.metadata.shape[2] for one in chunks)
        store = geometry_of_objects(memory, chunks[0], heads=None if is_mla else share(HEADS, 0, 1))
        ids = block_ids(store, chunks)
        used = {size: own[first // size :][: -(-tokens // size)] for size, own in pages.items()}
        stored = hand_off(store, [described(p, 0, 1)], tokens, [ids], [used[16]])
        assert not len(stored.zero)
        for rank, d in enumerate(ranks):
            hand_off(described(d, rank, tp_d), [store], tokens, [used[64]], [ids])
    assert torch.equal(torch.cat([one.tensor for one in made], 2), values.flatten(3))
    slots = slots_of(pages[64], 64, TOKENS)
    for rank, d in enumerate(ranks):
        for n in range(shape[1]):
            buffers = [d.get_key_buffer(n)] if is_mla else [d.get_key_buffer(n), d.get_value_buffer(n)]
            whole = values if is_mla else values.chunk(tp_d, dim=3)[rank]
            assert all(torch.equal(one[slots], of[n]) for one, of in zip(buffers, whole, strict=True))
    for one in made:
        before[one.metadata.address :][: one.tensor.nbytes] = one.tensor.view(torch.uint8).flatten()
    assert torch.equal(memory, before)


def test_objects_that_are_not_known_are_refused(lmcache: Any) -> None:
    make, formats = lmcache
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    other = make(memory).allocate([torch.Size((8, 2, 32))], [torch.bfloat16], fmt=formats.KV_T2D)
    with pytest.raises(GeometryError, match="KV_T2D"):
        geometry_of_objects(memory, other)
    known = make(memory).allocate([torch.Size((2, 3, 8, 32))], [torch.bfloat16], fmt=formats.KV_2LTD)
    with pytest.raises(GeometryError, match="heads is None, and the object is KV_2LTD of 32 items"):
        geometry_of_objects(memory, known)
    with pytest.raises(GeometryError, match=r"layers \[4\]: the object has 3"):
        geometry_of_objects(memory, known, heads=share(2, 0, 1), layers=[4])
    for other in (memory.view(torch.bfloat16), memory.view(256, 256), memory[::2]):
        with pytest.raises(GeometryError, match="it is the flat uint8 buffer of an allocator"):
            geometry_of_objects(other, known, heads=share(2, 0, 1))
    with pytest.raises(GeometryError, match="align 0; it is the flat"):
        geometry_of_objects(memory, known, heads=share(2, 0, 1), align=0)


def test_ids_are_places_and_not_the_numbers_of_an_allocator(lmcache: Any) -> None:
    """`PagedTensorMemoryAllocator` calls 1 the address of its second page: address // 4096 was the first one."""
    paged = pytest.importorskip("lmcache.v1.memory_allocators.paged_tensor_memory_allocator", exc_type=ImportError)
    _, formats = lmcache
    shape = torch.Size((2, 3, CHUNK, 32))
    memory = torch.zeros(4 * shape.numel() * 2, dtype=torch.uint8)
    pages = paged.PagedTensorMemoryAllocator(memory, [shape], [torch.bfloat16], formats.KV_2LTD)
    made = [pages.allocate([shape], [torch.bfloat16]) for _ in range(3)]
    assert [one.metadata.address for one in made] == [0, 1, 2]
    store = geometry_of_objects(memory, made[0], heads=share(2, 0, 1))
    assert block_ids(store, made[1:]) == [24, 48]
    short = pages.allocate([torch.Size((2, 3, 8, 32))], [torch.bfloat16])
    with pytest.raises(GeometryError, match=r"object: \(2, 3, 8, 32\) at byte 294912; blocks have 256 tokens"):
        block_ids(store, [short])
    coarse = geometry_of_objects(memory, made[0], heads=share(2, 0, 1), align=65536)
    with pytest.raises(GeometryError, match="at byte 98304; blocks have 256 tokens, 65536 bytes apart"):
        block_ids(coarse, made)
    other = geometry_of_objects(memory[8192:], made[0], heads=share(2, 0, 1))
    with pytest.raises(GeometryError, match="at byte -8192"):
        block_ids(other, made)
    (part,) = geometry_of_objects(memory[8192:], made[0], heads=share(4, 1, 2)).layers[0].page.parts
    assert (part.axes[0].start, part.axes[0].length, other.layers[0].offset) == (2, 2, 8192)
