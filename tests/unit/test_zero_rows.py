# SPDX-License-Identifier: Apache-2.0
"""Ranges that are zeroed: as few as there are gaps between them, also where only D has a layer."""

from itertools import pairwise

import kvhma
from kvhma import Span
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region


def cache(layers: int, base: int) -> Geometry:
    """Layers side by side in each block of four tokens of a byte."""
    page = Page((Part("kv", "uint8", 1, 0, (Axis("tokens", 4, 1),)),))
    rows = tuple(Layer(f"l{at}", 0, 0, 4 * at, 8, 4 * layers, page) for at in range(layers))
    return Geometry((Region(base, 8 * 4 * layers),), (Group("full", 4),), rows)


def test_a_layer_on_one_side_only() -> None:
    moved = kvhma.plan(cache(3, 4096), cache(2, 1 << 20), descriptor_bytes=0).transfer(
        6, [Span(0, [1, 2])], [Span(0, [1, 2])]
    )
    rows = moved.zero[:, :2].tolist()
    # Block 1: the third layer. Block 2: tokens 6 and 7 of the first, then of the second, which touches the third.
    assert rows == [[4096 + 12 + 8, 4], [4096 + 24 + 2, 2], [4096 + 24 + 6, 6]]
    assert not any(first[0] + first[1] == second[0] for first, second in pairwise(rows))


def whole(content: str, size: int) -> Geometry:
    """A layer without a known format, as of a rank of TP 1 or 2."""
    page = Page((Part("whole", content, 1, 0, (Axis("bytes", 64, 1, 0, size),)),))
    return Geometry((Region(4096, 8 * 64),), (Group("ssm", 4),), (Layer("conv", 0, 0, 0, 8, 64, page),))


def test_content_of_equal_engines_only() -> None:
    (finding, *_) = kvhma.validate(whole("SHORT_CONV/((32,2),)/tp2", 32), whole("SHORT_CONV/((64,2),)/tp1", 64))
    assert (finding.code, finding.field) == ("equal-engines", "content")
    assert "tp2" in finding.text
    assert "tp1" in finding.text
    assert "only engines with equal pages and ranks can pair" in finding.text
    assert "dtype" not in finding.text
