# SPDX-License-Identifier: Apache-2.0
"""Planners with one wrong rule, which the kit has to catch.

Most change the question by that rule and let a right planner answer it, so the result is a whole transfer and not a
broken one. The others corrupt a right answer. A mutant whose question is the right one, or whose planner refuses it,
proves nothing about a case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import kvhma
from kvhma.geometry import Axis, Geometry, Group, Layer, Part, Span
from kvhma.oracle.cases import Case
from kvhma.oracle.labels import by_source

Rows = list[dict[str, Any]]
Question = Callable[[Case], Case]
Spoil = Callable[[Rows], Rows]


def answer(case: Case, *, descriptor_bytes: int = 0) -> Rows:
    """Return what kvhma moves, or its refusal."""
    try:
        plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes)
        transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
    except kvhma.KvhmaError as error:
        return [{"refuse": error.code}]
    rows: Rows = [{"zero": address, "bytes": length} for address, length, _ in transfer.zero.tolist()]
    for read in transfer.reads:
        for (to, length, _), (start, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            rows.append({"source": read.source, "from": start, "to": to, "bytes": length})
    return rows


# --- Changing the question ------------------------------------------------------------------------------


def groups(change: Callable[[Group], Group], *, local: bool = True, remote: bool = False) -> Question:
    """Change groups of D, of P, or of both."""

    def of(geometry: Geometry) -> Geometry:
        found = tuple(change(group) for group in geometry.groups)
        return geometry if found == geometry.groups else replace(geometry, groups=found)

    return sides(of, local=local, remote=remote)


def layers(change: Callable[[Geometry, Layer], Layer], *, local: bool = True, remote: bool = False) -> Question:
    """Change layers of D, of P, or of both."""

    def of(geometry: Geometry) -> Geometry:
        found = tuple(change(geometry, layer) for layer in geometry.layers)
        return geometry if found == geometry.layers else replace(geometry, layers=found)

    return sides(of, local=local, remote=remote)


def sides(of: Callable[[Geometry], Geometry], *, local: bool = True, remote: bool = False) -> Question:
    """Change the geometry of D, of P, or of both."""

    def question(case: Case) -> Case:
        remotes = tuple(of(rank) for rank in case.remotes) if remote else case.remotes
        return replace(case, local=of(case.local) if local else case.local, remotes=remotes)

    return question


def parts(change: Callable[[Part], Part]) -> Callable[[Geometry, Layer], Layer]:
    """Change each part of a layer alone."""

    def of(geometry: Geometry, layer: Layer) -> Layer:
        found = tuple(change(part) for part in layer.page.parts)
        return replace(layer, page=replace(layer.page, parts=found))

    return of


def tokens(change: Callable[[Case], int]) -> Question:
    return lambda case: replace(case, num_tokens=change(case))


def remote_spans(change: Callable[[Case, int, int, Span], Span]) -> Question:
    """Change P's spans: of a case, a source, a group."""

    def question(case: Case) -> Case:
        spans = by_source(case.remote_spans, len(case.remotes))
        found = [tuple(change(case, s, g, span) for g, span in enumerate(spans[s])) for s in range(len(spans))]
        return replace(case, remote_spans=tuple(found))

    return question


def axis_of(part: Part, name: str) -> Axis | None:
    return next((axis for axis in part.axes if axis.name == name), None)


def _swapped(first: str, second: str) -> Callable[[Part], Part]:
    """Exchange the order of two axes; both are dense."""

    def change(part: Part) -> Part:
        one, other = axis_of(part, first), axis_of(part, second)
        if one is None or other is None or one.length == 1 or other.length == 1:
            return part
        inner, outer = sorted((one, other), key=lambda axis: axis.stride)
        moved = {
            outer.name: replace(outer, stride=inner.stride),
            inner.name: replace(inner, stride=inner.stride * (outer.length or 1)),
        }
        return replace(part, axes=tuple(moved.get(axis.name, axis) for axis in part.axes))

    return change


def _first_heads(part: Part) -> Part:
    """Treat every rank as the first."""
    axes = [replace(axis, start=0) if axis.name in ("heads", "channels") else axis for axis in part.axes]
    return replace(part, axes=tuple(axes))


