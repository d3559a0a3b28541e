# SPDX-License-Identifier: Apache-2.0
"""Quotations of untrusted input: short, printable, and quickly made."""

import pytest

from kvhma.text import one_line, quote

SHORT = [None, True, 7, -1, 1.5, "", "a\nb", "\x1b[31m", "é", b"\0", [], {}, [1, "x"], {"a": [None]}, (1,), [[[]]]]


@pytest.mark.parametrize("value", SHORT, ids=ascii)
def test_a_short_value_is_itself_in_ascii(value):
    assert quote(value) == ascii(value)


LONG = ["x" * 61, "é" * 10**6, b"x" * 10**6, [1] * 10**6, {str(key): key for key in range(10**5)}, [["x" * 10**6] * 99]]


@pytest.mark.parametrize("value", LONG, ids=lambda value: ascii(value)[:10])
def test_of_a_long_value_the_beginning_is_shown(value):
    assert quote(value) == ascii(value)[:60] + "..."


@pytest.mark.parametrize("value", [10**400, -(10**5000), [10**5000]], ids=("long", "too long for str", "inside"))
def test_a_huge_integer_is_not_written_out(value):
    assert "a huge integer" in quote(value)


def test_deeply_nested_containers_take_no_time():
    deep = wide = []
    for _ in range(100_000):
        deep = [deep]
    for _ in range(8):
        wide = [wide] * 1000
    assert quote(deep) == "[[['...']]]"
    assert len(quote(wide)) == 63


def test_a_text_becomes_one_line():
    assert one_line("evil\nname\x1b[31m é") == "evil?name?[31m é"
    assert len(one_line("x" * 5000)) == 2000
    assert one_line("abc", 2) == "ab"
