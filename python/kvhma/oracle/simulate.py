# SPDX-License-Identifier: Apache-2.0
"""The byte oracle: verifies a transfer by simulating every byte of it.

Every byte of a simulated global cache gets a separate label. The memory of every P rank is filled with these labels,
and the memory of D with *stale* labels. Then a transfer is applied, and every byte of D is checked. Nothing here plans:
the oracle only knows where a byte is and what a transfer of N tokens means (docs/geometry.md). So it works for every
pair of geometries.

    >>> oracle = Oracle(decode, [prefill])                                        # doctest: +SKIP
    >>> report = oracle.check(num_tokens, local_spans, remote_spans, transfer)    # doctest: +SKIP

The simulation needs 8 bytes per byte of cache. For caches of real size, real bytes and real processes use
:mod:`kvhma.oracle.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Transfer
from kvhma.errors import OracleError
from kvhma.geometry import Geometry, Span
from kvhma.oracle.apply import apply_read, apply_zero, reads_by_source, refuse_overlap
from kvhma.oracle.labels import (
    Blocks,
    Catalog,
    Ints,
    RemoteSpans,
    Side,
    Template,
    blocks_of,
    by_source,
    check_spans,
    first_needed,
    parts_of,
    reach,
    together,
    used_blocks,
)
from kvhma.oracle.memory import Difference, MemoryReport, owner_of
from kvhma.oracle.settled import settled

__all__ = ["Oracle", "Report"]

_TOO_LARGE = 1 << 28
_MOST_DIFFERENCES = 8
_BEFORE, _AFTER = 1, 2
"""Why a byte may be P's or zero: it is before the first needed token, or after the last token."""


@dataclass(frozen=True, slots=True)
class Report(MemoryReport):
    """The effect of a correct transfer on D's simulated memory.

    Attributes:
        mergeable: neighbouring descriptors of one source that could have been joined. With 0, no shorter list of
            descriptors moves the same bytes from the same places.
    """

    mergeable: int


@dataclass(slots=True)
class _Labels:
    """The numbering of labels for one request: 0 is zero, then content, then D's stale bytes, then P's junk."""

    first_token: int
    base: Ints
    stale: int
    junk: list[int]


