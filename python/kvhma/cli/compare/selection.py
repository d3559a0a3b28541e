# SPDX-License-Identifier: Apache-2.0
"""Counts what other connectors select when one D rank reads from one P rank.

* :func:`select_vllm`: the selection of vLLM 0.32's NIXL connector between engines of the same build.
* :func:`select_all`: a connector without HMA. Every layer holds and sends every block of the sequence.

A selection has three counts: requested descriptors, bytes, and the descriptors that are left after NIXL merges
neighbours. NIXL joins neighbours of a prepared list only if the ids of both sides increase by one together and both
sides are dense there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.block_tables import main_group
from kvhma.cli.compare.views import (
    Ids,
    View,
    contiguous_pieces,
    full_attention_views,
    joined,
    sending_order,
    vllm_views,
)
from kvhma.errors import AddressOverflowError, RequestError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Page, Part
from kvhma.lowlevel import window_blocks
from kvhma.types import IdsLike

_MAX_ENTRIES = 2**31


@dataclass(frozen=True, slots=True)
class Count:
    """How much is moved.

    Attributes:
        descriptors: contiguous pieces that are requested, on each side.
        bytes: their total length.
    """

    descriptors: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Selection(Count):
    """The descriptors that a connector passes to NIXL.

    Attributes:
        posted: descriptors that are left after NIXL's merging.
        local_tables: kernel blocks of D by group, int64 ``(n,)``.
        remote_tables: the blocks of P that are paired with them.
    """

    posted: int
    local_tables: list[Ids]
    remote_tables: list[Ids]


def select_vllm(
    local: Geometry, remote: Geometry, local_blocks: Sequence[IdsLike], remote_blocks: Sequence[IdsLike]
) -> Selection:
    """Select as vLLM 0.32's NIXL connector does when one D rank reads from one of its P ranks.

    Sliding groups move the last ``ceil(window / block) + 1`` blocks, chunked groups all blocks that they get, state
    groups the one block before the speculative slots. Blocks are expanded to kernel blocks as a whole. The two sides
    are paired from the end of their lists. If their kernel blocks per block differ, they are paired from the start, and
    vLLM then allows no prefix hits. With different TP an entry is the smaller of the two pages, because vLLM splits the
    larger page.

    Args:
        local: geometry of the D rank.
        remote: geometry of the P rank.
        local_blocks: per group, the logical blocks of D to fill, in the order of the sequence. Null blocks are dropped,
            because the manager marks the blocks before the window with them.
        remote_blocks: the same for P.

    Raises:
        UnsupportedPairError: vLLM 0.32 refuses the pair; the text has both values.
        RequestError: the wrong number of groups, or ids that are not integers.
        BlockIdError: an id is out of range.
    """
    for name, geometry, blocks in (("local", local, local_blocks), ("remote", remote, remote_blocks)):
        if len(blocks) != len(geometry.groups):
            raise RequestError(f"{name}_blocks has {len(blocks)} lists for {len(geometry.groups)} groups")
    views = [vllm_views(geometry) for geometry in (local, remote)]
    _check_pair(local, remote, views)
    pairs = []
    for index, (local_group, remote_group) in enumerate(zip(local.groups, remote.groups, strict=True)):
        kept = [
            kept_blocks(local, local_group, local_blocks[index]),
            kept_blocks(remote, remote_group, remote_blocks[index]),
        ]
        if not _share_heads(local, remote, state=local_group.kind == "ssm"):
            kept = [ids[:0] for ids in kept]
        pairs.append(_paired(local_group, remote_group, *kept))
    return _selection(views, pairs)


def select_all(local: Geometry, remote: Geometry, local_blocks: IdsLike, remote_blocks: IdsLike) -> Selection:
    """Select as a connector does that treats every layer as full attention with its own memory.

    All blocks of the sequence move for every layer, as whole pages with their padding. A state is counted as if it had
    grown with the sequence.

    Args:
        local: geometry of the D rank, for its layers and pages; its sharing of memory is ignored.
        remote: geometry of the P rank.
        local_blocks: the logical blocks of the whole sequence on D.
        remote_blocks: the same on P.

    Raises:
        UnsupportedPairError: layers or pages differ in a way that vLLM 0.32 refuses too.
        RequestError: ids that are not integers.
        BlockIdError: an id is out of range.
    """
    views = [full_attention_views(geometry) for geometry in (local, remote)]
    _check_pair(local, remote, views)
    # All layers would be in one group, with the blocks that attention has.
    blocks = _live(local, local_blocks), _live(remote, remote_blocks)
    return _selection(views, [_paired(main_group(local), main_group(remote), *blocks)])


def kept_blocks(geometry: Geometry, group: Group, ids: IdsLike) -> Ids:
    """Return a group's blocks after the connector's static clip, without null blocks."""
    live = _live(geometry, ids)
    if group.kind == "ssm":
        state_slot = max(len(live) - 1 - group.speculative, 0)
        return live[state_slot : state_slot + 1]
    if group.kind == "sliding" and group.window is not None:
        return live[-window_blocks(group.window, group.block_size) :]
    return live


def _live(geometry: Geometry, ids: IdsLike) -> Ids:
    """Return ids as int64 without null blocks."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"block ids have dtype {array.dtype} and {array.ndim} dimensions; need 1 of integers")
    array = array.astype(np.int64)
    return array if geometry.null_block is None else array[array != geometry.null_block]