def _one_chunk(geometry: Geometry, layer: Layer) -> Layer:
    """Treat all convolutions as one, of which every rank has the next part."""
    conv = [part for part in layer.page.parts if axis_of(part, "rows")]
    if len(conv) < 2 or any(axis.spare for part in conv for axis in part.axes):
        return layer
    channels = [axis_of(part, "channels") for part in conv]
    known = [axis for axis in channels if axis]
    extent, start, length = (sum(getattr(axis, name) for axis in known) for name in ("extent", "start", "length"))
    whole = Axis("channels", extent, known[0].stride, start, length)
    rows = axis_of(conv[0], "rows")
    assert rows is not None
    merged = Part(conv[0].name, conv[0].dtype, conv[0].item_bytes, min(part.offset for part in conv), (rows, whole))
    rest = [part for part in layer.page.parts if part not in conv]
    return replace(layer, page=replace(layer.page, parts=(merged, *rest)))


def _parts_turned(geometry: Geometry, layer: Layer) -> Layer:
    """Exchange the first two parts of equal size."""
    found = list(layer.page.parts)
    for i, part in enumerate(found[1:], 1):
        if part.nbytes == found[0].nbytes and part.item_bytes == found[0].item_bytes and part.name != "ssm":
            found[0], found[i] = replace(found[0], offset=part.offset), replace(part, offset=found[0].offset)
            break
    return replace(layer, page=replace(layer.page, parts=tuple(found)))


def _dense(geometry: Geometry, layer: Layer) -> Layer:
    """Place blocks without padding."""
    ratio = geometry.groups[layer.group].ratio
    ends = [
        part.offset + part.item_bytes + sum(((axis.length or 1) - 1) * axis.stride for axis in part.axes)
        for part in layer.page.parts
    ]
    return (
        replace(layer, block_stride=max(ends) * ratio, kernel_stride=None)
        if max(ends) * ratio < layer.block_stride
        else layer
    )


def _by_order(case: Case) -> Case:
    """Match layers by position, not by name."""
    names = [layer.name for layer in case.local.layers]
    remotes = []
    for remote in case.remotes:
        named = [replace(layer, name=name) for layer, name in zip(remote.layers, names, strict=False)]
        remotes.append(replace(remote, layers=tuple(named)))
    return replace(case, remotes=tuple(remotes))


def _tails_meet(case: Case, source: int, index: int, span: Span) -> Span:
    """Align the ends of lists, with any blocks after the last token."""
    group = case.remotes[source].groups[index]
    ends = [
        (mine.first + len(mine.ids)) * other.block_size // group.block_size
        for mine, other in zip(case.local_spans, case.local.groups, strict=True)
        if other.kind == group.kind
    ]
    return replace_first(span, ends[0] - len(span.ids)) if ends else span


def _heads_meet(case: Case, source: int, index: int, span: Span) -> Span:
    """Align the fronts of lists, with any blocks that D has already."""
    group = case.remotes[source].groups[index]
    starts = [
        mine.first * other.block_size // group.block_size
        for mine, other in zip(case.local_spans, case.local.groups, strict=True)
        if other.kind == group.kind
    ]
    return replace_first(span, starts[0]) if starts else span


def replace_first(span: Span, first: int) -> Span:
    return Span(max(0, first), span.ids)


def _turned(ids: Sequence[int]) -> list[int]:
    """The block after each."""
    return [*ids[1:], *ids[:1]]


def _one_hit(case: Case) -> Case:
    """Let all groups begin where the first one does."""
    first = case.local_spans[0].first
    return replace(case, local_spans=tuple(Span(first, span.ids) for span in case.local_spans))


def _state_spans(change: Callable[[list[int]], list[int]]) -> Question:
    def of(case: Case, source: int, index: int, span: Span) -> Span:
        kind = case.remotes[source].groups[index].kind
        return Span(span.first, change(list(span.ids))) if kind == "ssm" else span

    return remote_spans(of)


def _window(change: Callable[[Group, int], int]) -> Callable[[Group], Group]:
    def of(group: Group) -> Group:
        return group if group.window is None else replace(group, window=max(1, change(group, group.window)))

    return of


def _kind(group: Group, kind: Any, window: int | None = None) -> Group:
    return replace(group, kind=kind, window=window, chunk=None)


