# SPDX-License-Identifier: Apache-2.0
"""What `make bench-shapes` calls a cliff."""

from __future__ import annotations

import pytest

from support.programs import program

shapes = program("benches/shapes.py")
Line, Point = shapes.Line, shapes.Point


def cliffs(*calls: tuple[int, float]) -> int:
    """How many cliffs a function has that takes so many ns for so many ids."""
    return len(Line("f", [Point(str(ids), ids, ns) for ids, ns in calls]).cliffs())


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([(1, 1000), (4, 1000), (16, 1100), (64, 1500)], 0),  # a fixed cost that all share
        ([(1000, 1000), (4000, 11_900)], 0),
        ([(1000, 1000), (4000, 12_100)], 1),  # an id takes more than three times as long
        ([(1000, 2900), (4000, 1000)], 0),
        ([(1000, 3100), (4000, 1000)], 1),  # the smaller call takes more than three times as long
        ([(4000, 1000), (1000, 3100)], 1),  # an axis along which ids become fewer
        ([(256, 68e6), (256, 145e3)], 1),  # kernel blocks of 2047 and 2048 once
        ([(256, 145e3), (256, 68e6), (256, 145e3)], 2),
    ],
)
def test_what_a_cliff_is(calls, found):
    assert cliffs(*calls) == found
