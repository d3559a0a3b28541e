# SPDX-License-Identifier: Apache-2.0
"""Never more bytes than vLLM 0.32 moves, and never more descriptors, except for rows with a known reason."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvhma.cli.block_tables import block_tables
from kvhma.models import Model, model
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
HEADS = "P block 16 → D block 64, heads outside of tokens"
STRIDED = (
    "P TP 2 → D TP 4, logical blocks differ",
    "P TP 4 → D TP 2, logical blocks differ",
    "P block 16 → D block 64, tokens outside of heads",
)
ABSENT = {
    ("equal ranks", "gemma-3-4b", 128, "fresh"),
    ("equal ranks", "gemma-3-4b", 5_000, "fresh"),
    ("P block 16 → D block 64, tokens outside of heads", "gemma-3-4b", 128, "fresh"),
    ("P block 16 → D block 64, kernel blocks of P", "gemma-3-4b", 128, "fresh"),
}
"""Rows with more descriptors because vLLM sends bytes of layers that do not exist. The list is complete."""


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
    assert any(row.vllm is not None for row in found)


def test_never_more_descriptors_but_for_known_rows(found):
    pairing = found[0].pairing
    more = {key(row): row.reason for row in found if row.has_more()}
    if pairing.name == HEADS:
        assert set(more.values()) == {"heads"}
        assert "DeepSeek-V3" not in {name for _, name, *_ in more}  # a latent has no heads
    else:
        assert more == {row: "absent" for row in ABSENT if row[0] == pairing.name}


def test_ids_have_more_only_where_they_are_known_to(found):
    """Ids cannot express what `Plan.transfer` can where the two sides have different kernel blocks."""
    pairing = found[0].pairing
    more = {key(row): row.reason_of_ids for row in found if row.has_more(row.ids)}
    if pairing.name == HEADS:
        assert set(more.values()) <= {"heads", "strided"}
    elif pairing.name in STRIDED:
        assert set(more.values()) <= {"strided", "absent"}
    else:
        assert more == {row: "absent" for row in ABSENT if row[0] == pairing.name}


def test_cutting_the_last_block_is_never_the_cause(found):
    """A row with more descriptors also has more if last blocks always move whole."""
    assert all(row.has_more(row.whole) == row.has_more() for row in found)


@pytest.mark.parametrize("tokens", PROMPTS)
def test_no_layer_absent_no_descriptor_more(tokens):
    """With a 35th layer no place is empty, and the additional descriptor disappears."""
    full = replace(model("gemma-3-4b"), layers=(*model("gemma-3-4b").layers, "sliding"))
    assert descriptors_more(model("gemma-3-4b"), tokens) == 1
    assert descriptors_more(full, tokens) == 0


def descriptors_more(one: Model, tokens: int) -> int:
    equal, blocks = counts.PAIRINGS[0], counts.pool_blocks(one, tokens)
    sides = equal.d.ranks(one, blocks, 1 << 40), equal.p.ranks(one, blocks, 1 << 56)
    tables = [block_tables(side[0], tokens, "fresh", 0) for side in sides]
    ours = counts.kvhma_count(sides, tokens, tables)
    return ours.descriptors - counts.vllm_count(one, equal, sides, tables).descriptors


def test_published_table_equals_the_counts(found):
    """If this fails, run `make counts`."""
    published = (ROOT / "benches/COUNTS.md").read_text(encoding="utf-8")
    section = published.split(f"## {found[0].pairing.name}\n")[1].split("\n## ")[0].splitlines()
    shown = tuple(f"| {name} | {tokens:,} |" for name in NAMES for tokens in PROMPTS)
    lines = [counts.line(*both) for both in zip(found[::2], found[1::2], strict=True)]
    assert lines == [text for text in section if text.startswith(shown)]
