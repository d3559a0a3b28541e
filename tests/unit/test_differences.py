# SPDX-License-Identifier: Apache-2.0
"""docs/vllm-pairs.md allows those differences between P and D that a sweep over all built-in models found."""

from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from kvhma.models import models
from support.programs import program

ROOT = Path(__file__).parents[2]


differences = program("tools/differences.py")
RECORD = differences.load()
NAMES = [one.name for one in differences.DIFFERENCES]
STATE = [name for name, one in models().items() if one.state is not None]
SAMPLE = {*zip(NAMES, cycle(STATE[:3]), strict=False), ("layout", "gpt-oss-20b"), ("block size", "gemma-3-4b")}
"""`make test` checks one model for each difference, `make test-long` all of them."""


def test_the_record_has_every_model_and_difference() -> None:
    assert list(RECORD) == list(models())
    assert {tuple(found) for found in RECORD.values()} == {tuple(NAMES)}


def test_readme_has_the_table() -> None:
    """If this fails, run `make differences`."""
    page = (ROOT / "docs/vllm-pairs.md").read_text(encoding="utf-8")
    assert differences.filled(page, RECORD) == page
    with pytest.raises(ValueError, match=r"vllm-pairs\.md has no line"):
        differences.filled(page.replace(differences.MARKS.end, ""), RECORD)


@pytest.mark.parametrize(
    ("difference", "name"),
    [
        pytest.param(difference, name, marks=() if (difference, name) in SAMPLE else pytest.mark.long)
        for difference in NAMES
        for name in models()
    ],
)
def test_planned_and_refused_pairs(difference: str, name: str) -> None:
    """Every pair again; a planned pair that reads less than D needs raises an AssertionError."""
    (one,) = (one for one in differences.DIFFERENCES if one.name == difference)
    assert Counter(differences.tried(name, one)) == RECORD[name][difference]
