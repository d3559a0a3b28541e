# SPDX-License-Identifier: Apache-2.0
"""Such caches hand off requests to each other: the byte oracle on every byte, and real bytes through the views."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

import kvhma
from kvhma.models import Model, State, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import Oracle, Request, check_memory, fill_source, fill_stale
from kvhma.torch import Cache, allocate
from support.memory import carry_out_in_place
from support.tables import count_blocks, draw_tables
from support.torch_labels import read, regions_of, tensors_of

ATTENTION = Model("attention", ("sliding", "full", "sliding", "full", "sliding", "sliding"), 4, 3, window=10)
HYBRID = Model(
    "hybrid",
    ("mamba2", "full", "mamba2", "mamba2", "full"),
    4,
    4,
    state=State("mamba2", 4 * 6 + 2 * 2 * 8, 4, 4, 6, 8, 2, "bfloat16", "float32"),
)
LATENT = Model("latent", ("mla",) * 3, 1, 9)
CONTIGUOUS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
ALL = (*CONTIGUOUS, "BHLNC", "LHBNC")


def cache_of(one: Model, order: str, num_blocks: int, *, dims: str | None = None, device="cpu", **options) -> Cache:
    sizes = {"block_size": 4, "align": 4 if one.state else None, "kernel_blocks_in_page": False}
    geometry = layout(one, LayoutOptions(num_blocks=num_blocks, order=order, **{**sizes, **options}))
    return allocate(geometry, device=device, dims=dims)


def large(name: str, order: str, num_blocks: int, **options) -> Cache:
    """A model of the table without memory."""
    return cache_of(model(name), order, num_blocks, device="meta", **{"block_size": 16, "align": None, **options})


def requests(geometry, tokens, seed):
    rng = random.Random(seed)
    return kvhma.live_spans(geometry, tokens, draw_tables(geometry, tokens, rng))


PAIRS = [
    *((ATTENTION, pair) for pair in product(ALL, ALL)),
    *((HYBRID, pair) for pair in product(CONTIGUOUS, CONTIGUOUS)),
    *((LATENT, pair) for pair in product(ALL, ("BHLNC", "LBHNC"))),
]


@pytest.mark.parametrize(("one", "pair"), PAIRS, ids=lambda v: v.name if isinstance(v, Model) else "-".join(v))
def test_any_layout_to_any_other(one, pair):
    """And from one conv layout to the other, from whole blocks to kernel blocks."""
    tokens = 27
    forms = [{"conv": "SD"}, {"conv": "DS", "kernel_block": 2}]
    if one is not LATENT:
        forms = [form | {"kv": "split"} for form in forms]
    caches = []
    for order, form in zip(pair, forms, strict=True):
        probe = cache_of(one, order, 1, **form).geometry
        caches.append(cache_of(one, order, count_blocks(probe, tokens) + 4, **form))
    prefill, decode = (cache.geometry for cache in caches)
    local, remote = requests(decode, tokens, 1), requests(prefill, tokens, 2)
    moved = kvhma.plan(decode, prefill).transfer(tokens, local, remote)
    report = Oracle(decode, [prefill]).check(tokens, local, remote, moved)
    assert report.moved > 0
    assert report.mergeable == 0
    copy_and_check(caches[0], caches[1], tokens, local, remote, moved)


def copy_and_check(source, target, tokens, local, remote, moved):
    """Move real bytes between the tensors."""
    fill_source(regions_of(source), source.geometry, remote)
    fill_stale(regions_of(target))
    carry_out_in_place(moved)
    excess = moved.excess_bytes
    asked = Request(tokens, local, remote)
    check_memory(regions_of(target), target.geometry, [source.geometry], asked, excess_bytes=excess)


@pytest.mark.parametrize("pair", list(product(ALL, ALL)), ids="-".join)
def test_views_show_the_same_values(pair):
    """D reads through its views what P wrote through its own, with any bytes between them."""
    tokens = 24
    orders = ["BHNC", "NBHC"]
    source, target = (cache_of(ATTENTION, at, 24, dims=dims) for at, dims in zip(pair, orders, strict=True))
    generator = torch.Generator().manual_seed(5)
    for view in source.views.values():
        view.view(torch.int16).random_(generator=generator)
    local, remote = requests(target.geometry, tokens, 3), requests(source.geometry, tokens, 4)
    carry_out_in_place(kvhma.plan(target.geometry, source.geometry).transfer(tokens, local, remote))
    for layer in target.geometry.layers:
        local_span, remote_span = local[layer.group], remote[layer.group]
        keep = list(remote_span.ids)[local_span.first - remote_span.first :]
        local_values = read(target.views[layer.name]).transpose(1, 2, 0, 3, 4)[list(local_span.ids)]
        assert len(keep) == len(local_values) > 0
        assert np.array_equal(local_values, read(source.views[layer.name])[keep]), layer.name


@pytest.mark.parametrize("order", ["BHLNC", "BLHNC", "LHBNC", "LBNHC"])
@pytest.mark.parametrize(("p_size", "d_size"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_between_numbers_of_ranks(order, p_size, d_size):
    tokens, num_blocks = 21, 24
    ranks = [{"tp_rank": rank, "tp_size": p_size} for rank in range(p_size)]
    sources = [cache_of(ATTENTION, "BLNHC", num_blocks, kv="split", **rank) for rank in ranks]
    geometries = [source.geometry for source in sources]
    remote = requests(geometries[0], tokens, 5)
    for rank in range(d_size):
        sizes = {"tp_rank": rank, "tp_size": d_size}
        decode = cache_of(ATTENTION, order, num_blocks, kv="split", kernel_block=2, **sizes).geometry
        local = requests(decode, tokens, 6)
        moved = kvhma.plan(decode, geometries).transfer(tokens, local, remote)
        Oracle(decode, geometries).check(tokens, local, remote, moved)


def runs_of(local, remote):
    """Count stretches of blocks that are neighbours at both ends, over all groups."""
    pairs = []
    for local_span, remote_span in zip(local, remote, strict=True):
        pairs += zip(local_span.ids, list(remote_span.ids)[len(remote_span.ids) - len(local_span.ids) :], strict=True)
    pairs.sort()
    return sum(b[0] - a[0] != 1 or b[1] - a[1] != 1 for a, b in pairwise(pairs)) + 1


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "gemma-3-12b", "Llama-4-Scout-17B-16E", "DeepSeek-V3"])
def test_a_run_of_blocks_is_one_descriptor(name, order):
    """For any number of layers."""
    tokens = 16 * 300
    probe = large(name, order, 1).geometry
    caches = [large(name, order, count_blocks(probe, tokens) + extra) for extra in (1, 9)]
    decode, prefill = (cache.geometry for cache in caches)
    for seed in range(3):
        local, remote = requests(decode, tokens, seed), requests(prefill, tokens, seed + 10)
        moved = kvhma.plan(decode, prefill).transfer(tokens, local, remote)
        assert moved.descriptors == runs_of(local, remote)
        blocks = sum(len(span.ids) for span in local)
        assert moved.bytes == blocks * caches[0].buffers[0].tensor.nbytes // decode.layers[0].num_blocks
        assert moved.descriptors <= blocks


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC"])
def test_a_group_with_fewer_layers_costs_one_descriptor_a_block(order):
    """gemma-3-27b: the last slots of the sliding groups' blocks are unused, so blocks do not touch."""
    decode = large("gemma-3-27b", order, 600).geometry
    sizes = Counter(layer.group for layer in decode.layers)
    assert set(sizes.values()) == {8, 9, 10}
    tokens = 16 * 64
    local, remote = requests(decode, tokens, 1), requests(decode, tokens, 1)
    moved = kvhma.plan(decode, decode).transfer(tokens, local, remote)
    short = [len(span.ids) for index, span in enumerate(local) if sizes[index] < 10]
    whole = [span for index, span in enumerate(local) if sizes[index] == 10]
    assert sum(short) < moved.descriptors <= sum(short) + runs_of(whole, whole)


