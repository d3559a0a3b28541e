# SPDX-License-Identifier: Apache-2.0
"""The prepared lists of other connectors: views of a rank's memory, from which a request's blocks are taken by id.

vLLM 0.32 makes one view of every part of an attention page and of every part of a state page, for each region:

    region   |K0 K1 .|K2 K3 .|K4 ..        K: page of a kernel block, 2 in a logical block; .: padding
    view      K0 K1   K2 K3   K4 ..        entry 2 starts 1 * block_stride + 0 * kernel_stride after entry 0
    ids       0  1    2  3    4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import BlockIdError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Layer, Page, Part

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
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

    def offsets(self, ids: Ids) -> Ids:
        """Return the offset in bytes of each entry from `start`, int64 of the shape of `ids`."""
        return ids // self.ratio * self.block_stride + ids % self.ratio * self.kernel_stride


def vllm_views(geometry: Geometry) -> tuple[View, ...]:
    """Return the prepared list of vLLM 0.32 for one rank: attention of all regions, then state.

    A region is a distinct page address. All groups send from it if several use it, though some may have no
    layer there; else only its own group does. State has four views per region (three of the convolution, two
    for Mamba1 together with the recurrent one).

    Raises:
        UnsupportedPairError: context parallelism, opaque groups, or a convolution state in SD order, which
            that connector refuses.
    """
    users: dict[int, list[Layer]] = {}
    for layer in geometry.layers:
        users.setdefault(geometry.regions[layer.region].base + layer.offset, []).append(layer)
    check_supported(geometry)
    attention = tuple(index for index, group in enumerate(geometry.groups) if group.kind != "ssm")
    states = tuple(index for index, group in enumerate(geometry.groups) if group.kind == "ssm")
    pattern = next((layer for layer in geometry.layers if layer.group in attention), None)
    views: dict[tuple[int, int], View] = {}
    if pattern is not None:
        for start, layers in users.items():
            for view in _attention_views(geometry, pattern, start, _senders(layers, attention)):
                # Where a page is not contiguous, several layers name the same view: it is registered once.
                views.setdefault((view.start, view.length), view)
    found = list(views.values())
    for start, layers in users.items():
        for layer in [layer for layer in layers if layer.group in states][:1]:
            stride, senders = layer.block_stride, _senders(layers, states)
            for part in layer.page.parts:
                found.append(View(start + part.offset, part.nbytes, layer.num_blocks, stride, stride, 1, senders))
    return tuple(found)


def full_attention_views(geometry: Geometry) -> tuple[View, ...]:
    """Return the list of a connector with no HMA: for each layer the views of an attention page, at any address."""
    check_supported(geometry)
    pattern = next((layer for layer in geometry.layers if geometry.groups[layer.group].kind != "ssm"), None)
    if pattern is None:
        first = geometry.layers[0]
        stride, count = first.block_stride, first.num_blocks
        return tuple(View(0, stride, count, stride, stride, 1, (0,)) for _ in geometry.layers)
    views = tuple(_attention_views(geometry, pattern, 0, (0,)))
    if _is_interleaved(pattern.page, views[0].kernel_stride):
        length, ratio = pattern.page.nbytes * len(geometry.layers), views[0].ratio
        return (View(0, length, views[0].count, length * ratio, length, ratio, (0,)),)
    return views * len(geometry.layers)


def sending_order(views: Sequence[View]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the view and the groups of each stretch of ids: within one, blocks of neighbouring groups may merge.

    If all groups send from all views: view by view, the groups' blocks one after the other. Else, so for
    attention beside state, group by group and view by view within.
    """
    if len({view.groups for view in views}) <= 1:
        return [(index, view.groups) for index, view in enumerate(views)]
    groups = sorted({group for view in views for group in view.groups})
    return [(index, (group,)) for group in groups for index, view in enumerate(views) if group in view.groups]


