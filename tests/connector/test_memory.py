# SPDX-License-Identifier: Apache-2.0
"""Zeroing through the storages of the caches, also where these overlap."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.errors import GeometryError
from kvhma.geometry import Geometry, Region
from kvhma.tensors.storages import Storages
from kvhma.vllm.device.memory import DeviceMemory

BYTES = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def storages(*ranges: tuple[int, int]):
    """Memory full of ones, and a separate storage for each range of it."""
    raw = bytearray(b"\1" * BYTES)
    base = torch.frombuffer(raw, dtype=torch.uint8)
    return (
        raw,
        base.data_ptr(),
        {
            f"{start}..{end}": torch.frombuffer(raw, dtype=torch.uint8, offset=start, count=end - start)
            for start, end in ranges
        },
    )


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 64)],
        [(0, 64), (8, 16)],  # nested, and the zeroed range begins in the inner one
        [(8, 16), (0, 64)],
        [(0, 64), (0, 4)],  # with the same start
        [(0, 24), (16, 64)],  # adjacent
        [(0, 12), (12, 64)],
    ],
)
@pytest.mark.parametrize(("start", "length"), [(10, 4), (10, 30), (0, 64), (12, 1), (40, 0)])
def test_exactly_what_is_asked_for_is_zeroed(ranges, start, length):
    raw, base, made = storages(*ranges)
    for piece in Storages(made).pieces(np.array([[base + start, length, 0]], np.uint64)):
        piece.zero_()
    expected = np.ones(BYTES, np.uint8)
    expected[start : start + length] = 0
    assert np.array_equal(np.frombuffer(raw, np.uint8), expected)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (60, 65), (20, 30)])
def test_what_is_in_no_storage_is_refused(start, end):
    _, base, made = storages((0, 24), (28, 64))
    with pytest.raises(GeometryError, match="are in no storage of the caches"):
        Storages(made).pieces(np.array([[base + start, end - start, 0]], np.uint64))


@pytest.mark.parametrize("device", DEVICES)
def test_caches_of_one_storage_are_zeroed_on_their_device(device):
    whole = torch.ones(BYTES, dtype=torch.uint8, device=device)
    geometry = Geometry((Region(whole.data_ptr(), BYTES, "VRAM"),), (), ())
    memory = DeviceMemory(geometry, {"a": whole[:32], "b": whole[32:]})
    memory.zero(np.array([[whole.data_ptr() + 30, 4, 0]], np.uint64))
    assert whole.cpu().nonzero().flatten().tolist() == [*range(30), *range(34, BYTES)]