def test_a_slice_of_heads_is_one_descriptor_a_block():
    """From one rank to two, with heads before layers: half of each block; and per layer without."""
    tokens, counts = 16 * 8, {}
    for order in ("BHLNC", "BLHNC"):
        prefill = large("gpt-oss-20b", order, 40).geometry
        decode = large("gpt-oss-20b", order, 40, tp_rank=1, tp_size=2).geometry
        local, remote = requests(decode, tokens, 1), requests(prefill, tokens, 2)
        counts[order] = kvhma.plan(decode, prefill).transfer(tokens, local, remote).descriptors
        blocks = sum(len(span.ids) for span in local)
    assert counts == {"BHLNC": blocks, "BLHNC": 12 * blocks}


def test_state_moves_without_its_padding():
    decode = large("Qwen3-Next-80B-A3B", "BLHNC", 12).geometry
    tokens = 544 * 2
    local, remote = requests(decode, tokens, 1), requests(decode, tokens, 2)
    moved = kvhma.plan(decode, decode).transfer(tokens, local, remote)
    assert moved.bytes == 2 * 12 * 1114112 + 3 * 12 * 1097728
    # Attention: a run of blocks each; state: between two layers of a block is padding.
    assert moved.descriptors <= 2 + 3 * 12


def test_a_layer_does_not_see_what_is_written_in_another():
    """Blocks of one group: all its layers; the same with a state's tensors."""
    for order in CONTIGUOUS:
        cache = cache_of(HYBRID, order, 6)
        for group in range(len(cache.geometry.groups)):
            names = [layer.name for layer in cache.geometry.layers if layer.group == group]
            for name in names:
                for buffer in cache.buffers:
                    buffer.tensor.zero_()
                for tensor in tensors_of(cache.views[name]):
                    tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).fill_(-1)
                    assert bool((torch.from_numpy(read(tensor)) == 255).all())
                others = [tensor for other in names if other != name for tensor in tensors_of(cache.views[other])]
                assert all(not read(other).any() for other in others)
