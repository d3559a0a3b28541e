# SPDX-License-Identifier: Apache-2.0
"""What vLLM's hybrid memory allocator makes of a model, as the geometry of one tensor-parallel rank.

Layers of one sort form a bucket, buckets are cut into groups of equal size, and the j-th layers of all groups
share tensor j: at any time a block id belongs to one group, so the bytes of a block are one group's. All
pages of a block have one size: recurrent state that does not fit an attention page makes the block longer
until it does, and attention with fewer or smaller heads holds more tokens in a block, or is padded. In orders
with the block outermost pages of several sizes lie side by side instead. :mod:`kvhma.models.grouping` has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from kvhma.errors import LayoutError
from kvhma.geometry import Axis, Geometry, Group, Kind, Layer, Memory, Page, Part, Region, Shard
from kvhma.models.grouping import LayerSpec, Members, group_layers
from kvhma.models.stride_orders import PAGE_ORDERS, KVForm, Order, stride_axes
from kvhma.models.table import (
    INDEX_KEY,
    INDEX_SCALE,
    LATENT_KINDS,
    STATE_KINDS,
    Attention,
    CacheKind,
    Model,
    State,
    item_bytes,
)

__all__ = [
    "CacheGroup",
    "ConvOrder",
    "KVForm",
    "Order",
    "Summary",
    "cache_groups",
    "conv_split",
    "flashinfer_kernel_block",
    "hybrid_block_size",
    "kv_bytes",
    "layout",
    "state_bytes",
    "state_parts",
    "summary",
]


ConvOrder: TypeAlias = Literal["DS", "SD"]
"""``DS``: channels, then rows (rows innermost); ``SD``: rows, then channels."""

_FLASHINFER_BLOCKS = (64, 32, 16)
_SMALLEST_KERNEL_BLOCK = 16
_MLA_ALIGN = 128


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


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's cache in numbers, for one rank.

    Attributes:
        groups: kind and number of groups, in the order of the block tables.
        tensors: memory ranges that all groups share.
        padded_slots: places ``(group, tensor)`` without a layer.
        block_size: tokens of a logical block; of the longest, where groups differ.
        kernel_block: tokens of a kernel block in such a block.
        state_bytes: bytes of one layer's state, 0 if there is none.
        kv_bytes: bytes of one token in the attention layer that has the most, 0 if there is none.
    """

    groups: tuple[tuple[CacheKind, int], ...]
    tensors: int
    padded_slots: int
    block_size: int
    kernel_block: int
    state_bytes: int
    kv_bytes: int

    @property
    def ratio(self) -> int:
        """Kernel blocks in a logical block."""
        return self.block_size // self.kernel_block


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
    groups = _grouped(model, tp_size, block_size, align, order)
    return tuple(
        CacheGroup(_first(group).kind, tuple(group), _first(group).block_size, tuple(y.page for y in group.values()))
        for group in groups
    )


def conv_split(state: State, *, tp_rank: int = 0, tp_size: int = 1) -> dict[str, Shard]:
    """Return the channels of every part of the convolution state that a rank holds, by name, in memory order.

    ``x`` and ``v`` follow the heads. ``B`` and ``C`` follow the groups: split if `tp_size` divides them; a single
    group is held whole by every rank. Key heads of GDN and KDA are always split.

    Raises:
        LayoutError: heads or groups do not divide over the ranks; vLLM does not start such an engine.
    """
    columns = {}
    for name, extent in state.conv_parts:
        if name in ("x", "v"):
            items, start, length = state.n_heads, *_shard("state.n_heads", state.n_heads, tp_rank, tp_size)
        else:
            items = state.n_groups
            may_repeat = state.kind == "mamba2" and items == 1
            start, length = _shard("state.n_groups", items, tp_rank, tp_size, may_repeat=may_repeat)
        width = extent // items
        columns[name] = Shard(extent, start * width, length * width)
    return columns


def state_bytes(state: State, *, tp_size: int = 1) -> int:
    """Return the bytes of one layer's state on one rank, without padding.

    Raises:
        LayoutError: heads or groups do not divide over the ranks.
    """
    return sum(part.nbytes for part in state_parts(state, 0, tp_size, "DS"))


