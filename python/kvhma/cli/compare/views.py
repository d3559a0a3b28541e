# SPDX-License-Identifier: Apache-2.0
"""The prepared lists of other connectors: views of a rank's memory, indexed by the ids of a request's blocks.

vLLM 0.32 makes a region of each page address, and a view of each region. A region is as long as the page of the first
layer that is registered at that address, or of the last latent there:

    region   |P0 P1 .|P2 P3 .|P4 ..        P: page of a kernel block, 2 in a logical block; .: padding
    view      P0 P1   P2 P3   P4 ..        entry 2 starts 1 * block_stride + 0 * kernel_stride after entry 0
    ids       0  1    2  3    4

Only parts of a state are separate entries; any other page that is one run is one entry. The rules follow
``NixlBaseConnectorWorker.register_kv_caches`` (vllm 0.32, nixl/base_worker.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import BlockIdError, NotCountedError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Layer, Page, Part

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """Equal entries of a prepared list: an entry for every kernel block of a region.

    Attributes:
        start: address of entry 0.
        length: bytes of an entry.
        count: entries.
        block_stride: bytes between logical blocks.
        kernel_stride: bytes between the kernel blocks of a logical block.
        ratio: entries of a logical block.
        groups: the groups whose blocks are sent from here, in the order of their ids.
        is_latent: whether every tensor-parallel rank holds the same bytes in it.
    """

    start: int
    length: int
    count: int
    block_stride: int
    kernel_stride: int
    ratio: int
    groups: tuple[int, ...] = ()
    is_latent: bool = False

    def offsets(self, ids: Ids) -> Ids:
        """Return the offset in bytes of each entry from `start`, int64 with the shape of `ids`."""
        return ids // self.ratio * self.block_stride + ids % self.ratio * self.kernel_stride


def vllm_views(geometry: Geometry) -> tuple[View, ...]:
    """Return the prepared list of vLLM 0.32 for one rank: attention of all regions, then state.

    If several groups use a region, all groups send from it, though some may have no layer there; otherwise only its own
    group sends. If there is state, all attention groups send from all regions. State has four views per region: three
    of the convolution (Mamba1: one), and the recurrent state.

    Raises:
        NotCountedError: it is not known how that connector treats the cache.
        UnsupportedPairError: the connector makes no list; the text says why.
    """
    check_supported(geometry)
    ratios = sorted({group.ratio for group in geometry.groups if group.kind != "ssm"})
    if len(ratios) > 1:
        raise NotCountedError(f"kernel blocks of a block: {ratios} by group; vLLM 0.32 has one number for all")
    attention = tuple(index for index, group in enumerate(geometry.groups) if group.kind != "ssm")
    states = tuple(index for index, group in enumerate(geometry.groups) if group.kind == "ssm")
    regions, users = _regions(geometry)
    found = [
        replace(region, groups=attention if states else _senders(users[start], attention))
        for start, region in regions.items()
    ]
    for start, layers in users.items():
        first_state = next((layer for layer in layers if layer.group in states), None)
        if first_state is not None:
            found += _state_views(start, first_state, states)
    return tuple(found)


def _regions(geometry: Geometry) -> tuple[dict[int, View], dict[int, list[Layer]]]:
    """Return the region at each address, and the layers that are registered there, in vLLM's order."""
    regions, users = dict[int, View](), dict[int, list[Layer]]()
    for layer in sorted(geometry.layers, key=lambda layer: _region_order(layer.name)):
        for region in _registered(geometry, layer):
            if region.is_latent or region.start not in regions:
                regions[region.start] = region
            users.setdefault(region.start, []).append(layer)
    return regions, users


def _state_views(start: int, layer: Layer, groups: tuple[int, ...]) -> list[View]:
    stride = layer.block_stride
    return [
        View(start + part.offset, part.nbytes, layer.num_blocks, stride, stride, 1, groups) for part in layer.page.parts
    ]


def full_attention_views(geometry: Geometry) -> tuple[View, ...]:
    """Return the list of a connector without HMA: for each layer views of its pages, at any address.

    All layers then have blocks of one length, that of the first attention group. A state counts as much as an attention
    layer holds.
    """
    check_supported(geometry)
    pattern = _first_attention(geometry)
    if pattern is None:
        first = geometry.layers[0]
        stride, count = first.block_stride, first.num_blocks
        return tuple(View(0, stride, count, stride, stride, 1, (0,)) for _ in geometry.layers)
    group = geometry.groups[pattern.group]
    tokens, count = group.kernel_block_size, pattern.num_blocks * group.ratio
    found, interleaved = list[View](), 0
    for layer in geometry.layers:
        own = pattern if geometry.groups[layer.group].kind == "ssm" else layer
        own_group, step = geometry.groups[own.group], geometry.kernel_stride(own)

        def scaled(length: int, own_tokens: int = own_group.kernel_block_size) -> int:
            return length * tokens // own_tokens

        if _is_interleaved(own.page, step):
            interleaved += scaled(own.page.nbytes)
            continue
        strides = own.block_stride, step, group.ratio
        if (own_group.block_size, own_group.ratio) != (group.block_size, group.ratio):
            strides = scaled(own.page.nbytes), scaled(own.page.nbytes), 1
        found += [View(0, scaled(length), count, *strides, (0,)) for _, length in page_runs(own.page)]
    if interleaved:
        found.append(View(0, interleaved, count, interleaved * group.ratio, interleaved, group.ratio, (0,)))
    return tuple(found)


