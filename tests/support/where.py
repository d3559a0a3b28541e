# SPDX-License-Identifier: Apache-2.0
"""What every byte of a request's blocks is, and what a transfer does to them, as plain dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Axis, Geometry, Group, Layer, Part, Span
from kvhma.oracle import TransferLike
from kvhma.oracle.labels import by_source


class Content(NamedTuple):
    """What a byte holds, the same on every rank.

    Attributes:
        layer: name of the layer.
        part: name of the part.
        token: absolute token; the first of the kernel block if the part has no ``tokens`` axis; -1 for a state.
        at: global index on every other axis, by the axis' name.
        byte: byte of the item.
        token_axis: whether the part has a ``tokens`` axis.
    """

    layer: str
    part: str
    token: int
    at: tuple[tuple[str, int], ...]
    byte: int
    token_axis: bool


class Place(NamedTuple):
    """A byte of a request's block: what it holds, and the kernel block it is in."""

    content: Content
    kernel: int


def places(geometry: Geometry, spans: Sequence[Span]) -> dict[int, Place]:
    """Return every content byte of a request's blocks, by address."""
    found: dict[int, Place] = {}
    for layer in geometry.layers:
        group = geometry.groups[layer.group]
        base = geometry.regions[layer.region].base + layer.offset
        step = layer.block_stride // group.ratio if layer.kernel_stride is None else layer.kernel_stride
        for block, first in _blocks(group, spans[layer.group]):
            for k in range(group.ratio):
                token = first if group.kind == "ssm" else first + k * (group.block_size // group.ratio)
                page = base + block * layer.block_stride + k * step
                for content, offset in _page(layer, token):
                    found[page + offset] = Place(content, block * group.ratio + k)
    return found


def held(axis: Axis) -> int:
    """Return how many indices of an axis a rank holds."""
    assert axis.length is not None
    return axis.length


def first_needed(group: Group, tokens: int) -> int:
    """Return the first token that the token behind the last one still sees."""
    if group.kind == "sliding":
        assert group.window is not None
        return max(0, tokens - group.window + 1)
    if group.kind == "chunked":
        assert group.chunk is not None
        return tokens // group.chunk * group.chunk
    return 0


def stands_for(content: Content, group: Group) -> range:
    """Return the tokens of an attention byte: one, or those of its kernel block if tokens cannot cut it."""
    cut = content.token_axis
    return range(content.token, content.token + (1 if cut else group.block_size // group.ratio))


def copies(local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of every byte that is read: where to, where from."""
    for (to, size, _), (start, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
        yield from zip(range(to, to + size), range(start, start + size), strict=True)


def addresses(rows: NDArray[np.uint64]) -> set[int]:
    """Return the addresses of all bytes of some descriptors."""
    return {address for start, size, _ in rows.tolist() for address in range(start, start + size)}


Pairs = dict[int, dict[str, tuple[list[int], list[int]]]]
"""By source and layer: D's kernel blocks in the order of the sequence, and the kernel block of P that each gets."""


def kernel_pairs(
    local: Geometry,
    remotes: Sequence[Geometry],
    local_spans: Sequence[Span],
    remote_spans: Sequence[Span] | Sequence[Sequence[Span]],
    transfer: TransferLike,
) -> Pairs:
    """Map the runs of a transfer back to kernel blocks; fail if one meets two at once, or another layer's."""
    here = places(local, local_spans)
    theirs = by_source(remote_spans, len(remotes))
    pairs: Pairs = {}
    for read in transfer.reads:
        there = places(remotes[read.source], theirs[read.source])
        found: dict[str, dict[tuple[int, int], int]] = {}
        for to, start in copies(read.local, read.remote):
            mine, other = here[to], there[start]
            assert mine.content == other.content
            blocks = found.setdefault(mine.content.layer, {})
            token = min(mine.content.token, blocks.get((mine.kernel, other.kernel), mine.content.token))
            blocks[mine.kernel, other.kernel] = token
        pairs[read.source] = {
            layer: ([a for a, _ in order], [b for _, b in order])
            for layer, blocks in found.items()
            for order in [sorted(blocks, key=blocks.__getitem__)]
        }
    return pairs


def zeroed_kernels(local: Geometry, local_spans: Sequence[Span], transfer: TransferLike) -> dict[str, list[int]]:
    """Return, by layer, the kernel blocks that are zeroed whole."""
    zero = addresses(transfer.zero)
    kept: set[tuple[str, int]] = set()
    seen: dict[tuple[str, int], int] = {}
    for address, place in places(local, local_spans).items():
        key = (place.content.layer, place.kernel)
        seen.setdefault(key, place.content.token)
        if address not in zero:
            kept.add(key)
    found: dict[str, list[int]] = {layer.name: [] for layer in local.layers}
    for layer, kernel in sorted(seen, key=seen.__getitem__):
        if (layer, kernel) not in kept:
            found[layer].append(kernel)
    return found


def _blocks(group: Group, span: Span) -> list[tuple[int, int]]:
    """Return id and first token of the blocks that hold content."""
    ids = [int(block) for block in span.ids]
    if group.kind == "ssm":
        return [(ids[max(0, len(ids) - 1 - group.speculative)], -1)] if ids else []
    entries = range(span.first, span.first + len(ids))
    starts = [(entry * group.cp_size + group.cp_rank) * group.block_size for entry in entries]
    return list(zip(ids, starts, strict=True))


def _page(layer: Layer, token: int) -> Iterator[tuple[Content, int]]:
    """Yield every byte of a page and its offset."""
    for part in layer.page.parts:
        for local in product(*(range(held(axis)) for axis in part.axes)):
            yield from _item(layer, part, local, token)


def _item(layer: Layer, part: Part, local: tuple[int, ...], token: int) -> Iterator[tuple[Content, int]]:
    offset = part.offset + sum(index * axis.stride for index, axis in zip(local, part.axes, strict=True))
    at, cut = [], any(axis.name == "tokens" for axis in part.axes)
    for index, axis in zip(local, part.axes, strict=True):
        if axis.name == "tokens":
            token += index
        else:
            at.append((axis.name, axis.start + index))
    for byte in range(part.item_bytes):
        yield Content(layer.name, part.name, token, tuple(sorted(at)), byte, cut), offset + byte
