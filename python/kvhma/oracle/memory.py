# SPDX-License-Identifier: Apache-2.0
"""The oracle over real memory: bytes from coordinates on P, every byte of D checked afterwards.

Two processes that share nothing but geometries and spans can each call their half. The bytes of one token of
one part (its row) are a slice of one long table of pseudo-random bytes; where the slice starts is a hash of
layer, part and token. A row in the wrong place shows by its start, a byte in the wrong place by what follows
it. No byte is ever zero, so that zeroed is not mistaken for moved. A gigabyte is filled or checked in a
second or two.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvhma.errors import OracleError
from kvhma.geometry import Geometry, Group, Layer, Part, Span
from kvhma.oracle.labels import (
    Blocks,
    Ints,
    RemoteSpans,
    blocks_of,
    by_source,
    check_spans,
    held,
    kernel_stride,
    need,
    row_strides,
)
from kvhma.oracle.types import Difference

Bytes: TypeAlias = "NDArray[np.uint8]"

_STARTS = 1 << 20
"""How many slices of the table a row can be: two rows are equal with a chance of one in a million."""

_TILE = (1 << 20) - 3
"""Period of stale and junk bytes, odd so that no stride of a cache divides it."""

_BATCH = 1 << 20
"""Bytes worked on at a time: larger does not fit a cache, smaller is Python."""

_STATE = -1
"""Stands for the token of a state, which has none."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a correct transfer did to D's real memory.

    Attributes:
        moved: bytes that hold P's content now, `excess` included.
        excess: those of them that belong to tokens behind the token count.
        zeroed: bytes that are zero now.
        untouched: bytes that hold what they held before.
    """

    moved: int
    excess: int
    zeroed: int
    untouched: int


def fill_source(memory: Sequence[Bytes], geometry: Geometry, spans: Sequence[Span], *, seed: int = 0) -> None:
    """Fill a P rank's memory: content where the request's blocks are, junk everywhere else.

    Args:
        memory: the regions of `geometry`, each uint8 ``(region.bytes,)``; written.
        geometry: the rank.
        spans: the request's blocks, by group; what they hold behind the last token is filled as well.
        seed: another seed, other bytes; both sides need the same.

    Raises:
        ValueError: the memory or the spans do not fit the geometry.
    """
    _check_memory(memory, geometry)
    check_spans(geometry, spans)
    for index, region in enumerate(memory):
        _tile(region, seed, f"junk {index}")
    for layer, part in _parts(geometry):
        group = geometry.groups[layer.group]
        view = _view(memory[layer.region], layer, part, group)
        for ids, tokens in _batches(blocks_of(group, spans[layer.group]), part, group):
            view[ids] = _content(layer, part, tokens, seed)


def fill_stale(memory: Sequence[Bytes], *, seed: int = 0) -> None:
    """Fill a D rank's memory with what :func:`check_memory` takes for the bytes of somebody else's request.

    Args:
        memory: the regions, each uint8 ``(n,)``; written.
        seed: as given to :func:`check_memory`.
    """
    for index, region in enumerate(memory):
        _tile(region, seed, f"stale {index}")


def check_memory(
    memory: Sequence[Bytes],
    local: Geometry,
    remotes: Sequence[Geometry],
    num_tokens: int,
    local_spans: Sequence[Span],
    remote_spans: RemoteSpans,
    *,
    excess_bytes: int | None = None,
    seed: int = 0,
) -> MemoryReport:
    """Check every byte of D's memory after the transfer of one request.

    Before it the memory was filled by :func:`fill_stale`, and that of every source by :func:`fill_source`.
    That the sources together hold every coordinate of the layers D has is taken for granted here; labels
    prove it.

    Args:
        memory: the regions of `local`, each uint8 ``(region.bytes,)``; read.
        local: the D rank.
        remotes: the P ranks that were read from.
        num_tokens: tokens of the request that P computed.
        local_spans: D's blocks, by D's groups.
        remote_spans: P's blocks, by P's groups, for every source; or a list of such for each source.
        excess_bytes: what the transfer says of tokens behind `num_tokens`; None to accept any.
        seed: as given to the fills.

    Raises:
        OracleError: a byte is wrong, or `excess_bytes` is.
        ValueError: memory or spans do not fit the geometries.
    """
    _check_memory(memory, local)
    check_spans(local, local_spans)
    theirs = by_source(remote_spans, len(remotes))
    for remote, spans in zip(remotes, theirs, strict=True):
        check_spans(remote, spans)
    expected = [np.empty_like(region) for region in memory]
    fill_stale(expected, seed=seed)
    moved = excess = zeroed = 0
    coverage: dict[tuple[tuple[int, int], ...], NDArray[np.bool_]] = {}
    for layer, part in _parts(local):
        group = local.groups[layer.group]
        blocks = blocks_of(group, local_spans[layer.group])
        asked = need(group, blocks, num_tokens)
        blocks = Blocks(blocks.ids[asked.used], blocks.token[asked.used])
        has = _coverage(layer.name, part.name, remotes, theirs, coverage)
        behind = _behind(layer.name, group, remotes, num_tokens) if asked.low < num_tokens else 0
        view = _view(expected[layer.region], layer, part, group)
        actual = _view(memory[layer.region], layer, part, group)
        place, length = _tokens_axis(part)
        row = part.nbytes // max(1, length)
        size = 1 if place >= 0 else group.kernel_block_size
        for ids, tokens in _batches(blocks, part, group):
            content = _content(layer, part, tokens, seed)
            here = has[np.clip(tokens + 1, 0, has.size - 1)]
            if group.kind not in ("ssm", "opaque"):
                here &= tokens < behind
                # In the first and the last block P's byte and zero can both be right: nobody reads them.
                last = here & (tokens >= num_tokens)
                either = last | (here & (tokens + size <= asked.low))
                if either.any():
                    content[_spread(either, part) & (actual[ids] == 0)] = 0
                    excess += int(np.count_nonzero(_spread(last, part) & (content != 0)))
            content *= _spread(here, part)
            came = int(np.count_nonzero(content))
            moved += came
            zeroed += tokens.size * row - came
            view[ids] = content
    _compare(memory, expected, local, local_spans, seed)
    if excess_bytes is not None and excess != excess_bytes:
        raise OracleError(f"excess_bytes is {excess_bytes}, {excess} came along")
    total = sum(region.bytes for region in local.regions)
    return MemoryReport(moved=moved, excess=excess, zeroed=zeroed, untouched=total - moved - zeroed)


def _check_memory(memory: Sequence[Bytes], geometry: Geometry) -> None:
    sizes = [region.bytes for region in geometry.regions]
    found = [(region.dtype.name, region.shape) for region in memory]
    if found != [("uint8", (size,)) for size in sizes]:
        raise ValueError(f"memory is {found}, the regions have {sizes} bytes")


def _parts(geometry: Geometry) -> Iterator[tuple[Layer, Part]]:
    for layer in geometry.layers:
        for part in layer.page.parts:
            yield layer, part


def _tokens_axis(part: Part) -> tuple[int, int]:
    """Return place and length of the ``tokens`` axis of a part; (-1, 1) if it has none."""
    for place, axis in enumerate(part.axes):
        if axis.name == "tokens":
            return place, held(axis)
    return -1, 1


def _view(region: Bytes, layer: Layer, part: Part, group: Group) -> Bytes:
    """Return a part of all blocks of a layer as a view: blocks, kernel blocks, axes, bytes of an item."""
    shape = [layer.num_blocks, group.ratio, *map(held, part.axes), part.item_bytes]
    strides = [layer.block_stride, kernel_stride(layer, group), *(axis.stride for axis in part.axes), 1]
    return as_strided(region[layer.offset + part.offset :], shape, strides)


def _batches(blocks: Blocks, part: Part, group: Group) -> Iterator[tuple[Ints, Ints]]:
    """Yield block ids ``(n,)`` and the tokens of their rows ``(n, ratio, tokens of a kernel block or 1)``."""
    kernel = group.kernel_block_size
    if group.kind in ("ssm", "opaque"):
        inside = np.zeros((group.ratio, 1), np.int64)
    else:
        length = _tokens_axis(part)[1]
        inside = np.arange(group.ratio, dtype=np.int64)[:, None] * kernel + np.arange(length, dtype=np.int64)
    step = max(1, _BATCH // max(1, part.nbytes * group.ratio))
    for start in range(0, blocks.ids.size, step):
        ids = blocks.ids[start : start + step]
        if group.kind == "ssm":
            yield ids, np.full((ids.size, 1, 1), _STATE, np.int64)
        else:
            yield ids, blocks.token[start : start + step, None, None] + inside


def _content(layer: Layer, part: Part, tokens: Ints, seed: int) -> Bytes:
    """Return the bytes of rows, shaped like a slice of :func:`_view`."""
    strides = row_strides(part)
    place, _ = _tokens_axis(part)
    axes = [axis for axis in part.axes if axis.name != "tokens"]
    first = sum(axis.start * strides[axis.name] for axis in axes)
    row = part.item_bytes
    for axis in axes:
        row *= axis.extent
    table = _table(1 << (_STARTS + row).bit_length(), seed)
    rows = as_strided(
        table[first:],
        [_STARTS, *(held(axis) for axis in axes), part.item_bytes],
        [1, *(strides[axis.name] for axis in axes), 1],
        writeable=False,
    )
    salt = _salt(f"{seed}/{layer.name}/{part.name}")
    content = rows[(_mix(tokens.astype(np.uint64) + salt) % np.uint64(_STARTS)).astype(np.int64)]
    return content[:, :, 0] if place < 0 else np.moveaxis(content, 2, 2 + place)


def _spread(rows: NDArray[np.bool_], part: Part) -> NDArray[np.bool_]:
    """Give a mask of rows the dimensions of a slice of :func:`_view`, so that it broadcasts."""
    place, _ = _tokens_axis(part)
    wide = rows.reshape(*rows.shape, *([1] * (len(part.axes) + (1 if place < 0 else 0))))
    return wide[:, :, 0] if place < 0 else np.moveaxis(wide, 2, 2 + place)


def _coverage(
    layer: str,
    part: str,
    remotes: Sequence[Geometry],
    spans: Sequence[Sequence[Span]],
    known: dict[tuple[tuple[int, int], ...], NDArray[np.bool_]],
) -> NDArray[np.bool_]:
    """Return which tokens the sources hold of a part; index 0 is the state, index ``t + 1`` token ``t``."""
    sources = []
    for index, remote in enumerate(remotes):
        found = remote.layer_by_name.get(layer)
        if found is not None and any(other.name == part for other in found.page.parts):
            sources.append((index, found.group))
    key = tuple(sources)
    if key not in known:
        ranges = []
        for index, at in sources:
            group = remotes[index].groups[at]
            tokens = blocks_of(group, spans[index][at]).token
            if group.kind == "ssm":
                ranges += [(0, 1)] * tokens.size
            else:
                ranges += [(token + 1, token + 1 + group.block_size) for token in tokens.tolist()]
        # One entry more than the last token: whatever is behind clips to it, and nobody holds it.
        mask = np.zeros(max((end for _, end in ranges), default=1) + 1, bool)
        for start, end in ranges:
            mask[start:end] = True
        known[key] = mask
    return known[key]


def _behind(layer: str, group: Group, remotes: Sequence[Geometry], num_tokens: int) -> int:
    """Return how far a whole last block may reach: the nearer end of the two sides' last kernel blocks."""
    ends = [-(-num_tokens // (kernel := group.kernel_block_size)) * kernel]
    for remote in remotes:
        found = remote.layer_by_name.get(layer)
        if found is not None:
            kernel = remote.groups[found.group].kernel_block_size
            ends.append(-(-num_tokens // kernel) * kernel)
    return min(ends)


def _compare(
    memory: Sequence[Bytes], expected: Sequence[Bytes], local: Geometry, spans: Sequence[Span], seed: int
) -> None:
    for index, (found, wanted) in enumerate(zip(memory, expected, strict=True)):
        # Piece by piece: a mask of a whole region costs more to allocate than to compute.
        pieces = range(0, found.size, _BATCH)
        bad = [at for at in pieces if not np.array_equal(found[at : at + _BATCH], wanted[at : at + _BATCH])]
        if not bad:
            continue
        offset = bad[0] + int(np.argmax(found[bad[0] :][:_BATCH] != wanted[bad[0] :][:_BATCH]))
        layer, part, token = _owner(local, spans, index, offset)
        before = np.empty_like(found)
        _tile(before, seed, f"stale {index}")
        stale = int(before[offset])
        difference = Difference(
            region=index,
            offset=offset,
            layer=layer,
            part=part,
            token=token,
            expected=_say(int(wanted[offset]), stale),
            found=_say(int(found[offset]), stale),
        )
        wrong = int(np.count_nonzero(found != wanted))
        raise OracleError(f"{wrong} wrong bytes in region {index}, the first: {difference}")


def _say(byte: int, stale: int) -> str:
    return {0: "zero", stale: f"{byte:#04x} (as before)"}.get(byte, f"{byte:#04x}")


def _owner(
    geometry: Geometry, spans: Sequence[Span], region: int, offset: int
) -> tuple[str | None, str | None, int | None]:
    """Return layer, part and token of a byte: of the request's blocks if it is in one, else of any block."""
    elsewhere: tuple[str | None, str | None, int | None] = (None, None, None)
    for layer, part in _parts(geometry):
        if layer.region != region:
            continue
        group = geometry.groups[layer.group]
        blocks = blocks_of(group, spans[layer.group])
        mine = dict(zip(blocks.ids.tolist(), blocks.token.tolist(), strict=True))
        for block in range(layer.num_blocks):
            for kernel in range(group.ratio):
                start = layer.offset + block * layer.block_stride + kernel * kernel_stride(layer, group)
                inside = _token_at(part, offset - start - part.offset)
                if inside is None:
                    continue
                if block not in mine:
                    elsewhere = (layer.name, part.name, None)
                elif group.kind == "ssm":
                    return layer.name, part.name, None
                else:
                    token = mine[block] + kernel * group.kernel_block_size + inside
                    return layer.name, part.name, token
    return elsewhere


def _token_at(part: Part, rest: int) -> int | None:
    """Return the token of a byte (0 if the part has none), or None if the byte is not of the part."""
    token = 0
    if rest < 0:
        return None
    for axis in sorted(part.axes, key=lambda axis: axis.stride, reverse=True):
        index = min(rest // axis.stride, held(axis) - 1) if held(axis) > 1 else 0
        rest -= index * axis.stride
        token = index if axis.name == "tokens" else token
    return token if rest < part.item_bytes else None


def _tile(region: Bytes, seed: int, what: str) -> None:
    # One table for all regions, each with a start of its own: a table for every region takes longer than its use.
    size = 1 << 20
    shift = int(_salt(f"{seed}/{what}")) % size
    table = _table(size, seed, what.split()[0])
    tile = np.concatenate((table[shift:], table[:shift]))[:_TILE]
    for start in range(0, region.size, _TILE):
        end = min(region.size, start + _TILE)
        region[start:end] = tile[: end - start]


@lru_cache(maxsize=32)
def _table(size: int, seed: int, what: str = "content") -> Bytes:
    """Return `size` pseudo-random bytes, none of them zero, the same in every process."""
    mixed = _mix(np.arange(size, dtype=np.uint64) + _salt(f"{seed}/{what}"))
    return (mixed % np.uint64(255) + np.uint64(1)).astype(np.uint8)


def _salt(text: str) -> np.uint64:
    data = text.encode()
    return np.uint64(zlib.crc32(data) << 32 | zlib.adler32(data))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit values (the finaliser of splitmix64); arithmetic wraps on purpose."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
