# SPDX-License-Identifier: Apache-2.0
"""Clipping, expansion and ids: the numbers of vLLM 0.32's own unit tests for its hybrid connector."""

import numpy as np
import pytest

import kvhma
from kvhma import Span, lowlevel


def ids(values):
    return np.asarray(values).tolist()


def clipped(*arguments, **more):
    return [ids(group) for group in lowlevel.clip_blocks(*arguments, **more)]


def test_sliding_window_keeps_one_block_more_than_the_window():
    assert lowlevel.window_blocks(2048, 16) == 129
    assert (
        lowlevel.window_blocks(24, 16) == 3
    )  # two blocks hold the window, one more for a window that starts inside a block


def test_static_clip_of_a_gemma_3_1b_request():
    # window 512, block 16: 33 blocks of each sliding group, all 88 of the full group
    table = list(range(1, 89))
    full, sliding = clipped([table, table], [0, lowlevel.window_blocks(512, 16)])
    assert len(full) == 88
    assert sliding == table[-33:]


def test_null_blocks_in_front_are_dropped():
    assert clipped([[0, 0, 0, 7, 8]], [0]) == [[7, 8]]
    assert clipped([[0, 0, 7]], [2], null_block=None) == [[0, 7]]


def test_exchange_clip_keeps_the_state_slot_before_the_speculative_ones():
    assert clipped([[1, 2, 3], [7, 8, 9]], [2, 0], speculative=[None, 2]) == [[2, 3], [7]]


@pytest.mark.parametrize(
    ("table", "kept"),
    [([0, 0, 7, 8, 9], [7]), ([0, 6, 7, 8, 9], [7]), ([7, 8, 9], [7]), ([5], [5]), ([], [])],
)
def test_state_slot(table, kept):
    assert clipped([table], [0], speculative=[2]) == [kept]


def test_without_clipping_state_all_slots_stay():
    assert clipped([[7, 8]], [0]) == [[7, 8]]


@pytest.mark.parametrize(
    ("ratio", "blocks", "kernel"),
    [
        (2, [0, 1, 2], range(6)),
        (2, [3, 4], range(6, 10)),
        (10, [0], range(10)),
        (6, [0, 1], range(12)),
        (1, [10], [10]),
        (4, [0, 1], range(8)),
        (3, [0, 1], range(6)),
        (3, [2, 3], range(6, 12)),
        (34, [5, 6], range(170, 238)),
    ],
)
def test_logical_to_kernel(ratio, blocks, kernel):
    assert ids(lowlevel.expand_blocks(blocks, ratio)) == list(kernel)


def test_attention_and_state_ids():
    # two regions of 100 blocks, then one state region with four parts
    fa, ssm = [3, 5], [1, 2]
    got = lowlevel.descriptor_ids([fa, ssm], [100] * 2 + [100] * 4, [0] * 2 + [1] * 4)
    assert ids(got) == [3, 5, 103, 105, 201, 202, 301, 302, 401, 402, 501, 502]


def test_attention_and_state_ids_with_kernel_blocks():
    got = lowlevel.descriptor_ids([[3, 7], [1, 2]], [400] * 2 + [100] * 4, [0] * 2 + [1] * 4)
    assert ids(got) == [3, 7, 403, 407, 801, 802, 901, 902, 1001, 1002, 1101, 1102]


def test_state_is_never_expanded_for_smaller_blocks():
    got = lowlevel.descriptor_ids([[3, 5], [1]], [400] * 2 + [100] * 4, [0] * 2 + [1] * 4)
    assert ids(got) == [3, 5, 403, 405, 801, 901, 1001, 1101]


@pytest.mark.parametrize(
    ("groups", "counts", "members", "expected"),
    [
        (([1, 2], [7]), [10] * 3, [0, 0, 1], [1, 2, 11, 12, 27]),
        (([1, 2], [7]), [10] * 3, [1, 1, 0], [7, 17, 21, 22]),
        (([1], [2], [3]), [10] * 3, [0, (0, 1, 2), 2], [1, 11, 12, 13, 23]),
        (([4], [8]), [5, 10], [0, 1], [4, 13]),
        (([1, 2], [7]), [10, 10], [(0, 1), (0, 1)], [1, 2, 7, 11, 12, 17]),
    ],
)
def test_regions_and_groups(groups, counts, members, expected):
    # The second case is listed upstream group by group, [21, 22, 7, 17]: the same ids in another order.
    assert ids(lowlevel.descriptor_ids(groups, counts, members)) == expected


def test_hybrid_latent_and_linear_attention():
    # 12-token logical blocks of three 4-token kernel blocks, 4 blocks, 2 tensors shared by both groups
    page, state = 3 * 4 * 64, (16, 16, 16, 48)
    bases = [0x1000, 0x9000]
    attention = lowlevel.fa_views(bases, [page // 3] * 2, [page // 3] * 2, [12, 12])
    offsets = np.cumsum([0, *state[:-1]]).tolist()
    states = lowlevel.ssm_views(bases, list(zip(offsets, state, strict=True)), [page] * 2, [4, 4])
    views = np.concatenate([attention, states])
    assert views.shape == (2 + 8, 5)
    assert views[:, 4].tolist() == [12, 12] + [4] * 8
    rows = lowlevel.expand_views(views)
    assert len(rows) == 24 + 32
    assert rows[12].tolist() == [0x9000, page // 3, 0]
    assert rows[24 + 4].tolist() == [0x1000 + 16, 16, 0]


def test_state_descriptors_are_region_then_part_then_block():
    rows = lowlevel.ssm_descriptors([1000, 5000], [(0, 8), (8, 24)], [100, 100], [2, 3])
    assert rows[:, 0].tolist() == [1000, 1100, 1008, 1108, 5000, 5100, 5200, 5008, 5108, 5208]
    assert rows[:, 1].tolist() == [8, 8, 24, 24, 8, 8, 8, 24, 24, 24]


def test_capacities_place_every_region_after_the_last():
    rows = lowlevel.fa_descriptors([100, 1000], [16, 16], [16, 16], [2, 3])
    assert rows[:, 0].tolist() == [100, 116, 1000, 1016, 1032]


def hybrid(blocks, *, window=64, speculative=2):
    from support.tiny import tiny_hybrid

    return tiny_hybrid(blocks, window=window, speculative=speculative)


def test_live_spans_of_block_tables():
    geometry = hybrid(40)
    spans = kvhma.live_spans(geometry, 100, [list(range(1, 8)), [0, 0, 0, 13, 14, 15, 16], [0, 0, 37, 38, 39]])
    # the token after 100 sees tokens 37.. of a 64-token window: block 2 on, but the manager has kept 3 on
    assert spans == [Span(0, [1, 2, 3, 4, 5, 6, 7]), Span(3, [13, 14, 15, 16]), Span(0, [37])]
    spans = kvhma.live_spans(geometry, 100, [list(range(1, 8)), list(range(11, 18)), [37]], cached=[2, 5, 0])
    assert spans == [Span(2, [3, 4, 5, 6, 7]), Span(5, [16, 17]), Span(0, [37])]
