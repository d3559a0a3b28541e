# SPDX-License-Identifier: Apache-2.0
"""What others would move for the same request: the figures that kvhma's are compared with.

* :func:`plain`: no notion of a hybrid cache. Every layer keeps, and sends, every block of the sequence.
* :func:`vllm_selection`: the choice of vLLM 0.32's NIXL connector between engines of the same build.
* :func:`needed`: the least that must move, counted in whole kernel blocks, before any merging.

A selection is counted three ways: descriptors asked for, bytes, and descriptors left after NIXL's own
merging. NIXL joins neighbours of a prepared list only if both sides' ids go up by one together and both sides
are dense there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import AddressOverflowError, BlockIdError, RequestError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part
from kvhma.types import IdsLike

_Ids: TypeAlias = NDArray[np.int64]

_MAX_IDS = 2**31


@dataclass(frozen=True, slots=True)
class Count:
    """How much moves.

    Attributes:
        descriptors: contiguous pieces asked for, on each side.
        bytes: their length together.
    """

    descriptors: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Selection(Count):
    """What a connector hands to NIXL.

    Attributes:
        posted: descriptors left after NIXL's merging.
        local_ids: descriptor ids in the local prepared list, int32, shape ``(descriptors,)``.
        remote_ids: their partners in the remote list, same dtype and shape.
    """

    posted: int
    local_ids: NDArray[np.int32]
    remote_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """Equal entries of a prepared list: one of every kernel block of a region.

    Attributes:
        start: address of entry 0.
        length: bytes of an entry.
        count: entries.
        block_stride: bytes between logical blocks.
        kernel_stride: bytes between the kernel blocks of one.
        ratio: entries of a logical block.
        groups: the groups whose blocks are sent from here, in the order of their ids.
    """

    start: int
    length: int
    count: int
    block_stride: int
    kernel_stride: int
    ratio: int
    groups: tuple[int, ...]

    def offsets(self, ids: _Ids) -> _Ids:
        """Return the offset in bytes of each entry from `start`, int64 of the shape of `ids`."""
        return ids // self.ratio * self.block_stride + ids % self.ratio * self.kernel_stride


def vllm_list(geometry: Geometry) -> tuple[Row, ...]:
    """Return the prepared list of vLLM 0.32 for one rank: attention of all regions, then state.

    A region is a distinct page address. All groups send from it if several use it, though some may have no
    layer there; else only its own group does. State is four rows per region (three of the convolution, two
    for Mamba1 together with the recurrent one).

    Raises:
        UnsupportedPairError: context parallelism, opaque groups, or a convolution state in SD order, which
            that connector refuses.
    """
    users: dict[int, list[Layer]] = {}
    for layer in geometry.layers:
        users.setdefault(geometry.regions[layer.region].base + layer.offset, []).append(layer)
    _check_supported(geometry)
    attention = tuple(index for index, group in enumerate(geometry.groups) if group.kind != "ssm")
    states = tuple(index for index, group in enumerate(geometry.groups) if group.kind == "ssm")
    pattern = next((layer for layer in geometry.layers if layer.group in attention), None)
    rows: dict[tuple[int, int], Row] = {}
    if pattern is not None:
        for start, layers in users.items():
            for row in _attention_rows(geometry, pattern, start, _senders(layers, attention)):
                # Where a page is not contiguous, several layers name the same row: it is registered once.
                rows.setdefault((row.start, row.length), row)
    found = list(rows.values())
    for start, layers in users.items():
        for layer in [layer for layer in layers if layer.group in states][:1]:
            found += _state_rows(layer, start, _senders(layers, states))
    return tuple(found)


def row_ids(rows: Sequence[Row], tables: Sequence[_Ids]) -> _Ids:
    """Return the ids of every group's blocks in a prepared list, in the order of vLLM 0.32.

    If all groups send from all rows: row by row, the groups' blocks one after the other. Else, so for
    attention beside state, group by group and row by row within.

    Args:
        rows: the list.
        tables: per group, entries of a row (kernel blocks for attention), int64, shape ``(n,)``.

    Raises:
        BlockIdError: an entry is not in the row.
    """
    firsts = np.cumsum([0, *(row.count for row in rows)])
    found = [np.empty(0, np.int64)]
    for index, groups in _sends(rows):
        ids, count = _joined(tables, groups), rows[index].count
        if ids.size and not (ids.min() >= 0 and ids.max() < count):
            raise BlockIdError(f"ids {ids.min()}..{ids.max()}: the row has {count} entries")
        found.append(ids + firsts[index])
    return np.concatenate(found)


def vllm_selection(
    local: Geometry, remote: Geometry, local_blocks: Sequence[IdsLike], remote_blocks: Sequence[IdsLike]
) -> Selection:
    """Select as vLLM 0.32's NIXL connector does when one D rank reads from one of its P ranks.

    Sliding groups keep the last ``ceil(window / block) + 1`` blocks, chunked groups all they are given, state
    groups the one block before the speculative slots. Blocks are expanded to kernel blocks whole. The two
    sides meet at the end of their lists, or, if their kernel blocks per block differ, at the start: there
    vLLM allows no prefix hits. With different TP an entry is the smaller of the two pages, as vLLM splits the
    larger.

    Args:
        local: geometry of the D rank.
        remote: geometry of the P rank.
        local_blocks: per group, the logical blocks of D to fill, in the order of the sequence. Null blocks
            are dropped: that is how a manager marks blocks behind the window.
        remote_blocks: the same of P.

    Raises:
        UnsupportedPairError: a pair that vLLM 0.32 refuses; the text has both values.
        RequestError: the wrong number of groups, or ids that are not integers.
        BlockIdError: an id is out of range.
    """
    for side, geometry, blocks in (("local", local, local_blocks), ("remote", remote, remote_blocks)):
        if len(blocks) != len(geometry.groups):
            raise RequestError(f"{side}_blocks has {len(blocks)} lists for {len(geometry.groups)} groups")
    here, there = vllm_list(local), vllm_list(remote)
    _check_pair(local, remote, here, there)
    mine: list[_Ids] = []
    theirs: list[_Ids] = []
    for index, (ours, other) in enumerate(zip(local.groups, remote.groups, strict=True)):
        kept = [
            _clipped(group, _live(geometry, blocks[index]))
            for group, geometry, blocks in ((ours, local, local_blocks), (other, remote, remote_blocks))
        ]
        if not _heads_meet(local, remote, ours.kind == "ssm"):
            kept = [ids[:0] for ids in kept]
        mine_now, theirs_now = _paired(ours, other, *kept)
        mine.append(mine_now)
        theirs.append(theirs_now)
    return _selection(here, there, mine, theirs)


def plain(local: Geometry, remote: Geometry, local_blocks: IdsLike, remote_blocks: IdsLike) -> Selection:
    """Select as a connector that takes every layer for full attention with memory of its own.

    All blocks of the sequence move for every layer, as whole pages with their padding; so does a state, as if
    it had grown with the sequence.

    Args:
        local: geometry of the D rank; it gives layers and pages, its sharing of memory is ignored.
        remote: geometry of the P rank.
        local_blocks: the logical blocks of the whole sequence on D.
        remote_blocks: the same on P.

    Raises:
        UnsupportedPairError: layers or pages differ in a way that vLLM 0.32 refuses too.
        RequestError: ids that are not integers.
        BlockIdError: an id is out of range.
    """
    here, there = _unshared_list(local), _unshared_list(remote)
    _check_pair(local, remote, here, there)
    ours, other = _table_group(local), _table_group(remote)
    kept = [_live(local, local_blocks), _live(remote, remote_blocks)]
    mine, theirs = _paired(ours, other, *kept)
    return _selection(here, there, [mine], [theirs])


def needed(geometry: Geometry, num_tokens: int) -> Count:
    """Count what `num_tokens` tokens need on this rank: live kernel blocks, and two pieces per state.

    Whole kernel blocks, padding and absent layers excluded, nothing merged. So a plan can do with fewer
    descriptors, and with fewer bytes where a last block can be cut at no cost, as that of an MLA latent.

    Raises:
        RequestError: a negative number of tokens.
        UnsupportedPairError: context parallelism or an opaque group.
    """
    _check_supported(geometry)
    if num_tokens < 0:
        raise RequestError(f"num_tokens {num_tokens}: must not be negative")
    descriptors = total = 0
    for layer in geometry.layers:
        group = geometry.groups[layer.group]
        if group.kind == "ssm":
            pieces, size = 2, layer.page.nbytes
        else:
            tokens = group.kernel_block_size
            pieces = -(-num_tokens // tokens) - first_token(group, num_tokens) // tokens
            size = pieces * layer.page.nbytes
        descriptors += pieces
        total += size
    return Count(descriptors, total)


def first_token(group: Group, num_tokens: int) -> int:
    """Return the first token that attention still needs after `num_tokens`; 0 for all but windows and chunks.

    Raises:
        RequestError: a negative number of tokens.
    """
    if num_tokens < 0:
        raise RequestError(f"num_tokens {num_tokens}: must not be negative")
    if group.kind == "sliding" and group.window is not None:
        return max(0, num_tokens - group.window + 1)
    if group.kind == "chunked" and group.chunk is not None:
        return num_tokens // group.chunk * group.chunk
    return 0


def sequence_blocks(
    geometry: Geometry, num_tokens: int, *, first_id: int = 1, live_only: bool = True
) -> tuple[_Ids, ...]:
    """Return the block tables of a sequence in a fresh pool: ids count up through all groups.

    Args:
        geometry: gives groups and block sizes.
        num_tokens: tokens of the sequence.
        first_id: first block id.
        live_only: mark blocks before the window or chunk with the null block, as a manager does once the
            tokens are computed; else they keep an id.

    Returns:
        Per group the logical blocks, int64, shape ``(n,)``; for state, one block and the speculative slots.

    Raises:
        RequestError: a negative number of tokens.
    """
    tables = []
    for group in geometry.groups:
        dead = first_token(group, num_tokens) // group.block_size if live_only else 0
        count = 1 + group.speculative if group.kind == "ssm" else -(-num_tokens // group.block_size)
        ids = np.arange(first_id, first_id + count - dead, dtype=np.int64)
        first_id += len(ids)
        if geometry.null_block is not None:
            ids = np.concatenate((np.full(dead, geometry.null_block, np.int64), ids))
        tables.append(ids)
    return tuple(tables)


def _senders(layers: Iterable[Layer], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of `groups` send from a region: all of them, unless one group alone uses it."""
    users = {layer.group for layer in layers}
    return groups if len(users) > 1 else tuple(group for group in groups if group in users)


