# SPDX-License-Identifier: Apache-2.0
"""The maths of kvhma in plain Python: the version to read, and an oracle that the Rust core is compared with.

Its rules are written independently from docs/geometry.md and not from the core's code; so are those of `kvhma.oracle`.

It does everything the slow way. To find a transfer, it lists every byte that D must get together with the byte of P
that belongs there, and sorts the list by D's address. It then cuts the list where either address stops advancing by
one. The result is the longest possible copies, so their number is the smallest possible number of descriptors.

Read it from the top: which tokens are needed, which blocks hold them, where their bytes are, which bytes
meet, and which of those are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Part, Span
from kvhma.oracle.settled import settled

# --- Which tokens and which blocks ----------------------------------------------------------------------


def cdiv(value: int, unit: int) -> int:
    """Divide and round up: the number of units that hold `value`."""
    return -(-value // unit)


def first_needed_token(group: Group, num_tokens: int) -> int:
    """Return the first token whose cache the next token still attends to.

    The next token is number `num_tokens`. In a sliding window of ``w`` it sees itself and the ``w - 1``
    before it; in chunked attention it sees what its own chunk holds so far; else it sees everything.
    """
    if group.kind == "sliding":
        assert group.window is not None
        return max(0, num_tokens - group.window + 1)
    if group.kind == "chunked":
        assert group.chunk is not None
        return num_tokens // group.chunk * group.chunk
    return 0


def clip_window(ids: Sequence[int], window: int, block_size: int) -> list[int]:
    """Keep the trailing blocks that a sliding window can reach, for any number of tokens.

    This is vLLM's static rule, ``cdiv(window, block_size) + 1`` blocks: the window's own, and one more
    because it rarely starts at the start of a block.

        >>> clip_window(list(range(40)), window=512, block_size=16)[0]
        7
    """
    return list(ids)[-(cdiv(window, block_size) + 1) :]


def clip_tokens(span: Span, group: Group, num_tokens: int) -> Span:
    """Keep the blocks that hold a needed token below `num_tokens`: never more than the static rule keeps.

    A block is needed if one of its tokens is, and then it is needed whole.
    """
    low = first_needed_token(group, num_tokens)
    entries = [
        (span.first + i, int(block))
        for i, block in enumerate(span.ids)
        if any(low <= token < num_tokens for token in entry_tokens(group, span.first + i))
    ]
    first = entries[0][0] if entries else span.first
    return Span(first, [block for _, block in entries])


def clip_state(ids: Sequence[int], speculative: int) -> list[int]:
    """Keep the one slot that carries the last state of a recurrent layer.

    Later slots hold states that speculative decoding may discard; earlier slots are old.

        >>> clip_state([0, 0, 7, 8, 9], speculative=2), clip_state([5], speculative=2), clip_state([], 2)
        ([7], [5], [])
    """
    return [int(ids[max(0, len(ids) - 1 - speculative)])] if len(ids) else []


def expand_blocks(ids: Sequence[int], ratio: int) -> list[int]:
    """Turn logical block ids into kernel block ids: block ``b`` is kernel blocks ``b * ratio`` and on.

    >>> expand_blocks([3, 1], ratio=2)
    [6, 7, 2, 3]
    """
    return [int(block) * ratio + k for block in ids for k in range(ratio)]


@cache
def entry_tokens(group: Group, entry: int) -> tuple[int, ...]:
    """Return the tokens of entry `entry` of the block table that are this rank's, in the order of its block.

    An entry is for as many tokens as the blocks of all context-parallel ranks hold. They take turns: by whole blocks,
    or by `cp_interleave` tokens.

        >>> entry_tokens(Group("full", 4, cp_rank=1, cp_size=2), 1)
        (12, 13, 14, 15)
        >>> entry_tokens(Group("full", 4, cp_rank=1, cp_size=2, cp_interleave=1), 1)
        (9, 11, 13, 15)
    """
    turn = group.cp_interleave or group.block_size
    size = group.block_size * group.cp_size
    tokens = range(entry * size, (entry + 1) * size)
    return tuple(token for token in tokens if token // turn % group.cp_size == group.cp_rank)


# --- Where the bytes are --------------------------------------------------------------------------------


class Item(NamedTuple):
    """What a byte holds, the same on every rank.

    Attributes:
        layer: name of the layer.
        part: name of the part.
        token: absolute token; the first of the kernel block if the part has no ``tokens`` axis; -1 for a
            state.
        coordinates: global index on every other axis, sorted by the axis' name.
        byte: byte in the item.
    """

    layer: str
    part: str
    token: int
    coordinates: tuple[int, ...]
    byte: int


class Byte(NamedTuple):
    """Where a byte is: its address, and the index of the region that holds it."""

    address: int
    region: int


class KernelPage(NamedTuple):
    """The page of one kernel block of a request.

    Attributes:
        kernel: number of the kernel block: logical block times ratio, plus its place there.
        tokens: its tokens; -1 for a state.
        address: of its first byte.
    """

    kernel: int
    tokens: tuple[int, ...]
    address: int


def kernel_pages(geometry: Geometry, layer: Layer, span: Span) -> Iterator[KernelPage]:
    """Yield the pages of a request's blocks in one layer."""
    group = geometry.groups[layer.group]
    kernel_stride = layer.block_stride // group.ratio if layer.kernel_stride is None else layer.kernel_stride
    if group.kind == "ssm":
        blocks = [(block, (-1,)) for block in clip_state(list(span.ids), group.speculative)]
    else:
        blocks = [(int(block), entry_tokens(group, span.first + i)) for i, block in enumerate(span.ids)]
    base = geometry.regions[layer.region].base + layer.offset
    for block, tokens in blocks:
        for k in range(group.ratio):
            size = len(tokens) // group.ratio
            address = base + block * layer.block_stride + k * kernel_stride
            yield KernelPage(block * group.ratio + k, tokens[k * size : (k + 1) * size], address)


