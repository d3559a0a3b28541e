# SPDX-License-Identifier: Apache-2.0
"""The fake counts descriptors as NIXL 1.5.1 does: cases measured with its telemetry."""

from __future__ import annotations

import numpy as np
import pytest

from support.fake_nixl import ERRORS, Run, merge, runs_of_rows, runs_of_views

PAGE = 64


def dense(count, base=1 << 20):
    return Run(base, PAGE, PAGE, count)


def halves(count, base=1 << 20):
    return [Run(base, PAGE, 2 * PAGE, count), Run(base + PAGE, PAGE, 2 * PAGE, count)]


UP = list(range(64))
DOWN = UP[::-1]


@pytest.mark.parametrize(
    ("local", "local_ids", "remote", "remote_ids", "descriptors"),
    [
        pytest.param([dense(64)], UP, [dense(64)], UP, 1, id="dense, both ascending"),
        pytest.param([dense(64)], DOWN, [dense(64)], DOWN, 64, id="both descending"),
        pytest.param([dense(64)], UP, [dense(64)], DOWN, 64, id="one descending"),
        pytest.param(halves(64), [*range(128)], halves(64), [*range(128)], 128, id="K and V as halves"),
        pytest.param([dense(64)], UP, halves(64), UP, 64, id="one side strided"),
        pytest.param([dense(10), dense(10)], [*range(20)], [dense(10), dense(10)], [*range(20)], 2, id="two rows"),
        pytest.param([dense(20)], [*range(20)], [dense(10), dense(10)], [*range(20)], 2, id="two rows on one side"),
        pytest.param([dense(20)], [*range(20)], [dense(20)], [*range(20)], 1, id="one row"),
        pytest.param([dense(9)], [0, 1, 4, 5, 8], [dense(9)], [3, 4, 5, 6, 7], 3, id="gaps"),
        pytest.param([dense(9)], [2, 2, 3], [dense(9)], [2, 2, 3], 2, id="a repeated id"),
    ],
)
def test_merge_rule(local, local_ids, remote, remote_ids, descriptors):
    pairs = merge(local, local_ids, remote, remote_ids)
    assert len(pairs) == descriptors
    assert sum(nbytes for _, _, nbytes in pairs) == PAGE * len(local_ids)


@pytest.mark.parametrize(("local_ids", "remote_ids"), [([0], [64]), ([-1], [0]), ([0, 1], [0]), ([], [])], ids=str)
def test_refused_ids(local_ids, remote_ids):
    with pytest.raises(ERRORS["nixlInvalidParamError"]):
        merge([dense(64)], local_ids, [dense(64)], remote_ids)


def test_refused_lengths():
    with pytest.raises(ERRORS["nixlInvalidParamError"]):
        merge([dense(4)], [0], [Run(0, PAGE // 2, PAGE, 4)], [0])


def test_rows_compress_into_runs():
    rows = np.array([(1000 + 8 * i, 8, 0) for i in range(5)] + [(9000, 8, 0), (8000, 8, 0), (8020, 8, 0)], np.uint64)
    assert runs_of_rows(rows) == [Run(1000, 8, 8, 5), Run(9000, 8, 8, 1), Run(8000, 8, 20, 2)]
    views = np.array([(1000, 8, 0, 8, 5), (1040, 8, 0, 8, 5)], np.uint64)
    assert runs_of_views(views) == [Run(1000, 8, 8, 5), Run(1040, 8, 8, 5)]
