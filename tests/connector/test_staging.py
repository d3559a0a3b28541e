# SPDX-License-Identifier: Apache-2.0
"""Blocks that go through a bounded pool in host memory, on P and on D."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from vllm.v1.kv_cache_layout import KVCacheLayout

import kvhma
from connector import test_geometry, test_on_device
from connector.test_geometry import chunked, full, gdn, mamba2, mla, sliding, tables_of, worker
from connector.test_memory import DEVICES
from kvhma.errors import RequestError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.nixl import Agent
from kvhma.oracle import fill_source, fill_stale
from kvhma.planning import live_spans
from kvhma.vllm import connector
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.config import engine_config
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.metadata import StepMetadata
from kvhma.vllm.options.staging.pool import StagingPool
from kvhma.vllm.options.staging.slots import NAME, SlotRanges, Slots, staging_slots
from support.memory import carry_out_in_place
from support.workers import PAGE, PAGES, Decode, Prefill, hold_reads, threads_of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel_first", [False, True])
def test_blocks_go_through_the_host(device, kernel_first):
    """Two layers in one storage, with two kernel blocks per block, which need not be neighbours."""
    shape = (2, 2, 4, 6) if kernel_first else (2, 4, 2, 6)  # layer, kernel block and block or the other way, floats
    cache = torch.arange(96, dtype=torch.float32, device=device).reshape(shape)
    strides = (24, 96) if kernel_first else (48, 24)
    part = Part("kv", "float32", 4, 0, (Axis("tokens", 2, 12), Axis("content", 3, 4)))
    layers = tuple(
        Layer(name, 0, 0, 192 * index, 4, strides[0], Page((part,)), kernel_stride=strides[1])
        for index, name in enumerate("ab")
    )
    kind = "DRAM" if device == "cpu" else "VRAM"
    geometry = Geometry((Region(cache.data_ptr(), cache.nbytes, kind),), (Group("full", 4, ratio=2),), layers)
    pool = StagingPool(geometry, {"a": cache[0], "b": cache[1]}, SlotRanges.of(3, 2))
    assert [(layer.num_blocks, layer.page) for layer in pool.geometry.layers] == [(6, Page((part,)))] * 2
    pages = cache.transpose(1, 2) if kernel_first else cache  # layer, block, kernel block
    before = pages.cpu().clone()
    pool.copy_out([Span(0, [3, 1])], [Span(0, [2, 3])])
    assert torch.equal(in_pool(pool, [2, 3]), before[:, [3, 1]])
    (places,) = pool.take_places([Span(0, [1])])
    assert places == Span(0, [4])
    in_pool(pool, [4])[:] = 0
    for view in views_of(pool):
        view[4] = 1000
    pool.copy_in([places], [Span(0, [1])])
    before[:, 1] = 1000
    assert torch.equal(pages.cpu(), before)


def views_of(pool):
    """The pages of each layer in the pool, as its geometry says: slot, kernel block, floats."""
    (region,) = pool.geometry.regions
    raw = (ctypes.c_char * region.bytes).from_address(region.base)
    floats = torch.frombuffer(raw, dtype=torch.float32)
    return [
        floats.as_strided((6, 2, 6), (layer.block_stride // 4, layer.kernel_stride // 4, 1), layer.offset // 4)
        for layer in pool.geometry.layers
    ]


def in_pool(pool, slots):
    return torch.stack([view[slots] for view in views_of(pool)])


SPECS = {
    "full and sliding": lambda: [full(), sliding()],
    "chunked, kernel blocks": lambda: [chunked(block=32)],
    "latents": lambda: [mla()],
    "padded pages of state": lambda: [full(block=64), mamba2(1, padded=full(block=64).page_size_bytes, spec=2)],
    "gdn": lambda: [full(block=64), gdn(1, padded=full(block=64).page_size_bytes)],
}


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
@pytest.mark.parametrize("specs", SPECS)
def test_what_came_through_pools_is_what_a_direct_read_brings(monkeypatch, layout, specs):
    """In some layouts bytes of other layers and blocks are between the bytes of a page: they stay unchanged."""
    made = []
    geometry_of = test_geometry.geometry_of
    monkeypatch.setattr(
        test_geometry,
        "geometry_of",
        lambda config, caches, *of, **more: made.append(caches) or geometry_of(config, caches, *of, **more),
    )
    # vLLM splits no blocks of the other layouts.
    kernel = 16 if "kernel" in specs and layout in ("LBHNC", "LBNHC") else None
    p, d = (worker(SPECS[specs](), layout=layout, kernel=kernel) for _ in range(2))
    memories = [[in_memory(region) for region in geometry.regions] for geometry in (p, d)]
    tokens = 40
    theirs, ours = (live_spans(geometry, tokens, tables_of(geometry, tokens)) for geometry in (p, d))
    ours = [Span(span.first, [7 - block for block in span.ids]) for span in ours]
    fill_source(memories[0], p, theirs)
    fill_stale(memories[1])
    before = [region.copy() for region in memories[1]]
    move(d, p, tokens, ours, theirs)
    expected = [region.copy() for region in memories[1]]
    for region, old in zip(memories[1], before, strict=True):
        region[:] = old
    p_pool, d_pool = (
        StagingPool(geometry, caches, SlotRanges.of(7, 7)) for geometry, caches in zip((p, d), made, strict=True)
    )
    for pool in (p_pool, d_pool):
        in_memory(pool.geometry.regions[0])[:] = 0xEE
    slots, places = p_pool._slots.take_slots(theirs), d_pool.take_places(ours)
    p_pool.copy_out(theirs, slots)
    move(d_pool.geometry, p_pool.geometry, tokens, places, slots)
    d_pool.copy_in(places, ours)
    for found, wanted in zip(memories[1], expected, strict=True):
        assert np.array_equal(found, wanted)


def in_memory(region):
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.bytes).from_address(region.base))


def move(local, remote, tokens, ours, theirs):
    """Execute a transfer."""
    plan = kvhma.plan(local, (remote,), descriptor_bytes=0)
    carry_out_in_place(plan.transfer(tokens, list(ours), list(theirs)))


def test_slots_are_taken_and_given_back():
    slots = Slots(range(1, 6))
    first = slots.take_slots([Span(0, [9, 8]), Span(7, []), Span(3, [5])])
    assert first == (Span(0, [1, 2]), Span(7, []), Span(3, [3]))
    assert slots.take_slots([Span(0, [1, 2, 3])]) is None
    second = slots.take_slots([Span(0, [1, 2])])
    slots.release_slots(first)
    slots.release_slots(())
    assert slots.take_slots([Span(0, [1, 2, 3])]) == (Span(0, [1, 2, 3]),)
    slots.release_slots(second)
    with pytest.raises(RequestError, match="6 blocks go through host memory, staging_blocks has room for 5"):
        slots.take_slots([Span(0, range(6))])


def test_loads_wait_for_slots_and_each_gets_its_own_bytes(monkeypatch):
    moves = {f"r{at}": ([at, at + 20, at + 40], [3 * at, 3 * at + 1, 3 * at + 2]) for at in range(1, 7)}
    with contextlib.closing(Prefill()) as p, contextlib.closing(Decode(slots=(2, 4))) as d:
        d.reads(p, first=[60])
        go_on = hold_reads(monkeypatch)
        posted = threads_of(monkeypatch, Agent, "read")
        loads = {name: (p.remote(name, theirs), ours) for name, (theirs, ours) in moves.items()}
        d.start(**loads, too_long=(p.remote("too long", [1, 2, 3, 4, 5]), [30, 31, 32, 33, 34]))
        assert d.ended("too_long") == {"too_long": "request"}
        assert len(posted) == 1, "four slots are enough for one of them"
        go_on.set()
        assert d.ended(*moves) == {}
        expected = np.zeros((PAGES, PAGE), np.uint8)
        expected[60] = p.pages([60])
        for theirs, ours in moves.values():
            expected[ours] = p.pages(theirs)
        assert np.array_equal(d.pages(list(range(PAGES))), expected)
        d.reads(p, all_slots_are_free=[1, 2, 3, 4])


@pytest.mark.usefixtures("exact_plans")
def test_a_hand_off_through_the_pools_of_both_engines(monkeypatch):
    monkeypatch.setattr(connector, "writer_of", lambda config: lambda layer: Writer("FLASH_ATTN", "cuda", "9.0"))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setattr(engine_config, "HOST", "host")
    staged = {"place": lambda view: view, "buffer": "host"}
    p, d = test_on_device.Prefill(**staged), test_on_device.Engine("d", **staged)
    try:
        before = [cache.clone() for cache in d.caches]
        expected = test_on_device.expected_after_loading(p, before, test_on_device.TOKENS)
        slots = (Span(0, [2, 3, 1]),)
        p.connector.bind_connector_metadata(StepMetadata(extras={NAME: [((Span(0, test_on_device.THEIRS),), slots)]}))
        p.connector.wait_for_save()
        for cache in p.caches:
            cache.zero_()  # the blocks may belong to any request now
        d.step(p.load("r", theirs=[2, 3, 1]))
        assert d.until_received("r") == set()
        assert test_on_device.equal(d.caches, expected)
    finally:
        d.connector.shutdown()
        p.listener.close()
        p.connector.shutdown()


@pytest.mark.parametrize(
    ("role", "given", "expected"),
    [
        ("kv_both", None, (14, 14)),
        ("kv_producer", None, (14, 0)),
        ("kv_consumer", None, (0, 14)),
        ("kv_both", 3, (3, 3)),
    ],
)
def test_slots_by_role(role, given, expected):
    """A quarter of 20 blocks would not hold the longest request: 8 and 4 blocks, and one more of each group."""
    transfer = SimpleNamespace(is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer")
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(max_model_len=128))
    specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (16, 32)]
    caches = SimpleNamespace(num_blocks=20, kv_cache_groups=specs, transfer_group_ids=(0, 1))
    found = staging_slots(config, caches, Settings(staging_blocks=given))
    assert (len(found.reads), len(found.loads)) == expected
    assert not set(found.reads) & set(found.loads)
    assert 0 not in {*found.reads, *found.loads}