def layer_bytes(geometry: Geometry, layer: Layer, span: Span) -> Iterator[tuple[Item, Byte]]:
    """Yield every content byte of a request's blocks in one layer: the definition, byte by byte."""
    for page in kernel_pages(geometry, layer, span):
        for part in layer.page.parts:
            for item, address in part_bytes(part, layer.name, page):
                yield item, Byte(address, layer.region)


def part_bytes(part: Part, layer: str, page: KernelPage) -> Iterator[tuple[Item, int]]:
    """Yield every byte of a part in one kernel block, and its address."""
    for token, coordinates, offset in _items(part):
        for byte in range(part.item_bytes):
            item = Item(layer, part.name, page.tokens[token], coordinates, byte)
            yield item, page.address + offset + byte


@cache
def _items(part: Part) -> list[tuple[int, tuple[int, ...], int]]:
    """Return token in the kernel block, other coordinates, and offset in the page of every item of a part."""
    axes = sorted(part.axes, key=lambda axis: axis.name)
    items = []
    for local in product(*(range(_length(axis)) for axis in axes)):
        at = dict(zip((axis.name for axis in axes), local, strict=True))
        coordinates = tuple(axis.start + at[axis.name] for axis in axes if axis.name != "tokens")
        offset = part.offset + sum(at[axis.name] * axis.stride for axis in axes)
        items.append((at.get("tokens", 0), coordinates, offset))
    return items


def _length(axis: Axis) -> int:
    return axis.extent - axis.start if axis.length is None else axis.length


# --- Which bytes meet -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What one source gives: row ``i`` of `remote` goes to row ``i`` of `local`.

    Attributes:
        source: index of the source.
        local: uint64 ``(n, 3)``, address, length, device; sorted by address.
        remote: uint64 ``(n, 3)``, equal lengths.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        """Sum of the lengths."""
        return int(self.local[:, 1].sum())


@dataclass(frozen=True)
class Transfer:
    """What one request moves.

    Attributes:
        reads: by source.
        zero: local ranges to zero first, uint64 ``(n, 3)``.
        excess_bytes: bytes of tokens after the token count that are read too; the reference reads no such bytes.
    """

    reads: tuple[Read, ...]
    zero: NDArray[np.uint64]
    excess_bytes: int = 0

    @cached_property
    def bytes(self) -> int:
        """Bytes of all reads."""
        return sum(read.bytes for read in self.reads)

    @cached_property
    def descriptors(self) -> int:
        """Rows of all reads."""
        return sum(len(read.local) for read in self.reads)


