# SPDX-License-Identifier: Apache-2.0
"""Checks byte by byte what a connector did, without a plan.

Every byte of both engines gets a label for its content. The steps of a trace are applied to D's labels. Then each byte
that D's next step reads must have the label that belongs there:

    P | region 0 at 16 | layer 0, kv, token 4, byte 0  --- a row of the trace --> D, region 0 at 48
    D | region 0 at 48 | must hold layer 0, kv, token 4, byte 0; otherwise it is wrong

docs/audit.md defines the words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import numpy as np

from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.oracle.cases import Case, refuse_large
from kvhma.oracle.labels import Blocks, Ints, Template, blocks_of, by_source, first_needed, joinable, used_blocks
from kvhma.oracle.moves import read_masks
from kvhma.oracle.traced_memory import JUNK, KEYS, RACED, ZERO, Mask, RankTrace, TracedMemory
from kvhma.oracle.traces import Step, Trace
from kvhma.planning import plan

Outcome: TypeAlias = Literal["right", "wrong", "refused"]

_MOST = 12
_MAX_PARTS = 1 << 16
"""Limit of parts of all layers of all ranks."""
_MAX_MISSING = 1 << 24
"""Limit of bytes of a group for which D may have no block."""
_MAX_POOLS = 1 << 28
"""Limit of bytes of all layers' pools: layers may share memory."""
_AT_ONCE = 1 << 20
"""Number of bytes of a pool that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Bytes that are wrong for one reason.

    Attributes:
        what: ``wrong``, ``missing`` or ``extra``.
        layer: layer of the bytes, None for bytes outside of all regions.
        part: part of the layer's page.
        tokens: the first and the last token; None for state.
        found: what the bytes hold, in words.
        bytes: number of bytes.
    """

    what: str
    layer: str | None
    part: str | None
    tokens: tuple[int, int] | None
    found: str
    bytes: int

    def __str__(self) -> str:
        place = f"{self.layer}/{self.part}" if self.layer else "no region"
        first, last = self.tokens or (None, None)
        tokens = "" if first is None else f" token {first}" if first == last else f" tokens {first} to {last}"
        return f"{self.what}: {self.bytes:,} bytes of {place}{tokens}: {self.found}"


@dataclass(frozen=True, slots=True)
class Planned:
    """The counts of kvhma's own plan for the same request, or why it refuses."""

    descriptors: int = 0
    bytes: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """The result for one rank of D and one request. All but `outcome` and the texts are numbers.

    Attributes:
        outcome: ``wrong`` if `wrong`, `missing` or `extra` is not 0; ``refused``; ``right``.
        wrong: bytes that D's next step reads and that hold other content.
        missing: such bytes that hold zeros or D's earlier content, or for which D has no block.
        extra: bytes of other blocks, or outside of all regions, that were written.
        unheld: wrong or missing bytes that no P rank's blocks hold.
        stale: bytes of the request's blocks that are never read and are neither zero nor P's.
        idle: written bytes that belong to no layer, or to the null block.
        needed: bytes that D's next step reads, except those that D had before.
        bytes: bytes that were transferred.
        descriptors: rows of the transfers.
        joined: number of rows with neighbours joined.
        planned: kvhma's own plan.
        causes: which bytes are wrong and why, the most frequent cause first.
        refusal: why the request was refused.
    """

    outcome: Outcome
    wrong: int = 0
    missing: int = 0
    extra: int = 0
    unheld: int = 0
    stale: int = 0
    idle: int = 0
    needed: int = 0
    bytes: int = 0
    descriptors: int = 0
    joined: int = 0
    planned: Planned | None = None
    causes: tuple[Cause, ...] = ()
    refusal: str = ""

    @property
    def signature(self) -> tuple[str, ...]:
        """The kinds of faults, without numbers."""
        return tuple(name for name in ("wrong", "missing", "extra", "unheld") if getattr(self, name))


def ranks_of(trace: Trace) -> Iterator[RankTrace]:
    """Yield each request on each rank of D."""
    for request in trace.requests:
        local = by_source(request.local_spans, len(trace.local))
        cached = by_source(request.cached_spans, len(trace.local)) if request.cached_spans else [()] * len(local)
        for rank, geometry in enumerate(trace.local):
            case = Case(
                geometry, trace.remote, request.num_tokens, tuple(local[rank]), request.remote_spans, descriptor_bytes=0
            )
            steps = tuple(request.steps.get(rank, ()))
            yield RankTrace(
                request.name, rank, case, request.remote_tokens, tuple(cached[rank]), steps,
                request.refusals.get(rank, ""), trace.one_pool,
            )  # fmt: skip


