# SPDX-License-Identifier: Apache-2.0
"""From a tensor's storage to a region: joined where storages overlap, refused where the memory has no kind."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
import torch

from kvhma.errors import GeometryError
from kvhma.geometry import Region
from kvhma.tensors.regions import Location, locate
from support.torch_devices import Elsewhere


def views_of(raw: bytearray, *bounds: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Tensors of several storages over the same bytes, as from several frameworks."""
    return {
        f"{start}..{end}": torch.frombuffer(raw, dtype=torch.uint8, offset=start, count=end - start)
        for start, end in bounds
    }


@pytest.mark.parametrize(
    ("bounds", "regions", "places"),
    [
        ([(0, 64), (32, 96)], [(0, 96)], [(0, 0), (0, 32)]),
        ([(32, 96), (0, 64)], [(0, 96)], [(0, 32), (0, 0)]),
        ([(0, 96), (8, 16), (64, 80)], [(0, 96)], [(0, 0), (0, 8), (0, 64)]),
        # Adjacent tensors are two registrations.
        ([(48, 96), (0, 48)], [(48, 48), (0, 48)], [(0, 0), (1, 0)]),
        # The order is that of the first use of each.
        ([(80, 96), (0, 32), (16, 48), (80, 96)], [(80, 16), (0, 48)], [(0, 0), (1, 0), (1, 16)]),
    ],
)
def test_storages_that_overlap_are_one_region(bounds, regions, places):
    raw = bytearray(96)
    tensors = views_of(raw, *bounds)
    base = torch.frombuffer(raw, dtype=torch.uint8).data_ptr()
    found, locations = locate(tensors)
    assert found == tuple(Region(base + start, length) for start, length in regions)
    assert list(locations.values()) == [Location(*place) for place in places]
    for name, location in locations.items():
        assert found[location.region].base + location.offset == tensors[name].data_ptr()


def test_a_view_is_found_by_all_of_its_bytes():
    """A registered range that has the first item but not the last does not count."""
    tensor = torch.zeros(4, 16, dtype=torch.bfloat16)
    start = tensor.data_ptr()
    short, enough = (Region(start, tensor.nbytes - less) for less in (2, 0))
    assert locate({"a": tensor}, [short, enough])[1] == {"a": Location(1, 0)}
    assert locate({"a": tensor[:, :15]}, [short, enough])[1] == {"a": Location(0, 0)}
    with pytest.raises(GeometryError, match=r"a: bytes 0x.* of cpu are in no region of"):
        locate({"a": tensor}, [short, Region(start, tensor.nbytes, "VRAM")])


def test_a_device_whose_memory_has_no_kind_is_refused():
    with pytest.raises(GeometryError, match="a: device mps; known are cpu, meta, cuda, xpu"):
        locate({"a": Elsewhere("mps", (4, 16))})
