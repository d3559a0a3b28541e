# SPDX-License-Identifier: Apache-2.0
"""What a load leaves in D's prefix cache, with vLLM's real manager of blocks. The cache oracle does this at random."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Span
from kvhma.vllm.internals import check_manager, mark_uncacheable
from kvhma.vllm.loads.prefix_cache import hit_blocks, hits_may_differ
from kvhma.vllm.metadata import WorkerReport
from kvhma.vllm.reads.read_steps import first_filled_tokens
from support.tiny import BLOCK, tiny_hybrid


def block(*, null=False, hashed=False):
    return SimpleNamespace(is_null=null, block_hash=b"h" if hashed else None)


NULL, HIT, NEW = block(null=True), block(hashed=True), block()


@pytest.mark.parametrize(
    ("table", "hits"),
    [
        ([], 0),
        ([NEW, NEW], 0),
        ([HIT, HIT, NEW], 2),
        ([NULL, NULL, NEW], 2),
        ([NULL, HIT, NEW], 2),
        ([NULL, HIT], 2),
        ([NULL, NULL], 2),
    ],
)
def test_hits_are_what_has_a_hash(table, hits):
    assert hit_blocks(table) == hits


@pytest.mark.parametrize(
    ("first", "token", "expected"),
    [(3, 0, {}), (3, 3 * BLOCK, {}), (3, 3 * BLOCK + 1, {1: 3 * BLOCK + 1}), (3, 5 * BLOCK, {1: 5 * BLOCK})],
)
def test_groups_that_are_not_filled_from_their_first_block_on(first, token, expected):
    spans = [Span(0, [1]), Span(first, [2, 3]), Span(0, [4])]
    assert first_filled_tokens(tiny_hybrid(10), spans, [0, token, 0]) == expected


def test_of_several_ranks_the_latest_token_counts():
    one, other = WorkerReport(first_tokens={"r": {1: 5, 2: 9}}), WorkerReport(first_tokens={"r": {1: 7}, "s": {0: 1}})
    expected = {"r": {1: 7, 2: 9}, "s": {0: 1}}
    assert one.aggregate(other).first_tokens == other.aggregate(one).first_tokens == expected


def test_blocks_that_begin_before_a_token_get_no_hash():
    single = SimpleNamespace(block_size=16, num_cached_block={"r": 2})
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[None, single]))
    for token, cached in ((17, 2), (33, 3), (48, 3), (49, 4), (1, 4)):
        mark_uncacheable(manager, "r", 1, token)
        assert single.num_cached_block == {"r": cached}


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
