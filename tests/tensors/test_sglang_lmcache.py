# SPDX-License-Identifier: Apache-2.0
"""LMCache's real memory objects as blocks between two of SGLang's pools."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.geometry import Group
from kvhma.tensors import LayerTensors, TensorPart, geometry_from_tensors
from support.sglang_pools import hand_off, layer, mha, slots_of, torch

LAYERS, HEADS, DIM, CHUNK = 3, 2, 16, 256
AXES = ("blocks", "tokens", "heads", "content")


def engine(pool):
    """K and V of a layer are halves of one allocation, so they can be one layer, as in LMCache's objects."""
    groups = [Group("full", pool.page_size)]
    layers = {}
    for n in range(LAYERS):
        both = [pool.get_key_buffer(n), pool.get_value_buffer(n)]
        pages = [one.unflatten(0, (-1, pool.page_size)) for one in both]
        layers[f"layers.{n}"] = LayerTensors(0, tuple(map(TensorPart, "kv", pages, (AXES, AXES))))
    return geometry_from_tensors(groups, layers)


def test_full_chunks_hold_what_other_pages_had():
    logging.disable(logging.CRITICAL)
    try:
        allocators = pytest.importorskip("lmcache.v1.memory_allocators.tensor_memory_allocator", exc_type=ImportError)
        management = pytest.importorskip("lmcache.v1.memory_management", exc_type=ImportError)
    finally:
        logging.disable(logging.NOTSET)
    memory, tokens = torch.zeros(1 << 20, dtype=torch.uint8), 2 * CHUNK
    allocator = allocators.TensorMemoryAllocator(memory)
    shape, form = torch.Size([2, LAYERS, CHUNK, HEADS * DIM]), management.MemoryFormat.KV_2LTD
    chunks = [allocator.allocate([shape], [torch.bfloat16], fmt=form) for _ in range(2)]
    size = chunks[0].tensor.nbytes
    ids = [(chunk.tensor.data_ptr() - memory.data_ptr()) // size for chunk in chunks]
    blocks = memory[: len(memory) // size * size].view(torch.bfloat16).view(-1, 2, LAYERS, CHUNK, HEADS, DIM)
    parts = {n: tuple(TensorPart(part, blocks[:, at, n], AXES) for at, part in enumerate("kv")) for n in range(LAYERS)}
    store = geometry_from_tensors(
        [Group("full", CHUNK)], {f"layers.{n}": LayerTensors(0, parts[n]) for n in parts}, null_block=None
    )
    p, d = mha(16, 64), mha(64, 16)
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM).bfloat16()
    pages = list(range(60, 28, -1))
    for n in range(LAYERS):
        p.set_kv_buffer(layer(n), slots_of(pages, 16, tokens), k[n].clone(), v[n].clone())
    hand_off(store, [engine(p)], tokens, [ids], [pages])
    whole = torch.cat([chunk.tensor for chunk in chunks], 2).unflatten(3, (HEADS, DIM))
    assert torch.equal(whole, torch.stack([k, v]))
    hand_off(engine(d), [store], tokens, [range(2, 10)], [ids])
    slots = slots_of(range(2, 10), 64, tokens)
    for n in range(LAYERS):
        assert torch.equal(d.get_key_buffer(n)[slots], k[n])
        assert torch.equal(d.get_value_buffer(n)[slots], v[n])
    for chunk in chunks:
        allocator.free(chunk)
