# SPDX-License-Identifier: Apache-2.0
"""What a request moves, found byte by byte from what each byte is: no plan, no pieces, no intersection.

Every byte of D's blocks is looked up by what it holds among the bytes of P's blocks:

    D   address 4136   layer 0, kv, token 4, byte 0  ----.
    P   address 8216   layer 0, kv, token 4, byte 0  <---'   and neighbours on both sides are one run

The rules of docs/geometry.md ("What a transfer of N tokens means") say which of them must come, which are zero, and
which may be either, because nobody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Group, Span
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
    used_blocks,
)
from kvhma.oracle.settled import settled

__all__ = ["Copy", "Moves", "byte_moves", "keyed", "read_masks", "source_kernels"]


class Copy(NamedTuple):
    """Bytes that lie in one piece on both sides.

    Attributes:
        source: index of the P rank.
        remote: address there.
        local: address at D.
        length: bytes.
    """

    source: int
    remote: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class Moves:
    """What becomes of D's memory, each list sorted by region and address of D, and merged as far as it goes.

    Attributes:
        copies: what D has to hold of P; of several ranks that have a byte, the first.
        zero: what has to be zero: address and length.
        either: what may be zero or P's: before the first token that is read, and up to the end of the nearer last
            kernel block after the last one.
        fewest: with how few descriptors all of `copies` can be read, from whichever ranks, `either` filling gaps.
    """

    copies: tuple[Copy, ...]
    zero: tuple[tuple[int, int], ...]
    either: tuple[Copy, ...]
    fewest: int


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that P holds, sorted by key, then by source: int64 ``(n,)`` each."""

    key: Ints
    source: Ints
    region: Ints
    flat: Ints

    def first(self, key: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return where bytes are first, and whether they are anywhere."""
        if not self.key.size:
            return np.zeros(key.shape, np.int64), np.zeros(key.shape, bool)
        at = np.minimum(np.searchsorted(self.key, key), self.key.size - 1)
        return at, self.key[at] == key


class _Bytes(NamedTuple):
    """Bytes of D that come from P: flat offset, key, and index of the first of them in `_Held`; int64 ``(n,)``."""

    flat: Ints
    key: Ints
    at: Ints


def byte_moves(
    local: Geometry,
    remotes: Sequence[Geometry],
    num_tokens: int,
    local_spans: Sequence[Span],
    remote_spans: RemoteSpans,
) -> Moves:
    """Return what a request moves.

    Args:
        local: the D rank.
        remotes: the P ranks.
        num_tokens: tokens of the request that P computed.
        local_spans: D's blocks, by D's groups.
        remote_spans: P's blocks, by P's groups, for every source; or a list of such for each source.

    Raises:
        ValueError: the ranks are not cuts of one global cache, or no rank holds a byte that is needed.
    """
    local, *remotes = settled((local, *remotes))
    catalog = Catalog((local, *remotes))
    side, sources = Side(local, catalog), [Side(remote, catalog) for remote in remotes]
    held = _held(sources, by_source(remote_spans, len(remotes)), catalog)
    kernels = source_kernels(remotes, catalog)
    check_spans(local, local_spans)
    must: list[_Bytes] = []
    may: list[_Bytes] = []
    zero = []
    for group, template, span in zip(local.groups, side.templates, local_spans, strict=True):
        blocks = used_blocks(group, span, num_tokens)
        flat, key = keyed(template, blocks, catalog)
        at, found = held.first(key)
        needed, allowed = read_masks(group, template, blocks, num_tokens, kernels[template.entry])
        if np.any(needed & ~found & (kernels[template.entry] > 0)):
            raise ValueError("no source holds a byte that is needed")
        for rows, mask in ((must, found & needed), (may, found & allowed)):
            rows.append(_Bytes(flat[mask], key[mask], at[mask]))
        zero.append(flat[~(found & (needed | allowed))])
    copies, either = _joined(must), _joined(may)
    return Moves(
        _copies(side, sources, held, copies),
        _ranges(side, np.concatenate(zero)),
        _copies(side, sources, held, either),
        _fewest(side, held, copies, either),
    )


def read_masks(
    group: Group, template: Template, blocks: Blocks, num_tokens: int, kernels: Ints
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which bytes of some blocks are read by the next step, and which may come along.

    tokens   .. low - 1 | low .. num_tokens - 1 | num_tokens .. end - 1 | end ..
    bytes     allowed   |        needed         |        allowed        |  zero

    Args:
        group: the group of D.
        template: the content bytes of its blocks.
        blocks: some of its blocks.
        num_tokens: tokens of the request.
        kernels: P's tokens of a kernel block for each part, see :func:`source_kernels`.
    """
    token = blocks.token[:, None] + template.token
    if group.kind in ("ssm", "opaque"):
        return np.ones(token.shape, bool), np.zeros(token.shape, bool)
    low = first_needed(group, num_tokens)
    if low >= num_tokens:
        return np.zeros(token.shape, bool), np.zeros(token.shape, bool)
    needed = (token + template.tokens > low) & (token < num_tokens)
    end = np.minimum(_ceil(num_tokens, group.kernel_block_size), _ceil(num_tokens, kernels))
    return needed, ~needed & (token < end)


def source_kernels(remotes: Sequence[Geometry], catalog: Catalog) -> Ints:
    """Return P's tokens of a kernel block for each part, 0 where P does not have it.

    Args:
        remotes: the P ranks.
        catalog: numbers of parts.
    """
    found = np.zeros(len(catalog.entries), np.int64)
    for remote in remotes:
        for layer, part in parts_of(remote):
            entry = catalog.index[layer.name, part.name]
            found[entry] = max(found[entry], remote.groups[layer.group].kernel_block_size)
    return found


def keyed(template: Template, blocks: Blocks, catalog: Catalog) -> tuple[Ints, Ints]:
    """Return flat offsets and keys ``(blocks, bytes of a block)``; a key is part, token and byte in one number.

    Args:
        template: the content bytes of a block.
        blocks: some blocks.
        catalog: numbers of parts.
    """
    flat = blocks.ids[:, None] * template.stride + template.offset
    token = blocks.token[:, None] + template.token
    row = catalog.row_bytes[template.entry]
    return flat, (template.entry << 44) + token * row + template.byte


def _held(sources: Sequence[Side], spans: Sequence[Sequence[Span]], catalog: Catalog) -> _Held:
    found: list[tuple[Ints, ...]] = []
    for index, side in enumerate(sources):
        check_spans(side.geometry, spans[index])
        for group, template, span in zip(side.geometry.groups, side.templates, spans[index], strict=True):
            flat, key = (array.ravel() for array in keyed(template, blocks_of(group, span), catalog))
            region = np.searchsorted(side.starts[1:], flat, side="right")
            found.append((key, np.full(key.size, index, np.int64), region, flat))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Held(*(column[order] for column in columns))


def _joined(found: Sequence[_Bytes]) -> _Bytes:
    """Return the bytes of all groups, sorted by where they are."""
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Bytes(*(column[order] for column in columns))


def _copies(side: Side, sources: Sequence[Side], held: _Held, found: _Bytes) -> tuple[Copy, ...]:
    """Join bytes that are neighbours on both sides and in one region of each."""
    source, region, start = held.source[found.at], held.region[found.at], held.flat[found.at]
    goes_on = (np.diff(found.flat) == 1) & (np.diff(start) == 1) & (np.diff(source) == 0) & (np.diff(region) == 0)
    goes_on &= np.diff(np.searchsorted(side.starts[1:], found.flat, side="right")) == 0
    return tuple(
        Copy(int(source[a]), _address(sources[source[a]], int(start[a])), _address(side, int(found.flat[a])), b - a)
        for a, b in _pieces(goes_on, start.size)
    )


def _fewest(side: Side, held: _Held, must: _Bytes, may: _Bytes) -> int:
    """Count runs that go on as long as any rank that a run could be read from goes on: none can be fewer."""
    needed = set(must.flat.tolist())
    found = _joined((must, may))
    region = np.searchsorted(side.starts[1:], found.flat, side="right")
    ends = np.searchsorted(held.key, found.key, side="right")
    count, before, going = 0, (-1, -1), set[tuple[int, int, int]]()
    for where, at, end in zip(zip(region.tolist(), found.flat.tolist(), strict=True), found.at, ends, strict=True):
        columns = (held.source[at:end].tolist(), held.region[at:end].tolist(), held.flat[at:end].tolist())
        places = set(zip(*columns, strict=True))
        goes_on = where == (before[0], before[1] + 1)
        going = {(s, r, flat + 1) for s, r, flat in going} & places if goes_on else set()
        before = where
        if not going and where[1] in needed:
            count, going = count + 1, places
    return count


def _ranges(side: Side, flat: Ints) -> tuple[tuple[int, int], ...]:
    flat = np.sort(flat)
    goes_on = (np.diff(flat) == 1) & (np.diff(np.searchsorted(side.starts[1:], flat, side="right")) == 0)
    return tuple((_address(side, int(flat[a])), b - a) for a, b in _pieces(goes_on, flat.size))


def _pieces(goes_on: NDArray[np.bool_], size: int) -> list[tuple[int, int]]:
    """Return first and end of each piece of a list, which goes on from an entry to the next where it says so."""
    cuts = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), size]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _address(side: Side, flat: int) -> int:
    region, offset = side.name(flat)
    return side.geometry.regions[region].base + offset


def _ceil(value: int, unit: int | Ints) -> Ints:
    """Round `value` up to a multiple of `unit`; 0 where that is 0."""
    unit = np.asarray(unit, np.int64)
    return np.asarray(-(-value // np.maximum(unit, 1)) * unit, np.int64)