def sending_order(views: Sequence[View]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the view and the groups of each run of ids in which blocks of neighbouring groups may merge.

    If all groups send from all views, the order is view by view, with the groups' blocks after each other. Otherwise,
    so for attention next to state, the order is group by group, and view by view in each group.
    """
    if len({view.groups for view in views}) <= 1:
        return [(index, view.groups) for index, view in enumerate(views)]
    groups = sorted({group for view in views for group in view.groups})
    return [(index, (group,)) for group in groups for index, view in enumerate(views) if group in view.groups]


def joined(view: View, tables: Sequence[Ids], groups: tuple[int, ...]) -> Ids:
    """Return the tables of some groups after each other, as entries of a view.

    Raises:
        BlockIdError: an entry is not in the view.
    """
    ids = np.concatenate([np.empty(0, np.int64), *(tables[group] for group in groups)])
    if ids.size and not (ids.min() >= 0 and ids.max() < view.count):
        raise BlockIdError(f"ids {ids.min()}..{ids.max()}: the view has {view.count} entries")
    return ids


def contiguous_pieces(part: Part, *, limit: int | None = None) -> list[tuple[int, int]]:
    """Return offset in the page and length of a part's contiguous pieces, by address.

        heads      |<------- stride ------->|             The innermost axes form one piece as long as each entry
        tokens     |t0 t1 t2|               |t0 t1 t2|    starts where the previous entry ends. The outer axes are
        pieces      ^^^^^^^^                 ^^^^^^^^     walked.

    Args:
        part: the part.
        limit: return the whole part as one piece if it has more pieces; None for all pieces.
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


def page_runs(page: Page) -> list[tuple[int, int]]:
    """Return offset and length of the runs of a page's bytes, across its parts, by address."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(piece for part in page.parts for piece in contiguous_pieces(part)):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return runs


def check_supported(geometry: Geometry) -> None:
    """Refuse a rank that has no such list.

    Raises:
        NotCountedError: context parallelism, or opaque groups.
        UnsupportedPairError: a state that is neither Mamba's nor a gated delta net's, or a convolution state in SD
            order: vLLM 0.32 refuses both.
    """
    for index, group in enumerate(geometry.groups):
        if group.cp_size != 1:
            raise NotCountedError(f"group {index}: cp_size {group.cp_size}; a comparison needs 1")
        if group.kind == "opaque":
            raise NotCountedError(f"group {index}: kind opaque; only attention and state can be compared")
    for layer in geometry.layers:
        if geometry.groups[layer.group].kind == "ssm":
            _check_state(layer)


def _check_state(layer: Layer) -> None:
    # A short convolution has no part ssm; linear attention has only that part.
    if layer.page.parts[-1].name != "ssm" or len(layer.page.parts) == 1:
        names = ", ".join(part.name for part in layer.page.parts)
        raise UnsupportedPairError(f"{layer.name}: state of {names}; vLLM 0.32 moves only states of Mamba and GDN")
    for part in layer.page.parts:
        strides = {axis.name: axis.stride for axis in part.axes}
        if strides.get("rows", 0) > strides.get("channels", 0):
            raise UnsupportedPairError(f"{layer.name}: {part.name} is in SD order; vLLM 0.32 moves only DS")


def _region_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort names as vLLM does: numbers by value, and before letters."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _first_attention(geometry: Geometry) -> Layer | None:
    return next((layer for layer in geometry.layers if geometry.groups[layer.group].kind != "ssm"), None)


def _senders(layers: Sequence[Layer], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of `groups` send from a region: all of them, unless a single group uses the region."""
    users = {layer.group for layer in layers}
    return groups if len(users) > 1 else tuple(users)


def _registered(geometry: Geometry, layer: Layer) -> Iterator[View]:
    """Yield the regions that vLLM registers for a layer.

    Raises:
        UnsupportedPairError: padded pages between pages of other layers, for which vLLM registers no region.
    """
    start = geometry.regions[layer.region].base + layer.offset
    if geometry.groups[layer.group].kind == "ssm":
        pattern = _first_attention(geometry)
        ratio = 1 if pattern is None else geometry.groups[pattern.group].ratio
        # If the block is the outermost axis, its stride covers all layers; a state is as long as attention there.
        page = layer.block_stride
        if pattern is not None and _is_block_major(geometry, layer):
            page = min(page, pattern.page.nbytes * ratio)
        yield View(start, page // ratio, layer.num_blocks * ratio, layer.block_stride, page // ratio, ratio)
        return
    ratio, step = geometry.groups[layer.group].ratio, geometry.kernel_stride(layer)
    count, runs = layer.num_blocks * ratio, page_runs(layer.page)
    is_latent = all(axis.name != "heads" for part in layer.page.parts for axis in part.axes)
    is_alone = len({(placed.region, placed.offset) for placed in geometry.layers}) == 1
    is_padded = runs == [(0, layer.page.nbytes)] and layer.page.nbytes < step
    if is_padded and not (is_alone or _is_block_major(geometry, layer)):
        raise UnsupportedPairError(
            f"{layer.name}: a page of {step} bytes with {layer.page.nbytes} used; vLLM 0.32 registers no padded pages"
        )
    if (is_padded and is_alone) or _is_interleaved(layer.page, step):
        base = geometry.regions[layer.region].base
        yield View(base, step, count, layer.block_stride, step, ratio, is_latent=is_latent)
        return
    for offset, length in runs:
        yield View(start + offset, length, count, layer.block_stride, step, ratio, is_latent=is_latent)


def _is_block_major(geometry: Geometry, layer: Layer) -> bool:
    """Return whether each block holds all layers, because vLLM has one allocation for them."""
    total = sum(region.bytes for region in geometry.regions)
    return 0 <= total - layer.num_blocks * layer.block_stride < layer.block_stride


def _is_interleaved(page: Page, kernel_stride: int) -> bool:
    """Return whether other layers are between a page's heads, as in BHLNC; a block is one entry then."""
    runs = page_runs(page)
    return len(runs) > 1 and max(offset for offset, _ in runs) < kernel_stride
