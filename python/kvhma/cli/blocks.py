# SPDX-License-Identifier: Apache-2.0
"""The middle of the picture: the request's block tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvhma.cli.format import ranges
from kvhma.cli.pages import LEFT, SPAN, DrawnRank, color
from kvhma.cli.svg import Drawing

_MAX_BOXES = 32
"""Up to this many blocks of a group are drawn one by one; beyond it, neighbours in one state are one box."""
_WIDTH, _MIN_WIDTH = 34.0, 90.0
_MAX_RANGES = 8


def draw_blocks(page: Drawing, y: float, rank: DrawnRank) -> float:
    """Draw a line for each group that shows which blocks were dropped, which are read, and which are not."""
    y = page.paragraph(12, y, f"{rank.name}: blocks of the request", "head") - 8
    for index, (group, table) in enumerate(zip(rank.geometry.groups, rank.tables, strict=True)):
        page.text(12, y + 14, f"group {index} {group.kind}")
        styles = {"dropped": "null", "read": f"{color(index)} t1", "not read": f"{color(index)} held"}
        states = [_state(rank, index, block) for block in table]
        spans = [(at, at + 1) for at in range(len(table))] if len(table) <= _MAX_BOXES else _alike(states)
        x = float(LEFT)
        for (first, last), width in zip(spans, _widths(spans), strict=True):
            state = states[first]
            page.rect(x, y, width - 2, 18, styles[state], _hover(rank, index, first, last, state))
            if text := _text(table, first, last, state, width):
                page.text(x + width / 2 - 1, y + 13, text, "small mid")
            x += width
        y += 24
    return y


def _state(rank: DrawnRank, group: int, block: int) -> str:
    if block == rank.geometry.null_block:
        return "dropped"
    return "read" if block in rank.used[group] else "not read"


def _alike(states: Sequence[str]) -> list[tuple[int, int]]:
    """Return first entry and end of every run of equal states."""
    found, first = [], 0
    for _, same in groupby(states):
        last = first + len(list(same))
        found.append((first, last))
        first = last
    return found


def _widths(spans: list[tuple[int, int]]) -> list[float]:
    """Return the width of each box: proportional to its blocks, but wide enough for its text."""
    blocks = sum(last - first for first, last in spans)
    if blocks == len(spans):
        return [min(SPAN / max(len(spans), 1), _WIDTH)] * len(spans)
    narrowest = min(_MIN_WIDTH, SPAN / len(spans))
    rest = SPAN - narrowest * len(spans)
    return [narrowest + rest * (last - first) / blocks for first, last in spans]


def _text(table: Sequence[int], first: int, last: int, state: str, width: float) -> str:
    """Return the text of a box: how many blocks it stands for, or the id of its block if there is room."""
    if last - first > 1:
        return f"{last - first:,} {state}"
    name = str(table[first])
    return name if state != "dropped" and width > 7 * len(name) + 3 else ""


def _hover(rank: DrawnRank, index: int, first: int, last: int, state: str) -> str:
    group, table = rank.geometry.groups[index], rank.tables[index]
    tokens = f"tokens {first * group.block_size:,} to {last * group.block_size - 1:,}"
    if last - first == 1:
        what = state if state == "dropped" else f"block {table[first]}, {state}"
        return f"entry {first}: {what}\n{'the state' if group.kind == 'ssm' else tokens}"
    text = f"entries {first} to {last - 1}: {last - first:,} blocks, {state}\n{tokens}"
    if state == "dropped":
        return text
    ids = ranges(table[first:last]).split(", ")
    return f"{text}\nblocks {', '.join(ids[:_MAX_RANGES])}{', …' if len(ids) > _MAX_RANGES else ''}"
