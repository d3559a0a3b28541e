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
from kvhma.geometry import Geometry, Group, Span
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
    reach,
    together,
    used_blocks,
)
from kvhma.oracle.memory import Difference, MemoryReport, owner_of
from kvhma.oracle.moves import read_masks, source_kernels
from kvhma.oracle.settled import settled

_TOO_LARGE = 1 << 28
_JUNK = 1 << 44
"""Labels: positive for content, 0 for zero, negative for D's stale bytes, and from ``-_JUNK`` on down for P's junk."""
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
        self._kernels = source_kernels(remotes, self._catalog, together)
        self._first_token = 0
        self._base = np.zeros(1, np.int64)
        """Label of the first byte of each catalog entry, and one past the last label."""

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
        self._number(local_spans, sources)
        stale = -1 - np.arange(self._local.size, dtype=np.int64)
        memory = stale.copy()
        held, mergeable = self._apply(transfer, sources, memory)
        expected, optional = self._expected(num_tokens, local_spans, held, stale)
        # In the first and the last block P's byte and zero can both be valid, because they are never read. Only the
        # bytes after the last token are counted.
        at = np.flatnonzero(optional)
        came = memory[at] == expected[at]
        expected[at[~came]] = 0
        self._compare(expected, memory, local_spans)
        moved = int(np.count_nonzero(expected > 0))
        zeroed = int(np.count_nonzero(expected == 0))
        excess = int(np.count_nonzero(came & (optional[at] == _AFTER)))
        if excess != transfer.excess_bytes:
            raise OracleError(f"excess_bytes is {transfer.excess_bytes}, {excess} were moved", code="counts")
        return Report(moved, excess, zeroed, self._local.size - moved - zeroed, mergeable)

    def _number(self, local_spans: Sequence[Span], sources: Sequence[Sequence[Span]]) -> None:
        """Assign a range of labels to every item of the tokens of all blocks.

        Raises:
            ValueError: there are too many.
        """
        starts, ends = [], [1]
        for side, spans in zip([self._local, *self._remotes], [local_spans, *sources], strict=True):
            for group, span in zip(side.geometry.groups, spans, strict=True):
                token = blocks_of(group, span).token
                if token.size and group.kind != "ssm":
                    starts.append(int(token[0]))
                    ends.append(int(token[-1]) + reach(group))
        self._first_token = min(starts, default=0)
        tokens = max(ends) - self._first_token
        sizes = [entry.row_bytes * (1 if entry.state else tokens) for entry in self._catalog.entries]
        if sum(sizes) > _TOO_LARGE:
            raise ValueError("too large to simulate with labels; use check_memory")
        self._base = np.cumsum([1, *sizes], dtype=np.int64)

    def _labelled(self, group: Group, template: Template, blocks: Blocks) -> tuple[Ints, Ints]:
        """Return flat offsets and labels, ``(n, m)``, of all bytes of some blocks of a group."""
        token = blocks.token[:, None] + template.token
        token -= 0 if group.kind == "ssm" else self._first_token
        flat = blocks.ids[:, None] * template.stride + template.offset
        return flat, self._base[template.entry] + token * self._catalog.row_bytes[template.entry] + template.byte

    def _apply(
        self, transfer: Transfer, sources: Sequence[Sequence[Span]], memory: Ints
    ) -> tuple[NDArray[np.bool_], int]:
        """Apply `transfer` to D's `memory`.

        Returns:
            Which labels any source holds, and how many descriptors could have been joined with their neighbour.
        """
        apply_zero(self._local, transfer.zero, memory)
        reads = reads_by_source(transfer, len(self._remotes))
        held, written = np.zeros(self._base[-1], bool), []
        mergeable = 0
        for index, side in enumerate(self._remotes):
            source = -(index + 1) * _JUNK - np.arange(side.size, dtype=np.int64)
            for group, template, span in zip(side.geometry.groups, side.templates, sources[index], strict=True):
                flat, content = self._labelled(group, template, blocks_of(group, span))
                source[flat] = content
                held[content] = True
            for read in reads[index]:
                local, joined = apply_read(self._local, side, read, source, memory)
                written.append(local)
                mergeable += joined
        refuse_overlap(self._local, written)
        return held, mergeable

    def _expected(
        self, num_tokens: int, spans: Sequence[Span], held: NDArray[np.bool_], stale: Ints
    ) -> tuple[Ints, NDArray[np.int8]]:
        """Return the required content of D's memory, and where and why zero would be valid as well."""
        expected = stale.copy()
        optional = np.zeros(stale.size, np.int8)
        side = self._local
        for group, template, span in zip(side.geometry.groups, side.templates, spans, strict=True):
            blocks = used_blocks(group, span, num_tokens)
            flat, content = self._labelled(group, template, blocks)
            needed, allowed = read_masks(
                group, template, blocks, num_tokens, self._kernels[template.entry], together(group)
            )
            found = held[content]
            is_after = blocks.token[:, None] + template.token >= num_tokens
            optional[flat[found & allowed & ~is_after]] = _BEFORE
            optional[flat[found & allowed & is_after]] = _AFTER
            content[~(found & (needed | allowed))] = 0
            expected[flat] = content
        return expected, optional

    def _compare(self, expected: Ints, memory: Ints, local_spans: Sequence[Span]) -> None:
        differences = []
        for flat in np.flatnonzero(memory != expected)[:_MOST_DIFFERENCES].tolist():
            region, offset = self._local.name(flat)
            owner = owner_of(self._local.geometry, local_spans, region, offset)
            labels = (self._read_label(int(side[flat])) for side in (expected, memory))
            differences.append(str(Difference(region, offset, *owner, *labels)))
        if differences:
            raise OracleError("\n".join(["wrong bytes:", *differences]), code="wrong-bytes")

    def _read_label(self, label: int) -> str:
        """Describe a label in words."""
        if label == 0:
            return "zero"
        if label > 0:
            entry = int(np.searchsorted(self._base, label, side="right")) - 1
            known = self._catalog.entries[entry]
            row, byte = divmod(label - int(self._base[entry]), known.row_bytes)
            place = "state" if known.state else f"token {row + self._first_token}"
            return f"{known.layer}/{known.part} {place} {known.where(byte)}"
        source, flat = divmod(-label, _JUNK)
        if source == 0:
            region, offset = self._local.name(flat - 1)
            return f"stale byte of region {region} at {offset}"
        region, offset = self._remotes[source - 1].name(flat)
        return f"junk of source {source - 1}, region {region} at {offset}"