def joined(view: View, tables: Sequence[Ids], groups: tuple[int, ...]) -> Ids:
    """Return the tables of some groups, one after the other: entries of a view.

    Raises:
        BlockIdError: an entry is not in the view.
    """
    ids = np.concatenate([np.empty(0, np.int64), *(tables[group] for group in groups)])
    if ids.size and not (ids.min() >= 0 and ids.max() < view.count):
        raise BlockIdError(f"ids {ids.min()}..{ids.max()}: the view has {view.count} entries")
    return ids


def contiguous_pieces(part: Part, *, limit: int | None = None) -> list[tuple[int, int]]:
    """Return offset in the page and length of the contiguous pieces of a part, by address.

        heads      |<------- stride ------->|             axes from the innermost one on are one piece as long as
        tokens     |t0 t1 t2|               |t0 t1 t2|    each starts where the one before ends; the others are
        pieces      ^^^^^^^^                 ^^^^^^^^     walked

    Args:
        part: the part.
        limit: return the whole part as one piece if there were more; None for all of them.
    """
    length, outer = part.item_bytes, list[Axis]()
    for axis in sorted(part.axes, key=lambda axis: axis.stride):
        if not outer and axis.stride == length:
            length *= axis.shard.held
        elif axis.length != 1:
            outer.append(axis)
    if limit is not None and part.nbytes // length > limit:
        return [(part.offset, part.nbytes)]
    steps = product(*(range(0, axis.shard.held * axis.stride, axis.stride) for axis in outer))
    return sorted((part.offset + sum(offsets), length) for offsets in steps)


def page_pieces(page: Page) -> list[tuple[int, int]]:
    """Return offset and length of the contiguous pieces of all parts of a page."""
    return [piece for part in page.parts for piece in contiguous_pieces(part)]


def check_supported(geometry: Geometry) -> None:
    """Refuse a rank that has no such list.

    Raises:
        UnsupportedPairError: context parallelism, opaque groups, or a convolution state in SD order.
    """
    for index, group in enumerate(geometry.groups):
        if group.cp_size != 1:
            raise UnsupportedPairError(f"group {index}: cp_size {group.cp_size}; a comparison needs 1")
        if group.kind == "opaque":
            raise UnsupportedPairError(f"group {index}: kind opaque; only attention and state can be compared")
    for layer in geometry.layers:
        if geometry.groups[layer.group].kind != "ssm":
            continue
        for part in layer.page.parts:
            strides = {axis.name: axis.stride for axis in part.axes}
            if strides.get("rows", 0) > strides.get("channels", 0):
                raise UnsupportedPairError(f"{layer.name}: {part.name} is in SD order; vLLM 0.32 moves only DS")


def _senders(layers: Iterable[Layer], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of `groups` send from a region: all of them, unless one group alone uses it."""
    users = {layer.group for layer in layers}
    return groups if len(users) > 1 else tuple(group for group in groups if group in users)


def _attention_views(geometry: Geometry, pattern: Layer, start: int, groups: tuple[int, ...]) -> Iterable[View]:
    """Yield the views of one region, cut like the `pattern`'s pages whatever its own layers hold."""
    ratio = geometry.groups[pattern.group].ratio
    step = geometry.kernel_stride(pattern)
    count = pattern.num_blocks * ratio
    if _is_interleaved(pattern.page, step):
        base = geometry.regions[pattern.region].base
        yield View(base, step, count, pattern.block_stride, step, ratio, groups)
        return
    for offset, length in page_pieces(pattern.page):
        yield View(start + offset, length, count, pattern.block_stride, step, ratio, groups)


def _is_interleaved(page: Page, kernel_stride: int) -> bool:
    """Return whether other layers lie between a page's heads: then a block is one entry, as in BHLNC."""
    pieces = page_pieces(page)
    return len(pieces) > len(page.parts) and max(offset for offset, _ in pieces) < kernel_stride
