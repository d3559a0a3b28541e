# SPDX-License-Identifier: Apache-2.0
"""Which item every byte of a rank's cache holds: docs/geometry.md as arrays.

This part of the oracle knows where a byte is and which tokens are needed. It knows no runs, pieces or intersections, so
it cannot repeat a mistake of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import OracleError
from kvhma.geometry import Geometry, Group, Layer, Part, Span

Ints: TypeAlias = "NDArray[np.int64]"
"""Flat offsets, positions or labels: int64, one per byte of simulated memory."""

RemoteSpans: TypeAlias = "Sequence[Span] | Sequence[Sequence[Span]]"
"""P's spans by group, for all sources; or a list of spans for each source."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One part of one layer of the global cache, over all ranks.

    Attributes:
        layer: name of the layer.
        part: name of the part.
        state: the part belongs to an ``ssm`` group.
        axes: name and extent of every axis except ``tokens``, outermost first, see :func:`row_axes`.
        item_bytes: bytes of one item.
        row_bytes: bytes of the part for one token, or of the whole part if it has no ``tokens`` axis.
    """

    layer: str
    part: str
    state: bool
    axes: tuple[tuple[str, int], ...]
    item_bytes: int
    row_bytes: int

    def where(self, byte: int) -> str:
        """Name the coordinates of a byte of a row, e.g. ``heads=1 content=7 byte 0``."""
        item, rest = divmod(byte, self.item_bytes)
        names = []
        for name, extent in reversed(self.axes):
            item, index = divmod(item, extent)
            names.append(f"{name}={index}")
        return " ".join([*reversed(names), f"byte {rest}"])


def row_strides(part: Part) -> dict[str, int]:
    """Return, for every axis of `part` except ``tokens``, the bytes between two global indices in a row."""
    strides = {}
    step = part.item_bytes
    for name, extent in reversed(row_axes(part)):
        strides[name] = step
        step *= extent
    return strides


def row_axes(part: Part) -> tuple[tuple[str, int], ...]:
    """Return name and extent of the axes of a row, outermost first, independent of the strides of a rank.

    The largest axis is innermost. In real caches it usually is, and then a row is copied in few pieces.
    """
    found = [(axis.extent, axis.name) for axis in part.axes if axis.name != "tokens"]
    return tuple((name, extent) for extent, name in sorted(found))


def row_bytes(part: Part) -> int:
    """Return the bytes of a row over all ranks."""
    return part.item_bytes * prod(extent for _, extent in row_axes(part))


def parts_of(geometry: Geometry) -> Iterator[tuple[Layer, Part]]:
    """Yield every part of every layer's page."""
    for layer in geometry.layers:
        for part in layer.page.parts:
            yield layer, part


class Catalog:
    """Every (layer, part) of some ranks, numbered.

    Args:
        geometries: ranks of both sides.

    Raises:
        ValueError: two ranks disagree on an extent or on the bytes of an item, so no global cache exists.
    """

    def __init__(self, geometries: Iterable[Geometry]) -> None:
        """List the parts of the layers of `geometries`."""
        self.entries: list[Entry] = []
        self.index: dict[tuple[str, str], int] = {}
        for geometry in geometries:
            for layer, part in parts_of(geometry):
                self._add(geometry.groups[layer.group], layer, part)
        self.row_bytes = np.array([entry.row_bytes for entry in self.entries], np.int64)

    def _add(self, group: Group, layer: Layer, part: Part) -> None:
        entry = Entry(layer.name, part.name, group.kind == "ssm", row_axes(part), part.item_bytes, row_bytes(part))
        key = (layer.name, part.name)
        if key not in self.index:
            self.index[key] = len(self.entries)
            self.entries.append(entry)
        elif (known := self.entries[self.index[key]]) != entry:
            raise ValueError(f"no global cache: {known} on one rank, {entry} on another")


@dataclass(frozen=True, slots=True)
class Template:
    """Every content byte of one logical block, over all layers of one group; arrays int64 of shape ``(m,)``.

    Attributes:
        offset: flat offset of the byte in block 0.
        stride: bytes to the same byte of the next logical block.
        entry: index into the catalog.
        byte: byte in the entry's row.
        token: token in the logical block; for a part without ``tokens`` the first token of its kernel block.
        tokens: number of tokens that the byte stands for: 1, or a kernel block's for a part without ``tokens``.
    """

    offset: Ints
    stride: Ints
    entry: Ints
    byte: Ints
    token: Ints
    tokens: Ints


