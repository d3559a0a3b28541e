# SPDX-License-Identifier: Apache-2.0
"""What vLLM's hybrid memory allocator makes of a model, as the geometry of one tensor-parallel rank.

Layers of one sort form a bucket, buckets are cut into groups of equal size, and the j-th layers of all groups
share tensor j: at any time a block id belongs to one group, so the bytes of a block are one group's. All
pages of a block have one size: recurrent state that does not fit an attention page makes the block longer
until it does, and attention with fewer or smaller heads holds more tokens in a block, or is padded. In orders
with the block outermost pages of several sizes lie side by side instead. :mod:`kvhma.models.grouping` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast, get_args

from kvhma.errors import LayoutError
from kvhma.geometry import Geometry, Group, Kind, Layer, Memory, Page, Region
from kvhma.models.block_size import KernelBlock, has_attention, hybrid_block_size, kernel_block_size, token_bytes
from kvhma.models.grouping import LayerSpec, Members, group_layers
from kvhma.models.pages import ConvOrder, attention_page, state_bytes, state_parts
from kvhma.models.shards import check_positive, kv_heads, shard
from kvhma.models.stride_orders import PAGE_ORDERS, KVForm, Order, stride_axes
from kvhma.models.table import LATENT_KINDS, Attention, CacheKind, Model, State

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AllocatorOptions", "CacheGroup", "LayoutOptions", "cache_groups", "layout"]


class AllocatorOptions(TypedDict, total=False):
    """How an engine's allocator was asked to cut a model.

    Attributes:
        tp_rank: index among the tensor-parallel ranks; 0.
        tp_size: tensor-parallel ranks; 1.
        block_size: tokens per block that the user asked for, 16; state can make the logical block longer, and so can
            heads that differ by layer.
        kernel_block: tokens that the attention kernel addresses as one block: a number, ``"flashinfer"`` for
            that kernel's choice, or None, the default, for the whole logical block.
        align: see :func:`kvhma.models.block_size.hybrid_block_size`; None.
        conv: how channels and rows of the convolution state lie; ``"DS"``.
        speculative: extra state slots after the state-bearing one; 0.
    """

    tp_rank: int
    tp_size: int
    block_size: int
    kernel_block: KernelBlock
    align: int | None
    conv: ConvOrder
    speculative: int


class LayoutOptions(AllocatorOptions, total=False):
    """The same, and where the memory is.

    Attributes:
        order: stride order, ``"LBHNC"``. Models with state need one with contiguous pages, and so do several groups
            whose layers have different heads.
        kv: how K and V lie, ``"packed"``; MLA, and V of another length than K, have only that.
        one_storage: one region for all tensors instead of one each, False. Block-major orders always have one.
        base: address of the first region, 1 << 20.
        region_align: bytes, 4096; every region starts at a multiple of it, at or after `base`.
        memory: ``"DRAM"``, the default, or ``"VRAM"``.
        device: device id, 0.
    """

    order: Order
    kv: KVForm
    one_storage: bool
    base: int
    region_align: int
    memory: Memory
    device: int


@dataclass(frozen=True, slots=True)
class _Options:
    """All of :class:`LayoutOptions`, with their defaults."""

    num_blocks: int
    tp_rank: int = 0
    tp_size: int = 1
    block_size: int = 16
    kernel_block: KernelBlock = None
    align: int | None = None
    conv: ConvOrder = "DS"
    speculative: int = 0
    order: Order = "LBHNC"
    kv: KVForm = "packed"
    one_storage: bool = False
    base: int = 1 << 20
    region_align: int = 4096
    memory: Memory = "DRAM"
    device: int = 0

    @property
    def is_block_major(self) -> bool:
        return self.order[0] == "B"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. Where all pages have one size the j-th of them uses tensor j.

    Attributes:
        kind: what its layers cache; where they are of several kinds, that of the first.
        layers: their names; never more than there are tensors.
        block_size: tokens of a block.
        pages: bytes of a page of each layer, padding included.
    """

    kind: CacheKind
    layers: tuple[str, ...]
    block_size: int
    pages: tuple[int, ...]


