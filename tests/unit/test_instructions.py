# SPDX-License-Identifier: Apache-2.0
"""When `make bench-instructions` fails: a change of more than 3 %, where counts of the same tools are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.programs import program

instructions = program("benches/instructions.py")
Shape = instructions.Shape
SHAPES = [Shape("ids, sorted", 8_192, 65_536, 1_000_000, 100_000), Shape("clip", 512, 100, 20_000, 0)]
HERE = ("rustc 1.95.0 (59807616e) for x86_64-unknown-linux-gnu", "glibc 2.36")
RECORD = instructions.HEAD.format(tools=", ".join(HERE), table=instructions.table(SHAPES))


def test_a_record_is_read_as_it_was_written():
    assert instructions.read(RECORD) == (HERE, SHAPES)


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


def test_another_compiler_is_not_compared():
    shapes = [replace(shape, instructions=2 * shape.instructions) for shape in SHAPES]
    other = ("rustc 1.96.0 (000000000) for x86_64-unknown-linux-gnu", HERE[1])
    right, said = instructions.verdict(shapes, other, RECORD)
    assert right
    assert said == f"Not checked: recorded with {HERE[0]}, here is {other[0]}."


def test_another_c_library_counts_apart():
    """Its own instructions may change, those of the core may not."""
    other = (HERE[0], "glibc 2.39")
    in_library = [replace(SHAPES[0], instructions=1_100_000, in_c_library=200_000), SHAPES[1]]
    right, said = instructions.verdict(in_library, other, RECORD)
    assert right
    assert "recorded with glibc 2.36, here is glibc 2.39" in said
    assert not instructions.verdict(in_library, HERE, RECORD)[0]
    assert not instructions.verdict([replace(SHAPES[0], instructions=1_028_000), SHAPES[1]], other, RECORD)[0]


def test_instructions_are_split_by_object():
    """The line after `calls=` has the instructions of the called function, which it has counted itself."""
    dump = """\
# callgrind format
summary: 60
ob=/t/release/instructions
fn=core::write
10 7
calls=1 5
+2 40
-3 8
fi=slice.rs
* 5
ob=/lib/libc.so.6
fn=memcpy
0 40
"""
    assert instructions.split(dump, "instructions") == (20, 40)
