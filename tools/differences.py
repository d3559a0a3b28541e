# SPDX-License-Identifier: Apache-2.0
"""The differences that P and D may have: every built-in model between two engines, planned or refused.

    make differences    # writes tests/golden/differences.json and the table of docs/vllm-pairs.md

A pair is tried if both engines can be laid out, which means that vLLM starts them. It is planned if every rank of D has
a plan, and a request of TOKENS tokens by that plan reads at least the bytes that the rank needs. The byte oracle of the
tests proves that plans are right; this counts which pairs have one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, cast, get_args

from marks import Marks

from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import HandOff, RequestOptions, of_model
from kvhma.errors import KvhmaError, UnsupportedPairError
from kvhma.geometry import Geometry, Part
from kvhma.models import models
from kvhma.models.stride_orders import Order
from kvhma.oracle.labels import first_needed

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "golden" / "differences.json"
PAGE = ROOT / "docs" / "vllm-pairs.md"
MARKS = Marks(PAGE.name, "<!-- differences: made by tools/differences.py -->", "<!-- end of differences -->")
TOKENS = 500
PLANNED = "planned"
NOTE = (
    "Counted over the {models} built-in models, between engines that are equal in everything else. Each difference is\n"
    "tried with heads outside and inside of tokens, with the block outermost, and with short and long kernel blocks.\n"
    "A refused pair has the [code of its error](errors.md)."
)

Options = Mapping[str, Any]
Outcomes = dict[str, dict[str, int]]
"""By difference, and by `PLANNED` or a reason: how many pairs."""


@dataclass(frozen=True)
class Difference:
    """A property in which P and D may differ.

    Attributes:
        name: its name in the table.
        values: its values, as options of an engine; each is tried with each other one.
        tried: the table's text about them.
        cached: leading tokens that D has.
    """

    name: str
    values: tuple[Options, ...]
    tried: str
    cached: int = 0


def _each(field: str, *values: Any, **more: Any) -> tuple[Options, ...]:
    return tuple({field: value, **more} for value in values)


DIFFERENCES = (
    Difference("tensor-parallel size", _each("tp_size", 1, 2, 4, 8, 16), "1, 2, 4, 8, 16"),
    Difference("pipeline stages", _each("pp_size", 1, 2, 4), "1, 2, 4"),
    Difference("block size", _each("block_size", 16, 32, 64, 128), "16, 32, 64, 128"),
    Difference(
        "kernel block", _each("kernel_block", 16, 32, 64, None, block_size=64), "16, 32, 64 tokens and the whole block"
    ),
    Difference("layout", _each("order", *get_args(Order)), "six stride orders"),
    Difference("convolution state", _each("conv", "DS", "SD"), "`DS`, `SD`"),
    Difference("draft tokens", _each("speculative", 0, 1, 3), "0, 1, 3"),
    Difference(
        "several of these at once",
        (
            {"tp_size": 1, "block_size": 16, "order": "LBHNC"},
            {"tp_size": 2, "block_size": 64, "order": "LBNHC", "speculative": 2},
            {"tp_size": 4, "block_size": 128, "order": "BLHNC", "conv": "SD"},
        ),
        "ranks, blocks, layout, drafts",
    ),
    Difference(
        "tensor-parallel size, after a prefix hit", _each("tp_size", 1, 2, block_size=16), "200 tokens that D has", 200
    ),
    Difference("dtype of the KV cache", _each("kv_dtype", "bfloat16", "float8_e4m3fn"), "bf16, fp8"),
    Difference("dtype of the state", _each("ssm_dtype", "bfloat16", "float32"), "bf16, fp32"),
)


ALIKE: tuple[Options, ...] = (
    {},
    {"order": "LBNHC"},
    {"order": "BLHNC"},
    {"kernel_block": None},
    {"kernel_block": None, "order": "LBNHC"},
)
"""The other options of both engines: heads outside of tokens or inside, the block outermost, kernel blocks as long as
blocks. Each difference is tried with all of them that do not touch it."""


def outcomes(name: str) -> Outcomes:
    """Try all pairs of a built-in model."""
    return {one.name: dict(sorted(Counter(tried(name, one)).items())) for one in DIFFERENCES}


def tried(name: str, difference: Difference) -> Iterator[str]:
    """Yield the outcome of each pair.

    Raises:
        AssertionError: a plan reads less than D needs.
    """
    fields = {field for options in difference.values for field in options}
    for prefill, decode in (
        pair
        for common in ALIKE
        if not fields & set(common)
        for pair in permutations([EngineOptions(**common, **options) for options in difference.values], 2)
    ):
        if not (_starts(name, prefill) and _starts(name, decode)) or _alike(name, prefill, decode):
            continue
        request = RequestOptions(TOKENS, difference.cached)
        try:
            hand_off = of_model(models()[name], prefill, decode, request)
            lost = [local.tp_rank for local in hand_off.decode if _moved(hand_off, local) < _needed(hand_off, local)]
        except UnsupportedPairError as error:
            yield error.code
        except KvhmaError as error:
            yield type(error).__name__
        else:
            if lost:
                raise AssertionError(f"{name}, {difference.name}, {prefill} to {decode}: ranks {lost} read too little")
            yield PLANNED


def _moved(hand_off: HandOff, local: Geometry) -> int:
    """Return the bytes that a rank of D reads, without those after the last token."""
    transfer = hand_off.plan(local).transfer(hand_off.tokens, *hand_off.spans(local))
    return transfer.bytes - transfer.excess_bytes


def _needed(hand_off: HandOff, local: Geometry) -> int:
    """Return the bytes of the tokens that the next one attends to and D lacks, and of the states."""
    total = 0
    for layer in local.layers:
        group = local.groups[layer.group]
        if group.kind == "ssm":
            total += sum(part.nbytes // _rows(part) * (_rows(part) - _spare(part)) for part in layer.page.parts)
        else:
            have = hand_off.cached_blocks[layer.group] * group.block_size
            tokens = hand_off.tokens - max(first_needed(group, hand_off.tokens), have)
            total += max(tokens, 0) * layer.page.nbytes // group.kernel_block_size
    return total


def _rows(part: Part) -> int:
    return next((axis.shard.held for axis in part.axes if axis.name == "rows"), 1)


def _spare(part: Part) -> int:
    """Return the rows for drafts, which are not transferred."""
    return sum(axis.spare for axis in part.axes)


@cache
def _starts(name: str, engine: EngineOptions) -> bool:
    try:
        for rank in range(engine.num_ranks):
            engine.rank(models()[name], rank, 2, 1 << 20)
    except KvhmaError:
        return False
    return True


def _alike(name: str, prefill: EngineOptions, decode: EngineOptions) -> bool:
    """Whether the difference does not exist for this model, as drafts for a model without state."""
    if prefill.num_ranks != decode.num_ranks:
        return False
    forms = [
        [engine.rank(models()[name], rank, 2, 1 << 20).to_json() for rank in range(engine.num_ranks)]
        for engine in (prefill, decode)
    ]
    return forms[0] == forms[1]


def table(record: Mapping[str, Outcomes]) -> str:
    """Return the table of all properties that were tried with every model."""
    lines = [
        "| P and D may differ in | tried | pairs of engines that are planned | refused |",
        "|---|---|---|---|",
    ]
    for difference in DIFFERENCES:
        counts = Counter[str]()
        for found in record.values():
            counts.update(found[difference.name])
        reasons = ", ".join(f"{count} `{reason}`" for reason, count in sorted(counts.items()) if reason != PLANNED)
        planned = f"{counts[PLANNED]} of {counts.total()}" if counts[PLANNED] else f"none of {counts.total()}"
        lines.append(f"| {difference.name} | {difference.tried} | {planned} | {reasons or '–'} |")
    return "\n".join((*lines, "", NOTE.format(models=len(record))))


def filled(page: str, record: Mapping[str, Outcomes]) -> str:
    """Return the page with the table between its marks.

    Raises:
        ValueError: it has no such marks.
    """
    return MARKS.filled(page, f"\n{table(record)}\n")


def load() -> dict[str, Outcomes]:
    """Read the record: outcomes by model."""
    return cast("dict[str, Outcomes]", json.loads(RECORD.read_text(encoding="utf-8")))


def main() -> None:
    """Try every model."""
    record = {}
    for name in models():
        record[name] = outcomes(name)
        print(name, flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
