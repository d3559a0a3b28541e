# SPDX-License-Identifier: Apache-2.0
"""Derives the copies of a request byte by byte from the content of each byte, without a plan.

Every byte of D's blocks is looked up by its content among the bytes of P's blocks:

    D   address 4136   layer 0, kv, token 4, byte 0  ----.
    P   address 8216   layer 0, kv, token 4, byte 0  <---'   and neighbours on both sides are one run

The rules of docs/geometry.md ("What a transfer of N tokens means") say which bytes must be copied and which must be
zero. The remaining bytes may be either, because they are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
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
    """Bytes that are contiguous on both sides.

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
    """The required changes of D's memory: lists sorted by region and address of D, and merged as far as possible.

    Attributes:
        copies: the bytes that D needs from P; if several ranks have a byte, from the first of them.
        zero: ranges that must be zero: address and length.
        either: ranges that may be zero or P's: before the first token that is read, and after the last token up to the
            end of the nearer last kernel block.
        fewest: the minimum number of descriptors for all of `copies`, from any ranks, with `either` filling gaps.
    """

    copies: tuple[Copy, ...]
    zero: tuple[tuple[int, int], ...]
    either: tuple[Copy, ...]
    fewest: int


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of P, sorted by key, then by source: int64 ``(n,)`` each."""

    key: Ints
    source: Ints
    region: Ints
    flat: Ints

    def first(self, key: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the first index of each key, and whether the key exists."""
        if not self.key.size:
            return np.zeros(key.shape, np.int64), np.zeros(key.shape, bool)
        at = np.minimum(np.searchsorted(self.key, key), self.key.size - 1)
        return at, self.key[at] == key


class _Bytes(NamedTuple):
    """Bytes of D with a source: flat offset, key, and index of the first such byte in `_Held`; int64 ``(n,)``."""

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
    """Return the copies of a request.

    Args:
        local: the D rank.
        remotes: the P ranks.
        num_tokens: tokens of the request that P computed.
        local_spans: D's blocks, by D's groups.
        remote_spans: P's blocks, by P's groups, for every source; or a list of spans for each source.

    Raises:
        ValueError: the ranks do not share one global cache, or no rank holds a needed byte.
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
    group: Group, template: Template, blocks: Blocks, num_tokens: int, kernels: Ints, unit: int = 0
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which bytes of some blocks the next step reads, and which may be copied with them.

    tokens   .. low - 1 | low .. num_tokens - 1 | num_tokens .. end - 1 | end ..
    bytes     allowed   |        needed         |        allowed        |  zero

    Args:
        group: the group of D.
        template: the content bytes of the group's blocks.
        blocks: some of the group's blocks.
        num_tokens: tokens of the request.
        kernels: tokens of P's kernel block for each part, see :func:`source_kernels`.
        unit: tokens of D's kernel block; 0 for all of it.
    """
    token = blocks.token[:, None] + template.token
    if group.kind in ("ssm", "opaque"):
        return np.ones(token.shape, bool), np.zeros(token.shape, bool)
    low = first_needed(group, num_tokens)
    if low >= num_tokens:
        return np.zeros(token.shape, bool), np.zeros(token.shape, bool)
    needed = (token + template.tokens > low) & (token < num_tokens)
    end = np.minimum(_ceil(num_tokens, unit or group.kernel_block_size), _ceil(num_tokens, kernels))
    return needed, ~needed & (token < end)


def source_kernels(
    remotes: Sequence[Geometry], catalog: Catalog, unit: Callable[[Group], int] = attrgetter("kernel_block_size")
) -> Ints:
    """Return the tokens of P's kernel block for each part, 0 if P lacks the part.

    Args:
        remotes: the P ranks.
        catalog: numbers of parts.
        unit: returns the tokens of a group's kernel block that count.
    """
    found = np.zeros(len(catalog.entries), np.int64)
    for remote in remotes:
        for layer, part in parts_of(remote):
            entry = catalog.index[layer.name, part.name]
            found[entry] = max(found[entry], unit(remote.groups[layer.group]))
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
    """Return the bytes of all groups, sorted by flat offset."""
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Bytes(*(column[order] for column in columns))


def _copies(side: Side, sources: Sequence[Side], held: _Held, found: _Bytes) -> tuple[Copy, ...]:
    """Join bytes that are adjacent on both sides and in one region of each side."""
    source, region, start = held.source[found.at], held.region[found.at], held.flat[found.at]
    continues = (np.diff(found.flat) == 1) & (np.diff(start) == 1) & (np.diff(source) == 0) & (np.diff(region) == 0)
    continues &= np.diff(np.searchsorted(side.starts[1:], found.flat, side="right")) == 0
    return tuple(
        Copy(int(source[a]), _address(sources[source[a]], int(start[a])), _address(side, int(found.flat[a])), b - a)
        for a, b in _pieces(continues, start.size)
    )


def _fewest(side: Side, held: _Held, must: _Bytes, may: _Bytes) -> int:
    """Count runs greedily: each continues as long as one of its possible ranks does, which gives the minimum."""
    needed = set(must.flat.tolist())
    found = _joined((must, may))
    region = np.searchsorted(side.starts[1:], found.flat, side="right")
    ends = np.searchsorted(held.key, found.key, side="right")
    count, before, going = 0, (-1, -1), set[tuple[int, int, int]]()
    for where, at, end in zip(zip(region.tolist(), found.flat.tolist(), strict=True), found.at, ends, strict=True):
        columns = (held.source[at:end].tolist(), held.region[at:end].tolist(), held.flat[at:end].tolist())
        places = set(zip(*columns, strict=True))
        continues = where == (before[0], before[1] + 1)
        going = {(s, r, flat + 1) for s, r, flat in going} & places if continues else set()
        before = where
        if not going and where[1] in needed:
            count, going = count + 1, places
    return count


def _ranges(side: Side, flat: Ints) -> tuple[tuple[int, int], ...]:
    flat = np.sort(flat)
    continues = (np.diff(flat) == 1) & (np.diff(np.searchsorted(side.starts[1:], flat, side="right")) == 0)
    return tuple((_address(side, int(flat[a])), b - a) for a, b in _pieces(continues, flat.size))


def _pieces(continues: NDArray[np.bool_], size: int) -> list[tuple[int, int]]:
    """Return first and end of each piece; `continues` says for each entry but the first if it extends the piece."""
    cuts = [0, *(np.flatnonzero(~continues) + 1).tolist(), size]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _address(side: Side, flat: int) -> int:
    region, offset = side.name(flat)
    return side.geometry.regions[region].base + offset


def _ceil(value: int, unit: int | Ints) -> Ints:
    """Round `value` up to a multiple of `unit`; return 0 if `unit` is 0."""
    unit = np.asarray(unit, np.int64)
    return np.asarray(-(-value // np.maximum(unit, 1)) * unit, np.int64)
