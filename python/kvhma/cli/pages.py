# SPDX-License-Identifier: Apache-2.0
"""The upper part of the picture: one block's bytes, as each group uses them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhma.cli.compare.views import contiguous_pieces
from kvhma.cli.svg import COLORS, Drawing
from kvhma.geometry import Geometry, Layer, Part

LEFT, RIGHT = 150, 1180
"""Where drawings begin and end; left of them are names."""
SPAN = RIGHT - LEFT
_MAX_PIECES = 600


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank, and what of it the request uses.

    Attributes:
        name: ``"P"`` or ``"D"`` with its rank.
        geometry: the rank.
        tables: block tables by group.
        used: per group, ids that take part in the read.
        runs: address and length of what is read, shape ``(n, 2)`` as lists, sorted by address.
    """

    name: str
    geometry: Geometry
    tables: Sequence[Sequence[int]]
    used: list[set[int]]
    runs: list[tuple[int, int]]


def color(group: int) -> str:
    """Return the class of a group's color."""
    return f"c{group % COLORS}"


def draw_pages(page: Drawing, y: float, rank: DrawnRank) -> float:
    """Draw one block of the first tensor as each group sees it."""
    geometry = rank.geometry
    page.text(20, y, f"{rank.name}: one block of a tensor, as each group uses it", "head")
    longest = max(layer.block_stride for layer in geometry.layers)
    y += 12
    for index, group in enumerate(geometry.groups):
        layer = next((layer for layer in geometry.layers if layer.group == index), None)
        if layer is None:
            continue
        scale = SPAN / longest
        page.text(20, y + 16, f"group {index} {group.kind}", "")
        page.rect(LEFT, y, layer.block_stride * scale, 22, "pad", _padding(layer, group.ratio))
        page.rect(LEFT, y, layer.page.nbytes * group.ratio * scale, 22, "paper")
        start = _first_block(rank, layer, index)
        for shade, (part, offset, length, what) in enumerate(_pieces(geometry, layer)):
            tone = f"t{part % 4}" if len(layer.page.parts) > 1 else f"t{shade % 2}"
            hover = f"{layer.name}\n{what}\nblock bytes {offset:,} to {offset + length:,}"
            page.rect(LEFT + offset * scale, y, length * scale, 22, f"{color(index)} {tone}", hover)
            if (name := layer.page.parts[part].name) and length * scale > 9 * len(name) + 4:
                page.text(LEFT + (offset + length / 2) * scale, y + 15, name, "small mid")
        if start is not None:
            address, block = start
            for first, last in _covered(rank.runs, address, layer.block_stride, scale):
                hover = f"read of block {block}: {address + first:#x} to {address + last:#x}, {last - first:,} bytes"
                page.rect(LEFT + first * scale, y + 24, (last - first) * scale, 4, "read", hover)
        y += 36
    page.text(LEFT, y + 4, "0", "small soft")
    page.text(RIGHT, y + 4, f"{longest:,} bytes", "small soft end")
    return y + 8


def _padding(layer: Layer, ratio: int) -> str:
    used = layer.page.nbytes * ratio
    return (
        f"{layer.block_stride - used:,} bytes of {layer.block_stride:,} are padding"
        if used < layer.block_stride
        else ""
    )


def _first_block(rank: DrawnRank, layer: Layer, group: int) -> tuple[int, int] | None:
    """Return address and id of the first block of a layer that takes part."""
    block = next((block for block in rank.tables[group] if block in rank.used[group]), None)
    if block is None:
        return None
    return rank.geometry.regions[layer.region].base + layer.offset + block * layer.block_stride, block


def _pieces(geometry: Geometry, layer: Layer) -> Iterator[tuple[int, int, int, str]]:
    """Yield index of the part, offset in the block, length and name of every contiguous piece of a block."""
    ratio = geometry.groups[layer.group].ratio
    step = geometry.kernel_stride(layer)
    pieces = [
        (index, offset, length)
        for index, part in enumerate(layer.page.parts)
        for offset, length in contiguous_pieces(part, limit=_MAX_PIECES)
    ]
    inside = all(offset + length <= layer.block_stride for _, offset, length in pieces)
    if not inside or len(pieces) * ratio > _MAX_PIECES:
        # Too fine to draw, or with other blocks in between: what there is, one part after the other.
        at = 0
        for index, part in enumerate(layer.page.parts):
            yield index, at, part.nbytes * ratio, f"{_axes(part)}, in pieces"
            at += part.nbytes * ratio
        return
    for kernel in range(ratio):
        name = f"kernel block {kernel} of {ratio}: " if ratio > 1 else ""
        for at, offset, length in pieces:
            yield at, kernel * step + offset, length, name + _axes(layer.page.parts[at])


def _axes(part: Part) -> str:
    axes = " × ".join(
        f"{a.name} {a.start}..{a.start + a.shard.held} of {a.extent}{' or fewer' if a.may_repeat else ''}"
        for a in part.axes
    )
    return f"{part.name}: {axes}, {part.dtype}, {part.nbytes:,} bytes"


def _covered(runs: list[tuple[int, int]], start: int, length: int, scale: float) -> list[tuple[int, int]]:
    """Return what of ``start .. start + length`` the runs cover, as offsets; gaps that cannot be seen are closed."""
    found: list[tuple[int, int]] = []
    first = max(bisect_right(runs, (start, 0)) - 1, 0)
    for address, nbytes in runs[first:]:
        if address >= start + length:
            break
        begin, end = max(address - start, 0), min(address + nbytes - start, length)
        if begin >= end:
            continue
        if found and (begin - found[-1][1]) * scale < 0.3:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
