# SPDX-License-Identifier: Apache-2.0
"""When `make bench-instructions` fails: a change of more than 3 %, or of the shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.programs import program

instructions = program("benches/instructions.py")
Shape = instructions.Shape
SHAPES = [Shape("ids, sorted", 8_192, 65_536, 1_000_000, 100_000), Shape("clip", 512, 100, 20_000, 0)]
HERE = ("rustc 1.95.0 (59807616e) for x86_64-unknown-linux-gnu", "glibc 2.36")
RECORD = instructions.HEAD.format(tools=", ".join(HERE), table=instructions.table(SHAPES))


@pytest.mark.parametrize(
    ("first", "is_right"), [(1_029_000, True), (1_031_000, False), (971_000, True), (969_000, False)]
)
def test_a_change_of_more_than_three_percent_fails(first: int, is_right: bool):
    shapes = [replace(SHAPES[0], instructions=first), SHAPES[1]]
    right, said = instructions.verdict(shapes, HERE, RECORD)
    assert right == is_right
    assert ("ids, sorted" in said) == (not is_right)


def test_shapes_that_are_new_or_gone_fail():
    right, said = instructions.verdict([SHAPES[0], replace(SHAPES[1], name="expand")], HERE, RECORD)
    assert not right
    assert "clip: gone; expand: new" in said
