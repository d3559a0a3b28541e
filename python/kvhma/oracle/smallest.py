# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest request with the fault of a trace: smaller by structure, with the steps that remain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvhma.geometry import Geometry
from kvhma.oracle.audit import Judged, judge
from kvhma.oracle.cases import Case, Expected
from kvhma.oracle.moves import byte_moves
from kvhma.oracle.shrink import shrink
from kvhma.oracle.traced_memory import Mask, RankTrace
from kvhma.oracle.traces import Rows, Step, Trace, TracedRequest

_STEPS_NAME_THEM = frozenset(("exact", "sources", "ids"))
"""Passes that are not possible: steps have numbers of sources and addresses of blocks."""
_CACHED_NAMES_THEM = frozenset(("groups", "pools"))


def smallest(traced: RankTrace, *, max_tries: int = 400) -> RankTrace:
    """Return the smallest request with the same kinds of faults, most of them for the same reason.

    Args:
        traced: a request with a fault; any other request is returned as it is.
        max_tries: limit of judged requests.
    """
    before = judge(traced, with_plan=False)
    if not before.signature:
        return traced

    def is_same(case: Case) -> bool:
        # A step that a smaller geometry cannot do is left out; its bytes are then missing, which is another failure.
        found = judge(_with_case(traced, case), with_plan=False)
        return found.signature == before.signature and _reason(found) == _reason(before)

    kept = _STEPS_NAME_THEM | (_CACHED_NAMES_THEM if traced.cached else frozenset())
    case = shrink(traced.case, is_same, max_tries=max_tries, leave_out=kept)
    return _without_idle_rows(_with_case(traced, case), max_tries)


def answered(case: Case) -> Case:
    """Return a case with the required reads, byte by byte; without them if no source holds the needed bytes."""
    try:
        moves = byte_moves(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
    except ValueError:
        return case
    runs = tuple((copy.source, copy.local, copy.remote, copy.length) for copy in moves.copies)
    return replace(case, expect=Expected(runs=runs))


def trace_of(traced: RankTrace, connector: str = "") -> Trace:
    """Return a trace with this request on this rank only."""
    case = traced.case
    request = TracedRequest(
        traced.name, case.num_tokens, traced.remote_tokens, case.local_spans, case.remote_spans, traced.cached,
        {0: list(traced.steps)}, {0: traced.refusal} if traced.refusal else {},
    )  # fmt: skip
    return Trace((case.local,), case.remotes, (request,), connector, traced.one_pool)


def _with_case(traced: RankTrace, case: Case) -> RankTrace:
    """Return the same steps between smaller engines, without the rows in removed memory."""
    before, steps = traced.case, []
    for step in traced.steps:
        lost = _lost(step.rows[:, -2], step.rows[:, -1], before.local, case.local)
        if step.doing != "zero":
            sides = (before.local, case.local)
            if step.doing == "transfer":
                sides = (before.remotes[step.source], case.remotes[step.source])
            lost |= _lost(step.rows[:, 0], step.rows[:, -1], *sides)
        if not lost.all():
            steps.append(replace(step, rows=step.rows[~lost]))
    return replace(traced, case=case, steps=tuple(steps))


def _lost(addresses: Rows, sizes: Rows, before: Geometry, now: Geometry) -> Mask:
    return _inside(before, addresses, sizes) & ~_inside(now, addresses, sizes)


def _inside(geometry: Geometry, addresses: Rows, sizes: Rows) -> Mask:
    """Return which ranges are in one region."""
    inside = np.zeros(len(addresses), bool)
    for region in geometry.regions:
        base, room = np.uint64(region.base), np.uint64(region.bytes)
        offset = addresses - base
        inside |= (addresses >= base) & (offset <= room) & (sizes <= room - np.minimum(offset, room))
    return inside


def _without_idle_rows(traced: RankTrace, tries: int) -> RankTrace:
    """Join rows, then remove rows as long as the fault stays the same: halves, quarters, .., single rows."""
    counts = _counts(traced)
    steps = [replace(step, rows=_joined(step.rows)) for step in traced.steps]

    def has_same_fault(index: int, shorter: Step) -> bool:
        nonlocal tries
        tries -= 1
        return tries > 0 and _counts(replace(traced, steps=(*steps[:index], shorter, *steps[index + 1 :]))) == counts

    for index in range(len(steps)):
        size = len(steps[index].rows) // 2 or 1
        while size and len(steps[index].rows):
            shorter = next((cut for cut in _shorter_steps(steps[index], size) if has_same_fault(index, cut)), None)
            if shorter is None:
                size //= 2
            else:
                steps[index] = shorter
    return replace(traced, steps=tuple(step for step in steps if len(step.rows)))


def _shorter_steps(step: Step, size: int) -> Iterator[Step]:
    """Yield a step without `size` of its rows, for each place of them."""
    for start in range(0, len(step.rows), size):
        yield replace(step, rows=np.delete(step.rows, slice(start, start + size), axis=0))


def _counts(traced: RankTrace) -> tuple[object, ...]:
    found = judge(traced, with_plan=False)
    return found.wrong, found.missing, found.extra, found.unheld, _reason(found)


def _reason(found: Judged) -> tuple[str, ...]:
    """Return the most frequent fault, and what is there instead."""
    return tuple(text for cause in found.causes[:1] for text in (cause.what, cause.found))


def _joined(rows: Rows) -> Rows:
    return joined_rows(rows[np.argsort(rows[:, -2], kind="stable")]) if len(rows) else rows


def joined_rows(rows: Rows) -> Rows:
    """Join rows, ``(n, 2)`` or ``(n, 3)``, whose addresses continue in the next row on all sides; at least one row."""
    places, sizes = rows[:, :-1], rows[:, -1:]
    first = np.ones(len(rows), bool)
    first[1:] = np.any(places[:-1] + sizes[:-1] != places[1:], axis=1)
    starts = np.flatnonzero(first)
    return np.column_stack((places[starts], np.add.reduceat(rows[:, -1], starts)))
