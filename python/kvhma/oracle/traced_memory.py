# SPDX-License-Identifier: Apache-2.0
"""D's memory in labels, and what the steps of a trace make of it.

Labels are numbers: content (part, token and byte in one), zero, what D held before, and what else P holds:

    .. RACED ..      .. JUNK - flat ..        -1 - flat      0        KEYS + part, token, byte ..
    two writers      P's, no content of the   D's, before    zero     content
                     request
"""

from __future__ import annotations

from dataclasses import dataclass
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

__all__ = ["JUNK", "KEYS", "RACED", "ZERO", "Mask", "RankTrace", "TracedMemory"]

Mask: TypeAlias = "NDArray[np.bool_]"

KEYS = np.int64(1 << 44)
ZERO = np.int64(0)
JUNK = np.int64(-(1 << 44))
RACED = np.int64(-(1 << 62))
MAX_MOVED = 1 << 26
"""Bytes of a step."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What was done for one request on one rank of D.

    Attributes:
        name: of the request.
        rank: of D.
        case: the rank, P's ranks and the request.
        remote_tokens: tokens that P has computed.
        cached: D's blocks that had been filled before, by group; empty if that is not known: then D has what is before.
        steps: what was done, in order.
        refusal: why nothing came of it; empty if that was not so.
        one_pool: as of the trace.
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
        traced: what is done to them.
    """

    def __init__(self, traced: RankTrace) -> None:
        """Label both sides as they are before."""
        case = traced.case
        local, *remotes = settled((case.local, *case.remotes))
        self.traced, self.catalog = traced, Catalog((local, *remotes))
        self.side = Side(local, self.catalog)
        self.sources = [Side(remote, self.catalog) for remote in remotes]
        self.remote_spans = by_source(case.remote_spans, len(remotes))
        self.kernels = source_kernels(remotes, self.catalog)
        rows = int(self.catalog.row_bytes.max(initial=1))
        if (max(case.num_tokens, traced.remote_tokens) + 1) * rows >= int(KEYS):
            raise ValueError(f"{max(case.num_tokens, traced.remote_tokens)} tokens of {rows} bytes")
        self.before = -1 - np.arange(self.side.size, dtype=np.int64)
        self.outside = 0
        for group, template, span in zip(local.groups, self.side.templates, traced.cached, strict=False):
            if group.kind != "ssm":
                flat, label = self.labels(template, blocks_of(group, span), case.num_tokens)
                self.before[flat] = label
        self.after = self.before.copy()

    def labels(self, template: Template, blocks: Blocks, state_tokens: int) -> tuple[Ints, Ints]:
        """Return flat offsets and labels ``(blocks, bytes of a block)``; a state is that after `state_tokens`."""
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

    def run(self) -> None:
        """Do the steps. Transfers between two other steps are in no order: what two of them write differs is raced."""
        labels: dict[int, Ints] = {}
        written = np.zeros(self.side.size, bool)
        raced = np.zeros(self.side.size, bool)
        for step in self.traced.steps:
            if step.doing == "transfer":
                if step.source not in labels:
                    labels[step.source] = self.source_labels(step.source)
                to, values = self._taken(step, self.sources[step.source], labels[step.source])
                raced[to[written[to] & (self.after[to] != values)]] = True
                self.after[to] = values
                raced[to[self.after[to] != values]] = True
                written[to] = True
                continue
            self.after[raced] = RACED
            written[:] = raced[:] = False
            if step.doing == "rearrange":
                to, values = self._taken(step, self.side, self.after.copy())
                self.after[to] = values
            else:
                to, inside = _flat(self.side, step.rows[:, 0], step.rows[:, 1])
                self.outside += int(np.count_nonzero(~inside))
                self.after[to[inside]] = ZERO
        self.after[raced] = RACED

    def _taken(self, step: Step, side: Side, labels: Ints) -> tuple[Ints, Ints]:
        """Return which bytes of D a step writes, and the labels; what lies outside is counted, or read as junk."""
        start, from_inside = _flat(side, step.rows[:, 0], step.rows[:, 2])
        to, to_inside = _flat(self.side, step.rows[:, 1], step.rows[:, 2])
        self.outside += int(np.count_nonzero(~to_inside))
        values = np.where(from_inside, labels[np.where(from_inside, start, 0)], JUNK)
        return to[to_inside], values[to_inside]


def _flat(side: Side, addresses: Rows, sizes: Rows) -> tuple[Ints, Mask]:
    """Return the offset of each byte of some ranges in a rank's memory, and whether its range is in one region."""
    if int(np.minimum(sizes, MAX_MOVED + 1).sum()) > MAX_MOVED:
        raise ValueError(f"a step of more than {MAX_MOVED} bytes")
    counts = sizes.astype(np.int64)
    regions = side.geometry.regions
    if not regions:
        return np.zeros(int(counts.sum()), np.int64), np.zeros(int(counts.sum()), bool)
    order = sorted(range(len(regions)), key=lambda index: regions[index].base)
    if any(regions[a].base + regions[a].bytes > regions[b].base for a, b in pairwise(order)):
        raise ValueError("regions of two devices have the same addresses")
    bases, room = (np.array([getattr(regions[at], name) for at in order], np.uint64) for name in ("base", "bytes"))
    at = np.searchsorted(bases, addresses, side="right") - 1
    place = np.maximum(at, 0)
    offset = addresses - bases[place]
    good = (at >= 0) & (offset <= room[place]) & (sizes <= room[place] - np.minimum(offset, room[place]))
    first = side.starts[np.array(order, np.int64)[place]] + np.where(good, offset, 0).astype(np.int64)
    return bytes_of(np.where(good, first, 0), counts), np.repeat(good, counts)