def _paired(local: Group, remote: Group, local_ids: Ids, remote_ids: Ids) -> tuple[Ids, Ids]:
    """Return the same number of kernel blocks for both sides.

    same ratio, from the end       different ratio, kernel blocks from the start
    local        7 8 9             local    |0 1 2|3 4 5|
    remote   1 2 3 4 5             remote   |0 1|2 3|
    pairs        3 4 5             pairs     0 1 2 3
    """
    if local.ratio == remote.ratio:
        count = min(len(local_ids), len(remote_ids))
        local_ids, remote_ids = local_ids[len(local_ids) - count :], remote_ids[len(remote_ids) - count :]
        return _kernel_blocks(local_ids, local.ratio), _kernel_blocks(remote_ids, remote.ratio)
    local_ids, remote_ids = _kernel_blocks(local_ids, local.ratio), _kernel_blocks(remote_ids, remote.ratio)
    count = min(len(local_ids), len(remote_ids))
    return local_ids[:count], remote_ids[:count]


def _kernel_blocks(ids: Ids, ratio: int) -> Ids:
    return (ids[:, None] * ratio + np.arange(ratio, dtype=np.int64)).reshape(-1)


def _selection(sides: Sequence[Sequence[View]], pairs: Sequence[tuple[Ids, Ids]]) -> Selection:
    """Count what is requested: `pairs` has the kernel blocks of both sides, by group."""
    for views in sides:
        if (entries := sum(view.count for view in views)) > _MAX_ENTRIES:
            raise AddressOverflowError(f"prepared list of {entries} entries; ids are int32")
    local, remote = sides
    local_tables, remote_tables = ([pair[side] for pair in pairs] for side in (0, 1))
    descriptors = total = posted = 0
    for index, groups in sending_order(local):
        length = min(local[index].length, remote[index].length)
        local_ids = joined(local[index], local_tables, groups)
        remote_ids = joined(remote[index], remote_tables, groups)
        merged = _is_joined(local[index], local_ids, length) & _is_joined(remote[index], remote_ids, length)
        descriptors += len(local_ids)
        total += length * len(local_ids)
        posted += len(local_ids) - int(np.count_nonzero(merged))
    return Selection(descriptors, total, posted, local_tables, remote_tables)


def _is_joined(view: View, ids: Ids, length: int) -> NDArray[np.bool_]:
    """Return for each entry except the first whether this side lets NIXL join it to the previous entry.

    A run in NIXL's list has one stride, so exactly the entries that touch each other form a dense run. NIXL never joins
    across two views, and never joins descending ids.
    """
    joins: NDArray[np.bool_] = (np.diff(ids) == 1) & (np.diff(view.offsets(ids)) == length)
    return joins


def _check_pair(local: Geometry, remote: Geometry, views: Sequence[Sequence[View]]) -> None:
    """Refuse what vLLM 0.32 refuses in the handshake, as far as it affects the selection."""
    groups = [[group for group in rank.groups if group.kind != "ssm"] for rank in (local, remote)]
    _check_equal("group kinds", *([group.kind for group in rank.groups] for rank in (local, remote)))
    _check_equal("kernel block tokens", *([group.kernel_block_size for group in side] for side in groups))
    _check_equal("regions and their groups", *([view.groups for view in side] for side in views))
    _check_lengths(local, remote, views)
    pages = [next(_pages(rank), None) for rank in (local, remote)]
    if pages[0] is None or pages[1] is None or pages[0] == pages[1]:
        return
    orders = [_axis_order(page.parts[0]) for page in pages if page]
    _check_equal("axes of a page", *orders)
    whole = all(len(contiguous_pieces(part)) == 1 for page in pages if page for part in page.parts)
    if pages[0].nbytes != pages[1].nbytes and not (orders[0][0] == "heads" and whole):
        raise UnsupportedPairError(f"axes of a page: {orders[0]}; heads can only be split in a contiguous page")


def _check_lengths(local: Geometry, remote: Geometry, views: Sequence[Sequence[View]]) -> None:
    """Refuse regions if vLLM would assert that their lengths have the ratio of the heads of the first layer."""
    axes = [heads_axis(rank) for rank in (local, remote)]
    heads = [axis.shard.held if axis else 1 for axis in axes]
    for index, (at_local, at_remote) in enumerate(zip(*views, strict=True)):
        if not at_local.groups or local.groups[at_local.groups[0]].kind == "ssm":
            continue
        scale = (1, 1) if at_local.is_latent else heads
        if at_local.length * scale[1] != at_remote.length * scale[0]:
            raise UnsupportedPairError(
                f"region {index}: {at_local.length} bytes on D, {at_remote.length} on P, with {heads[0]} and "
                f"{heads[1]} heads"
            )


def _check_equal(field: str, local: object, remote: object) -> None:
    if local != remote:
        raise UnsupportedPairError(f"{field}: {local} on D, {remote} on P")


def _pages(geometry: Geometry, *, state: bool = False) -> Iterator[Page]:
    """Yield the pages of layers with state, or of those with attention."""
    return (layer.page for layer in geometry.layers if (geometry.groups[layer.group].kind == "ssm") == state)


def heads_axis(geometry: Geometry, *, state: bool = False) -> Axis | None:
    """Return the heads axis of the first state that has such an axis, or of KV heads; None without such an axis."""
    parts = (page.parts[-1 if state else 0] for page in _pages(geometry, state=state))
    return next((axis for part in parts for axis in part.axes if axis.name == "heads"), None)


def _axis_order(part: Part) -> tuple[str, ...]:
    return tuple(axis.name for axis in sorted(part.axes, key=lambda axis: -axis.stride))


def _share_heads(local: Geometry, remote: Geometry, *, state: bool) -> bool:
    """Return whether the ranks share a head of the state or of attention."""
    axes = [heads_axis(geometry, state=state) for geometry in (local, remote)]
    shards = [axis.shard for axis in axes if axis]
    if len(shards) < 2:
        return True
    return max(shard.start for shard in shards) < min(shard.start + shard.held for shard in shards)
