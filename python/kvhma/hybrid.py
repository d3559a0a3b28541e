# SPDX-License-Identifier: Apache-2.0
"""What vLLM's hybrid memory allocator makes of a model, as the geometry of one tensor-parallel rank.

Layers of one kind form a bucket, buckets are cut into groups of equal size, and the j-th layers of all groups
share tensor j: at any time a block id belongs to one group, so the bytes of a block are one group's. All
pages of a block have one size; recurrent state that does not fit an attention page makes the block longer
until it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from kvhma.errors import KvhmaError
from kvhma.geometry import Axis, Geometry, Group, Kind, Layer, Memory, Page, Part, Region, Shard
from kvhma.models import ATTENTION_KINDS, STATE_KINDS, CacheKind, Model, State, item_bytes
from kvhma.stride_orders import PAGE_ORDERS, KVForm, Order, stride_axes

ConvOrder: TypeAlias = Literal["DS", "SD"]
"""``DS``: channels, then rows (rows innermost); ``SD``: rows, then channels."""

_FLASHINFER_BLOCKS = (64, 32, 16)
_SMALLEST_KERNEL_BLOCK = 16
_MLA_ALIGN = 128


class LayoutError(KvhmaError, ValueError):
    """A model cannot be laid out as asked; the text names the field and its value."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. The j-th of them uses tensor j.

    Attributes:
        kind: what its layers cache.
        layers: their names; never more than there are tensors.
    """

    kind: CacheKind
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's cache in numbers, for one rank.

    Attributes:
        groups: kind and number of groups, in the order of the block tables.
        tensors: memory ranges that all groups share.
        padded_slots: places ``(group, tensor)`` without a layer.
        block_size: tokens of a logical block.
        kernel_block: tokens of a kernel block.
        state_bytes: bytes of one layer's state, 0 if there is none.
        kv_bytes: bytes of one token in one attention layer, 0 if there is none.
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


def cache_groups(model: Model) -> tuple[CacheGroup, ...]:
    """Cut a model's layers into groups of the size of the smallest bucket.

    If the largest bucket has less than 1.5 times the smallest, its size is taken instead: a few empty places
    cost less than twice the block tables.

    Returns:
        The groups: buckets in the order in which the model first uses them, each cut with stride, so that
        neighbouring layers are in different groups.

    Raises:
        LayoutError: the model has no cache at all.
    """
    buckets: dict[CacheKind, list[str]] = {}
    for name, kind in model.caches():
        buckets.setdefault(kind, []).append(name)
    if not buckets:
        raise LayoutError(f"layers: {model.name} has no layer with a cache")
    sizes = [len(names) for names in buckets.values()]
    size = max(sizes) if 2 * max(sizes) < 3 * min(sizes) else min(sizes)
    groups = []
    for kind, names in buckets.items():
        count = -(-len(names) // size)
        groups += [CacheGroup(kind, tuple(names[first::count])) for first in range(count)]
    return tuple(groups)


def conv_split(state: State, *, tp_rank: int = 0, tp_size: int = 1) -> dict[str, Shard]:
    """Return the channels of every part of the convolution state that a rank holds, by name, in memory order.

    ``x`` and ``v`` follow the heads. ``B`` and ``C`` follow the groups: split if `tp_size` divides them; with
    fewer groups than ranks a rank holds, whole, the one group that its heads use. Key heads of GDN are always
    split.

    Raises:
        LayoutError: heads or groups do not divide over the ranks.
    """
    columns = {}
    for name, extent in state.conv_parts:
        if name in ("x", "v"):
            items, start, length = state.n_heads, *_shard("state.n_heads", state.n_heads, tp_rank, tp_size)
        else:
            may_repeat = state.kind == "mamba2"
            items = state.n_groups
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
    """Return the bytes of one token in one attention layer on one rank; 0 for a model without attention.

    Raises:
        LayoutError: the KV heads do not divide over the ranks, or MLA and other attention are mixed.
    """
    kinds = _attention_kinds(model)
    if not kinds:
        return 0
    if "mla" in kinds:
        return model.head_dim * model.dtype_bytes
    _, heads = _shard("kv_heads", model.kv_heads, 0, tp_size, may_repeat=True)
    return heads * 2 * model.head_dim * model.dtype_bytes


def hybrid_block_size(model: Model, *, tp_size: int = 1, block_size: int = 16, align: int | None = None) -> int:
    """Return the tokens of a logical block: the least multiple of `align` whose page holds a state.

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
    per_token = kv_bytes(model, tp_size=tp_size)
    if model.state is None or per_token == 0:
        return block_size
    if align is None:
        align = max(_MLA_ALIGN if "mla" in _attention_kinds(model) else _SMALLEST_KERNEL_BLOCK, block_size)
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
    groups = cache_groups(model)
    tensors = max(len(group.layers) for group in groups)
    kinds = list(dict.fromkeys(group.kind for group in groups))
    logical = hybrid_block_size(model, tp_size=tp_size, block_size=block_size, align=align)
    return Summary(
        groups=tuple((kind, sum(group.kind == kind for group in groups)) for kind in kinds),
        tensors=tensors,
        padded_slots=len(groups) * tensors - len(model.caches()),
        block_size=logical,
        kernel_block=_kernel_block(kernel_block, logical) if _attention_kinds(model) else logical,
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
        block_size: tokens per block that the user asked for; state can make the logical block longer.
        kernel_block: tokens that the attention kernel addresses as one block: a number, ``"flashinfer"`` for
            that kernel's choice, or None for the whole logical block.
        align: see :func:`hybrid_block_size`.
        order: stride order. Models with state need one with contiguous pages.
        kv: how K and V lie; MLA has only ``"packed"``.
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
        LayoutError: a combination that this allocator cannot make; the text names the field and its value.
        GeometryError: an argument is out of range.
        AddressOverflowError: `base` leaves no room.
    """
    _positive(num_blocks=num_blocks, region_align=region_align)
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(f"tp_rank {tp_rank}: tp_size is {tp_size}")
    _check_forms(model, order, kv, conv)
    logical = hybrid_block_size(model, tp_size=tp_size, block_size=block_size, align=align)
    groups = cache_groups(model)
    slots = max(len(group.layers) for group in groups)
    kinds = _attention_kinds(model)
    kernel = _kernel_block(kernel_block, logical) if kinds else logical
    heads = _shard("kv_heads", model.kv_heads, tp_rank, tp_size, may_repeat=True) if kinds else (0, 1)
    sizes = {"L": slots, "B": num_blocks, "K": logical // kernel, "H": heads[1], "N": kernel, "S": 2}
    if not kinds:
        sizes |= {"N": 1, "C": state_bytes(model.state, tp_size=tp_size) if model.state else 0}
    elif "mla" in kinds:
        sizes |= {"H": 1, "C": model.head_dim * model.dtype_bytes}
    else:
        sizes |= {"C": model.head_dim * model.dtype_bytes * (2 if kv == "packed" else 1)}
    axes = stride_axes(order, kv, kernel_blocks_in_page=True)
    strides = _strides(axes, sizes)
    total = strides[axes[0]] * sizes[axes[0]]

    pages: dict[str, Page] = {}
    for kind in dict.fromkeys(group.kind for group in groups):
        if kind in STATE_KINDS:
            assert model.state is not None  # noqa: S101 - Model has checked it
            pages[kind] = Page(state_parts(model.state, tp_rank, tp_size, conv))
        else:
            pages[kind] = Page(_attention_parts(model, kind, kv, heads, kernel, strides))

    separate = axes[0] == "L" and not one_storage
    region_bytes = strides["L"] if separate else total
    step = -(-region_bytes // region_align) * region_align
    first = -(-base // region_align) * region_align
    regions = tuple(
        Region(first + index * step, region_bytes, memory, device) for index in range(slots if separate else 1)
    )
    place = {name: (index, slot) for index, group in enumerate(groups) for slot, name in enumerate(group.layers)}
    return Geometry(
        regions=regions,
        groups=tuple(_group(model, group.kind, logical, kernel, speculative) for group in groups),
        layers=tuple(
            Layer(
                name=name,
                group=place[name][0],
                region=place[name][1] if separate else 0,
                offset=0 if separate else place[name][1] * strides["L"],
                num_blocks=num_blocks,
                block_stride=strides["B"],
                page=pages[kind],
                kernel_stride=None if kind in STATE_KINDS else _kernel_stride(strides, sizes["K"]),
            )
            for name, kind in model.caches()
        ),
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise LayoutError(f"{name} {value}: must be at least 1")


def _attention_kinds(model: Model) -> frozenset[str]:
    kinds = frozenset(kind for _, kind in model.caches()) & ATTENTION_KINDS
    if "mla" in kinds and len(kinds) > 1:
        raise LayoutError(f"layers: {model.name} mixes {', '.join(sorted(kinds))}; their pages differ in size")
    return kinds


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
    if "mla" in _attention_kinds(model):
        raise LayoutError(f"kv {kv!r}: an MLA latent has no K and V to separate")
    if order not in PAGE_ORDERS:
        raise LayoutError(f"kv {kv!r} with order {order!r}: K and V are separate only in contiguous pages")
    if kv == "apart" and (order[0] != "L" or model.state is not None):
        # K of block b would lie in the bytes of another block's state.
        raise LayoutError(f"kv 'apart' with order {order!r} and state {model.state is not None}: pages must be whole")


def _strides(axes: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes from one index to the next for every axis, outermost first; C is counted in bytes."""
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def _kernel_stride(strides: Mapping[str, int], ratio: int) -> int | None:
    """Return the stride only where it is not what a geometry assumes anyway."""
    return None if strides["K"] * ratio == strides["B"] else strides["K"]


def _group(model: Model, kind: CacheKind, logical: int, kernel: int, speculative: int) -> Group:
    if kind in STATE_KINDS:
        return Group("ssm", logical, speculative=speculative)
    return Group(
        cast("Kind", kind),
        logical,
        ratio=logical // kernel,
        window=model.window if kind == "sliding" else None,
        chunk=model.chunk if kind == "chunked" else None,
    )


def _attention_parts(
    model: Model, kind: str, kv: str, heads: tuple[int, int], kernel: int, strides: Mapping[str, int]
) -> tuple[Part, ...]:
    item = model.dtype_bytes
    tokens = Axis("tokens", kernel, strides["N"])
    if kind == "mla":
        return (Part("kv", model.dtype, item, 0, (tokens, Axis("content", model.head_dim, item))),)
    lead = (Axis("heads", model.kv_heads, strides["H"], *heads), tokens)
    if kv == "packed":
        return (Part("kv", model.dtype, item, 0, (*lead, Axis("content", 2 * model.head_dim, item))),)
    axes = (*lead, Axis("content", model.head_dim, item))
    return tuple(Part(name, model.dtype, item, at * strides["S"], axes) for at, name in enumerate("kv"))


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
