# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing case by structure, deterministically, as long as it still fails.

Every pass tries large cuts before small ones and only removes, so shrinking ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from kvhma.errors import KvhmaError
from kvhma.geometry import Geometry, Layer, Page, Span
from kvhma.oracle.cases import Case, check
from kvhma.oracle.labels import by_source

_Side: TypeAlias = "tuple[Geometry, tuple[Span, ...]]"
_Sides: TypeAlias = "list[_Side]"
"""The local side, then every source, each with its spans."""

_Make: TypeAlias = "Callable[[], Case]"


def spans_of(case: Case, source: int) -> tuple[Span, ...]:
    """Return P's spans of one source."""
    return tuple(by_source(case.remote_spans, len(case.remotes))[source])


def failure(case: Case) -> str | None:
    """Return the kind of failure, without numbers and names: outcome, code and field; None if right.

    Raises:
        RequestError: the case cannot be simulated.
    """
    verdict = check(case)
    if verdict.outcome == "right":
        return None
    return " ".join(filter(None, (verdict.outcome, verdict.code, verdict.field)))


def shrink(
    case: Case, fails: Callable[[Case], bool], *, max_tries: int = 4000, leave_out: Collection[str] = ()
) -> Case:
    """Return the smallest case found that still fails.

    Sources, layers, groups, parts and block ids are dropped, tokens and pools cut, ids numbered anew. The same
    input gives the same output.

    Args:
        case: a case that fails.
        fails: returns whether a smaller case still fails, e.g. ``lambda c: failure(c) == sort``. Cases for which it
            raises a KvhmaError count as not failing.
        max_tries: limit of calls of `fails`; then the best case so far is returned.
        leave_out: names of `PASSES` to skip.
    """
    tries = _Tries(fails, max_tries)
    case = with_sides(case, sides_of(case))
    passes = [candidates for name, candidates in PASSES.items() if name not in leave_out]
    improved = True
    while improved:
        improved = False
        for candidates in passes:
            while (smaller := tries.first_failing(candidates(case))) is not None:
                case, improved = smaller, True
    return _flat(case)


@dataclass
class _Tries:
    """Calls of `fails`, of which `left` are left."""

    fails: Callable[[Case], bool]
    left: int

    def first_failing(self, candidates: Iterator[_Make]) -> Case | None:
        """Return the first smaller case that still fails; None if no case does or no tries are left."""
        for make in candidates:
            if self.left == 0:
                return None
            try:
                smaller = make()
                self.left -= 1
                if self.fails(smaller):
                    return smaller
            except KvhmaError:
                continue
        return None


def sides_of(case: Case) -> _Sides:
    """Return D's rank and every source, each with its spans."""
    return [
        (case.local, case.local_spans),
        *((remote, spans_of(case, index)) for index, remote in enumerate(case.remotes)),
    ]


def with_sides(case: Case, sides: Sequence[_Side]) -> Case:
    """Return the case with other ranks and spans."""
    return replace(
        case,
        local=sides[0][0],
        local_spans=sides[0][1],
        remotes=tuple(geometry for geometry, _ in sides[1:]),
        remote_spans=tuple(spans for _, spans in sides[1:]),
    )


def _flat(case: Case) -> Case:
    """Store the spans of sources only once if all sources have the same."""
    spans = [spans_of(case, index) for index in range(len(case.remotes))]
    return replace(case, remote_spans=spans[0]) if spans and all(entry == spans[0] for entry in spans) else case


def _runs(count: int) -> Iterator[range]:
    """Yield what to remove of `count` entries: halves, quarters, .., single entries."""
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield range(start, min(count, start + size))
        size //= 2


# Each pass yields functions that make a smaller case. A case that cannot be made (a geometry that contradicts itself)
# then fails where it is tried.


def _fewer_sources(case: Case) -> Iterator[_Make]:
    sides = sides_of(case)
    for gone in _runs(len(case.remotes)):
        kept = [side for index, side in enumerate(sides[1:]) if index not in gone]
        if kept:
            yield partial(with_sides, case, [sides[0], *kept])


def _fewer_layers(case: Case) -> Iterator[_Make]:
    names = list(dict.fromkeys(layer.name for geometry, _ in sides_of(case) for layer in geometry.layers))
    for gone in _runs(len(names)):
        lost = {names[index] for index in gone}
        yield partial(each_rank, case, partial(without_layers, lost))


def _fewer_layers_on_one_side(case: Case) -> Iterator[_Make]:
    sides = sides_of(case)
    for at, (geometry, _) in enumerate(sides):
        for layer in geometry.layers:
            yield partial(_one, case, at, partial(without_layers, {layer.name}))


def without_layers(lost: set[str], geometry: Geometry) -> Geometry:
    """Return a rank without the layers of these names."""
    return replace(geometry, layers=tuple(layer for layer in geometry.layers if layer.name not in lost))


def _fewer_groups(case: Case) -> Iterator[_Make]:
    """Drop groups without a layer, with their spans."""
    for at, (geometry, _) in enumerate(sides_of(case)):
        used = {layer.group for layer in geometry.layers}
        if len(used) < len(geometry.groups):
            yield partial(without_idle_groups, case, at)


def without_idle_groups(case: Case, at: int) -> Case:
    """Return the case without the groups of a side that have no layer."""
    sides = sides_of(case)
    geometry, spans = sides[at]
    used = sorted({layer.group for layer in geometry.layers})
    layers = tuple(replace(layer, group=used.index(layer.group)) for layer in geometry.layers)
    groups = tuple(geometry.groups[index] for index in used)
    sides[at] = (replace(geometry, layers=layers, groups=groups), tuple(spans[index] for index in used))
    return with_sides(case, sides)