def _attention_rows(geometry: Geometry, pattern: Layer, start: int, groups: tuple[int, ...]) -> Iterable[Row]:
    """Yield the rows of one region, cut like the `pattern`'s pages whatever its own layers hold."""
    ratio = geometry.groups[pattern.group].ratio
    step = geometry.kernel_stride(pattern)
    count = pattern.num_blocks * ratio
    if _is_interleaved(pattern.page, step):
        base = geometry.regions[pattern.region].base
        yield Row(base, step, count, pattern.block_stride, step, ratio, groups)
        return
    for at, length in _page_segments(pattern.page):
        yield Row(start + at, length, count, pattern.block_stride, step, ratio, groups)


def _state_rows(layer: Layer, start: int, groups: tuple[int, ...]) -> list[Row]:
    stride, count = layer.block_stride, layer.num_blocks
    return [Row(start + part.offset, part.nbytes, count, stride, stride, 1, groups) for part in layer.page.parts]


def _unshared_list(geometry: Geometry) -> tuple[Row, ...]:
    """Return the list of :func:`plain`: per layer the rows of an attention page, at made-up addresses."""
    _check_supported(geometry)
    pattern = next((layer for layer in geometry.layers if geometry.groups[layer.group].kind != "ssm"), None)
    if pattern is None:
        first = geometry.layers[0]
        stride, count = first.block_stride, first.num_blocks
        return tuple(Row(0, stride, count, stride, stride, 1, (0,)) for _ in geometry.layers)
    rows = tuple(_attention_rows(geometry, pattern, 0, (0,)))
    if _is_interleaved(pattern.page, rows[0].kernel_stride):
        length, ratio = pattern.page.nbytes * len(geometry.layers), rows[0].ratio
        return (Row(0, length, rows[0].count, length * ratio, length, ratio, (0,)),)
    return rows * len(geometry.layers)


