# SPDX-License-Identifier: Apache-2.0
"""Regions of a live worker follow the same rule as those of any other tensors."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvhma.errors import GeometryError
from kvhma.geometry import Region
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from support.torch_devices import Elsewhere

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
BLOCKS, PAGE = 8, SPEC.page_size_bytes


def described(caches):
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(caches), SPEC)])
    return geometry_of(config, caches, RankInfo())


def test_storages_that_overlap_are_one_region():
    """Two layers in one piece of memory, each seen through a separate storage; the second is all of it."""
    raw = bytearray(2 * BLOCKS * PAGE)
    whole = torch.frombuffer(raw, dtype=torch.bfloat16)
    half = torch.frombuffer(raw, dtype=torch.bfloat16, count=BLOCKS * PAGE // 2)
    views = {"a": half, "b": whole[BLOCKS * PAGE // 2 :]}
    geometry = described({name: view.view(BLOCKS, 2, 16, 16) for name, view in views.items()})
    assert geometry.regions == (Region(whole.data_ptr(), len(raw)),)
    assert [(layer.region, layer.offset) for layer in geometry.layers] == [(0, 0), (0, BLOCKS * PAGE)]


def test_a_device_whose_memory_has_no_kind_is_refused():
    with pytest.raises(GeometryError, match="layer 'a': device mps; known are cpu, meta, cuda, xpu"):
        described({"a": Elsewhere("mps", (BLOCKS, 2, 16, 16), torch.bfloat16)})
