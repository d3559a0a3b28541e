# SPDX-License-Identifier: Apache-2.0
"""The bytes with which P's memory is filled, and D's before a transfer.

The bytes of one token of one part (its row) are a slice of one long table of pseudo-random bytes. A hash of layer, part
and token selects the start of the slice:

    table    |b0 b1 b2 b3 b4 b5 b6 b7 ..
    row of (layer, part, token)   starts at hash % 2**20, one byte for each byte of all ranks' row
    a rank's row                  starts as many bytes later as its shards do

A row in the wrong place shows by its start, and a byte in the wrong place by the bytes after it. No byte is ever zero,
so zeroed bytes cannot be mistaken for moved bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvhma.geometry import Geometry, Group, Layer, Part
from kvhma.oracle.labels import Blocks, Ints, row_bytes, row_strides, tokens_from_first

Bytes: TypeAlias = "NDArray[np.uint8]"

_STARTS = 1 << 20
"""Number of possible slices of a row: two rows are equal with a chance of one in a million."""

_TILE = (1 << 20) - 3
"""Period of stale and junk bytes, odd so that no stride of a cache divides it."""

BATCH = 1 << 20
"""Number of bytes processed at a time: more does not fit a CPU cache, less spends the time in Python."""

_STATE = -1
"""Stands for the token of a state, which has no token."""


def tokens_axis(part: Part) -> tuple[int, int]:
    """Return index and length of the ``tokens`` axis of a part; (-1, 1) without such an axis."""
    for place, axis in enumerate(part.axes):
        if axis.name == "tokens":
            return place, axis.shard.held
    return -1, 1


def view_of(memory: Sequence[Bytes], geometry: Geometry, layer: Layer, part: Part) -> Bytes:
    """Return a part of all blocks of a layer as a view: blocks, kernel blocks, axes, bytes of an item."""
    shape = [
        layer.num_blocks,
        geometry.groups[layer.group].ratio,
        *(axis.shard.held for axis in part.axes),
        part.item_bytes,
    ]
    strides = [layer.block_stride, geometry.kernel_stride(layer), *(axis.stride for axis in part.axes), 1]
    return as_strided(memory[layer.region][layer.offset + part.offset :], shape, strides)


def batches(blocks: Blocks, part: Part, group: Group) -> Iterator[tuple[Ints, Ints]]:
    """Yield block ids ``(n,)`` and the tokens of their rows ``(n, ratio, tokens of a kernel block or 1)``."""
    kernel = group.kernel_block_size
    if group.kind in ("ssm", "opaque"):
        inside = np.zeros((group.ratio, 1), np.int64)
    else:
        length = tokens_axis(part)[1]
        inside = np.arange(group.ratio, dtype=np.int64)[:, None] * kernel + np.arange(length, dtype=np.int64)
        inside = tokens_from_first(group, inside)
    step = max(1, BATCH // max(1, part.nbytes * group.ratio))
    for start in range(0, blocks.ids.size, step):
        ids = blocks.ids[start : start + step]
        if group.kind == "ssm":
            yield ids, np.full((ids.size, 1, 1), _STATE, np.int64)
        else:
            yield ids, blocks.token[start : start + step, None, None] + inside


def content_of(layer: Layer, part: Part, tokens: Ints, seed: int) -> Bytes:
    """Return the bytes of rows, shaped like a slice of :func:`view_of`."""
    strides = row_strides(part)
    place, _ = tokens_axis(part)
    axes = [axis for axis in part.axes if axis.name != "tokens"]
    first = sum(axis.start * strides[axis.name] for axis in axes)
    table = _table(1 << (_STARTS + row_bytes(part)).bit_length(), seed)
    rows = as_strided(
        table[first:],
        [_STARTS, *(axis.shard.held for axis in axes), part.item_bytes],
        [1, *(strides[axis.name] for axis in axes), 1],
        writeable=False,
    )
    salt = _salt(f"{seed}/{layer.name}/{part.name}")
    content = rows[(_mix(tokens.astype(np.uint64) + salt) % np.uint64(_STARTS)).astype(np.int64)]
    return content[:, :, 0] if place < 0 else np.moveaxis(content, 2, 2 + place)


def spread(rows: NDArray[np.bool_], part: Part) -> NDArray[np.bool_]:
    """Reshape a mask of rows to broadcast over a slice of :func:`view_of`."""
    place, _ = tokens_axis(part)
    wide = rows.reshape(*rows.shape, *([1] * (len(part.axes) + (1 if place < 0 else 0))))
    return wide[:, :, 0] if place < 0 else np.moveaxis(wide, 2, 2 + place)


def tile_with(region: Bytes, seed: int, what: str) -> None:
    """Fill a region with a periodic pattern that `what` and the seed determine."""
    # One table for all regions, each with its own start: making a table for every region takes longer than using it.
    size = 1 << 20
    shift = int(_salt(f"{seed}/{what}")) % size
    table = _table(size, seed, what.split()[0])
    tile = np.concatenate((table[shift:], table[:shift]))[:_TILE]
    for start in range(0, region.size, _TILE):
        end = min(region.size, start + _TILE)
        region[start:end] = tile[: end - start]


@lru_cache(maxsize=32)
def _table(size: int, seed: int, what: str = "content") -> Bytes:
    """Return `size` pseudo-random bytes without zeros, the same in every process."""
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
