# SPDX-License-Identifier: Apache-2.0
"""Every byte of generated caches, through the views of all layers and through the buffers."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from kvhma.errors import LayoutError
from kvhma.geometry import Geometry
from kvhma.models import Attention, Model, State
from kvhma.models.stride_orders import Order
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.torch import Cache, allocate
from support.torch_labels import Labels, addresses, read, regions_of, tensors_of

GENERATED = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
STATES = (
    State("mamba2", 2 * 4 + 2 * 2, 3, 2, 4, 2, 1, "bfloat16", "float32"),
    State("gdn", 2 * 4 + 2 * 2 * 4, 4, 2, 4, 4, 2, "bfloat16", "bfloat16"),
    State("mamba1", 4, 2, 4, 1, 4, 0, "float32", "float32"),
    State("short_conv", 6, 3, 6, 1, 0, 0, "bfloat16", "bfloat16"),
    State("linear", 0, 1, 2, 4, 4, 0, "bfloat16", "bfloat16"),
)
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


@st.composite
def geometries(draw: Any) -> tuple[Geometry, str]:
    """Draw the cache of a rank, and the order of the dimensions that its kernel wants."""
    state = draw(st.sampled_from([None, None, *STATES]))
    kinds = ["full", "sliding", "chunked"] + ([state.kind] if state else []) + draw(st.sampled_from([[], ["wide"]]))
    if draw(st.integers(0, 5)) == 0:
        kinds = ["mla"]
    width = draw(st.sampled_from([2, 4]))
    one = Model(
        "mix",
        tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))),
        1 if kinds == ["mla"] else draw(st.sampled_from([1, 2, 4])),
        width,
        dtype=draw(st.sampled_from(DTYPES)),
        window=5,
        chunk=6,
        state=state,
        attention=(Attention("full", 2, 2 * width, name="wide"),),
    )
    kv, tp = draw(st.sampled_from(["packed", "packed", "split", "apart"])), draw(st.sampled_from([1, 2]))
    options = LayoutOptions(
        num_blocks=draw(st.integers(1, 6)),
        order=draw(st.sampled_from(get_args(Order))),
        kv=kv,
        kernel_blocks_in_page=draw(st.booleans()),
        one_storage=draw(st.booleans()),
        tp_size=tp,
        tp_rank=draw(st.integers(0, tp - 1)),
        block_size=draw(st.sampled_from([2, 4])),
        align=2,
        kernel_block=draw(st.sampled_from([None, None, 1, 2])),
        conv=draw(st.sampled_from(["DS", "SD"])),
    )
    try:
        made = layout(one, options)
    except LayoutError:  # tests/unit/test_hybrid.py has what a layout refuses
        assume(False)
    letters = "BHNC" if kv == "packed" else "BSHNC"
    return made, draw(st.permutations(letters).map("".join))


def made(geometry: Geometry, dims: str) -> Cache:
    try:
        return allocate(geometry, dims=dims)
    except LayoutError as error:
        uneven = any(
            layer.kernel_stride and layer.kernel_stride * geometry.groups[layer.group].ratio != layer.block_stride
            for layer in geometry.layers
            if geometry.groups[layer.group].ratio > 1
        )
        if not (uneven and "evenly spaced" in str(error)):
            raise
        assume(False)
        raise


@given(geometries(), st.randoms(use_true_random=False))
@GENERATED
def test_every_label_is_where_the_geometry_says_and_nowhere_else(mix, rng):
    geometry, dims = mix
    cache = made(geometry, dims)
    owner = np.array([rng.randrange(len(geometry.groups)) for _ in range(geometry.layers[0].num_blocks)])
    labels = Labels(cache, dims, owner)
    images = labels.written()
    # No label is lost or duplicated: live pages do not overlap, for all users of the buffer.
    seen = np.concatenate(images)
    assert np.array_equal(np.sort(seen[seen > 0]), np.arange(1, labels.count + 1))
    for name, found in labels.locations().items():
        image = images[geometry.layer_by_name[name].region]
        for locations, expected in zip(found, labels.labels[name], strict=True):
            assert np.array_equal(image[locations], expected), name
    event(f"kinds {sorted({buffer.kind for buffer in cache.buffers})}")


@given(geometries(), st.integers(0, 2**32 - 1))
@GENERATED
def test_every_byte_of_a_buffer_is_read_back_through_the_views(mix, seed):
    geometry, dims = mix
    cache = made(geometry, dims)
    memory = regions_of(cache)
    rng = np.random.default_rng(seed)
    for region in memory:
        region[:] = rng.integers(0, 256, region.size, dtype=np.uint8)
    for name, view in cache.views.items():
        region = memory[geometry.layer_by_name[name].region]
        for tensor, grid in zip(tensors_of(view), addresses(geometry, name, dims), strict=True):
            assert np.array_equal(read(tensor), region[grid]), name


@given(geometries())
@GENERATED
def test_a_buffer_is_its_region_and_has_every_layer_once(mix):
    geometry, dims = mix
    cache = made(geometry, dims)
    assert [buffer.tensor.nbytes for buffer in cache.buffers] == [region.bytes for region in geometry.regions]
    assert [buffer.tensor.data_ptr() for buffer in cache.buffers] == [one.base for one in cache.geometry.regions]
    shown = [name for buffer in cache.buffers for slot in buffer.layers for name in slot]
    assert sorted(shown) == sorted(cache.views)
    for buffer in cache.buffers:
        assert len(buffer.dims) == buffer.tensor.dim()
        assert all(len({geometry.layer_by_name[name].group for name in slot}) == len(slot) for slot in buffer.layers), (
            "two layers of one group in a slot"
        )


@given(geometries())
@GENERATED
def test_a_cross_layer_tensor_is_the_layers_one_behind_the_other(mix):
    geometry, dims = mix
    cache = made(geometry, dims)
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
