# SPDX-License-Identifier: Apache-2.0
"""Which managers of blocks the connector takes. The cache oracle has what a load leaves in the prefix cache."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.internals import check_manager
from kvhma.vllm.loads.prefix_cache import hits_may_differ


def test_a_manager_that_counts_otherwise_is_refused():
    single = SimpleNamespace(block_size=16)
    with pytest.raises(UnsupportedPairError, match="num_cached_block"):
        check_manager(SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[single])))


ATTENTION = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**ATTENTION)


@pytest.mark.parametrize(
    ("spec", "inside", "expected"),
    [
        (FULL, True, True),
        (SlidingWindowSpec(**ATTENTION, sliding_window=24), True, False),
        (SlidingWindowSpec(**ATTENTION, sliding_window=24), False, True),
        # Without that cache the length of a hit is unknown.
        (EncoderOnlyAttentionSpec(**ATTENTION), True, False),
    ],
)
def test_where_hits_may_differ(spec, inside, expected):
    groups = [KVCacheGroupSpec([f"model.layers.{index}"], one) for index, one in enumerate((spec, FULL))]
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    coordinator = SimpleNamespace(enable_partial_hash_hits=inside)
    assert hits_may_differ(SimpleNamespace(coordinator=coordinator, kv_cache_config=config)) is expected
