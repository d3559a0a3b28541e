# SPDX-License-Identifier: Apache-2.0
"""Every byte of generated caches, through the views of all layers and through the buffers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from kvhma.errors import LayoutError
from kvhma.geometry import Shard
from kvhma.torch import AttentionSpec, Cache, allocate
from support.torch_labels import Labels, addresses, read, regions_of, tensors_of
from support.torch_specs import Mix, mixes

GENERATED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


WIDE = AttentionSpec(Shard(3), 4, torch.bfloat16, 2, page_bytes=128)
UNEQUAL_HEADS = Mix(
    (
        {"0.0": WIDE, "0.1": replace(WIDE, head_dim=2), "0.2": WIDE, "0.3": replace(WIDE, heads=Shard(2))},
        {"1.0": replace(WIDE, heads=Shard(4)), "1.1": replace(WIDE, head_dim=1, kv="split")},
    ),
    5,
    "BHLNC",
    None,
)
"""Heads before layers in groups whose layers have unlike heads in pages of one size."""


def made(mix: Mix) -> Cache:
    try:
        cache = allocate(mix.groups, mix.num_blocks, layout=mix.layout, shared=mix.shared, null_block=None)
    except LayoutError as error:
        # Right refusals: pages that cannot share though they are equal, and items out of line.
        impossible = "would share memory" in str(error) and not mix.strict()
        unaligned = "would start at byte" in str(error) and mix.layout == "BHLNC"
        misfit = "must be a multiple" in str(error)
        if not (impossible or unaligned or misfit):
            raise
        assume(False)
    return cache


@given(mixes(), st.randoms(use_true_random=False))
@example(UNEQUAL_HEADS, random.Random(1))
@GENERATED
def test_every_label_is_where_the_geometry_says_and_nowhere_else(mix, rng):
    cache = made(mix)
    owner = np.array([rng.randrange(len(mix.groups)) for _ in range(mix.num_blocks)])
    labels = Labels(cache, mix.specs, owner)
    images = labels.written()
    # No label is lost or duplicated: live pages do not overlap, for all users of the buffer.
    seen = np.concatenate(images)
    assert np.array_equal(np.sort(seen[seen > 0]), np.arange(1, labels.count + 1))
    for name in mix.specs:
        image = images[cache.geometry.layer_by_name[name].region]
        for locations, expected in zip(labels.locations(name), labels.labels[name], strict=True):
            assert np.array_equal(image[locations], expected), name
    event(f"layout {mix.layout}, {len(cache.buffers)} buffers")
    event(f"kinds {sorted({buffer.kind for buffer in cache.buffers})}")


@given(mixes(), st.integers(0, 2**32 - 1))
@GENERATED
def test_every_byte_of_a_buffer_is_read_back_through_the_views(mix, seed):
    cache = made(mix)
    memory = regions_of(cache)
    rng = np.random.default_rng(seed)
    for region in memory:
        region[:] = rng.integers(0, 256, region.size, dtype=np.uint8)
    for name, spec in mix.specs.items():
        region = memory[cache.geometry.layer_by_name[name].region]
        for tensor, grid in zip(tensors_of(cache.views[name]), addresses(cache.geometry, name, spec), strict=True):
            assert np.array_equal(read(tensor), region[grid]), name


@given(mixes())
@GENERATED
def test_references_hold_the_bytes_of_the_geometry(mix):
    cache = made(mix)
    tensors = cache.references.tensors
    assert [tensor.nbytes for tensor in tensors] == [buffer.tensor.nbytes for buffer in cache.buffers]
    for index, group in enumerate(cache.references.groups):
        assert [data.layer for data in group] == list(mix.groups[index])
        for data in group:
            layer = cache.geometry.layer_by_name[data.layer]
            assert cache.geometry.regions[layer.region].base == tensors[data.tensor].base
            spec = mix.specs[data.layer]
            by_segments: Counter[int] = Counter()
            for block in range(data.num_blocks):
                for segment in data.segments:
                    one = segment.nbytes // segment.heads
                    for head in range(segment.heads):
                        start = segment.offset + block * data.block_stride + head * (segment.head_stride or 0)
                        by_segments.update(range(start, start + one))
            by_geometry = np.concatenate([grid.reshape(-1) for grid in addresses(cache.geometry, data.layer, spec)])
            assert by_segments == Counter(by_geometry.tolist())
            assert sum(segment.nbytes for segment in data.segments) * data.num_blocks == spec.nbytes * mix.num_blocks
            # In a part whose heads can be read one by one, a head is one run of bytes.
            heads = [segment for segment in data.segments if segment.heads > 1]
            assert all(segment.nbytes % segment.heads == 0 and segment.head_stride for segment in heads)


@given(mixes())
@GENERATED
def test_a_cross_layer_tensor_is_the_layers_one_behind_the_other(mix):
    cache = made(mix)
    for buffer in cache.buffers:
        whole = buffer.cross_layer
        if whole is None:
            continue
        slots = len(buffer.layers)
        strides = list(whole.stride())
        assert strides == sorted(strides, reverse=True)
        for at, slot in enumerate(buffer.layers):
            for name in slot:
                (view,) = tensors_of(cache.views[name])
                step = (view.storage_offset() - whole.storage_offset()) // max(at, 1)
                assert at == 0 or (slots, step) in zip(whole.shape, strides, strict=True)
                assert view.numel() * slots == whole.numel()
