# SPDX-License-Identifier: Apache-2.0
"""Stride orders against tables written by hand, and the strides and shards that follow from a geometry's fields."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Shard
from kvhma.models.stride_orders import Order, stride_axes

# With a page that stays contiguous, as the hybrid allocator needs under a state; and with kernel blocks like blocks.
PACKED = {
    "LBHNC": ("LBKHNC", "LBKHNC"),
    "LBNHC": ("LBKNHC", "LBKNHC"),
    "LHBNC": ("LHBKNC", "LHBKNC"),
    "BLHNC": ("BLKHNC", "BKLHNC"),
    "BLNHC": ("BLKNHC", "BKLNHC"),
    "BHLNC": ("BKHLNC", "BKHLNC"),
}
# K, then V: in each page, or in the bytes of each head where heads come before layers or blocks.
SPLIT = {
    "LBHNC": ("LBKSHNC", "LBKSHNC"),
    "LBNHC": ("LBKSNHC", "LBKSNHC"),
    "LHBNC": ("LHBKSNC", "LHBKSNC"),
    "BLHNC": ("BLKSHNC", "BKLSHNC"),
    "BLNHC": ("BLKSNHC", "BKLSNHC"),
    "BHLNC": ("BKHLSNC", "BKHLSNC"),
}
APART = {
    "LBHNC": "LSBKHNC",
    "LBNHC": "LSBKNHC",
    "LHBNC": "LSHBKNC",
    "BLHNC": "LSBKHNC",
    "BLNHC": "LSBKNHC",
    "BHLNC": "LSBKHNC",
}


@pytest.mark.parametrize("order", get_args(Order))
def test_where_kernel_blocks_and_k_and_v_go(order: str) -> None:
    for kv, table in (("packed", PACKED), ("split", SPLIT)):
        found = tuple(stride_axes(order, kv, kernel_blocks_in_page=inside) for inside in (True, False))
        assert found == table[order]
    assert stride_axes(order, "apart", kernel_blocks_in_page=False) == APART[order]


def test_default_stride_of_kernel_blocks() -> None:
    group = Group("full", 48, ratio=3)
    page = Page((Part("kv", "int8", 1, 0, (Axis("tokens", 16, 4), Axis("content", 4, 1))),))
    layer = Layer("a", 0, 0, 0, 4, 3 * 80, page)
    far = replace(layer, name="b", block_stride=64, kernel_stride=4 * 64)
    geometry = Geometry((Region(0, 1024),), (group,), (layer, far))
    assert group.kernel_block_size == 16
    assert [geometry.kernel_stride(one) for one in geometry.layers] == [80, 256]


def test_default_length_of_a_shard() -> None:
    assert [Shard(8).held, Shard(8, 6).held, Shard(8, 2, 3).held] == [8, 2, 3]
    assert Axis("heads", 8, 64, 2, 3).shard == Shard(8, 2, 3)
    assert Shard(8, 2, 6).problem("heads") is None
    assert Shard(8, 2, 7).problem("heads") == "heads 2..9: must be a range within the extent 8"
    assert Shard(8, 8).problem("heads") == "heads 8..8: must be a range within the extent 8"