def audit(trace: Trace) -> list[tuple[RankTrace, Judged]]:
    """Judge all requests of a trace on all ranks of D.

    Raises:
        RequestError: a request cannot be simulated: it is too large, or the ranks do not share one global cache.
    """
    return [(rank, judge(rank)) for rank in ranks_of(trace)]


def judge(traced: RankTrace, *, with_plan: bool = True) -> Judged:
    """Judge one request on one rank of D.

    Args:
        traced: the steps to judge.
        with_plan: whether to count kvhma's own plan as well.

    Raises:
        RequestError: as for :func:`audit`.
    """
    if traced.refusal:
        return Judged("refused", refusal=traced.refusal)
    case = traced.case
    parts = sum(len(layer.page.parts) for rank in (case.local, *case.remotes) for layer in rank.layers)
    if parts > _MAX_PARTS:
        raise RequestError(f"too large to simulate: {parts} parts of all ranks' layers, at most {_MAX_PARTS}")
    filled = zip(case.local_spans, traced.cached, strict=True) if traced.cached else ()
    both = tuple(Span(span.first, [*_ids(span), *_ids(before)]) for span, before in filled)
    refuse_large(replace(case, local_spans=both or case.local_spans))
    try:
        memory = TracedMemory(traced)
        memory.run()
        found = _Findings(memory).judged()
    except ValueError as error:
        raise RequestError(f"cannot be simulated: {error}") from error
    rows, joined, total = _counts(traced.steps)
    return replace(found, descriptors=rows, joined=joined, bytes=total, planned=_planned(case) if with_plan else None)


def _planned(case: Case) -> Planned:
    try:
        moved = plan(case.local, case.remotes, descriptor_bytes=case.descriptor_bytes).transfer(
            case.num_tokens, case.local_spans, case.remote_spans
        )
    except KvhmaError as error:
        return Planned(refusal=f"{type(error).__name__}: {error}")
    return Planned(moved.descriptors, moved.bytes)


def _counts(steps: Sequence[Step]) -> tuple[int, int, int]:
    """Count the rows of the transfers, the rows left after joining neighbours on both sides, and the bytes."""
    rows = joined = total = 0
    for step in steps:
        if step.doing != "transfer" or not len(step.rows):
            continue
        ordered = step.rows[np.argsort(step.rows[:, 1], kind="stable")]
        start, to, size = ordered.T
        rows += len(ordered)
        joined += len(ordered) - int(np.count_nonzero(joinable(to, start, size)))
        total += int(size.sum())
    return rows, joined, total


def _ids(span: Span) -> list[int]:
    return cast("list[int]", span.ids)


