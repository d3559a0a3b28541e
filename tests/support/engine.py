# SPDX-License-Identifier: Apache-2.0
"""One engine of a generated pair: how it cuts a model into groups, pages, pools and regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from kvhma.geometry import Axis, Geometry, Group, Kind, Layer, Memory, Page, Part, Region
from support.model import AxisSpec, Family, PartSpec

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True)
class GroupShape:
    """A group of an engine: layers of one family, cut into blocks; `kind` may be ``full`` for windows.

    `turn` is how many tokens a context-parallel rank has before the next one, None for a block.
    """

    family: Family
    kind: Kind
    layers: tuple[str, ...]
    kernel_tokens: int
    ratio: int
    cp: bool
    turn: int | None = None

    @property
    def block_size(self) -> int:
        return self.kernel_tokens * self.ratio

    def needed(self, tokens: int) -> int:
        """Return the first token that is still needed."""
        if self.kind == "sliding":
            return max(0, tokens - self.family.limit + 1)
        return tokens // self.family.limit * self.family.limit if self.kind == "chunked" else 0


@dataclass(frozen=True)
class Shape:
    """What all ranks of an engine have in common, and what equal ranks of P and D share.

    Attributes:
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        pp: pipeline stages.
        groups: in the order of the block tables.
        order: one of the six stride orders.
        kv: where the axis of a page with K and V apart is: ``outer`` or ``inner``.
        conv: ``SD`` (rows first) or ``DS`` (channels first).
        shared: whether groups share memory (HMA).
        split_kernel: in block-major orders, whether layers are inside a kernel block.
        spread: whether padding of a block is spread over its kernel blocks.
        row_pad: bytes of padding after each innermost row.
        page_pad: bytes of padding after each kernel page.
        block_pad: bytes of padding after each logical block.
        overlap: whether uneven shards overlap.
    """

    tp: int
    cp: int
    pp: int
    groups: tuple[GroupShape, ...]
    order: str
    kv: str
    conv: str
    shared: bool
    split_kernel: bool
    spread: bool
    row_pad: int
    page_pad: int
    block_pad: int
    overlap: bool


@dataclass(frozen=True)
class Placement:
    """What only one engine knows: addresses and ids."""

    ids: tuple[tuple[int, ...], ...]
    null_block: int | None
    regions: str
    base: int
    gap: int
    lead: int
    spare: int
    memory: Memory
    device: int
    devices: int
    id_type: str


def shard(axis: AxisSpec, tp: int, rank: int, overlap: bool) -> tuple[int, int]:
    """Return start and length of what a rank holds of an axis."""
    units = axis.extent // axis.unit
    if axis.rule == "whole" or (axis.rule == "groups" and units % tp):
        return 0, axis.extent
    low = rank * units // tp
    high = (rank + 1) * units // tp
    if units < tp:
        high = low + 1
    elif overlap:
        high = -(-(rank + 1) * units // tp)
    return low * axis.unit, (high - low) * axis.unit


def dense(axes: Sequence[tuple[str, int]], step: int) -> dict[str, int]:
    """Return strides of a dense array of axes, the last one innermost, `step` bytes an item."""
    strides = {}
    for name, length in reversed(axes):
        strides[name] = step
        step *= length
    return strides


@dataclass
class _Area:
    """Bytes that will be a region or a piece of one."""

    size: int
    layers: list[tuple[str, int, int, int, int, Page, int | None]] = field(default_factory=list)


class Rank:
    """Builds the geometry of one rank."""

    def __init__(
        self, shape: Shape, place: Placement, tp_rank: int, cp_rank: int, stage: int, names: list[str]
    ) -> None:
        self.shape, self.place = shape, place
        self.tp_rank, self.cp_rank, self.stage = tp_rank, cp_rank, stage
        self.mine = set(names)
        self.areas: list[_Area] = []
        self._page = cache(self._build_page)  # the same for all layers of a group

    def geometry(self) -> Geometry:
        """Build the layout of all groups and return the checked geometry."""
        groups = self.shape.groups
        attention = [i for i, group in enumerate(groups) if self._heads(group.family)]
        if self.shape.order == "LHBNC":
            # With heads outside of blocks, only layers with equal rows can share memory.
            pools: dict[tuple[int, ...], list[int]] = {}
            for i in attention:
                key = (
                    self._heads(groups[i].family),
                    self._row_bytes(groups[i]) * groups[i].ratio,
                    groups[i].ratio,
                )
                pools.setdefault(key if self.shape.shared else (i,), []).append(i)
            for members in pools.values():
                self._heads_outside(members)
            rest = [i for i in range(len(groups)) if i not in attention]
        else:
            rest = list(range(len(groups)))
        for members in [rest] if self.shape.shared else [[i] for i in rest]:
            if self.shape.order.startswith("B"):
                self._blocks_outside(members)
            else:
                self._layers_outside(members)
        return self._assemble()

    # How many blocks a pool needs: ids are the engine's, so every pool has room for its largest.
    def _blocks(self, members: Sequence[int]) -> int:
        largest = max((max(self.place.ids[i], default=0) for i in members), default=0)
        return largest + 1 + (self.place.spare + self.tp_rank) % 4

    def _layers_of(self, index: int) -> list[str]:
        return [name for name in self.shape.groups[index].layers if name in self.mine]

    def _heads(self, family: Family) -> int:
        for axis in family.parts[0].axes:
            if axis.name == "heads" and family.attention:
                return shard(axis, self.shape.tp, self.tp_rank, self.shape.overlap)[1]
        return 0

    def _lengths(self, part: PartSpec, tokens: int) -> dict[str, tuple[int, int]]:
        """Return start and length of each axis."""
        return {
            axis.name: (0, tokens)
            if axis.name == "tokens"
            else shard(axis, self.shape.tp, self.tp_rank, self.shape.overlap)
            for axis in part.axes
        }

    def _part(self, spec: PartSpec, tokens: int, strides: dict[str, int], offset: int) -> Part:
        axes = []
        for axis in spec.axes:
            start, length = self._lengths(spec, tokens)[axis.name]
            extent = tokens if axis.name == "tokens" else axis.extent
            axes.append(Axis(axis.name, extent, strides[axis.name], start, length))
        return Part(spec.name, spec.dtype, spec.item_bytes, offset, tuple(axes))

    def _inner(self, spec: PartSpec) -> list[str]:
        """Return the axes of a head's row, outermost first."""
        names = [axis.name for axis in spec.axes]
        return [name for name in ("kv", "tokens", "content", "packed") if name in names]

    def _row_bytes(self, group: GroupShape) -> int:
        """Return the bytes of one head in one kernel block."""
        spec = group.family.parts[0]
        lengths = self._lengths(spec, group.kernel_tokens)
        size = spec.item_bytes
        for name in self._inner(spec):
            size *= lengths[name][1]
        return size

    def _build_page(self, group: GroupShape) -> tuple[Page, int]:
        """Return a page whose bytes are contiguous, and its size."""
        if group.family.kind == "ssm":
            return self._state_page(group.family)
        parts, offset = [], 0
        for spec in group.family.parts:
            names = [axis.name for axis in spec.axes]
            outer = ["tokens", "heads"] if self.shape.order.endswith("NHC") else ["heads", "tokens"]
            order = [name for name in (*outer, "content", "packed", "bytes") if name in names]
            if "kv" in names:
                order.insert(0 if self.shape.kv == "outer" else len(order) - 1, "kv")
            lengths = self._lengths(spec, group.kernel_tokens)
            last = order[-1]
            row = lengths[last][1] * spec.item_bytes + self.shape.row_pad * spec.item_bytes
            sized = [(name, lengths[name][1]) for name in order[:-1]]
            strides = {last: spec.item_bytes, **dense(sized, row)}
            parts.append(self._part(spec, group.kernel_tokens, strides, offset))
            size = row
            for _, length in sized:
                size *= length
            offset += size
        return Page(tuple(parts)), offset + self.shape.page_pad

    def _state_page(self, family: Family) -> tuple[Page, int]:
        conv, ssm = family.parts[:-1], family.parts[-1]
        lengths = [self._lengths(spec, 0) for spec in conv]
        rows, item = conv[0].axes[0].extent, conv[0].item_bytes
        width = sum(length["channels"][1] for length in lengths)
        parts, channel = [], 0
        for spec, length in zip(conv, lengths, strict=True):
            if self.shape.conv == "SD":
                strides, offset = {"rows": width * item, "channels": item}, channel * item
            else:
                strides, offset = {"rows": item, "channels": rows * item}, channel * rows * item
            parts.append(self._part(spec, 0, strides, offset))
            channel += length["channels"][1]
        start = -(-rows * width * item // ssm.item_bytes) * ssm.item_bytes
        held = [(axis.name, self._lengths(ssm, 0)[axis.name][1]) for axis in ssm.axes]
        strides = dense(held, ssm.item_bytes)
        parts.append(self._part(ssm, 0, strides, start))
        size = start + strides[held[0][0]] * held[0][1]
        return Page(tuple(parts)), size + self.shape.page_pad

    def _layers_outside(self, members: Sequence[int]) -> None:
        """LB orders: every layer has its own array of blocks; layers of several groups share it."""
        blocks = self._blocks(members)
        for slot in range(max((len(self._layers_of(i)) for i in members), default=0)):
            here = [i for i in members if slot < len(self._layers_of(i))]
            pages = {i: self._page(self.shape.groups[i]) for i in here}
            stride = max(self.shape.groups[i].ratio * pages[i][1] for i in here) + self.shape.block_pad
            if self.shape.spread:
                unit = self.shape.groups[here[0]].ratio
                stride = -(-stride // unit) * unit
            area = _Area(blocks * stride)
            for i in here:
                ratio, (page, size) = self.shape.groups[i].ratio, pages[i]
                kernel = None if self.shape.spread and stride % ratio == 0 else size
                kernel = None if ratio == 1 or (kernel == stride // ratio and stride % ratio == 0) else kernel
                area.layers.append((self._layers_of(i)[slot], i, 0, blocks, stride, page, kernel))
            self.areas.append(area)

    def _heads_outside(self, members: Sequence[int]) -> None:
        """LHBNC: for each layer, head by head, the rows of all blocks."""
        blocks = self._blocks(members)
        group = self.shape.groups[members[0]]
        heads, row, ratio = self._heads(group.family), self._row_bytes(group), group.ratio
        stride = row * ratio
        head_stride = blocks * stride + self.shape.block_pad
        for slot in range(max(len(self._layers_of(i)) for i in members)):
            area = _Area(heads * head_stride)
            for i in members:
                if slot < len(self._layers_of(i)):
                    page = self._headed_page(self.shape.groups[i], head_stride)
                    name = self._layers_of(i)[slot]
                    area.layers.append((name, i, 0, blocks, stride, page, None if self.shape.spread else row))
            self.areas.append(area)

    def _headed_page(self, group: GroupShape, head_stride: int) -> Page:
        spec = group.family.parts[0]
        lengths = self._lengths(spec, group.kernel_tokens)
        strides = dense([(name, lengths[name][1]) for name in self._inner(spec)], spec.item_bytes)
        return Page((self._part(spec, group.kernel_tokens, {**strides, "heads": head_stride}, 0),))

    def _blocks_outside(self, members: Sequence[int]) -> None:
        """BL and BH orders: all layers of a block are contiguous; each group divides a block its own way."""
        blocks = self._blocks(members)
        plans = []
        for i in members:
            group, names = self.shape.groups[i], self._layers_of(i)
            if not names:
                continue
            if self.shape.order == "BHLNC" and self._heads(group.family):
                row = self._row_bytes(group)
                page = self._headed_page(group, len(names) * row)
                kernel, step = self._heads(group.family) * len(names) * row + self.shape.page_pad, row
                total = kernel * group.ratio
            else:
                page, size = self._page(group)
                inside = self.shape.split_kernel and group.ratio > 1
                kernel, step = (len(names) * size, size) if inside else (size, size * group.ratio)
                total = len(names) * size * group.ratio
            plans.append((i, names, page, kernel, step, total))
        if not plans:
            return
        stride = max(plan[-1] for plan in plans) + self.shape.block_pad
        area = _Area(blocks * stride)
        for i, names, page, kernel, step, _ in plans:
            ratio = self.shape.groups[i].ratio
            default = ratio == 1 or (stride % ratio == 0 and stride // ratio == kernel)
            for place, name in enumerate(names):
                area.layers.append((name, i, place * step, blocks, stride, page, None if default else kernel))
        self.areas.append(area)

    def _assemble(self) -> Geometry:
        """Give areas their regions and addresses."""
        place = self.place
        regions: list[Region] = []
        layers: list[Layer] = []
        base = place.base + 4096 * 1024 * (self.tp_rank + 8 * self.cp_rank + 32 * self.stage)
        offset = place.lead
        for area in self.areas:
            for name, group, start, blocks, stride, page, kernel in area.layers:
                at = len(regions)
                layers.append(Layer(name, group, at, offset + start, blocks, stride, page, kernel))
            offset += area.size
            if place.regions == "each":
                device = place.device + len(regions) % place.devices
                regions.append(Region(base, offset, place.memory, device))
                base += offset + place.gap
                offset = place.lead
            else:
                offset += place.gap
        if place.regions == "one":
            regions.append(Region(base, offset + place.gap + 1, place.memory, place.device))
        layers.sort(key=lambda layer: int(layer.name.split(".")[2]))
        return Geometry(
            regions=tuple(regions),
            groups=tuple(self._group(group) for group in self.shape.groups),
            layers=tuple(layers),
            tp_rank=self.tp_rank,
            tp_size=self.shape.tp,
            null_block=place.null_block,
        )

    def _group(self, shape: GroupShape) -> Group:
        family = shape.family
        return Group(
            kind=shape.kind,
            block_size=shape.block_size,
            ratio=shape.ratio,
            window=family.limit if shape.kind == "sliding" else None,
            chunk=family.limit if shape.kind == "chunked" else None,
            speculative=family.speculative,
            cp_rank=self.cp_rank if shape.cp else 0,
            cp_size=self.shape.cp if shape.cp else 1,
            cp_interleave=shape.turn if shape.cp and self.shape.cp > 1 else None,
        )