class Side:
    """One rank's memory, with all regions after each other, and where its groups' bytes are.

    Args:
        geometry: the rank.
        catalog: numbers of the rank's parts.

    Raises:
        ValueError: two regions overlap, so one address would be two bytes.
    """

    def __init__(self, geometry: Geometry, catalog: Catalog) -> None:
        """Number the bytes of one rank."""
        self.geometry = geometry
        self.starts = np.cumsum([0, *(region.bytes for region in geometry.regions)], dtype=np.int64)
        self.size = int(self.starts[-1])
        self._by_device: dict[int, tuple[NDArray[np.uint64], NDArray[np.uint64], Ints]] = {}
        for device in {region.device for region in geometry.regions}:
            order = [i for i, region in enumerate(geometry.regions) if region.device == device]
            order.sort(key=lambda i: geometry.regions[i].base)
            for a, b in pairwise(order):
                if geometry.regions[a].base + geometry.regions[a].bytes > geometry.regions[b].base:
                    raise ValueError(f"regions {a} and {b} overlap")
            self._by_device[device] = (
                np.array([geometry.regions[i].base for i in order], np.uint64),
                np.array([geometry.regions[i].bytes for i in order], np.uint64),
                np.array(order, np.int64),
            )
        self.templates = [self._template(index, catalog) for index in range(len(geometry.groups))]

    def _template(self, index: int, catalog: Catalog) -> Template:
        group = self.geometry.groups[index]
        columns: list[tuple[Ints, ...]] = []
        known: dict[tuple[Part, int], tuple[Ints, Ints, Ints]] = {}  # most layers of a group are alike
        for layer, part in parts_of(self.geometry):
            if layer.group != index:
                continue
            start = int(self.starts[layer.region]) + layer.offset
            alike = part, self.geometry.kernel_stride(layer)
            if alike not in known:
                known[alike] = _part_bytes(part, group, alike[1])
            offset, byte, token = known[alike]
            cut = any(axis.name == "tokens" for axis in part.axes)
            constants = (
                layer.block_stride,
                catalog.index[layer.name, part.name],
                1 if cut else group.kernel_block_size,
            )
            stride, entry, tokens = (np.full(offset.size, value, np.int64) for value in constants)
            columns.append((offset + start, stride, entry, byte, token, tokens))
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)] or [np.empty(0, np.int64)] * 6
        return Template(*joined)

    def locate(self, rows: NDArray[np.uint64], what: str) -> tuple[Ints, Ints]:
        """Turn descriptors into offsets in this memory.

        Args:
            rows: uint64 ``(n, 3)``: address, length, device.
            what: name of the descriptors for an error.

        Returns:
            int64 ``(n,)`` flat offsets and int64 ``(n,)`` region indices.

        Raises:
            OracleError: a row is not inside one region.
        """
        flat = np.zeros(len(rows), np.int64)
        region = np.full(len(rows), -1, np.int64)
        for device, (bases, sizes, order) in self._by_device.items():
            rank = np.searchsorted(bases, rows[:, 0], side="right") - 1
            place = np.maximum(rank, 0)
            inside = rows[:, 0] - bases[place]
            room = sizes[place]
            good = (rank >= 0) & (rows[:, 2] == np.uint64(device))
            good &= (inside < room) & (rows[:, 1] <= room - np.minimum(inside, room)) & (rows[:, 1] > 0)
            flat[good] = self.starts[order[place[good]]] + inside[good].astype(np.int64)
            region[good] = order[place[good]]
        bad = np.flatnonzero(region < 0)
        if bad.size:
            row = tuple(map(int, rows[bad[0]]))
            raise OracleError(f"{what}: row {bad[0]} {row} is not inside one region", code="outside")
        return flat, region

    def name(self, flat: int) -> tuple[int, int]:
        """Return the region index and the offset in it of a flat offset."""
        region = int(np.searchsorted(self.starts[1:], flat, side="right"))
        return region, flat - int(self.starts[region])


