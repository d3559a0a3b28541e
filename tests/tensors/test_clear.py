# SPDX-License-Identifier: Apache-2.0
"""``kvhma.tensors.clear`` zeroes bytes by address, and no others."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

import torch

from kvhma.errors import GeometryError
from kvhma.tensors import clear


def test_ranges_are_zero_and_others_are_not() -> None:
    """In several tensors, of any types and views; an empty list does nothing."""
    made = [torch.ones(1000, dtype=torch.int8), torch.ones(500, dtype=torch.bfloat16)]
    views = [made[0][100:300], made[1].view(50, 10).transpose(0, 1)]
    expected = [one.clone().view(torch.int8) for one in made]
    rows = []
    for tensor, right, start, length in ((made[0], expected[0], 7, 13), (made[1], expected[1], 998, 2)):
        right[start : start + length] = 0
        rows.append([tensor.data_ptr() + start, length, 0])
    clear(np.array(rows, np.uint64), views)
    assert all(torch.equal(one.view(torch.int8), right) for one, right in zip(made, expected, strict=True))
    clear(np.empty((0, 3), np.uint64), [])


def test_what_is_elsewhere_is_refused_before_anything_is_zeroed() -> None:
    made = torch.ones(1000, dtype=torch.int8)
    base = made.data_ptr()
    with pytest.raises(GeometryError, match="are in no storage"):
        clear(np.array([[base, 10, 0], [base + 995, 10, 0]], np.uint64), [made])
    assert int(made.sum()) == 1000
