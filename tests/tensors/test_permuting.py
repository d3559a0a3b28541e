# SPDX-License-Identifier: Apache-2.0
"""``kvhma.tensors.permute``: blocks of heads become heads of blocks, and nothing else changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

import torch

from kvhma.errors import GeometryError
from kvhma.tensors import permute, permuting


@pytest.mark.parametrize("batch", [1, 200, 1 << 30])
@pytest.mark.parametrize("seed", range(10))
def test_ranges_of_several_tensors(seed: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, distances and starts of any kind, some of which no row of more than a byte divides."""
    monkeypatch.setattr(permuting, "_BATCH_BYTES", batch)
    rng = random.Random(seed)
    made = [torch.randint(0, 255, (5000,), dtype=torch.uint8), torch.randn(2000, dtype=torch.float32)]
    expected = [one.clone().view(torch.uint8).numpy() for one in made]
    step = rng.choice([1, 4, 16])
    rows = []
    for tensor, right in zip(made, expected, strict=True):
        at = rng.randrange(0, 64)
        while True:
            blocks, heads, nbytes = rng.randrange(2, 6), rng.randrange(2, 5), step * rng.randrange(1, 20)
            size = blocks * heads * nbytes
            if at + size > len(right):
                break
            part = right[at : at + size].reshape(blocks, heads, nbytes)
            right[at : at + size] = part.transpose(1, 0, 2).ravel().copy()
            rows.append([tensor.data_ptr() + at, 0, blocks, heads, nbytes])
            at += size + step * rng.randrange(0, 9)
    rng.shuffle(rows)
    permute(np.array(rows, np.uint64), made)
    for one, right in zip(made, expected, strict=True):
        assert np.array_equal(one.view(torch.uint8).numpy(), right)


def test_nothing_and_what_is_elsewhere() -> None:
    made = torch.arange(100, dtype=torch.uint8)
    permute(np.empty((0, 5), np.uint64), [made])
    base = made.data_ptr()
    with pytest.raises(GeometryError, match="in no storage"):
        permute(np.array([[base, 0, 2, 2, 4], [base + 90, 0, 2, 2, 4]], np.uint64), [made])
    assert torch.equal(made, torch.arange(100, dtype=torch.uint8))