class Oracle:
    """Label maps of one D rank and its sources, made once for any number of requests.

    Args:
        local: the D rank.
        remotes: the P ranks that transfers read from, in the order of the plan.

    Raises:
        ValueError: the ranks do not share one global cache, or regions of a rank overlap.
    """

    def __init__(self, local: Geometry, remotes: Sequence[Geometry]) -> None:
        """Make the label maps."""
        local, *remotes = settled((local, *remotes))
        self._catalog = Catalog((local, *remotes))
        self._local = Side(local, self._catalog)
        self._remotes = [Side(remote, self._catalog) for remote in remotes]
        rows = self._catalog.row_bytes.size
        self._is_state = np.array([entry.state for entry in self._catalog.entries], bool)
        # Kernel blocks of P bound how far after the token count a whole last block may extend.
        self._remote_kernel = np.ones(rows, np.int64)
        for side in self._remotes:
            for layer, part in parts_of(side.geometry):
                entry = self._catalog.index[layer.name, part.name]
                # This only bounds how far a block may be moved as a whole; sources may differ.
                kernel = together(side.geometry.groups[layer.group])
                self._remote_kernel[entry] = max(self._remote_kernel[entry], kernel)

    def check(
        self,
        num_tokens: int,
        local_spans: Sequence[Span],
        remote_spans: RemoteSpans,
        transfer: Transfer,
    ) -> Report:
        """Simulate `transfer`, and return its effect or raise with the first wrong bytes.

        Args:
            num_tokens: tokens of the request that P computed.
            local_spans: D's blocks, by D's groups.
            remote_spans: P's blocks, by P's groups, for every source; or a list of spans for each source.
            transfer: the transfer under test, or an object with the same attributes.

        Returns:
            How many bytes were moved, zeroed and left untouched.

        Raises:
            OracleError: a byte is wrong, a range leaves its region, ranges overlap, or a count is wrong.
            ValueError: the request does not fit the geometries.
        """
        check_spans(self._local.geometry, local_spans)
        sources = by_source(remote_spans, len(self._remotes))
        for side, spans in zip(self._remotes, sources, strict=True):
            check_spans(side.geometry, spans)
        labels = self._number(local_spans, sources)
        stale = np.arange(labels.stale, labels.stale + self._local.size, dtype=np.int64)
        memory = stale.copy()
        held, mergeable = self._apply(transfer, sources, labels, memory)
        expected, optional = self._expected(num_tokens, local_spans, labels, held, stale)
        # In the first and the last block P's byte and zero can both be valid, because they are never read. Only the
        # bytes after the last token are counted.
        at = np.flatnonzero(optional)
        came = memory[at] == expected[at]
        expected[at[~came]] = 0
        self._compare(expected, memory, local_spans, labels)
        moved = int(np.count_nonzero((expected > 0) & (expected < labels.stale)))
        zeroed = int(np.count_nonzero(expected == 0))
        excess = int(np.count_nonzero(came & (optional[at] == _AFTER)))
        if excess != transfer.excess_bytes:
            raise OracleError(f"excess_bytes is {transfer.excess_bytes}, {excess} were moved", code="counts")
        return Report(moved, excess, zeroed, self._local.size - moved - zeroed, mergeable)

    def _apply(
        self, transfer: Transfer, sources: Sequence[Sequence[Span]], labels: _Labels, memory: Ints
    ) -> tuple[NDArray[np.bool_], int]:
        """Apply `transfer` to D's `memory`.

        Returns:
            Which labels any source holds, bool ``(labels.stale,)``, and how many descriptors could have been joined
            with their neighbour.
        """
        held = np.zeros(labels.stale, bool)
        apply_zero(self._local, transfer.zero, memory)
        reads = reads_by_source(transfer, len(self._remotes))
        written = []
        mergeable = 0
        for index, side in enumerate(self._remotes):
            source = self._source_memory(side, sources[index], labels, index, held)
            for read in reads[index]:
                local, joined = apply_read(self._local, side, read, source, memory)
                written.append(local)
                mergeable += joined
        refuse_overlap(self._local, written)
        return held, mergeable

    def _compare(self, expected: Ints, memory: Ints, local_spans: Sequence[Span], labels: _Labels) -> None:
        wrong = np.flatnonzero(memory != expected)
        if not wrong.size:
            return
        differences = [
            self._difference(flat, local_spans, int(expected[flat]), int(memory[flat]), labels)
            for flat in wrong[:_MOST_DIFFERENCES].tolist()
        ]
        raise OracleError("\n".join(["wrong bytes:", *map(str, differences)]), code="wrong-bytes")

    def _number(self, local_spans: Sequence[Span], sources: Sequence[Sequence[Span]]) -> _Labels:
        """Assign a range of labels to every item that a block of either side holds."""
        low, high = 0, 1
        starts = []
        sides = [self._local, *self._remotes]
        for side, spans in zip(sides, [local_spans, *sources], strict=True):
            for group, span in zip(side.geometry.groups, spans, strict=True):
                token = blocks_of(group, span).token
                if token.size and group.kind != "ssm":
                    starts += [int(token[0]), int(token[-1]) + reach(group)]
        if starts:
            low, high = min(starts), max(starts)
        rows = self._catalog.row_bytes
        sizes = np.where(self._is_state, rows, rows * (high - low))
        if int(sizes.sum()) > _TOO_LARGE:
            raise ValueError("too large to simulate with labels; use check_memory")
        base = np.concatenate(([0], np.cumsum(sizes))) + 1
        stale = int(base[-1])
        junk = [stale + self._local.size]
        for side in self._remotes:
            junk.append(junk[-1] + side.size)
        return _Labels(first_token=low, base=base, stale=stale, junk=junk)

    def _labelled(self, template: Template, blocks: Blocks, labels: _Labels) -> tuple[Ints, Ints]:
        """Return flat offsets and labels, ``(n, m)``, of all bytes of some blocks of a group."""
        row = np.where(self._is_state, 0, self._catalog.row_bytes)[template.entry]
        first = labels.base[template.entry] + template.byte + (template.token - labels.first_token) * row
        flat = blocks.ids[:, None] * template.stride
        flat += template.offset
        content = blocks.token[:, None] * row
        content += first
        return flat, content

    def _source_memory(
        self, side: Side, spans: Sequence[Span], labels: _Labels, index: int, held: NDArray[np.bool_]
    ) -> Ints:
        memory = np.arange(labels.junk[index], labels.junk[index + 1], dtype=np.int64)
        for group, template, span in zip(side.geometry.groups, side.templates, spans, strict=True):
            flat, content = self._labelled(template, blocks_of(group, span), labels)
            memory[flat] = content
            held[content] = True
        return memory

    def _expected(
        self,
        num_tokens: int,
        spans: Sequence[Span],
        labels: _Labels,
        held: NDArray[np.bool_],
        stale: Ints,
    ) -> tuple[Ints, NDArray[np.int8]]:
        """Return the required content of D's memory, and where and why zero would be valid as well."""
        expected = stale.copy()
        optional = np.zeros(stale.size, np.int8)
        side = self._local
        for group, template, span in zip(side.geometry.groups, side.templates, spans, strict=True):
            blocks, low = used_blocks(group, span, num_tokens), first_needed(group, num_tokens)
            flat, content = self._labelled(template, blocks, labels)
            moved = held[content]
            if group.kind not in ("ssm", "opaque"):
                kernel = together(group)
                # How far a whole last block may extend: the nearer end of the two sides' last kernel blocks.
                end = np.minimum(_ceil(num_tokens, kernel), _ceil(num_tokens, self._remote_kernel[template.entry]))
                start = -blocks.token[:, None]
                moved &= (template.token - end < start) & (low < num_tokens)
                before = moved & (template.token + template.tokens <= low + start)
                after = moved & (template.token >= num_tokens + start)
                optional[flat[before]] = _BEFORE
                optional[flat[after]] = _AFTER
            content[~moved] = 0
            expected[flat] = content
        return expected, optional

    def _difference(self, flat: int, spans: Sequence[Span], expected: int, found: int, labels: _Labels) -> Difference:
        region, offset = self._local.name(flat)
        owner = owner_of(self._local.geometry, spans, region, offset)
        return Difference(region, offset, *owner, self._read_label(expected, labels), self._read_label(found, labels))

    def _read_label(self, label: int, labels: _Labels) -> str:
        """Describe a label in words."""
        if label == 0:
            return "zero"
        if label < labels.stale:
            entry = int(np.searchsorted(labels.base, label, side="right")) - 1
            known = self._catalog.entries[entry]
            row, byte = divmod(label - int(labels.base[entry]), known.row_bytes)
            place = "state" if known.state else f"token {row + labels.first_token}"
            return f"{known.layer}/{known.part} {place} {known.where(byte)}"
        if label < labels.junk[0]:
            region, offset = self._local.name(label - labels.stale)
            return f"stale byte of region {region} at {offset}"
        source = int(np.searchsorted(labels.junk, label, side="right")) - 1
        region, offset = self._remotes[source].name(label - labels.junk[source])
        return f"junk of source {source}, region {region} at {offset}"


def _ceil(value: int, unit: int | Ints) -> Ints:
    """Round `value` up to a multiple of `unit`."""
    return np.asarray(-(-value // np.asarray(unit, np.int64)) * unit, np.int64)
