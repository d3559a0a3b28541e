# SPDX-License-Identifier: Apache-2.0
"""The upper part of the picture: one block's bytes, as each group uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.format import ranges
from kvhma.cli.pieces import contiguous_pieces
from kvhma.cli.svg import COLORS, COLUMN, Drawing
from kvhma.geometry import Geometry, Layer, Part

LEFT, RIGHT = 128, COLUMN - 12
"""Left and right end of drawings; names are left of them."""
SPAN = RIGHT - LEFT
_MAX_PIECES = 48
"""Limit of boxes in a block; beyond it, boxes are joined."""

Addresses: TypeAlias = NDArray[np.uint64]
Piece: TypeAlias = tuple[int, int, int, str]
"""Index of the part, offset in the block, length, and a description."""


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank, and what the request uses of it.

    Attributes:
        name: ``"P"`` or ``"D"`` with its rank.
        geometry: the rank.
        tables: block tables by group.
        used: per group, ids of the blocks that are read or written.
        runs: address and length of the read, shape ``(n, 2)``, sorted by address.
    """

    name: str
    geometry: Geometry
    tables: Sequence[Sequence[int]]
    used: list[set[int]]
    runs: Addresses


def by_address(runs: Addresses) -> Addresses:
    """Return address and length of runs, sorted by address."""
    return runs[np.argsort(runs[:, 0], kind="stable")]


def color(group: int) -> str:
    """Return the CSS class of a group's color."""
    return f"c{group % COLORS}"


def longest_block(*ranks: DrawnRank) -> int:
    """Return the bytes of the longest block, which sets the scale of both sides."""
    return max(layer.block_stride for rank in ranks for layer in rank.geometry.layers)


@dataclass(frozen=True, slots=True)
class _Row:
    """A block as some groups with equal blocks use it: the groups, a layer, its first block, and the runs in it."""

    groups: list[int]
    layer: Layer
    block: tuple[int, int] | None
    bars: list[tuple[int, int]]


def draw_pages(page: Drawing, y: float, rank: DrawnRank, longest: int) -> float:
    """Draw one block of the first tensor as each group sees it; the page is `longest` bytes wide."""
    geometry, scale = rank.geometry, SPAN / longest
    page.text(12, y, f"{rank.name}: one block of a tensor, as each group uses it", "head")
    y += 12
    for row in _rows(rank, scale):
        _draw_row(page, y, geometry, row, scale)
        y += 36
    page.text(LEFT, y + 4, "0", "small soft")
    page.text(RIGHT, y + 4, f"{longest:,} bytes", "small soft end")
    return y + 8


def _draw_row(page: Drawing, y: float, geometry: Geometry, row: _Row, scale: float) -> None:
    layer, group = row.layer, geometry.groups[row.groups[0]]
    parts = layer.page.parts
    page.text(12, y + 16, _group_name(row.groups, group.kind))
    page.rect(LEFT, y, layer.block_stride * scale, 22, "pad", _padding(layer, group.ratio))
    page.rect(LEFT, y, layer.page.nbytes * group.ratio * scale, 22, "paper")
    for shade, (part, offset, length, what) in enumerate(_pieces(geometry, layer)):
        tone = f"t{part % 4}" if len(parts) > 1 else f"t{shade % 2}"
        hover = f"{layer.name}\n{what}\nblock bytes {offset:,} to {offset + length:,}"
        page.rect(LEFT + offset * scale, y, length * scale, 22, f"{color(row.groups[0])} {tone}", hover)
        name = parts[part].name
        if name and length * scale > 8 * len(name) + 4:
            page.text(LEFT + (offset + length / 2) * scale, y + 15, name, "small mid")
    address, block = row.block or (0, 0)  # without a block there are no bars
    for first, last in row.bars:
        hover = f"read of block {block}: {address + first:#x} to {address + last:#x}, {last - first:,} bytes"
        page.rect(LEFT + first * scale, y + 24, (last - first) * scale, 4, "read", hover)


def _group_name(groups: list[int], kind: str) -> str:
    return f"group{'s' if len(groups) > 1 else ''} {ranges(groups)} {kind}"


