# SPDX-License-Identifier: Apache-2.0
"""Never more bytes than whole blocks, and more descriptors only where heads are separate."""

from functools import cache
from pathlib import Path

import pytest

from support.programs import program

ROOT = Path(__file__).parents[2]


counts = program("benches/counts.py")
NAMES = (
    "gemma-3-4b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "Llama-4-Scout-17B-16E",
    "NVIDIA-Nemotron-3-Nano-30B-A3B",
    "Qwen3-Next-80B-A3B",
    "granite-4.0-h-tiny",
    "Falcon-H1-7B",
    "Jamba-v0.1",
    "DeepSeek-V3",
)
PROMPTS = (128, 5_000)


@cache
def rows(index):
    return list(counts.rows(counts.PAIRINGS[index], NAMES, PROMPTS))


def key(row):
    return row.pairing.name, row.model, row.tokens, row.pool


@pytest.fixture(params=range(len(counts.PAIRINGS)), ids=lambda index: counts.PAIRINGS[index].name)
def found(request):
    """All rows of a pairing."""
    return rows(request.param)


def test_never_more_bytes(found):
    assert [key(row) for row in found if counts.more_bytes(row)] == []


def test_never_more_descriptors_where_blocks_and_heads_are_equal(found):
    if found[0].pairing.name == "equal ranks":
        assert [key(row) for row in found if row.has_more()] == []


def test_published_table_equals_the_counts(found):
    """If this fails, run `make counts`."""
    published = (ROOT / "benches/COUNTS.md").read_text(encoding="utf-8")
    section = published.split(f"## {found[0].pairing.name}\n")[1].split("\n## ")[0].splitlines()
    shown = tuple(f"| {name} | {counts.SHOWN:,} |" for name in NAMES)
    pairs = zip(found[::2], found[1::2], strict=True)
    lines = [counts.line(fresh, used) for fresh, used in pairs if fresh.tokens == counts.SHOWN]
    assert lines == [text for text in section if text.startswith(shown)]
