# SPDX-License-Identifier: Apache-2.0
"""The layout of a model in vLLM's hybrid memory allocator, as the geometry of one tensor-parallel rank.

Layers of one sort form a bucket, and buckets are cut into groups of equal size. The j-th layers of all groups share
tensor j. A block id belongs to one group at a time, so the bytes of a block belong to one group.

All pages of a block have one size. A recurrent state that does not fit an attention page makes the block longer until
it fits. Attention with fewer or smaller heads gets more tokens in a block, or padding. In orders with the block
outermost, pages of several sizes are next to each other instead. :mod:`kvhma.models.grouping` has the rules.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast, get_args

from kvhma.errors import LayoutError
from kvhma.geometry import Geometry, Group, Kind, Layer, Memory, Page, Region
from kvhma.models.block_size import KernelBlock, kernel_block_size
from kvhma.models.grouping import LayerSpec, Members, alike, group_layers, layer_specs
from kvhma.models.pages import ConvOrder, attention_page, state_parts
from kvhma.models.shards import check_positive
from kvhma.models.stride_orders import PAGE_ORDERS, KVForm, Order, stride_axes
from kvhma.models.table import LATENT_KINDS, Attention, Model, State

__all__ = ["LayoutOptions", "layout", "stage_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """How an engine's allocator cuts a model, and the memory.

    Attributes:
        num_blocks: logical blocks of every tensor, the null block 0 included.
        tp_rank: index among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        pp_rank: index of the pipeline stage.
        pp_size: pipeline stages; vLLM's split of the layers without ``VLLM_PP_LAYER_PARTITION``.
        block_size: tokens per block that the user asked for. A state, or heads that differ by layer, can make the
            logical block longer.
        kernel_block: tokens that the attention kernel addresses as one block: a number, ``"flashinfer"`` for
            that kernel's choice, or None for the whole logical block.
        align: see :func:`kvhma.models.block_size.hybrid_block_size`.
        conv: order of channels and rows of the convolution state.
        speculative: extra state slots after the slot with the state.
        order: stride order. Models with state need an order with contiguous pages; so do several groups whose layers
            have different heads.
        kv: where K and V are; MLA, and V of another length than K, allow only ``"packed"``.
        kernel_blocks_in_page: whether the kernel blocks of a block follow each other in the page of their layer, in
            orders with blocks outermost. False places them like blocks of their size, so that all kernel blocks of a
            layer are evenly spaced, as a view of them needs.
        one_storage: one region for all tensors instead of one each. Block-major orders always have one.
        base: address of the first region.
        region_align: bytes; every region starts at a multiple of it, at or after `base`.
        memory: ``"DRAM"`` or ``"VRAM"``.
        device: device id.
    """

    num_blocks: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    block_size: int = 16
    kernel_block: KernelBlock = None
    align: int | None = None
    conv: ConvOrder = "DS"
    speculative: int = 0
    order: Order = "LBHNC"
    kv: KVForm = "packed"
    kernel_blocks_in_page: bool = True
    one_storage: bool = False
    base: int = 1 << 20
    region_align: int = 4096
    memory: Memory = "DRAM"
    device: int = 0

    @property
    def is_block_major(self) -> bool:
        """Whether all layers of a block follow each other."""
        return self.order[0] == "B"


def layout(model: Model, options: LayoutOptions) -> Geometry:
    """Return the geometry of one rank of a model in vLLM's layout.

    Args:
        model: the model.
        options: how the model is cut, and where the memory is.

    Returns:
        The geometry. Regions are the tensors, layers are in model order, groups as
        :func:`kvhma.models.grouping.group_layers` makes them.

    Raises:
        LayoutError: a combination that this allocator cannot make, or that vLLM does not start with; the text names the
            field and its value.
        GeometryError: an argument is out of range.
        AddressOverflowError: there is not enough room above `base`.
    """
    check_positive(num_blocks=options.num_blocks, region_align=options.region_align)
    if not 0 <= options.tp_rank < options.tp_size:
        raise LayoutError(f"tp_rank {options.tp_rank}: tp_size is {options.tp_size}")
    if not 0 <= options.pp_rank < options.pp_size:
        raise LayoutError(f"pp_rank {options.pp_rank}: pp_size is {options.pp_size}")
    _check_forms(model, options)
    sizes = {"tp_rank": options.tp_rank, "tp_size": options.tp_size, "block_size": options.block_size}
    specs = layer_specs(model, **sizes, align=options.align)
    groups = group_layers(specs, block_major=options.is_block_major)
    _check_pages(groups, options)
    held = _of_stage(model, groups, options)
    block_bytes = max(sum(spec.page for spec in group.values()) for group in held)
    placed = [layer for index, group in enumerate(held) for layer in _place(index, group, options, block_bytes)]
    regions, layers = _cut(placed, options, block_bytes * options.num_blocks)
    return Geometry(
        regions=regions,
        groups=tuple(_group(group, options) for group in groups),
        layers=tuple(layers[name] for name in specs if name in layers),
        tp_rank=options.tp_rank,
        tp_size=options.tp_size,
    )


def stage_layers(num_layers: int, pp_rank: int, pp_size: int) -> range:
    """Return the layers of a pipeline stage: equally many; the remaining layers go to the stages before the last.

        10 layers, 4 stages     0 1 | 2 3 4 | 5 6 7 | 8 9

    Args:
        num_layers: layers of the model.
        pp_rank: the stage, from 0.
        pp_size: pipeline stages.

    Raises:
        LayoutError: there are more stages than layers.
    """
    each, rest = divmod(num_layers, pp_size)
    if not each:
        raise LayoutError(f"pp_size {pp_size}: the model has {num_layers} layers")
    # The stages with an additional layer begin here and end before the last.
    first = pp_size - 1 - rest
    start = pp_rank * each + min(max(pp_rank - first, 0), rest)
    return range(start, start + each + (first <= pp_rank < first + rest))


def _of_stage(model: Model, groups: list[Members], options: LayoutOptions) -> list[Members]:
    """Return the layers of one stage for each group; all stages have the same groups."""
    if options.pp_size == 1:
        return groups
    stage = stage_layers(len(model.layers), options.pp_rank, options.pp_size)
    # A name is model.layers.N. followed by the cache.
    held = [{name: spec for name, spec in group.items() if int(name.split(".")[2]) in stage} for group in groups]
    if not any(held):
        raise LayoutError(
            f"pp_size {options.pp_size}: stage {options.pp_rank}, layers {stage[0]} to {stage[-1]}, caches nothing"
        )
    return held


# --- What an order supports, and groups ---------------------------------------------------------------------


def _check_forms(model: Model, options: LayoutOptions) -> None:
    """Refuse what no engine has; the text has the field and value that the caller can change."""
    order, kv = options.order, options.kv
    for field, value, known in (("order", order, Order), ("kv", kv, KVForm), ("conv", options.conv, ConvOrder)):
        if value not in get_args(known):
            raise LayoutError(f"{field} {value!r}: known are {', '.join(get_args(known))}")
    if model.state is not None and order not in PAGE_ORDERS:
        raise LayoutError(f"order {order!r}: a state page must be contiguous, as in {', '.join(PAGE_ORDERS)}")
    if kv == "packed":
        return
    for name, spec in model.specs:
        if spec.kind in LATENT_KINDS:
            raise LayoutError(f"kv {kv!r}: an MLA latent has no K and V to separate")
        if isinstance(spec, Attention) and spec.v_head_dim is not None:
            raise LayoutError(f"kv {kv!r}: head_dim {spec.head_dim} and v_head_dim {spec.v_head_dim} of {name} differ")
    if kv == "apart" and (order not in ("LBHNC", "LBNHC") or model.state is not None):
        # K of block b would be in the bytes of another block's state.
        raise LayoutError(f"kv 'apart' with order {order!r} and state {model.state is not None}: pages must be whole")


def _check_pages(groups: list[Members], options: LayoutOptions) -> None:
    """Refuse orders in which pages of several sizes or shapes would overlap each other."""
    specs = [spec for group in groups for spec in group.values()]
    sizes = ", ".join(sorted({f"{spec.page} bytes of {spec.block_size} tokens" for spec in specs}))
    padded = any(spec.page != spec.content and not isinstance(spec.cache, State) for spec in specs)
    if options.kv == "apart" and padded:
        raise LayoutError(f"kv 'apart': padded pages ({sizes}) must be whole")
    if options.order in PAGE_ORDERS:
        return
    heads = {spec.heads.held for spec in specs if spec.heads}
    # With heads outside of blocks, the bytes of a block are between those of other blocks, as its shape says.
    crossing = options.order[0] == "L" and len(groups) > 1 and len(heads) > 1
    if padded or crossing or len({spec.page for spec in specs}) > 1:
        raise LayoutError(f"order {options.order!r}: pages of {sizes} need an order of {', '.join(PAGE_ORDERS)}")


def _group(group: Members, options: LayoutOptions) -> Group:
    """Return the group for a geometry; if it has several kinds, of the first kind that is not a latent."""
    specs = list(group.values())
    spec = next((spec for spec in specs if spec.kind not in LATENT_KINDS), specs[0])
    if isinstance(spec.cache, State):
        return Group("ssm", spec.block_size, speculative=options.speculative)
    return Group(
        "mla" if spec.kind in LATENT_KINDS else cast("Kind", spec.kind),
        spec.block_size,
        ratio=spec.block_size // kernel_block_size(options.kernel_block, spec.block_size),
        window=spec.window,
        chunk=spec.chunk,
    )


# --- Where layers are ----------------------------------------------------------------------------------------


def _place(index: int, group: Members, options: LayoutOptions, block_bytes: int) -> list[Layer]:
    """Place a group's layers in the memory that all groups share, as one region.

    Layers of one spec follow each other, in the order of each spec's first layer.
    """
    placed: list[Layer] = []
    start = 0
    for spec, names in alike(group, lambda spec: spec).items():
        is_state = isinstance(spec.cache, State)
        kernel = spec.block_size if is_state else kernel_block_size(options.kernel_block, spec.block_size)
        ratio = spec.block_size // kernel
        if ratio > 1 and spec.page != spec.content:
            raise LayoutError(
                f"kernel_block {kernel}: a page of {spec.page} bytes with {spec.content} used is not cut further"
            )
        in_page = options.kernel_blocks_in_page or ratio == 1
        if not in_page and options.is_block_major and block_bytes % ratio:
            raise LayoutError(f"kernel_block {kernel}: {ratio} of them do not divide a block of {block_bytes} bytes")
        strides = _strides(spec, len(names), kernel, options, block_bytes)
        pages = {spec.cache: _page(spec, kernel, strides, options) for spec in names.values()}
        # Given only if it differs from the default of a geometry.
        kernel_stride = None if is_state or strides["K"] * ratio == strides["B"] else strides["K"]
        for at, (name, spec) in enumerate(names.items()):
            offset, page = start + at * strides["L"], pages[spec.cache]
            placed.append(Layer(name, index, 0, offset, options.num_blocks, strides["B"], page, kernel_stride))
        start += len(names) * (spec.page if options.is_block_major and in_page else strides["L"])
    return placed


def _page(spec: LayerSpec, kernel: int, strides: dict[str, int], options: LayoutOptions) -> Page:
    if isinstance(spec.cache, State) or spec.heads is None:
        return Page(state_parts(cast("State", spec.cache), options.tp_rank, options.tp_size, options.conv))
    return attention_page(spec.cache, kernel, strides, spec.heads)


def _strides(spec: LayerSpec, layers: int, kernel: int, options: LayoutOptions, block_bytes: int) -> dict[str, int]:
    """Return bytes from one index to the next for every axis; C is counted in bytes.

        LBHNC    |layer 0: block 0|block 1|..|layer 1: block 0|..      L = blocks * page, B = page
        BLHNC    |block 0: layer 0|layer 1|..|block 1: layer 0|..      L = page, B = block_bytes
        a page   |H0: N0 N1 ..|H1: N0 N1 ..|padding|                   H = tokens * N, N = bytes of a token

    A page can be padded; with the block outermost, the gap holds the other layers.
    """
    sizes = {"L": layers, "B": options.num_blocks, "K": spec.block_size // kernel, "S": 2, "H": 1, "N": kernel}
    if isinstance(spec.cache, State) or spec.heads is None:
        sizes |= {"N": 1, "C": spec.content}
    else:
        halves = 1 if options.kv == "packed" else 2
        sizes |= {"H": spec.heads.held, "C": spec.cache.token_bytes // halves}
    in_page = options.kernel_blocks_in_page or sizes["K"] == 1
    axes = stride_axes(options.order, options.kv, kernel_blocks_in_page=in_page)
    strides, step = dict[str, int](), 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= sizes[axis]
        if options.order in PAGE_ORDERS and axis == "K" and options.kv != "apart":
            step = spec.page  # contiguous except for padding
    if options.is_block_major:
        strides["B"] = block_bytes
        if axes[1] == "K":
            strides["K"] = block_bytes // sizes["K"]
    return strides


def _cut(placed: list[Layer], options: LayoutOptions, total: int) -> tuple[tuple[Region, ...], dict[str, Layer]]:
    """Return the regions, each at the next multiple of the alignment, and the layers in them by name.

    ::

        offset of layers   0           1000        2000        total
        one storage        |<-------------- region 0 ------------->|
        else               |<- region 0 ->|<- region 1 ->|<- region 2 ->|
    """
    is_one = options.one_storage or options.is_block_major
    starts = [0] if is_one else sorted({layer.offset for layer in placed})
    regions, align = [], options.region_align
    base = -(-options.base // align) * align
    for start, end in pairwise([*starts, total]):
        regions.append(Region(base, end - start, options.memory, options.device))
        base += -(-(end - start) // align) * align
    layers = {}
    for layer in placed:
        region = bisect_right(starts, layer.offset) - 1
        layers[layer.name] = replace(layer, region=region, offset=layer.offset - starts[region])
    return tuple(regions), layers
