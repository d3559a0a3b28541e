# SPDX-License-Identifier: Apache-2.0
"""Which layers a buffer can hold, its shape, and where the bytes of each layer are in it.

The order of slots s and blocks b in memory, by the form of their pages::

    blocks    | b0: s0 s1 s2 | b1: s0 s1 s2 | ...          one buffer, blocks outermost
    pages     | b0 | b1 | b2 | ...                         a buffer for each slot, layers outermost
    heads     | head 0: b0 b1 b2 ... | head 1: b0 b1 ...   a buffer for each slot, heads before blocks
    apart     | K: b0 b1 b2 ... | V: b0 b1 b2 ...          a buffer for each slot, K and V outermost
    opaque    | b0 | b1 | b2 | ...                         a buffer for each layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvhma.errors import LayoutError
from kvhma.models.stride_orders import Order, stride_axes
from kvhma.torch.specs import OpaqueSpec, Spec, StateSpec, TokenSpec

BufferKind: TypeAlias = Literal["ordered", "default", "isolated"]


@dataclass(frozen=True, slots=True)
class PageClass:
    """Properties that layers must share to share bytes.

    Attributes:
        form: which bytes are contiguous. ``blocks``: a block over all layers. ``pages``: a block of one layer.
            ``heads``: a head over all blocks. ``apart``: K of all blocks, then V. ``opaque``: only the owner knows.
        page_bytes: bytes of a logical block of one layer, including padding.
        heads: heads outside of blocks; 1 if heads are inside.
    """

    form: Literal["blocks", "pages", "heads", "apart", "opaque"]
    page_bytes: int
    heads: int = 1

    def __str__(self) -> str:
        words = {
            "blocks": "each block contiguous over layers",
            "pages": "each page contiguous",
            "heads": f"{self.heads} heads outside of blocks",
            "apart": f"K and V apart, {self.heads} outside of blocks" if self.heads > 1 else "K and V apart",
            "opaque": "opaque",
        }
        return f"pages of {self.page_bytes} bytes, {words[self.form]}"


def page_class(spec: Spec, order: str) -> PageClass:
    """Return the class of a layer's pages: layers share bytes only with layers of the same class."""
    page = spec.padded_bytes
    if isinstance(spec, OpaqueSpec):
        return PageClass("opaque", page)
    heads = 1
    if not isinstance(spec, StateSpec):
        heads = spec.sizes["H"] if order == "LHBNC" else 1
        if spec.kv == "apart":
            return PageClass("apart", page, heads)
    if order[0] == "B":
        return PageClass("blocks", page)
    return PageClass("heads" if heads > 1 else "pages", page, heads)


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One buffer.

    Attributes:
        page_class: the common properties of its layers.
        slots: for each slot the layers that share it, at most one of each group.
        num_blocks: logical blocks.
        order: stride order.
        kind: ``ordered``: heads before layers; ``default``: layers before all but blocks; ``isolated``: one slot.
        dims: names and sizes of its dimensions as int8, outermost first.
    """

    page_class: PageClass
    slots: tuple[tuple[str, ...], ...]
    num_blocks: int
    order: Order
    kind: BufferKind
    dims: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.dims.values())


def plan_buffer(
    pages: PageClass, slots: Sequence[tuple[str, ...]], specs: Mapping[str, Spec], num_blocks: int, order: Order
) -> BufferPlan:
    """Return the shape of a buffer: with a heads dimension if its layers have equal heads, else bytes of pages."""
    kind: BufferKind
    if pages.form == "blocks":
        kind, dims = _shared_dims(pages.page_bytes, slots, specs, num_blocks, order)
    else:
        halves = 2 if pages.form == "apart" else 1
        outer = {"kv": halves, "heads": pages.heads, "blocks": num_blocks}
        dims = {name: size for name, size in outer.items() if size > 1 or name == "blocks"}
        kind, dims = "isolated", dims | {"bytes": pages.page_bytes // halves // pages.heads}
    return BufferPlan(pages, tuple(slots), num_blocks, order, kind, dims)


def _shared_dims(
    page: int, slots: Sequence[tuple[str, ...]], specs: Mapping[str, Spec], num_blocks: int, order: Order
) -> tuple[BufferKind, dict[str, int]]:
    """Return kind and dimensions of a buffer whose blocks have the bytes of many layers."""
    members = [specs[name] for slot in slots for name in slot]
    # A state is one kernel block. Heads fill a page only without other content and padding.
    ratios = {spec.ratio if isinstance(spec, TokenSpec) else 1 for spec in members}
    heads = {spec.sizes["H"] if isinstance(spec, TokenSpec) and spec.nbytes == page else 0 for spec in members}
    ratio = next(iter(ratios)) if len(ratios) == 1 else 1
    blocks, nbytes = num_blocks * ratio, page // ratio
    if order == "BHLNC" and len(ratios) == len(heads) == 1 and heads != {0}:
        count = heads.pop()
        return "ordered", {"blocks": blocks, "heads": count, "layers": len(slots), "bytes": nbytes // count}
    return "default", {"blocks": blocks, "layers": len(slots), "bytes": nbytes}


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where the bytes of one layer are.

    Attributes:
        buffer: index of the buffer.
        offset: bytes from the buffer's start to block 0.
        strides: bytes from one index to the next: B logical blocks, K kernel blocks, and S, H, N, C as in a spec's
            `sizes`; for state and opaque bytes B only. The first byte of index (b, k, h, ...) is at
            ``offset + b * B + k * K + h * H + ...``.
    """

    buffer: int
    offset: int
    strides: Mapping[str, int]


