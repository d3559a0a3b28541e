# SPDX-License-Identifier: Apache-2.0
"""D's memory as labels, and the effect of a trace's steps on it.

Labels are numbers: content (part, token and byte in one), zero, D's earlier bytes, and P's other bytes:

    .. RACED ..      .. JUNK - flat ..        -1 - flat      0        KEYS + part, token, byte ..
    two writers      P's, no content of the   D's, before    zero     content
                     request
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.oracle.apply import bytes_of
from kvhma.oracle.cases import Case
from kvhma.oracle.forms import Spans
from kvhma.oracle.labels import Blocks, Catalog, Ints, Side, Template, blocks_of, by_source
from kvhma.oracle.moves import keyed, source_kernels
from kvhma.oracle.settled import settled
from kvhma.oracle.traces import Rows, Step

Mask: TypeAlias = "NDArray[np.bool_]"

KEYS = np.int64(1 << 44)
ZERO = np.int64(0)
JUNK = np.int64(-(1 << 44))
RACED = np.int64(-(1 << 62))
_TOP = (1 << 64) - 1
_MAX_STEP = 1 << 25
"""Limit of bytes of a step; all regions together are not larger."""
_MAX_STEPS = 1 << 27
"""Limit of bytes of all steps of a request on a rank."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The steps for one request on one rank of D.

    Attributes:
        name: of the request.
        rank: of D.
        case: the rank, P's ranks and the request.
        remote_tokens: tokens that P has computed.
        cached: D's blocks that were filled before, by group. Empty if unknown; then D has everything before its blocks.
        steps: what was done, in order.
        refusal: why the request was refused; empty if it was not.
        one_pool: the field of the trace.
    """

    name: str
    rank: int
    case: Case
    remote_tokens: int
    cached: Spans
    steps: tuple[Step, ...]
    refusal: str = ""
    one_pool: bool = False


class TracedMemory:
    """The labels of D's bytes before and after.

    Args:
        traced: the steps that change the labels.
    """

    def __init__(self, traced: RankTrace) -> None:
        """Label both sides in their state before the steps."""
        case = traced.case
        local, *remotes = settled((case.local, *case.remotes))
        self.traced, self.catalog = traced, Catalog((local, *remotes))
        self.side = Side(local, self.catalog)
        self.sources = [Side(remote, self.catalog) for remote in remotes]
        self.remote_spans = by_source(case.remote_spans, len(remotes))
        self.kernels = source_kernels(remotes, self.catalog)
        self._refuse_large_labels()
        self.before = -1 - np.arange(self.side.size, dtype=np.int64)
        self.outside = 0
        self._sources: dict[int, tuple[_Places, Ints]] = {}
        for group, template, span in zip(local.groups, self.side.templates, traced.cached, strict=False):
            if group.kind != "ssm":
                flat, label = self.labels(template, blocks_of(group, span), case.num_tokens)
                self.before[flat] = label
        self.after = self.before.copy()

    def _refuse_large_labels(self) -> None:
        """Refuse sizes for which two labels would be equal."""
        case, rows = self.traced.case, int(self.catalog.row_bytes.max(initial=1))
        tokens = max(case.num_tokens, self.traced.remote_tokens)
        sides = [(case.local, case.local_spans), (case.local, self.traced.cached)]
        sides += zip(case.remotes, map(tuple, self.remote_spans), strict=True)
        for geometry, spans in sides:
            for group, span in zip(geometry.groups, spans, strict=False):
                if group.kind != "ssm":
                    tokens = max(tokens, (span.first + len(span.ids)) * group.block_size * group.cp_size)
        if (tokens + 1) * rows >= int(KEYS):
            raise ValueError(f"{tokens} tokens of {rows} bytes")

    def labels(self, template: Template, blocks: Blocks, state_tokens: int) -> tuple[Ints, Ints]:
        """Return flat offsets and labels ``(blocks, bytes of a block)``; a state is the one after `state_tokens`."""
        flat, key = keyed(template, blocks, self.catalog)
        is_state = np.array([entry.state for entry in self.catalog.entries], bool)[template.entry]
        row = self.catalog.row_bytes[template.entry]
        return flat, key + KEYS + np.where(is_state, state_tokens * row, 0)

    def source_labels(self, index: int) -> Ints:
        """Return the labels of a P rank's bytes: content up to the last token that it computed, else junk."""
        side, tokens = self.sources[index], self.traced.remote_tokens
        found = cast("Ints", JUNK * (index + 1) - np.arange(side.size, dtype=np.int64))
        for group, template, span in zip(side.geometry.groups, side.templates, self.remote_spans[index], strict=True):
            blocks = blocks_of(group, span)
            flat, label = self.labels(template, blocks, tokens)
            computed = (blocks.token[:, None] + template.token < tokens) | (group.kind in ("ssm", "opaque"))
            found[flat[computed]] = label[computed]
        return found

    @cached_property
    def held(self) -> Ints:
        """Labels of all content that P's ranks hold, sorted."""
        found = [self._source(index)[1] for index in range(len(self.sources))]
        return cast("Ints", np.unique(np.concatenate([labels[labels >= KEYS] for labels in found])))

    def _source(self, index: int) -> tuple[_Places, Ints]:
        if index not in self._sources:
            self._sources[index] = _Places(self.sources[index]), self.source_labels(index)
        return self._sources[index]

    def run(self) -> None:
        """Apply the steps. Transfers between two other steps are unordered, so bytes that two of them write race."""
        if (total := sum(map(_size_of, self.traced.steps))) > _MAX_STEPS:
            raise ValueError(f"steps of {total} bytes, at most {_MAX_STEPS}")
        places = _Places(self.side)
        written, raced = np.zeros(self.side.size, bool), np.zeros(self.side.size, bool)
        unordered: list[Ints] = []
        for step in self.traced.steps:
            if step.doing == "transfer":
                to, values = self._taken(step, places, *self._source(step.source))
                raced[to[written[to] & (self.after[to] != values)]] = True
                self.after[to] = values
                raced[to[self.after[to] != values]] = True
                written[to] = True
                unordered.append(to)
                continue
            self._mark(unordered, written, raced)
            if step.doing == "rearrange":
                to, values = self._taken(step, places, places, self.after)
                self.after[to] = values
                self.after[to[self.after[to] != values]] = RACED
            else:
                to, inside = places.flat(step.rows[:, 0], step.rows[:, 1])
                self.outside += int(np.count_nonzero(~inside))
                self.after[to[inside]] = ZERO
        self._mark(unordered, written, raced)

    def _mark(self, unordered: list[Ints], written: Mask, raced: Mask) -> None:
        """Mark the bytes for which transfers raced; later steps are ordered after them."""
        for to in unordered:
            self.after[to[raced[to]]] = RACED
            written[to] = False
        for to in unordered:
            raced[to] = False
        unordered.clear()

    def _taken(self, step: Step, to_places: _Places, from_places: _Places, labels: Ints) -> tuple[Ints, Ints]:
        """Return which bytes of D a step writes, and the labels; bytes outside are counted, or read as junk."""
        start, from_inside = from_places.flat(step.rows[:, 0], step.rows[:, 2])
        to, to_inside = to_places.flat(step.rows[:, 1], step.rows[:, 2])
        self.outside += int(np.count_nonzero(~to_inside))
        values = np.full(start.size, JUNK, np.int64)
        values[from_inside] = labels[start[from_inside]]
        return to[to_inside], values[to_inside]


