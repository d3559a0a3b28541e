# SPDX-License-Identifier: Apache-2.0
"""The auditor accepts a connector that is right in an unusual way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvhma.geometry import Geometry, Region, Span
from kvhma.oracle.audit import judge
from kvhma.oracle.cases import Case
from kvhma.oracle.traces import Step
from support.generate import generate
from support.pairs import HERE, THERE
from support.recipe import draw
from support.save import as_case
from support.traced import RUNS, rows_of, small, steps_of, traced

SEEDS = range(40)
STAGED = 1 << 40


def shuffled(steps: list[Step]) -> list[Step]:
    """Transfers come in no order; zeros come first."""
    rest = [step for step in steps if step.doing == "transfer"]
    random.Random(len(rest)).shuffle(rest)
    return [step for step in steps if step.doing == "zero"] + rest


def byte_by_byte(steps: list[Step]) -> list[Step]:
    found = []
    for step in steps:
        rows = [
            (*(at + index for at in places), 1)
            for *places, size in step.rows.tolist()
            for index in range(min(size, 64))
        ]
        rows += [(*(at + 64 for at in places), size - 64) for *places, size in step.rows.tolist() if size > 64]
        found.append(replace(step, rows=rows_of(*rows)))
    return found


def twice(steps: list[Step]) -> list[Step]:
    return [*steps, *(step for step in steps if step.doing == "transfer")]


def with_empty_rows(steps: list[Step]) -> list[Step]:
    """Rows of no bytes, wherever they are."""
    nothing = [rows_of((at, at, 0)) for at in (0, 1, (1 << 64) - 1)]
    return [*steps, *(Step("transfer", 0, rows) for rows in nothing), Step("transfer", 0, rows_of((0, 0, 0))[:0])]


def one_step(steps: list[Step]) -> list[Step]:
    """All transfers of a source at once."""
    sources = sorted({step.source for step in steps if step.doing == "transfer"})
    return [step for step in steps if step.doing == "zero"] + [
        Step("transfer", source, np.concatenate([s.rows for s in steps if (s.doing, s.source) == ("transfer", source)]))
        for source in sources
    ]


def there_and_back(steps: list[Step]) -> list[Step]:
    """Finally move every byte to where it already is."""
    rows = np.concatenate([step.rows for step in steps if step.doing == "transfer"] or [rows_of((0, 0, 0))[:0]])
    same = np.column_stack((rows[:, 1], rows[:, 1], rows[:, 2]))
    return [*steps, Step("rearrange", 0, same)]


@pytest.mark.parametrize("way", [shuffled, byte_by_byte, twice, with_empty_rows, one_step, there_and_back])
def test_an_unusual_way(way: Callable[[list[Step]], list[Step]]) -> None:
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        found = judge(traced(case, way(steps_of(case))), with_plan=False)
        assert (found.outcome, found.causes) == ("right", ()), seed


def neighbours(case: Case) -> Case:
    """The same request between engines whose regions are neighbours."""

    def packed(geometry: Geometry) -> Geometry:
        base, regions = geometry.regions[0].base, []
        for region in geometry.regions:
            regions.append(Region(base, region.bytes))
            base += region.bytes
        return replace(geometry, regions=tuple(regions))

    return replace(case, local=packed(case.local), remotes=tuple(map(packed, case.remotes)))


def test_a_row_continues_in_the_next_region() -> None:
    case = neighbours(small())
    ends = case.local.regions[0].base + case.local.regions[0].bytes, THERE + 8 * 4
    assert ends[0] == case.local.regions[1].base
    # Blocks 7 of the layer and 0 of the state are neighbours, on both sides.
    request = replace(
        case, num_tokens=4, local_spans=(Span(0, [7]), Span(0, [0])), remote_spans=(Span(0, [7]), Span(0, [0]))
    )
    one = Step("transfer", 0, rows_of((ends[1] - 4, ends[0] - 4, 8)))
    found = judge(traced(request, [one]))
    assert (found.outcome, found.descriptors, found.causes) == ("right", 1, ())
    # The bytes after the last region are in no region.
    more = judge(traced(request, [one, Step("transfer", 0, rows_of((THERE, ends[0] + 30, 8)))]))
    assert (more.signature, more.extra) == (("extra",), 8 - 2 + 2)


def test_corrections_after_the_transfers_have_ended() -> None:
    whole = Step("transfer", 0, rows_of((THERE + 4, HERE + 12, 4), (THERE + 4, HERE + 20, 4), RUNS[2]))
    put_right = Step("transfer", 0, rows_of((THERE + 8, HERE + 20, 2)))
    assert judge(traced(small(), [whole, put_right])).signature == ("wrong",)
    # A step without work shows that one request ended before the other began.
    ended = Step("zero", 0, rows_of((0, 0))[:0])
    assert judge(traced(small(), [whole, ended, put_right])).outcome == "right"


def test_memory_beside_the_cache_through_which_it_comes() -> None:
    case = small()
    local = replace(case.local, regions=(*case.local.regions, Region(STAGED, 64)))
    staged = [(start, STAGED + 8 * at, size) for at, (start, _, size) in enumerate(RUNS)]
    placed = [(STAGED + 8 * at, to, size) for at, (_, to, size) in enumerate(RUNS)]
    steps = [Step("transfer", 0, rows_of(*staged)), Step("rearrange", 0, rows_of(*placed))]
    found = judge(traced(replace(case, local=local), steps))
    assert (found.outcome, found.idle) == ("right", 10)


def test_a_rearrangement_may_write_each_byte_once() -> None:
    both = Step("rearrange", 0, rows_of((HERE + 13, HERE + 12, 1), (HERE + 12, HERE + 12, 1)))
    found = judge(traced(small(), [Step("transfer", 0, rows_of(*RUNS)), both]))
    assert (found.outcome, found.wrong) == ("wrong", 1)