def cache_groups(
    model: Model, *, tp_size: int = 1, block_size: int = 16, align: int | None = None, order: Order = "LBHNC"
) -> tuple[CacheGroup, ...]:
    """Cut a model's layers into groups, as vLLM's allocator does.

    Layers of one sort are cut into groups of the size of the smallest sort. If the largest sort has less than 1.5
    times the smallest, its size is taken instead. Layers that need blocks for the same tokens, as latents and their
    index do, are one group even if their pages differ, where there is nothing else.

    Args:
        model: the model.
        tp_size: tensor-parallel ranks: heads of a rank say how large a page is.
        block_size: as for :func:`layout`.
        align: as for :func:`layout`.
        order: as for :func:`layout`; those with the block outermost hold pages of several sizes.

    Returns:
        The groups: sorts in the order in which the model first uses them, each cut with stride, so that
        neighbouring layers are in different groups.

    Raises:
        LayoutError: the model has no cache at all, or cannot be laid out so.
    """
    groups = _grouped(model, _Options(1, tp_size=tp_size, block_size=block_size, align=align, order=order))
    return tuple(
        CacheGroup(_first(group).kind, tuple(group), _first(group).block_size, tuple(y.page for y in group.values()))
        for group in groups
    )


def layout(model: Model, *, num_blocks: int, **options: Unpack[LayoutOptions]) -> Geometry:
    """Lay a model out as vLLM does and return the geometry of one rank.

    Args:
        model: the model.
        num_blocks: logical blocks of every tensor, the null block 0 included.
        **options: see :class:`AllocatorOptions` and :class:`LayoutOptions`.

    Returns:
        The geometry. Regions are the tensors, layers are in model order, groups as in :func:`cache_groups`.

    Raises:
        LayoutError: a combination that this allocator cannot make, or with which vLLM does not start an engine; the
            text names the field and its value.
        GeometryError: an argument is out of range.
        AddressOverflowError: `base` leaves no room.
    """
    asked = _Options(num_blocks, **options)
    check_positive(num_blocks=num_blocks, region_align=asked.region_align)
    if not 0 <= asked.tp_rank < asked.tp_size:
        raise LayoutError(f"tp_rank {asked.tp_rank}: tp_size is {asked.tp_size}")
    _check_forms(model, asked)
    groups = _grouped(model, asked)
    _check_pages(groups, asked)
    block_bytes = max(sum(spec.page for spec in group.values()) for group in groups)
    placed = [_place(group, asked, block_bytes) for group in groups]
    tensors = _tensors(placed, asked, block_bytes)
    layers = {
        name: _layer(name, index, layer, tensors, num_blocks)
        for index, group in enumerate(placed)
        for name, layer in group.items()
    }
    return Geometry(
        regions=_regions(tensors, asked),
        groups=tuple(_group(group, asked) for group in groups),
        layers=tuple(layers[name] for name, _ in model.caches()),
        tp_rank=asked.tp_rank,
        tp_size=asked.tp_size,
    )


# --- Groups and what they can be ------------------------------------------------------------------------


def _first(group: Members) -> LayerSpec:
    return next(iter(group.values()))


def _grouped(model: Model, options: _Options) -> list[Members]:
    """Return the groups of one rank."""
    tp_size = options.tp_size
    if model.query_heads is not None and has_attention(model):
        shard("query_heads", model.query_heads, 0, tp_size)
    logical = hybrid_block_size(model, tp_size=tp_size, block_size=options.block_size, align=options.align)
    state = state_bytes(model.state, tp_size=tp_size) if model.state else 0
    padded = logical * token_bytes(model.token_spec(), tp_size=tp_size) if has_attention(model) else state
    specs = {}
    for name, cache in model.specs():
        if isinstance(cache, State):
            specs[name] = LayerSpec(cache, (), cache.kind, logical, state, padded)
        else:
            held = (kv_heads(cache, 0, tp_size).held, cache.head_dim, cache.v_head_dim, cache.dtype)
            page = logical * token_bytes(cache, tp_size=tp_size)
            specs[name] = LayerSpec(cache, held, cache.kind, logical, page, page, cache.window, cache.chunk)
    if not specs:
        raise LayoutError(f"layers: {model.name} has no layer with a cache")
    return group_layers(specs, block_major=options.is_block_major)