class _Findings:
    """Compares every byte of D after the steps.

    Args:
        memory: the labels.
    """

    def __init__(self, memory: TracedMemory) -> None:
        """Compute for each byte whether a block of the request holds it."""
        self.memory, self.traced, self.side = memory, memory.traced, memory.side
        self.groups = self.side.geometry.groups
        self.own = np.zeros(self.side.size, bool)
        self.causes: dict[tuple[str, int, str], tuple[int, int, int]] = {}
        self.sums: Counter[str] = Counter()

    def judged(self) -> Judged:
        """Return everything except the counts of the steps themselves."""
        cached = self.traced.cached or (Span(0, []),) * len(self.groups)
        for index, (span, before) in enumerate(zip(self.traced.case.local_spans, cached, strict=True)):
            self._look(index, span, fill=True)
            self._look(index, before, fill=False)
            self._look_for_blocks(index, (span, before))
        self._look_elsewhere()
        ordered = sorted(self._causes(), key=lambda cause: (-cause.bytes, str(cause)))
        outcome: Outcome = "wrong" if any(self.sums[name] for name in ("wrong", "missing", "extra")) else "right"
        sums = self.sums
        return Judged(
            outcome, sums["wrong"], sums["missing"], sums["extra"], sums["unheld"], sums["stale"], sums["idle"],
            sums["needed"], causes=tuple(ordered[:_MOST]),
        )  # fmt: skip

    def _look(self, index: int, span: Span, *, fill: bool) -> None:
        """Compare the bytes of some blocks with their expected content."""
        group, template = self.groups[index], self.side.templates[index]
        tokens, kernels = self.traced.case.num_tokens, self.memory.kernels[template.entry]
        if fill:
            self.own[self.memory.labels(template, blocks_of(group, span), 0)[0]] = True
        elif group.kind == "ssm":
            return
        blocks = used_blocks(group, span, tokens)
        flat, want = self.memory.labels(template, blocks, tokens)
        needed, _ = read_masks(group, template, blocks, tokens, kernels)
        needed &= kernels > 0
        after, before = self.memory.after[flat], self.memory.before[flat]
        bad = needed & (after != want)
        lacks = bad & ((after == ZERO) | (after == before))
        token = np.broadcast_to(blocks.token[:, None] + template.token, flat.shape)
        entry = np.broadcast_to(template.entry, flat.shape)
        for name, mask in (("missing", lacks), ("wrong", bad & ~lacks)):
            self._add(name, entry[mask], token[mask], after[mask], want[mask])
        self._count_unheld(want[bad])
        if fill:
            self.sums["needed"] += int(np.count_nonzero(needed))
            self.sums["stale"] += int(np.count_nonzero(~needed & (after != want) & (after != ZERO) & (kernels > 0)))

    def _look_for_blocks(self, index: int, spans: Sequence[Span]) -> None:
        """Count the needed tokens, or state, for which D has no block."""
        group, template = self.groups[index], self.side.templates[index]
        tokens, kernels = self.traced.case.num_tokens, self.memory.kernels[template.entry]
        blocks = self._lacking(index, spans)
        if not blocks.ids.size:
            return
        needed, _ = read_masks(group, template, blocks, tokens, kernels)
        needed &= kernels > 0
        want = self.memory.labels(template, blocks, tokens)[1][needed]
        entries = np.broadcast_to(template.entry, needed.shape)[needed]
        at = (blocks.token[:, None] + template.token)[needed]
        self._add("missing", entries, at, np.full(at.size, _NO_BLOCK), want)
        self.sums["needed"] += int(at.size)
        self._count_unheld(want)

    def _lacking(self, index: int, spans: Sequence[Span]) -> Blocks:
        """Return the needed blocks that are in none of D's blocks, whether to fill or filled before."""
        group, tokens, known = self.groups[index], self.traced.case.num_tokens, bool(self.traced.cached)
        if group.kind == "opaque" or (group.kind == "ssm" and not known):
            return blocks_of(group, Span(0, []))  # it is unknown which of its blocks are read, or whether D has a state
        if group.kind == "ssm":
            return blocks_of(group, Span(0, [] if _ids(spans[0]) else [0]))
        turn = group.block_size * group.cp_size
        first, last = first_needed(group, tokens) // turn, -(-tokens // turn)
        if not known:
            first = max(first, spans[0].first)
        if (last - first) * max(1, self.side.templates[index].offset.size) > _MAX_MISSING:
            raise ValueError(f"num_tokens is {tokens}, {last - first} blocks of group {index}")
        lacks = np.ones(max(0, last - first), bool)
        for span in spans:
            lacks[max(0, span.first - first) : max(0, span.first + len(_ids(span)) - first)] = False
        blocks = blocks_of(group, Span(first, np.zeros(lacks.size, np.int64)))
        return Blocks(blocks.ids[lacks], blocks.token[lacks])

    def _count_unheld(self, want: Ints) -> None:
        """Count labels that no P rank's blocks hold."""
        if want.size:
            held = self.memory.held
            at = np.minimum(np.searchsorted(held, want), max(0, held.size - 1))
            self.sums["unheld"] += int(np.count_nonzero(held[at] != want)) if held.size else int(want.size)

    def _look_elsewhere(self) -> None:
        """Count bytes written outside of the request's blocks."""
        changed = (self.memory.after != self.memory.before) & ~self.own
        free = np.zeros(self.side.size, bool)
        entry = np.full(self.side.size, -1, np.int64)
        if changed.any():
            for template, blocks, idle in self._pools():
                flat = blocks[:, None] * template.stride + template.offset
                entry[flat] = template.entry
                free[flat[idle]] = True
        bad = changed & (entry >= 0) & ~free
        self.sums["idle"] += int(np.count_nonzero(changed & ~bad))
        where = np.flatnonzero(bad)
        self._add("extra", entry[where], np.full(where.size, -1), self.memory.after[where], None)
        if self.memory.outside:
            self.sums["extra"] += self.memory.outside
            self.causes["extra", -1, "written outside of D's regions"] = (self.memory.outside, -1, -1)

    def _pools(self) -> Iterator[tuple[Template, Ints, Mask]]:
        """Yield the blocks of each group in batches, with a mask of those that belong to no other request."""
        local = self.side.geometry
        counts = [_blocks(local, index) for index in range(len(local.groups))]
        templates = self.side.templates
        if (total := sum(n * each.offset.size for n, each in zip(counts, templates, strict=True))) > _MAX_POOLS:
            raise ValueError(f"{total} bytes in all layers' blocks, at most {_MAX_POOLS}")
        own = np.unique([int(block) for span in self.traced.case.local_spans for block in span.ids])
        for count, template in zip(counts, templates, strict=True):
            step = max(1, _AT_ONCE // max(1, template.offset.size))
            for start in range(0, count if template.offset.size else 0, step):
                blocks = np.arange(start, min(start + step, count), dtype=np.int64)
                idle = np.isin(blocks, own) if self.traced.one_pool else np.zeros(blocks.size, bool)
                yield template, blocks, idle | (blocks == (-1 if local.null_block is None else local.null_block))

    def _add(self, what: str, entry: Ints, token: Ints, found: Ints, want: Ints | None) -> None:
        """Record wrong bytes, by part and by their content. Extra bytes have no `want`."""
        self.sums[what] += int(entry.size)
        if not entry.size:
            return
        kinds = self._kinds(found, want, entry)
        order = np.lexsort((kinds, entry))
        entry, kinds, token = entry[order], kinds[order], token[order]
        starts = np.flatnonzero(np.append(True, (np.diff(entry) != 0) | (np.diff(kinds) != 0)))
        counts = np.diff(np.append(starts, entry.size))
        for at, kind, size, first, last in zip(
            entry[starts].tolist(), kinds[starts].tolist(), counts.tolist(),
            np.minimum.reduceat(token, starts).tolist(), np.maximum.reduceat(token, starts).tolist(), strict=True,
        ):  # fmt: skip
            key = (what, at, self._say(kind))
            count, low, high = self.causes.get(key, (0, first, last))
            self.causes[key] = (count + size, min(low, first), max(high, last))

    def _kinds(self, found: Ints, want: Ints | None, entry: Ints) -> Ints:
        """Classify labels: content of which part, of the same token or another, zeros, junk, D's own."""
        kinds = np.where(found >= KEYS, (found - KEYS) >> 44, 0)
        if want is not None:
            row = self.memory.catalog.row_bytes[entry]
            tokens = [(np.maximum(label - KEYS, 0) & (int(KEYS) - 1)) // row for label in (found, want)]
            near = np.where(tokens[0] == tokens[1], _SAME_TOKEN, _OTHER_TOKEN)
            kinds = np.where(kinds == entry, near, kinds)
        for kind, mask in (
            (ZEROS, found == ZERO),
            (_STALE, (found < ZERO) & (found > JUNK)),
            (_OF_P, (found <= JUNK) & (found > RACED)),
            (_TWICE, found == RACED),
            (_NOWHERE, found == _NO_BLOCK),
        ):
            kinds = np.where(mask, kind, kinds)
        return cast("Ints", kinds)

    def _say(self, kind: int) -> str:
        if kind in _WORDS:
            return _WORDS[kind]
        entry = self.memory.catalog.entries[kind]
        return f"they hold {entry.layer}/{entry.part}"

    def _causes(self) -> Iterator[Cause]:
        for (what, entry, found), (count, low, high) in self.causes.items():
            known = self.memory.catalog.entries[entry] if entry >= 0 else None
            tokens = None if known is None or known.state or low < 0 else (low, high)
            layer, part = (known.layer, known.part) if known else (None, None)
            yield Cause(what, layer, part, tokens, found, count)


_NO_BLOCK = np.int64(-(1 << 61))
ZEROS, _STALE, _OF_P, _TWICE, _NOWHERE, _SAME_TOKEN, _OTHER_TOKEN = range(-7, 0)
_WORDS = {
    ZEROS: "they are zero",
    _STALE: "they hold what D held before",
    _OF_P: "they hold bytes of P that are no token of the request",
    _TWICE: "two transfers write them, each something else",
    _NOWHERE: "D has no block for them",
    _SAME_TOKEN: "they hold other items of the same token or state",
    _OTHER_TOKEN: "they hold other tokens, or a state after other tokens",
}


def _blocks(geometry: Geometry, group: int) -> int:
    return min((layer.num_blocks for layer in geometry.layers if layer.group == group), default=0)
