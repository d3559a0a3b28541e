# SPDX-License-Identifier: Apache-2.0
"""All cases, numbered, with their expected results: from the bytes (`kvhma.oracle.moves`), from no planner."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from conformance import blocks, pages, ranks, refused
from conformance.build import Draft
from kvhma.oracle.cases import Case
from kvhma.oracle.moves import byte_moves
from support.generate import generate
from support.recipe import draw
from support.save import as_case

FOLDER = Path(__file__).parents[2] / "conformance"
FILE = FOLDER / "cases.jsonl.gz"
VERSION = "1.0"

MIXED = 36
_MOST_BYTES = 9000
"""Of all regions of a case that was drawn: labels are made for each byte."""


def mixed() -> Iterator[Draft]:
    """Drawn cases: engines that differ in many ways at once."""
    found = 0
    seed = 0
    while found < MIXED:
        recipe, seed = draw(seed), seed + 1
        case = as_case(generate(seed - 1, recipe, max_tokens=40), 0)
        ranks_ = (case.local, *case.remotes)
        size = sum(region.bytes for rank in ranks_ for region in rank.regions)
        last = max(region.base + region.bytes for rank in ranks_ for region in rank.regions)
        if size > _MOST_BYTES or last >= 1 << 53 or len(ranks_) > 7:
            continue
        if not expect(case)["runs"]:
            continue
        found += 1
        yield Draft(", ".join(f"{name} {value}" for name, value in vars(recipe).items() if value != "none"), case, 3)


AXES: dict[str, Callable[[], Iterator[Draft]]] = {
    "attention": pages.attention,
    "tp": ranks.tp,
    "repeated-heads": ranks.repeated_heads,
    "heads-by-layer": ranks.heads_by_layer,
    "layers": ranks.layers,
    "cp": ranks.context_parallel,
    "block-ratio": blocks.block_ratio,
    "kernel-ratio": blocks.kernel_ratio,
    "prefix-hit": blocks.prefix_hit,
    "window": blocks.window,
    "lengths": blocks.lengths,
    "block-ids": blocks.block_ids,
    "layout": pages.layout,
    "latent": pages.latent,
    "items": pages.items,
    "state": pages.state,
    "mixed": mixed,
    "refused-pair": refused.pairs,
    "refused-request": lambda: chain(refused.requests(), refused.numbers()),
}


def entries() -> Iterator[dict[str, Any]]:
    """Yield every case as the file has it."""
    for axis, drafts in AXES.items():
        for number, draft in enumerate(drafts(), 1):
            yield {
                "id": f"{axis}-{number:02}",
                "axis": axis,
                "difficulty": draft.difficulty,
                "title": draft.title,
                "case": form(draft.case),
                "expect": {"refuse": list(draft.refuse)} if draft.refuse else expect(draft.case),
            }


def form(case: Case) -> dict[str, Any]:
    """Return the JSON form of a case, without fields that only kvhma uses."""
    found: dict[str, Any] = json.loads(case.to_json())
    del found["descriptor_bytes"]
    return found


def expect(case: Case) -> dict[str, Any]:
    """Return the expected result of a case; the runner adds the digests."""
    moves = byte_moves(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
    return {
        "runs": [list(copy) for copy in moves.copies],
        "zero": [list(row) for row in moves.zero],
        "either": [list(copy) for copy in moves.either],
        "fewest": moves.fewest,
    }


def text(found: list[dict[str, Any]]) -> bytes:
    """Return the lines of the file: what it is, then a case in each."""
    lines = [{"kvhma_conformance": VERSION, "cases": len(found)}, *found]
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def packed(data: bytes) -> bytes:
    """Compress without a name or a time, so that equal cases are equal files."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as file:
        file.write(data)
    return buffer.getvalue()