def transfer(
    local: Geometry,
    remotes: Sequence[Geometry],
    num_tokens: int,
    local_spans: Sequence[Span],
    remote_spans: Sequence[Span] | Sequence[Sequence[Span]],
) -> Transfer:
    """Return what moves for a request of `num_tokens` tokens, to the byte.

    Args:
        local: the D rank.
        remotes: the P ranks; of several that hold a byte, the first gives it.
        num_tokens: tokens that P computed.
        local_spans: D's blocks, by D's groups: those that D does not hold already.
        remote_spans: P's blocks, by P's groups, for every source; or a list of such for each source.

    Raises:
        UnsupportedPairError: no source has some coordinates of a layer that both sides have.
    """
    local, *remotes = settled((local, *remotes))
    spans = spans_by_source(remote_spans, len(remotes))
    held: dict[Item, tuple[int, Byte]] = {}
    for source, remote in enumerate(remotes):
        for layer in remote.layers:
            for item, place in layer_bytes(remote, layer, spans[source][layer.group]):
                held.setdefault(item, (source, place))
    shared = {layer.name for remote in remotes for layer in remote.layers}
    tokens = {(item.layer, item.token) for item in held}
    starts = [
        first_held_token(local, index, remotes, spans, first_needed_token(group, num_tokens))
        for index, group in enumerate(local.groups)
    ]

    pairs: dict[int, list[tuple[Byte, Byte]]] = {}
    zero: list[tuple[Byte, Byte]] = []
    for layer in local.layers:
        group = local.groups[layer.group]
        span = local_spans[layer.group]
        low = first_needed_token(group, num_tokens)
        # A chunk that just ended, or a window of one token, needs nothing of what is there.
        last = num_tokens if low < num_tokens else 0
        if group.kind in ("ssm", "opaque"):
            moved = range(-1, 1 << 63)
        else:
            moved = range(starts[layer.group], last)
            gone = sum(entry_tokens(group, span.first + i)[-1] < low for i in range(len(span.ids)))
            span = Span(span.first + gone, list(span.ids)[gone:])
        for item, place in layer_bytes(local, layer, span):
            if item.token in moved and item in held:
                source, there = held[item]
                pairs.setdefault(source, []).append((place, there))
            elif item.token in moved and layer.name in shared and (item.layer, item.token) in tokens:
                raise UnsupportedPairError(f"no source holds {item}")
            else:
                zero.append((place, place))
    reads = []
    for source, found in sorted(pairs.items()):
        rows = runs(found)
        reads.append(Read(source, _rows(local, rows, 0), _rows(remotes[source], rows, 1)))
    return Transfer(tuple(reads), _rows(local, runs(zero), 0))


def spans_by_source(spans: Sequence[Span] | Sequence[Sequence[Span]], sources: int) -> list[Sequence[Span]]:
    """Return the spans of each source, from spans that hold for all of them or a list of such for each."""
    if all(isinstance(span, Span) for span in spans):
        return [cast("Sequence[Span]", spans)] * sources
    return list(cast("Sequence[Sequence[Span]]", spans))


def first_held_token(
    local: Geometry, index: int, remotes: Sequence[Geometry], spans: Sequence[Sequence[Span]], needed: int
) -> int:
    """Return the first token from which P has everything before `needed` of all layers of D's group `index`.

    Its layers may be in several groups of P, whose spans hold different tokens. They may differ only in tokens that are
    no longer needed, and a group is moved from one token onwards.
    """
    names = {layer.name for layer in local.layers if layer.group == index}
    owners = [
        (remote.groups[layer.group], spans[source][layer.group])
        for source, remote in enumerate(remotes)
        for layer in remote.layers
        if layer.name in names
    ]
    for token in reversed(range(needed)):
        for group, span in owners:
            entry = token // (group.block_size * group.cp_size)
            if token in entry_tokens(group, entry) and not span.first <= entry < span.first + len(span.ids):
                return token + 1
    return 0


# --- Which bytes are neighbours -------------------------------------------------------------------------


class Run(NamedTuple):
    """`length` bytes that are contiguous on both sides."""

    local: Byte
    remote: Byte
    length: int


def runs(pairs: Sequence[tuple[Byte, Byte]]) -> list[Run]:
    """Join pairs of bytes into the longest copies, sorted by local address.

    A copy continues while both addresses advance by one and neither leaves its region: a descriptor must be inside one
    registered region, even where two regions touch.
    """
    out: list[Run] = []
    for local, remote in sorted(pairs):
        if out:
            last = out[-1]
            follows = local == (last.local.address + last.length, last.local.region) and remote == (
                last.remote.address + last.length,
                last.remote.region,
            )
            if follows:
                out[-1] = last._replace(length=last.length + 1)
                continue
        out.append(Run(local, remote, 1))
    return out


def _rows(geometry: Geometry, found: Sequence[Run], side: int) -> NDArray[np.uint64]:
    """Return one side of some runs as uint64 ``(n, 3)``: address, length, device."""
    rows = np.empty((len(found), 3), np.uint64)
    for i, run in enumerate(found):
        place = (run.local, run.remote)[side]
        rows[i] = (place.address, run.length, geometry.regions[place.region].device)
    return rows