def _check_forms(model: Model, options: _Options) -> None:
    """Refuse what no engine has: the field and value are what the caller can change."""
    order, kv = options.order, options.kv
    for field, value, known in (("order", order, Order), ("kv", kv, KVForm), ("conv", options.conv, ConvOrder)):
        if value not in get_args(known):
            raise LayoutError(f"{field} {value!r}: known are {', '.join(get_args(known))}")
    if model.state is not None and order not in PAGE_ORDERS:
        raise LayoutError(f"order {order!r}: a state page must be contiguous, as in {', '.join(PAGE_ORDERS)}")
    if kv == "packed":
        return
    for name, spec in model.specs():
        if spec.kind in LATENT_KINDS:
            raise LayoutError(f"kv {kv!r}: an MLA latent has no K and V to separate")
        if isinstance(spec, Attention) and spec.v_head_dim is not None:
            raise LayoutError(f"kv {kv!r}: head_dim {spec.head_dim} and v_head_dim {spec.v_head_dim} of {name} differ")
    if order not in PAGE_ORDERS:
        raise LayoutError(f"kv {kv!r} with order {order!r}: K and V are separate only in contiguous pages")
    if kv == "apart" and (order[0] != "L" or model.state is not None):
        # K of block b would lie in the bytes of another block's state.
        raise LayoutError(f"kv 'apart' with order {order!r} and state {model.state is not None}: pages must be whole")


def _check_pages(groups: list[Members], options: _Options) -> None:
    """Refuse orders in which pages of several sizes or shapes would lie in each other's bytes."""
    specs = [spec for group in groups for spec in group.values()]
    sizes = ", ".join(sorted({f"{spec.page} bytes of {spec.block_size} tokens" for spec in specs}))
    padded = any(spec.page != spec.content and not spec.is_state for spec in specs)
    if options.kv == "apart" and padded:
        raise LayoutError(f"kv 'apart': padded pages ({sizes}) must be whole")
    if options.order in PAGE_ORDERS:
        return
    heads = {kv_heads(spec.cache, 0, options.tp_size).held for spec in specs if isinstance(spec.cache, Attention)}
    # With heads outside of blocks a block has bytes between those of others, as its shape says.
    crossing = options.order[0] == "L" and len(groups) > 1 and len(heads) > 1
    if padded or crossing or len({spec.page for spec in specs}) > 1:
        raise LayoutError(f"order {options.order!r}: pages of {sizes} need an order of {', '.join(PAGE_ORDERS)}")


def _group(group: Members, options: _Options) -> Group:
    """Return the group as a geometry has it; that of several kinds is of the first that is no latent."""
    spec = next((spec for spec in group.values() if spec.kind not in LATENT_KINDS), _first(group))
    if isinstance(spec.cache, State):
        return Group("ssm", spec.block_size, speculative=options.speculative)
    return Group(
        "mla" if spec.kind in LATENT_KINDS else cast("Kind", spec.kind),
        spec.block_size,
        ratio=spec.block_size // kernel_block_size(options.kernel_block, spec.block_size),
        window=spec.window,
        chunk=spec.chunk,
    )


# --- Where layers lie -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a layer is in the memory that all groups share; `size` is the bytes of its own range of it."""

    page: Page
    offset: int
    size: int
    block_stride: int
    kernel_stride: int | None