class _Places:
    """Maps the addresses of a rank to its labels, region by region of the geometry.

    ::

        addresses   .. base of 1 ....   base of 0 ......      flat   0 ....      start of 1 ......
                       region 1         region 0                     region 0    region 1

    Args:
        side: the rank.

    Raises:
        ValueError: one address is in two regions.
    """

    def __init__(self, side: Side) -> None:
        """Sort the regions by address."""
        regions = side.geometry.regions
        order = sorted(range(len(regions)), key=lambda index: regions[index].base)
        if any(regions[a].base + regions[a].bytes > regions[b].base for a, b in pairwise(order)):
            raise ValueError("regions of two devices have the same addresses")
        self._bases, self._room = (
            np.array([getattr(regions[at], name) for at in order], np.uint64) for name in ("base", "bytes")
        )
        self._starts = side.starts[np.array(order, np.int64)]
        ends = (region.base + region.bytes for region in regions)
        cuts = {*(region.base for region in regions), *(end for end in ends if end <= _TOP)}
        self._cuts = np.array(sorted(cuts), np.uint64)

    def flat(self, addresses: Rows, sizes: Rows) -> tuple[Ints, Mask]:
        """Return the position of each byte of some ranges, and whether it is in a region."""
        addresses, sizes = self._pieces(addresses, sizes)
        first, inside = self._first(addresses, sizes)
        counts = sizes.astype(np.int64)
        return bytes_of(np.where(inside, first, 0), counts), np.repeat(inside, counts)

    def _pieces(self, addresses: Rows, sizes: Rows) -> tuple[Rows, Rows]:
        """Cut ranges at the ends of regions, because adjacent regions may be anywhere among the labels.

        ::

            range        [--------------)       pieces   [-----)[-------)
            regions   [-- 1 ----)[-- 0 -----)
        """
        last = addresses + np.minimum(np.maximum(sizes, 1) - 1, np.uint64(_TOP) - addresses)
        low, high = (np.searchsorted(self._cuts, ends, side="right") for ends in (addresses, last))
        if np.array_equal(low, high):
            return addresses, sizes
        counts = high - low + 1
        row = np.repeat(np.arange(len(counts)), counts)
        number = bytes_of(np.zeros(len(counts), np.int64), counts)
        begin = np.where(number == 0, addresses[row], self._cuts[low[row] + number - 1])
        end = np.append(begin[1:], np.uint64(0))
        end[np.cumsum(counts) - 1] = addresses + sizes
        return begin, end - begin

    def _first(self, addresses: Rows, sizes: Rows) -> tuple[Ints, Mask]:
        """Return the position of the first byte of each range, and whether the whole range is in one region."""
        if not self._bases.size:
            return np.zeros(len(addresses), np.int64), np.zeros(len(addresses), bool)
        at = np.searchsorted(self._bases, addresses, side="right") - 1
        place = np.maximum(at, 0)
        offset, room = addresses - self._bases[place], self._room[place]
        good = (at >= 0) & (offset <= room) & (sizes <= room - np.minimum(offset, room))
        return self._starts[place] + np.where(good, offset, 0).astype(np.int64), good


def _size_of(step: Step) -> int:
    size = int(np.minimum(step.rows[:, -1], _MAX_STEP + 1).sum())
    if size > _MAX_STEP:
        raise ValueError(f"a step of more than {_MAX_STEP} bytes")
    return size
