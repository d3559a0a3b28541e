# SPDX-License-Identifier: Apache-2.0
"""What every byte of a request's blocks is, and what a transfer does to them, as plain dictionaries.

Its rules come from the plain reference. They share nothing with the byte oracle, which this module checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Group, Span
from support.reference import Item, kernel_pages, part_bytes, spans_by_source


class Place(NamedTuple):
    """A byte of a request's block: what it holds, and the kernel block it is in.

    Attributes:
        content: what it holds, the same on every rank.
        token_axis: whether its part has a ``tokens`` axis.
        kernel: the kernel block.
    """

    content: Item
    token_axis: bool
    kernel: int


class Moves(Protocol):
    """One read of a transfer: descriptors, where to and where from."""

    @property
    def source(self) -> int: ...
    @property
    def local(self) -> NDArray[np.uint64]: ...
    @property
    def remote(self) -> NDArray[np.uint64]: ...


def places(geometry: Geometry, spans: Sequence[Span]) -> dict[int, Place]:
    """Return every content byte of a request's blocks, by address."""
    found: dict[int, Place] = {}
    for layer in geometry.layers:
        cut = {part.name: any(axis.name == "tokens" for axis in part.axes) for part in layer.page.parts}
        for page in kernel_pages(geometry, layer, spans[layer.group]):
            for part in layer.page.parts:
                for item, address in part_bytes(part, layer.name, page):
                    found[address] = Place(item, cut[part.name], page.kernel)
    return found


def stands_for(place: Place, group: Group) -> range:
    """Return the tokens of an attention byte: one, or those of its kernel block if tokens cannot cut it."""
    token = place.content.token
    return range(token, token + (1 if place.token_axis else group.block_size // group.ratio))


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
    reads: Sequence[Moves],
) -> Pairs:
    """Map the reads of a transfer back to kernel blocks; fail if a block meets two at once, or another layer's."""
    local_places = places(local, local_spans)
    sources = spans_by_source(remote_spans, len(remotes))
    pairs: Pairs = {}
    for read in reads:
        remote_places = places(remotes[read.source], sources[read.source])
        found: dict[str, dict[tuple[int, int], int]] = {}
        for to, start in copies(read.local, read.remote):
            to_place, from_place = local_places[to], remote_places[start]
            assert to_place.content == from_place.content
            blocks = found.setdefault(to_place.content.layer, {})
            pair, token = (to_place.kernel, from_place.kernel), to_place.content.token
            blocks[pair] = min(token, blocks.get(pair, token))
        pairs[read.source] = {
            layer: ([a for a, _ in order], [b for _, b in order])
            for layer, blocks in found.items()
            for order in [sorted(blocks, key=blocks.__getitem__)]
        }
    return pairs


def zeroed_kernels(local: Geometry, local_spans: Sequence[Span], zero_rows: NDArray[np.uint64]) -> dict[str, list[int]]:
    """Return, by layer, the kernel blocks that are zeroed whole."""
    zero = addresses(zero_rows)
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