def place_layers(plan: BufferPlan, buffer: int, group: Mapping[str, Spec]) -> dict[str, LayerPlacement]:
    """Return the places of one group's layers in a buffer.

    Args:
        plan: the buffer.
        buffer: its index.
        group: specs of the group's layers by name; layers outside the buffer are skipped.

    Raises:
        LayoutError: heads before layers would leave a layer's items unaligned.
    """
    found: dict[str, LayerPlacement] = {}
    heads_first: dict[tuple[int, int], dict[str, TokenSpec]] = {}
    for slot, names in enumerate(plan.slots):
        for name in names:
            spec = group.get(name)
            if spec is None:
                continue
            if isinstance(spec, TokenSpec) and plan.page_class.form == "blocks" and plan.order == "BHLNC":
                heads_first.setdefault((spec.sizes["H"], spec.nbytes), {})[name] = spec
            else:
                found[name] = _place_in_slot(plan, buffer, slot, spec)
    offset = 0
    for layers in heads_first.values():
        found |= _place_heads_first(plan, buffer, layers, offset)
        offset += sum(spec.nbytes // spec.ratio for spec in layers.values())
    return found


def _place_in_slot(plan: BufferPlan, buffer: int, slot: int, spec: Spec) -> LayerPlacement:
    """Return the place of a layer in a slot.

    Forms `blocks`, `pages` and `opaque`; a layer alone in its buffer is slot 0 of n = 1::

        | block 0                        | block 1
        | slot 0 | slot 1 | ... slot n-1 | slot 0 | ...
        |<-page->|
        |<--------- B = n * page ------->|

    Kernel blocks are placed like blocks of their size, here two of them::

        | block 0                                                             | block 1
        | kernel block 0                   | kernel block 1                   |
        | slot 0   | slot 1 | ... slot n-1 | slot 0 | slot 1 | ... slot n-1   | slot 0 | ...
        |<-page/2->|
        |<-------- K = n * page / 2 ------>|

    Forms `heads` and `apart` are one dense array, here K and V of two heads, heads before blocks::

        | K, head 0       | K, head 1       | V, head 0       | V, head 1       |
        | b0 | b1 | b2 .. | b0 | b1 | b2 .. | b0 | b1 | b2 .. | b0 | b1 | b2 .. |
        |<-B>|
        |<------ H ------>|
        |<--------------- S --------------->|
    """
    page, slots = plan.page_class.page_bytes, len(plan.slots)
    if not isinstance(spec, TokenSpec):
        return LayerPlacement(buffer, slot * page, {"B": slots * page})
    if plan.page_class.form in ("heads", "apart"):
        return LayerPlacement(buffer, 0, _dense(spec, plan.order, {"B": plan.num_blocks, "K": spec.ratio}))
    kernel_page = page // spec.ratio
    outer = {"K": slots * kernel_page, "B": slots * page}
    return LayerPlacement(buffer, slot * kernel_page, _dense(spec, plan.order, {}) | outer)


def _place_heads_first(
    plan: BufferPlan, buffer: int, layers: Mapping[str, TokenSpec], offset: int
) -> dict[str, LayerPlacement]:
    """Return the places of layers with equal pages, with heads before layers.

    Only the layers of one group are interleaved, so a group with fewer layers has no gaps::

        kernel block: | offset | head 0                 | head 1                 | ...
                               | layer 0 | layer 1 | ...| layer 0 | layer 1 | ...|
                               |<-unit-->|
                               |<- H = layers * unit -->|
    """
    block = len(plan.slots) * plan.page_class.page_bytes
    found = {}
    for index, (name, spec) in enumerate(layers.items()):
        if offset % spec.dtype.itemsize:
            raise LayoutError(
                f"layout {plan.order!r}: layer {name!r} of {spec.dtype} would start at byte {offset} of a block, "
                f"after layers of another dtype; it must be a multiple of {spec.dtype.itemsize} bytes"
            )
        unit = spec.nbytes // spec.ratio // spec.sizes["H"]
        outer = {"H": len(layers) * unit, "K": block // spec.ratio, "B": block}
        found[name] = LayerPlacement(buffer, offset + index * unit, _dense(spec, plan.order, {}) | outer)
    return found


def _dense(spec: TokenSpec, order: str, outer: Mapping[str, int]) -> dict[str, int]:
    """Return bytes from one index to the next for every axis of a dense kernel block, and for the axes around it.

    ::

        axes "BHC", 2 items C of 2 bytes, 3 heads:   | b0: h0 h0 h1 h1 h2 h2 | b1: h0 ...
                                                           C = 2, H = 4, B = 12
    """
    sizes, step = {**spec.sizes, **outer}, spec.dtype.itemsize
    strides: dict[str, int] = {}
    for axis in reversed(stride_axes(order, spec.kv, kernel_blocks_in_page=False)):
        if axis in sizes:
            strides[axis] = step
            step *= sizes[axis]
    return strides