def _rows(rank: DrawnRank, scale: float) -> list[_Row]:
    """Return the groups; groups with equal blocks are one entry."""
    found: dict[tuple[object, ...], _Row] = {}
    for index, group in enumerate(rank.geometry.groups):
        layer = next((layer for layer in rank.geometry.layers if layer.group == index), None)
        if layer is None:
            continue
        block = _first_block(rank, layer, index)
        bars = _covered(rank.runs, block[0], layer.block_stride, scale) if block else []
        key = (group.kind, group.ratio, layer.block_stride, layer.kernel_stride, layer.page, tuple(bars))
        found.setdefault(key, _Row([], layer, block, bars)).groups.append(index)
    return list(found.values())


def _padding(layer: Layer, ratio: int) -> str:
    used = layer.page.nbytes * ratio
    return (
        f"{layer.block_stride - used:,} bytes of {layer.block_stride:,} are padding"
        if used < layer.block_stride
        else ""
    )


def _first_block(rank: DrawnRank, layer: Layer, group: int) -> tuple[int, int] | None:
    """Return address and id of the first used block of a layer."""
    block = next((block for block in rank.tables[group] if block in rank.used[group]), None)
    if block is None:
        return None
    return rank.geometry.regions[layer.region].base + layer.offset + block * layer.block_stride, block


def _pieces(geometry: Geometry, layer: Layer) -> Iterator[Piece]:
    """Return the boxes of a block: every contiguous piece, or joined kernel blocks if there are too many pieces."""
    ratio, step = geometry.groups[layer.group].ratio, geometry.kernel_stride(layer)
    parts = layer.page.parts
    pieces = [
        (index, offset, length, _axes(part))
        for index, part in enumerate(parts)
        for offset, length in contiguous_pieces(part, limit=_MAX_PIECES)
    ]
    inside = all(offset + length <= layer.block_stride for _, offset, length, _ in pieces)
    if inside and len(pieces) * ratio <= _MAX_PIECES:
        return _pieces_by_kernel_block(pieces, ratio, step)
    if len(parts) == 1 and step == layer.page.nbytes:
        return _joined_kernel_blocks(parts[0], ratio)
    return _joined_parts(parts, ratio)  # other blocks are in between


def _pieces_by_kernel_block(pieces: Sequence[Piece], ratio: int, step: int) -> Iterator[Piece]:
    for kernel in range(ratio):
        name = f"kernel block {kernel} of {ratio}: " if ratio > 1 else ""
        for index, offset, length, what in pieces:
            yield index, kernel * step + offset, length, name + what


def _joined_kernel_blocks(part: Part, ratio: int) -> Iterator[Piece]:
    together = -(-ratio // _MAX_PIECES)
    for first in range(0, ratio, together):
        last = min(first + together, ratio)
        name = f"kernel blocks {first} to {last - 1} of {ratio}" if last - first > 1 else f"kernel block {first}"
        yield 0, first * part.nbytes, (last - first) * part.nbytes, f"{name}, each: {_axes(part)}"


def _joined_parts(parts: Sequence[Part], ratio: int) -> Iterator[Piece]:
    start = 0
    for index, part in enumerate(parts):
        yield index, start, part.nbytes * ratio, f"{_axes(part)}, in pieces"
        start += part.nbytes * ratio


def _axes(part: Part) -> str:
    axes = " × ".join(
        f"{a.name} {a.start}..{a.start + a.shard.held} of {a.extent}{' or fewer' if a.may_repeat else ''}"
        for a in part.axes
    )
    return f"{part.name}: {axes}, {part.dtype}, {part.nbytes:,} bytes"


def _covered(runs: Addresses, start: int, length: int, scale: float) -> list[tuple[int, int]]:
    """Return what the runs cover of ``start .. start + length``, as offsets; gaps too small to see are closed."""
    found: list[tuple[int, int]] = []
    first, last = np.searchsorted(runs[:, 0], np.array((start, start + length), np.uint64))
    for address, nbytes in runs[max(first - 1, 0) : last].tolist():
        begin, end = max(address - start, 0), min(address + nbytes - start, length)
        if begin >= end:
            continue
        if found and (begin - found[-1][1]) * scale < 0.3:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
