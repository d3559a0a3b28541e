# SPDX-License-Identifier: Apache-2.0
"""What benches/connectors.py makes of its measurements: ratios and quartiles."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benches"))

from handoffs.tables import EVEN, OURS, THEIRS, Row


def test_ratios_are_of_the_same_round() -> None:
    row = Row("load")
    for ours, theirs in ((0.001, 0.002), (0.010, 0.010), (0.002, 0.006), (0.004, 0.020), (0.001, 0.004)):
        row.add(OURS, ours)
        row.add(THEIRS, theirs)
    # 2, 1, 3, 5, 4: the quartiles of five are the second and the fourth.
    assert row.cells() == {OURS: "2.00 ms", THEIRS: "6.00 ms", f"{THEIRS} / kvhma": "3.00× (2.00 to 4.00) better"}
    assert row.medians(THEIRS) == "2.00 ms; 6.00 ms"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 1.0, 1.0], [0.5, 0.6, 0.7], "0.60× (0.55 to 0.65) worse"),
        ([1.0, 1.0, 1.0], [0.5, 1.0, 2.0], "1.00× (0.75 to 1.50) tie"),
        ([2.0], [4.0], "2.00×"),
        ([1.0, -1.0], [1.0, 1.0], "no ratio"),
        ([1.0, 1.0], [1.0], "–"),
        ([1.0], [], "–"),
    ],
)
def test_ratios(ours: list[float], theirs: list[float], expected: str) -> None:
    assert Row("x", "", {OURS: ours, EVEN: theirs}).ratio(EVEN) == expected