def _fewer_parts(case: Case) -> Iterator[_Make]:
    names = dict.fromkeys(part.name for layer in case.local.layers for part in layer.page.parts)
    for name in names:
        parts = [{part.name for part in layer.page.parts} for layer in case.local.layers]
        if any(len(held) > 1 and name in held for held in parts):
            yield partial(each_rank, case, partial(_without_part, name))


def _without_part(name: str, geometry: Geometry) -> Geometry:
    layers = []
    for layer in geometry.layers:
        parts = tuple(part for part in layer.page.parts if part.name != name)
        layers.append(replace(layer, page=Page(parts)) if parts else layer)
    return replace(geometry, layers=tuple(layers))


def _fewer_tokens(case: Case) -> Iterator[_Make]:
    tokens = case.num_tokens
    for fewer in sorted({1, tokens // 4, tokens // 2, tokens - tokens // 4, tokens - 1}):
        if 0 < fewer < tokens:
            yield partial(replace, case, num_tokens=fewer)


def _fewer_ids(case: Case) -> Iterator[_Make]:
    for at, (_, spans) in enumerate(sides_of(case)):
        for group, span in enumerate(spans):
            yield from (partial(_with_span, case, at, group, shorter) for shorter in _shorter_spans(span))


def _shorter_spans(span: Span) -> Iterator[Span]:
    """Yield a span without blocks at its end, or at its start: then it begins later."""
    ids = list(span.ids)
    for gone in sorted({len(ids), len(ids) // 2 or 1, 1} if ids else (), reverse=True):
        yield Span(span.first, ids[: len(ids) - gone])
        yield Span(span.first + gone, ids[gone:])


def _with_span(case: Case, at: int, group: int, span: Span) -> Case:
    sides = sides_of(case)
    geometry, spans = sides[at]
    sides[at] = (geometry, (*spans[:group], span, *spans[group + 1 :]))
    return with_sides(case, sides)


def _lower_ids(case: Case) -> Iterator[_Make]:
    """Number the used blocks from 1, in their order, over a whole side, because groups share memory."""
    for at, (geometry, spans) in enumerate(sides_of(case)):
        used = sorted({block for span in spans for block in span.ids})
        free = [block for block in range(len(used) + 1) if block != geometry.null_block]
        if any(block > new for block, new in zip(used, free, strict=False)):
            names = dict(zip(used, free, strict=False))
            renamed = tuple(Span(span.first, [names[block] for block in span.ids]) for span in spans)
            yield partial(_with_side, case, at, (geometry, renamed))


def _with_side(case: Case, at: int, side: _Side) -> Case:
    sides = sides_of(case)
    sides[at] = side
    return with_sides(case, sides)


def _smaller_pools(case: Case) -> Iterator[_Make]:
    for at, (geometry, spans) in enumerate(sides_of(case)):
        cut = cut_pools(geometry, spans)
        if cut != geometry:
            yield partial(_with_side, case, at, (cut, spans))


def cut_pools(geometry: Geometry, spans: Sequence[Span]) -> Geometry:
    """Cut every pool after the last used block, and regions after their last layer; drop idle regions."""
    layers, ends = [], dict[int, int]()
    for layer in geometry.layers:
        blocks = max(spans[layer.group].ids, default=0) + 1 if layer.group < len(spans) else layer.num_blocks
        layer = replace(layer, num_blocks=max(1, min(layer.num_blocks, blocks)))
        layers.append(layer)
        ends[layer.region] = max(ends.get(layer.region, 0), _end(geometry, layer))
    used = sorted(ends)
    return replace(
        geometry,
        layers=tuple(replace(layer, region=used.index(layer.region)) for layer in layers),
        regions=tuple(replace(geometry.regions[index], bytes=ends[index]) for index in used),
    )


def _end(geometry: Geometry, layer: Layer) -> int:
    """Return one past the last byte of a layer's last page."""
    group = geometry.groups[layer.group]
    page = max(
        part.offset + part.item_bytes + sum((axis.shard.held - 1) * axis.stride for axis in part.axes)
        for part in layer.page.parts
    )
    last = (layer.num_blocks - 1) * layer.block_stride + (group.ratio - 1) * geometry.kernel_stride(layer)
    return layer.offset + last + page


def _exact(case: Case) -> Iterator[_Make]:
    if case.descriptor_bytes:
        yield partial(replace, case, descriptor_bytes=0)


def each_rank(case: Case, change: Callable[[Geometry], Geometry]) -> Case:
    """Return the case with every rank changed."""
    return with_sides(case, [(change(geometry), spans) for geometry, spans in sides_of(case)])


def _one(case: Case, at: int, change: Callable[[Geometry], Geometry]) -> Case:
    geometry, spans = sides_of(case)[at]
    return _with_side(case, at, (change(geometry), spans))


PASSES: dict[str, Callable[[Case], Iterator[_Make]]] = {
    "exact": _exact,
    "sources": _fewer_sources,
    "layers": _fewer_layers,
    "layers of one side": _fewer_layers_on_one_side,
    "groups": _fewer_groups,
    "parts": _fewer_parts,
    "tokens": _fewer_tokens,
    "blocks": _fewer_ids,
    "ids": _lower_ids,
    "pools": _smaller_pools,
}
"""The passes, in this order."""
