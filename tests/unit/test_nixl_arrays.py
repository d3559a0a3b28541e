# SPDX-License-Identifier: Apache-2.0
"""Arrays for NIXL have the one form that it accepts, and cannot wrap around its range check."""

from __future__ import annotations

import numpy as np
import pytest

from kvhma._kvhma import check_rows
from kvhma.errors import AddressOverflowError, RequestError
from kvhma.lowlevel import expand_views
from kvhma.nixl.arrays import check_ids

TOP = 2**64 - 1


def rows(*values):
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param([(1, 2, 0)], id="a list"),
        pytest.param(np.zeros((2, 3), np.int64), id="int64"),
        pytest.param(np.zeros((2, 3), np.uint32), id="uint32"),
        pytest.param(np.zeros((2, 3), np.dtype(np.uint64).newbyteorder()), id="other byte order"),
        pytest.param(np.ones(3, np.uint64), id="one dimension"),
        pytest.param(np.ones((2, 4), np.uint64), id="four columns"),
        pytest.param(np.ones((2, 5), np.uint64), id="five columns"),
        pytest.param(np.ones((3, 3), np.uint64).T[:, ::2], id="a slice"),
        pytest.param(np.asfortranarray(np.ones((4, 3), np.uint64)), id="column-major"),
        pytest.param(rows((16, 8, 0), (32, 0, 0)), id="an empty row"),
        pytest.param(np.asfortranarray(np.ones((3, 3), np.uint64)), id="a square in column-major order"),
        pytest.param(None, id="None"),
    ],
)
def test_descriptors_of_another_form(array):
    with pytest.raises(RequestError, match="the descriptors"):
        check_rows("the descriptors", array)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.zeros((2, 3), np.uint64), id="three columns"),
        pytest.param(rows((16, 0, 0, 8, 2)), id="no length"),
        pytest.param(rows((16, 8, 0, 0, 2)), id="no stride"),
        pytest.param(rows((16, 8, 0, 8, 0)), id="no entries"),
    ],
)
def test_views_of_another_form(array):
    with pytest.raises(RequestError, match="the views"):
        check_rows("the views", array, 5)


@pytest.mark.parametrize(
    "array",
    [
        rows((TOP, 1, 0), (16, 8, 0)),
        rows((4096, TOP - 4094, 0)),
        rows((TOP - 10, 11, 0, 1, 2)),
        rows((4096, 8, 0, 2**63, 3)),
        rows((4096, 8, 0, TOP, 2)),
        rows((4096, 8, 0, 2**40, 2**30)),
    ],
)
def test_what_nixl_would_let_wrap(array):
    with pytest.raises(AddressOverflowError, match=r"rows: row 0: .* does not fit 64 bits"):
        check_rows("rows", array, array.shape[1])


@pytest.mark.parametrize(
    "array", [rows((16, 1, 0, 1, 2**31)), rows((16, 1, 0, 1, 2**30), (16, 1, 0, 1, 2**30))], ids=["in one", "in sum"]
)
def test_more_entries_than_int32_ids(array):
    with pytest.raises(AddressOverflowError, match="2147483648 descriptors does not fit 31 bits"):
        check_rows("the views", array, 5)


def test_what_fits_is_taken_as_it_is():
    direct = rows((TOP - 8, 8, 0), (1, 1, 7))
    direct.setflags(write=False)
    views = rows((TOP - 24, 8, 0, 8, 3), (16, 1, 0, 2**40, 1))
    for array in (direct, views, np.empty((0, 3), np.uint64), np.empty((0, 5), np.uint64)):
        before = array.copy()
        check_rows("rows", array, array.shape[1])
        assert np.array_equal(array, before)


@pytest.mark.parametrize(
    "array",
    [
        [1, 2],
        np.array([1, 2]),
        np.array([1, 2], np.uint32),
        np.array([[1, 2]], np.int32),
        np.arange(8, dtype=np.int32)[::2],
        np.array([True, False]),
        np.array([1.0]),
    ],
)
def test_ids_of_another_form(array):
    with pytest.raises(RequestError, match="local ids"):
        check_ids(array, "local ids")


def test_expansion_keeps_the_order_of_ids():
    views = rows((1000, 8, 0, 8, 3), (5000, 4, 1, 100, 2), (2**63, 8, 0, 2**61, 1))
    assert expand_views(views).tolist() == [
        [1000, 8, 0],
        [1008, 8, 0],
        [1016, 8, 0],
        [5000, 4, 1],
        [5100, 4, 1],
        [2**63, 8, 0],
    ]
    assert check_rows("the views", views, 5) == 6
    assert expand_views(views).flags.c_contiguous
    assert expand_views(views).dtype == np.uint64