def _table_group(geometry: Geometry) -> Group:
    """Return the group whose blocks a single table would have."""
    kinds = [group for group in geometry.groups if group.kind != "ssm"]
    group = (kinds or list(geometry.groups))[0]
    return Group("full", group.block_size, ratio=group.ratio)


def _segments(part: Part) -> list[tuple[int, int]]:
    """Return offset and length of the contiguous pieces of a part, in address order."""
    length, outer = part.item_bytes, list[Axis]()
    for axis in sorted(part.axes, key=lambda axis: axis.stride):
        if not outer and axis.stride == length:
            length *= axis.length or 0
        elif axis.length != 1:
            outer.append(axis)
    steps = product(*(range(axis.length or 0) for axis in reversed(outer)))
    strides = [axis.stride for axis in reversed(outer)]
    return [(part.offset + sum(i * stride for i, stride in zip(at, strides, strict=True)), length) for at in steps]


def _page_segments(page: Page) -> list[tuple[int, int]]:
    return [segment for part in page.parts for segment in _segments(part)]


def _is_interleaved(page: Page, kernel_stride: int) -> bool:
    """Return whether other layers lie between a page's heads: then a block is one row, as in BHLNC."""
    segments = _page_segments(page)
    return len(segments) > len(page.parts) and max(at for at, _ in segments) < kernel_stride