def kv_bytes(model: Model, *, tp_size: int = 1) -> int:
    """Return the bytes of one token on one rank in the attention layer that has the most; 0 without attention.

    Raises:
        LayoutError: heads do not divide over the ranks.
    """
    return max((_token_bytes(spec, tp_size) for _, spec in model.specs() if isinstance(spec, Attention)), default=0)


def hybrid_block_size(model: Model, *, tp_size: int = 1, block_size: int = 16, align: int | None = None) -> int:
    """Return the tokens of a logical block: the least multiple of `align` whose page holds a state.

    The page is one of the model's own heads. Groups whose layers have other heads can have longer blocks.

    Args:
        model: the model.
        tp_size: tensor-parallel ranks.
        block_size: tokens per block that the user asked for; the result for a model without state or
            attention.
        align: tokens; None for the larger of `block_size` and the smallest kernel block (16, MLA 128).

    Raises:
        LayoutError: a size is not positive, or does not divide over the ranks.
    """
    _positive(block_size=block_size, tp_size=tp_size)
    if model.state is None or not _has_attention(model):
        return block_size
    token = model.token_spec()
    per_token = _token_bytes(token, tp_size)
    if align is None:
        align = max(_MLA_ALIGN if token.kind == "mla" else _SMALLEST_KERNEL_BLOCK, block_size)
    _positive(align=align)
    return align * -(-state_bytes(model.state, tp_size=tp_size) // (align * per_token))


def flashinfer_kernel_block(block_size: int) -> int:
    """Return the kernel block that FlashInfer picks: the largest of 64, 32, 16 that divides the block.

    Raises:
        LayoutError: none of them does.
    """
    for tokens in _FLASHINFER_BLOCKS:
        if block_size % tokens == 0:
            return tokens
    raise LayoutError(f"block_size {block_size}: FlashInfer needs a multiple of {_FLASHINFER_BLOCKS[-1]}")


def summary(
    model: Model,
    *,
    tp_size: int = 1,
    block_size: int = 16,
    kernel_block: int | Literal["flashinfer"] | None = "flashinfer",
    align: int | None = None,
) -> Summary:
    """Return what the allocator makes of a model, in numbers. Arguments and errors as for :func:`layout`."""
    groups = cache_groups(model, tp_size=tp_size, block_size=block_size, align=align)
    tensors = max(len(group.layers) for group in groups)
    kinds = list(dict.fromkeys(group.kind for group in groups))
    # A block of state has no kernel blocks of its own.
    logical = max((group.block_size for group in groups if group.kind not in STATE_KINDS), default=groups[0].block_size)
    return Summary(
        groups=tuple((kind, sum(group.kind == kind for group in groups)) for kind in kinds),
        tensors=tensors,
        padded_slots=len(groups) * tensors - len(model.caches()),
        block_size=logical,
        kernel_block=_kernel_block(kernel_block, logical) if _has_attention(model) else logical,
        state_bytes=state_bytes(model.state, tp_size=tp_size) if model.state else 0,
        kv_bytes=kv_bytes(model, tp_size=tp_size),
    )


def layout(
    model: Model,
    *,
    num_blocks: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    block_size: int = 16,
    kernel_block: int | Literal["flashinfer"] | None = None,
    align: int | None = None,
    order: Order = "LBHNC",
    kv: KVForm = "packed",
    conv: ConvOrder = "DS",
    speculative: int = 0,
    one_storage: bool = False,
    base: int = 1 << 20,
    region_align: int = 4096,
    memory: Memory = "DRAM",
    device: int = 0,
) -> Geometry:
    """Lay a model out as vLLM does and return the geometry of one rank.

    Args:
        model: the model.
        num_blocks: logical blocks of every tensor, the null block 0 included.
        tp_rank: place among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        block_size: tokens per block that the user asked for; state can make the logical block longer, and so can
            heads that differ by layer.
        kernel_block: tokens that the attention kernel addresses as one block: a number, ``"flashinfer"`` for
            that kernel's choice, or None for the whole logical block.
        align: see :func:`hybrid_block_size`.
        order: stride order. Models with state need one with contiguous pages, and so do several groups whose
            layers have different heads.
        kv: how K and V lie; MLA, and V of another length than K, have only ``"packed"``.
        conv: how channels and rows of the convolution state lie.
        speculative: extra state slots behind the state-bearing one.
        one_storage: one region for all tensors instead of one each. Block-major orders always have one.
        base: address of the first region.
        region_align: bytes; every region starts at a multiple of it, at or behind `base`.
        memory: ``"DRAM"`` or ``"VRAM"``.
        device: device id.

    Returns:
        The geometry. Regions are the tensors, layers are in model order, groups as in :func:`cache_groups`.

    Raises:
        LayoutError: a combination that this allocator cannot make, or with which vLLM does not start an engine; the
            text names the field and its value.
        GeometryError: an argument is out of range.
        AddressOverflowError: `base` leaves no room.
    """
    _positive(num_blocks=num_blocks, region_align=region_align)
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(f"tp_rank {tp_rank}: tp_size is {tp_size}")
    _check_forms(model, order, kv, conv)
    groups = _grouped(model, tp_size, block_size, align, order)
    form = _Form(order, kv, conv, kernel_block, tp_rank, tp_size, num_blocks, _block_bytes(groups))
    _check_pages(groups, form)
    placed = [_place(group, form) for group in groups]
    spans = _tensors(placed, form, one_storage=one_storage)
    first = -(-base // region_align) * region_align
    regions, starts = [], {}
    for index, (offset, length) in enumerate(spans.items()):
        regions.append(Region(first, length, memory, device))
        starts[offset] = index
        first += -(-length // region_align) * region_align
    layers = {}
    for index, group in enumerate(placed):
        for name, found in group.items():
            region = starts.get(found.offset, 0) if len(spans) > 1 else 0
            layers[name] = Layer(
                name=name,
                group=index,
                region=region,
                offset=0 if len(spans) > 1 else found.offset,
                num_blocks=num_blocks,
                block_stride=found.block_stride,
                page=found.page,
                kernel_stride=found.kernel_stride,
            )
    return Geometry(
        regions=tuple(regions),
        groups=tuple(_group(group, form, speculative) for group in groups),
        layers=tuple(layers[name] for name, _ in model.caches()),
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """How a rank's pages lie in its memory, for all groups alike; the fields are arguments of :func:`layout`."""

    order: str
    kv: str
    conv: str
    kernel_block: int | Literal["flashinfer"] | None
    tp_rank: int
    tp_size: int
    num_blocks: int
    block_bytes: int
    """Bytes of a block over all its layers."""

    @property
    def is_block_major(self) -> bool:
        return self.order[0] == "B"


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a layer is in the memory that all groups share; `size` is the bytes of its own range of it."""

    page: Page
    offset: int
    size: int
    block_stride: int
    kernel_stride: int | None


def _first(group: Members) -> LayerSpec:
    return next(iter(group.values()))


def _grouped(model: Model, tp_size: int, block_size: int, align: int | None, order: str) -> list[Members]:
    """Return the groups of one rank."""
    if model.query_heads is not None and _has_attention(model):
        _shard("query_heads", model.query_heads, 0, tp_size)
    logical = hybrid_block_size(model, tp_size=tp_size, block_size=block_size, align=align)
    state = state_bytes(model.state, tp_size=tp_size) if model.state else 0
    padded = logical * _token_bytes(model.token_spec(), tp_size) if _has_attention(model) else state
    specs = {}
    for name, cache in model.specs():
        if isinstance(cache, State):
            specs[name] = LayerSpec(cache, (), cache.kind, logical, state, padded)
        else:
            held = (_heads(cache, 0, tp_size)[1], cache.head_dim, cache.v_head_dim, cache.dtype)
            page = logical * _token_bytes(cache, tp_size)
            specs[name] = LayerSpec(cache, held, cache.kind, logical, page, page, cache.window, cache.chunk)
    if not specs:
        raise LayoutError(f"layers: {model.name} has no layer with a cache")
    return group_layers(specs, block_major=order[0] == "B")


def _token_bytes(cache: Attention, tp_size: int) -> int:
    """Return the bytes of a token on one rank."""
    return _heads(cache, 0, tp_size)[1] * cache.token_bytes


def _heads(cache: Attention, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return start and length of a rank's heads; every rank has the one vector of a latent."""
    _positive(tp_size=tp_size)
    if cache.kind in LATENT_KINDS:
        return 0, 1
    return _shard("kv_heads", cache.kv_heads, tp_rank, tp_size, may_repeat=True)


def _has_attention(model: Model) -> bool:
    return any(isinstance(spec, Attention) for _, spec in model.specs())


def _block_bytes(groups: list[Members]) -> int:
    return max(sum(spec.page for spec in group.values()) for group in groups)


def _place(group: Members, form: _Form) -> dict[str, _Placed]:
    """Place a group's layers: those of one spec lie together, in the order in which each spec comes first."""
    sorts: dict[LayerSpec, list[str]] = {}
    for name, spec in group.items():
        sorts.setdefault(spec, []).append(name)
    placed, start = {}, 0
    for spec, names in sorts.items():
        kernel = spec.block_size if spec.is_state else _kernel_block(form.kernel_block, spec.block_size)
        strides = _strides(spec, len(names), kernel, form)
        ratio = spec.block_size // kernel
        if ratio > 1 and spec.page != spec.content:
            raise LayoutError(
                f"kernel_block {kernel}: a page of {spec.page} bytes with {spec.content} used is not cut further"
            )
        pages = {cache: _page(cache, kernel, strides, form) for cache in {group[name].cache for name in names}}
        for index, name in enumerate(names):
            placed[name] = _Placed(
                pages[group[name].cache],
                start + index * strides["L"],
                spec.page * form.num_blocks,
                strides["B"],
                # Given only where it is not what a geometry assumes anyway.
                None if spec.is_state or strides["K"] * ratio == strides["B"] else strides["K"],
            )
        start += len(names) * (spec.page if form.is_block_major else strides["L"])
    return placed


def _tensors(placed: list[dict[str, _Placed]], form: _Form, *, one_storage: bool) -> dict[int, int]:
    """Return offset and bytes of every region; offsets as those of the layers."""
    if one_storage or form.is_block_major:
        return {0: form.block_bytes * form.num_blocks}
    spans = {found.offset: found.size for group in placed for found in group.values()}
    return dict(sorted(spans.items()))


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise LayoutError(f"{name} {value}: must be at least 1")


def _shard(field: str, items: int, rank: int, size: int, *, may_repeat: bool = False) -> tuple[int, int]:
    """Return start and length of the items of one rank."""
    _positive(tp_size=size)
    if items % size == 0:
        return rank * (items // size), items // size
    if may_repeat and size % items == 0:
        return rank * items // size, 1
    raise LayoutError(f"tp_size {size}: {field} {items} cannot be shared out evenly")


def _kernel_block(asked: int | str | None, logical: int) -> int:
    if asked == "flashinfer":
        return flashinfer_kernel_block(logical)
    if asked is None:
        return logical
    if not isinstance(asked, int) or asked < 1 or logical % asked:
        raise LayoutError(f"kernel_block {asked!r}: must divide the logical block of {logical} tokens")
    return asked


def _check_forms(model: Model, order: str, kv: str, conv: str) -> None:
    """Refuse what no engine has: the field and value are what the caller can change."""
    for field, value, known in (("order", order, Order), ("kv", kv, KVForm), ("conv", conv, ConvOrder)):
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


def _check_pages(groups: list[Members], form: _Form) -> None:
    """Refuse orders in which pages of several sizes or shapes would lie in each other's bytes."""
    specs = [spec for group in groups for spec in group.values()]
    told = ", ".join(sorted({f"{spec.page} bytes of {spec.block_size} tokens" for spec in specs}))
    padded = any(spec.page != spec.content and not spec.is_state for spec in specs)
    if form.kv == "apart" and padded:
        raise LayoutError(f"kv 'apart': padded pages ({told}) must be whole")
    if form.order in PAGE_ORDERS:
        return
    shapes = {_heads(spec.cache, 0, form.tp_size)[1] for spec in specs if isinstance(spec.cache, Attention)}
    # With heads outside of blocks a block has bytes between those of others, as its shape says.
    crossing = form.order[0] == "L" and len(groups) > 1 and len(shapes) > 1
    if padded or crossing or len({spec.page for spec in specs}) > 1:
        raise LayoutError(f"order {form.order!r}: pages of {told} need an order of {', '.join(PAGE_ORDERS)}")


def _strides(spec: LayerSpec, layers: int, kernel: int, form: _Form) -> dict[str, int]:
    """Return bytes from one index to the next for every axis; C is counted in bytes.

    A page can be padded, and where the block is outermost other layers lie in it too.
    """
    sizes = {"L": layers, "B": form.num_blocks, "K": spec.block_size // kernel, "S": 2, "H": 1, "N": kernel}
    if isinstance(spec.cache, State):
        sizes |= {"N": 1, "C": spec.content}
    else:
        halves = 1 if form.kv == "packed" else 2
        heads = _heads(spec.cache, form.tp_rank, form.tp_size)[1]
        sizes |= {"H": heads, "C": spec.cache.token_bytes // halves}
    axes, strides, step = stride_axes(form.order, form.kv, kernel_blocks_in_page=True), {}, 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= sizes[axis]
        if form.order in PAGE_ORDERS and axis == "K" and form.kv != "apart":
            step = spec.page  # contiguous but for what pads it
    if form.is_block_major:
        strides["B"] = form.block_bytes
        if axes[1] == "K":
            strides["K"] = form.block_bytes // sizes["K"]
    return strides


def _group(group: Members, form: _Form, speculative: int) -> Group:
    """Return the group as a geometry has it; that of several kinds is of the first that is no latent."""
    spec = next((spec for spec in group.values() if spec.kind not in LATENT_KINDS), _first(group))
    if isinstance(spec.cache, State):
        return Group("ssm", spec.block_size, speculative=speculative)
    return Group(
        "mla" if spec.kind in LATENT_KINDS else cast("Kind", spec.kind),
        spec.block_size,
        ratio=spec.block_size // _kernel_block(form.kernel_block, spec.block_size),
        window=spec.window,
        chunk=spec.chunk,
    )


def _page(cache: Attention | State, kernel: int, strides: Mapping[str, int], form: _Form) -> Page:
    if isinstance(cache, State):
        return Page(state_parts(cache, form.tp_rank, form.tp_size, form.conv))
    if cache.kind == "indexer":
        return Page(_index_parts(kernel))
    if cache.dtype is None:
        raise LayoutError(f"dtype None of {cache.kind} attention")
    item = item_bytes(cache.dtype)
    tokens = Axis("tokens", kernel, strides["N"])
    if cache.kind == "mla":
        return Page((Part("kv", cache.dtype, item, 0, (tokens, Axis("content", cache.head_dim, item))),))
    heads = Axis("heads", cache.kv_heads, strides["H"], *_heads(cache, form.tp_rank, form.tp_size))
    if form.kv == "packed":
        return Page((Part("kv", cache.dtype, item, 0, (heads, tokens, Axis("content", cache.items, item))),))
    axes = (heads, tokens, Axis("content", cache.head_dim, item))
    return Page(tuple(Part(name, cache.dtype, item, at * strides["S"], axes) for at, name in enumerate("kv")))


def _index_parts(tokens: int) -> tuple[Part, ...]:
    """Return the parts of an index page as its writer has them: the keys of all tokens, then all scales."""
    sizes = (("data", 0, INDEX_KEY), ("scales", tokens * INDEX_KEY, INDEX_SCALE))
    return tuple(
        Part(name, "uint8", 1, offset, (Axis("tokens", tokens, size), Axis("content", size, 1)))
        for name, offset, size in sizes
    )


def state_parts(state: State, tp_rank: int, tp_size: int, conv: str) -> tuple[Part, ...]:
    """Return the parts of one state page: the convolution's, then ``ssm`` if there is one; no gaps between them.

    Args:
        state: the state over all ranks.
        tp_rank: place among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        conv: how channels and rows of the convolution state lie.

    Raises:
        LayoutError: heads or groups do not divide over the ranks.
    """
    columns = conv_split(state, tp_rank=tp_rank, tp_size=tp_size)
    item, rows = item_bytes(state.conv_dtype), state.d_conv - 1 + state.draft_rows
    width = sum(part.held for part in columns.values())
    channel_stride, row_stride = (rows * item, item) if conv == "DS" else (item, width * item)
    parts, before = [], 0
    for name, part in columns.items():
        axes = (
            Axis("channels", part.extent, channel_stride, part.start, part.length),
            Axis("rows", rows, row_stride, spare=state.draft_rows),
        )
        parts.append(Part(name, state.conv_dtype, item, before * channel_stride, axes))
        before += part.held
    if not state.is_recurrent:
        return tuple(parts)
    cell = item_bytes(state.ssm_dtype)
    content = state.head_dim * state.d_state
    heads = _shard("state.n_heads", state.n_heads, tp_rank, tp_size)
    axes = (Axis("heads", state.n_heads, content * cell, *heads), Axis("content", content, cell))
    return (*parts, Part("ssm", state.ssm_dtype, cell, math.prod((width, rows, item)), axes))