def _part_bytes(part: Part, group: Group, stride: int) -> tuple[Ints, Ints, Ints]:
    """Return, for every byte in a logical block, its page offset, byte of the row and token index in the block."""
    strides = row_strides(part)
    kernel_tokens = group.kernel_block_size
    offset = np.arange(group.ratio, dtype=np.int64) * stride + part.offset
    token = np.arange(group.ratio, dtype=np.int64) * kernel_tokens
    byte = np.zeros(group.ratio, np.int64)
    for axis in part.axes:
        local = np.arange(axis.shard.held, dtype=np.int64)
        offset = (offset[:, None] + local * axis.stride).ravel()
        moves = (0, 1) if axis.name == "tokens" else (strides[axis.name], 0)
        byte = (byte[:, None] + (local + axis.start) * moves[0]).ravel()
        token = (token[:, None] + local * moves[1]).ravel()
    local = np.arange(part.item_bytes, dtype=np.int64)
    return (
        (offset[:, None] + local).ravel(),
        (byte[:, None] + local).ravel(),
        tokens_from_first(group, np.repeat(token, part.item_bytes)),
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """A request's blocks of one group on one rank.

    Attributes:
        ids: int64 ``(n,)``.
        token: int64 ``(n,)``, the absolute token at which the block starts; 0 for the state of an ``ssm`` group.
    """

    ids: Ints
    token: Ints


def blocks_of(group: Group, span: Span) -> Blocks:
    """Return the blocks of `span` with content; for an ``ssm`` group the slot with the last state."""
    ids = np.asarray(span.ids, dtype=np.int64).reshape(-1)
    if group.kind == "ssm":
        last = max(0, ids.size - 1 - group.speculative)
        return Blocks(ids[last : last + 1], np.zeros(min(ids.size, 1), np.int64))
    entry = np.arange(span.first, span.first + ids.size, dtype=np.int64)
    return Blocks(ids, entry * group.cp_size * group.block_size + group.cp_rank * group.turn)


def reach(group: Group) -> int:
    """Return the number of tokens of the sequence from a block's first token to its last token."""
    return int(tokens_from_first(group, np.array([group.block_size - 1]))[0]) + 1


def together(group: Group) -> int:
    """Return how many tokens of a kernel block are consecutive in the sequence, from a multiple of that number on."""
    kernel = group.kernel_block_size
    return kernel if group.cp_size == 1 or group.turn % kernel == 0 else group.turn


def tokens_from_first(group: Group, local: Ints) -> Ints:
    """Return the distance, in tokens of the sequence, from a block's first token to its token number `local`.

    ::

        cp_size 2, turns of 2    block of rank 0   0 1 2 3      tokens of the sequence   0 1 4 5
    """
    return local // group.turn * group.turn * group.cp_size + local % group.turn


def first_needed(group: Group, num_tokens: int) -> int:
    """Return the first token whose cache the next step still reads, or `num_tokens` if it reads no token.

    A window of one token, or a chunk that just ended, needs no cached token, so nothing is read.
    """
    if group.kind == "sliding" and group.window is not None:
        return max(0, num_tokens - group.window + 1)
    if group.kind == "chunked" and group.chunk is not None:
        return num_tokens // group.chunk * group.chunk
    return 0


def used_blocks(group: Group, span: Span, num_tokens: int) -> Blocks:
    """Return the blocks of `span` that a request may change: those not wholly before what it needs."""
    blocks = blocks_of(group, span)
    used = blocks.token + reach(group) > first_needed(group, num_tokens)
    return Blocks(blocks.ids[used], blocks.token[used])


def by_source(spans: RemoteSpans, sources: int) -> list[Sequence[Span]]:
    """Return the spans of each source, from spans for all sources or a list of spans for each.

    Raises:
        ValueError: the list has another number of sources.
    """
    if all(isinstance(span, Span) for span in spans):
        return [cast("Sequence[Span]", spans)] * sources
    if len(spans) != sources:
        raise ValueError(f"spans of {len(spans)} sources for {sources}")
    return list(cast("Sequence[Sequence[Span]]", spans))


def check_spans(geometry: Geometry, spans: Sequence[Span]) -> None:
    """Refuse spans that the oracle cannot simulate.

    Raises:
        ValueError: the number of spans differs from the number of groups, or an id is outside of a layer.
    """
    if len(spans) != len(geometry.groups):
        raise ValueError(f"{len(spans)} spans for {len(geometry.groups)} groups")
    for layer in geometry.layers:
        ids = np.asarray(spans[layer.group].ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < layer.num_blocks:
            raise ValueError(f"layer {layer.name!r} has {layer.num_blocks} blocks, ids are {ids.tolist()}")


def joinable(to: Ints, start: Ints, size: Ints) -> NDArray[np.bool_]:
    """Return for each row except the last whether the next row continues it on both sides; arrays ``(n,)``, bytes."""
    ends = (to[:-1] + size[:-1] == to[1:]) & (start[:-1] + size[:-1] == start[1:])
    return cast("NDArray[np.bool_]", ends)