def _live(geometry: Geometry, ids: IdsLike) -> _Ids:
    """Return ids as int64 without null blocks."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"block ids have dtype {array.dtype} and {array.ndim} dimensions; need 1 of integers")
    array = array.astype(np.int64)
    return array if geometry.null_block is None else array[array != geometry.null_block]


def _clipped(group: Group, ids: _Ids) -> _Ids:
    """Return what is left of a group's blocks after the connector's static clip."""
    if group.kind == "ssm":
        at = max(len(ids) - 1 - group.speculative, 0)
        return ids[at : at + 1]
    if group.kind == "sliding" and group.window is not None:
        return ids[-(-(-group.window // group.block_size) + 1) :]
    return ids


def _paired(ours: Group, other: Group, mine: _Ids, theirs: _Ids) -> tuple[_Ids, _Ids]:
    """Return equally many kernel blocks of both sides."""
    if ours.ratio == other.ratio:
        count = min(len(mine), len(theirs))
        mine, theirs = mine[len(mine) - count :], theirs[len(theirs) - count :]
        return _expanded(mine, ours.ratio), _expanded(theirs, other.ratio)
    mine, theirs = _expanded(mine, ours.ratio), _expanded(theirs, other.ratio)
    count = min(len(mine), len(theirs))
    return mine[:count], theirs[:count]


def _expanded(ids: _Ids, ratio: int) -> _Ids:
    return (ids[:, None] * ratio + np.arange(ratio, dtype=np.int64)).reshape(-1)


def _joined(tables: Sequence[_Ids], groups: tuple[int, ...]) -> _Ids:
    return np.concatenate([np.empty(0, np.int64), *(tables[group] for group in groups)])


def _sends(rows: Sequence[Row]) -> list[tuple[int, tuple[int, ...]]]:
    """Return row and groups of every stretch of ids: within one, blocks of neighbouring groups may merge."""
    if len({row.groups for row in rows}) <= 1:
        return [(index, row.groups) for index, row in enumerate(rows)]
    groups = sorted({group for row in rows for group in row.groups})
    return [(index, (group,)) for group in groups for index, row in enumerate(rows) if group in row.groups]


def _selection(here: Sequence[Row], there: Sequence[Row], mine: Sequence[_Ids], theirs: Sequence[_Ids]) -> Selection:
    total = posted = 0
    for index, groups in _sends(here):
        ours, other = here[index], there[index]
        length = min(ours.length, other.length)
        ids, others = _joined(mine, groups), _joined(theirs, groups)
        total += length * len(ids)
        posted += len(ids) - _merges(ours, other, ids, others, length)
    for rows in (here, there):
        if (entries := sum(row.count for row in rows)) > _MAX_IDS:
            raise AddressOverflowError(f"prepared list of {entries} entries; ids are int32")
    local_ids, remote_ids = (row_ids(rows, tables).astype(np.int32) for rows, tables in ((here, mine), (there, theirs)))
    return Selection(len(local_ids), total, posted, local_ids, remote_ids)


def _merges(ours: Row, other: Row, mine: _Ids, theirs: _Ids, length: int) -> int:
    """Return how many entries NIXL joins to the one before: never across rows, never downwards."""
    joined = np.ones(max(len(mine) - 1, 0), np.bool_)
    for row, ids in ((ours, mine), (other, theirs)):
        # A run in NIXL's list has one stride, so entries that touch are in a dense run, and only those are.
        joined &= (np.diff(ids) == 1) & (np.diff(row.offsets(ids)) == length)
    return int(np.count_nonzero(joined))


def _check_supported(geometry: Geometry) -> None:
    for index, group in enumerate(geometry.groups):
        if group.cp_size != 1:
            raise UnsupportedPairError(f"group {index}: cp_size {group.cp_size}; the baselines need 1")
        if group.kind == "opaque":
            raise UnsupportedPairError(f"group {index}: kind opaque; the baselines know attention and state")
    for layer in geometry.layers:
        if geometry.groups[layer.group].kind != "ssm":
            continue
        for part in layer.page.parts:
            strides = {axis.name: axis.stride for axis in part.axes}
            if strides.get("rows", 0) > strides.get("channels", 0):
                raise UnsupportedPairError(f"{layer.name}: {part.name} is in SD order; vLLM 0.32 moves only DS")


def _check_pair(local: Geometry, remote: Geometry, here: Sequence[Row], there: Sequence[Row]) -> None:
    """Refuse what vLLM 0.32 refuses in the handshake, as far as it changes the selection."""
    checks = [
        ("group kinds", [g.kind for g in local.groups], [g.kind for g in remote.groups]),
        (
            "kernel block tokens",
            [g.kernel_block_size for g in local.groups if g.kind != "ssm"],
            [g.kernel_block_size for g in remote.groups if g.kind != "ssm"],
        ),
        ("regions and their groups", [row.groups for row in here], [row.groups for row in there]),
    ]
    for field, ours, other in checks:
        if ours != other:
            raise UnsupportedPairError(f"{field}: {ours} here, {other} there")
    pages = [_first_page(geometry, False) for geometry in (local, remote)]
    if pages[0] is None or pages[1] is None or pages[0] == pages[1]:
        return
    orders = [_axis_order(page.parts[0]) for page in pages if page]
    if orders[0] != orders[1]:
        raise UnsupportedPairError(f"axes of a page: {orders[0]} here, {orders[1]} there")
    whole = all(len(_page_segments(page)) == len(page.parts) for page in pages if page)
    if pages[0].nbytes != pages[1].nbytes and not (orders[0][0] == "heads" and whole):
        raise UnsupportedPairError(f"axes of a page: {orders[0]}; heads can only be split in a contiguous page")


def _first_page(geometry: Geometry, state: bool) -> Page | None:
    """Return the page of the first layer with state, or of the first with attention."""
    found = (layer.page for layer in geometry.layers if (geometry.groups[layer.group].kind == "ssm") == state)
    return next(found, None)


def _axis_order(part: Part) -> tuple[str, ...]:
    return tuple(axis.name for axis in sorted(part.axes, key=lambda axis: -axis.stride))


def _heads_meet(local: Geometry, remote: Geometry, state: bool) -> bool:
    """Return whether the ranks hold a head in common, of the state or of attention."""
    ranges = []
    for geometry in (local, remote):
        page = _first_page(geometry, state)
        heads = [axis for axis in page.parts[-1].axes if axis.name == "heads"] if page else []
        if not heads:
            return True
        ranges.append(range(heads[0].start, heads[0].start + (heads[0].length or 0)))
    return max(r.start for r in ranges) < min(r.stop for r in ranges)