def _place(group: Members, options: _Options, block_bytes: int) -> dict[str, _Placed]:
    """Place a group's layers: those of one spec lie together, in the order in which each spec comes first."""
    sorts: dict[LayerSpec, list[str]] = {}
    for name, spec in group.items():
        sorts.setdefault(spec, []).append(name)
    placed: dict[str, _Placed] = {}
    start = 0
    for spec, names in sorts.items():
        kernel = spec.block_size if spec.is_state else kernel_block_size(options.kernel_block, spec.block_size)
        ratio = spec.block_size // kernel
        if ratio > 1 and spec.page != spec.content:
            raise LayoutError(
                f"kernel_block {kernel}: a page of {spec.page} bytes with {spec.content} used is not cut further"
            )
        strides = _strides(spec, len(names), kernel, options, block_bytes)
        pages = {cache: _page(cache, kernel, strides, options) for cache in {group[name].cache for name in names}}
        # Given only where it is not what a geometry assumes anyway.
        kernel_stride = None if spec.is_state or strides["K"] * ratio == strides["B"] else strides["K"]
        for index, name in enumerate(names):
            offset, size = start + index * strides["L"], spec.page * options.num_blocks
            placed[name] = _Placed(pages[group[name].cache], offset, size, strides["B"], kernel_stride)
        start += len(names) * (spec.page if options.is_block_major else strides["L"])
    return placed


def _page(cache: Attention | State, kernel: int, strides: dict[str, int], options: _Options) -> Page:
    if isinstance(cache, State):
        return Page(state_parts(cache, options.tp_rank, options.tp_size, options.conv))
    return attention_page(cache, kernel, strides, options.tp_rank, options.tp_size)


def _strides(spec: LayerSpec, layers: int, kernel: int, options: _Options, block_bytes: int) -> dict[str, int]:
    """Return bytes from one index to the next for every axis; C is counted in bytes.

        LBHNC    |layer 0: block 0|block 1|..|layer 1: block 0|..      L = blocks * page, B = page
        BLHNC    |block 0: layer 0|layer 1|..|block 1: layer 0|..      L = page, B = block_bytes
        a page   |H0: N0 N1 ..|H1: N0 N1 ..|padding|                   H = tokens * N, N = bytes of a token

    A page can be padded, and where the block is outermost other layers lie in it too.
    """
    sizes = {"L": layers, "B": options.num_blocks, "K": spec.block_size // kernel, "S": 2, "H": 1, "N": kernel}
    if isinstance(spec.cache, State):
        sizes |= {"N": 1, "C": spec.content}
    else:
        halves = 1 if options.kv == "packed" else 2
        heads = kv_heads(spec.cache, options.tp_rank, options.tp_size).held
        sizes |= {"H": heads, "C": spec.cache.token_bytes // halves}
    axes, strides, step = stride_axes(options.order, options.kv, kernel_blocks_in_page=True), dict[str, int](), 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= sizes[axis]
        if options.order in PAGE_ORDERS and axis == "K" and options.kv != "apart":
            step = spec.page  # contiguous but for what pads it
    if options.is_block_major:
        strides["B"] = block_bytes
        if axes[1] == "K":
            strides["K"] = block_bytes // sizes["K"]
    return strides


def _tensors(placed: list[dict[str, _Placed]], options: _Options, block_bytes: int) -> dict[int, int]:
    """Return offset and bytes of every region; offsets as those of the layers."""
    if options.one_storage or options.is_block_major:
        return {0: block_bytes * options.num_blocks}
    spans = {layer.offset: layer.size for group in placed for layer in group.values()}
    return dict(sorted(spans.items()))


def _regions(tensors: dict[int, int], options: _Options) -> tuple[Region, ...]:
    """Return the regions, each at the next multiple of the alignment."""
    regions, align = [], options.region_align
    start = -(-options.base // align) * align
    for length in tensors.values():
        regions.append(Region(start, length, options.memory, options.device))
        start += -(-length // align) * align
    return tuple(regions)


def _layer(name: str, group: int, placed: _Placed, tensors: dict[int, int], num_blocks: int) -> Layer:
    """Return the layer, in its own region or in the one of all."""
    shared = len(tensors) == 1
    return Layer(
        name=name,
        group=group,
        region=0 if shared else list(tensors).index(placed.offset),
        offset=placed.offset if shared else 0,
        num_blocks=num_blocks,
        block_stride=placed.block_stride,
        page=placed.page,
        kernel_stride=placed.kernel_stride,
    )