QUESTIONS: dict[str, Question] = {
    "one token less": tokens(lambda case: case.num_tokens - 1),
    "one token more": tokens(lambda case: case.num_tokens + 1),
    "last block as if it were full": tokens(lambda c: -(-c.num_tokens // _size(c)) * _size(c)),
    "last block left out": tokens(lambda c: max(1, c.num_tokens // _size(c) * _size(c))),
    "the block after": remote_spans(lambda c, s, g, span: Span(span.first, _turned(list(span.ids)))),
    "ends of lists meet": remote_spans(_tails_meet),
    "fronts of lists meet": remote_spans(_heads_meet),
    "one prefix hit for all groups": _one_hit,
    "window one block early": groups(_window(lambda group, window: window + group.block_size)),
    "window one token less": groups(_window(lambda group, window: window - 1)),
    "window one token more": groups(_window(lambda group, window: window + 1)),
    "window ignored": groups(lambda group: _kind(group, "full") if group.window else group),
    "chunk ignored": groups(lambda group: _kind(group, "full") if group.chunk else group),
    "chunk as a window": groups(lambda group: _kind(group, "sliding", group.chunk) if group.chunk else group),
    "kernel blocks in equal steps": layers(lambda geometry, layer: replace(layer, kernel_stride=None), remote=True),
    "blocks without padding": layers(_dense, local=False, remote=True),
    "rank ignored": layers(parts(_first_heads)),
    "tokens and heads the other way": layers(parts(_swapped("heads", "tokens")), local=False, remote=True),
    "rows and channels the other way": layers(parts(_swapped("rows", "channels")), local=False, remote=True),
    "K and V inside of tokens": layers(parts(_swapped("kv", "tokens")), local=False, remote=True),
    "convolutions as one chunk": layers(_one_chunk, remote=True),
    "two parts for each other": layers(_parts_turned, local=False, remote=True),
    "layers by place": _by_order,
    "layer's offset ignored": layers(lambda geometry, layer: replace(layer, offset=0), local=False, remote=True),
    "a draft token's slot": groups(lambda group: replace(group, speculative=0), local=False, remote=True),
    "the first slot of a state": _state_spans(lambda ids: ids[::-1]),
    "the next rank's turn": groups(lambda g: replace(g, cp_rank=(g.cp_rank + 1) % g.cp_size), remote=True, local=False),
    "turns ignored": groups(lambda group: replace(group, cp_rank=0, cp_size=1), remote=True),
}  # fmt: skip


def _size(case: Case) -> int:
    return max((group.block_size for group in case.local.groups if group.kind not in ("ssm", "opaque")), default=1)


# --- Corrupting the answer ------------------------------------------------------------------------------


def _copies(rows: Rows) -> list[int]:
    return [i for i, row in enumerate(rows) if "source" in row]


def _changed(rows: Rows, at: int, **fields: int) -> Rows:
    return [*rows[:at], {**rows[at], **fields}, *rows[at + 1 :]]


def _shifted(name: str, step: int) -> Spoil:
    def spoil(rows: Rows) -> Rows:
        found = _copies(rows)
        return _changed(rows, found[-1], **{name: rows[found[-1]][name] + step}) if found else rows

    return spoil


def _swapped_runs(rows: Rows) -> Rows:
    """Swap where the first two runs of equal length come from: two heads, or two layers."""
    found = _copies(rows)
    for i, at in enumerate(found):
        for other in found[i + 1 :]:
            one, two = rows[at], rows[other]
            if one["bytes"] == two["bytes"] and one["source"] == two["source"]:
                return _changed(_changed(rows, at, **{"from": two["from"]}), other, **{"from": one["from"]})
    return rows


SPOILS: dict[str, Spoil] = {
    "nothing zeroed": lambda rows: [row for row in rows if "zero" not in row],
    "a byte more zeroed": lambda rows: [{**row, "bytes": row["bytes"] + 1} if "zero" in row else row for row in rows],
    "the last run lost": lambda rows: [row for i, row in enumerate(rows) if i not in _copies(rows)[-1:]],
    "the last run a byte short": _shifted("bytes", -1),
    "the last run from a byte later": _shifted("from", 1),
    "the last run to a byte later": _shifted("to", 1),
    "two runs swapped": _swapped_runs,
    "all from one rank": lambda rows: [{**row, "source": 0} if "source" in row else row for row in rows],
    "nothing refused": lambda rows: [row for row in rows if "refuse" not in row],
}


def mutant(name: str, case: Case) -> Rows | None:
    """Return a mutant's answer to a case; None if a right planner gives the same, or the mutant cannot ask at all."""
    right = answer(case)
    if name in SPOILS:
        spoiled = SPOILS[name](right)
        return spoiled if spoiled != right else None
    if any("refuse" in row for row in right):
        return None
    try:
        changed = QUESTIONS[name](case)
    except kvhma.KvhmaError:
        return None  # the wrong rule contradicts the engine: it would have been noticed
    rows = answer(changed) if changed != case else right
    return rows if rows != right else None
