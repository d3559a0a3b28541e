# SPDX-License-Identifier: Apache-2.0
"""Decides which layers share bytes: groups of layers become few buffers, in numbers only.

A block id belongs to one group at a time, so layers of different groups share memory: by default the j-th layers of
all groups have slot j. Only layers of one :class:`PageClass` share a buffer::

                group 0   group 1   group 2
    slot 0      full.0    swa.0     mamba.0
    slot 1      full.1    swa.1     mamba.1
    slot 2                swa.2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, get_args

from kvhma.errors import LayoutError
from kvhma.geometry import Group
from kvhma.models.stride_orders import Order
from kvhma.torch.placement import BufferPlan, LayerPlacement, PageClass, page_class, place_layers, plan_buffer
from kvhma.torch.specs import Spec, TokenSpec

Groups: TypeAlias = Sequence[Mapping[str, Spec]]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The layout of all layers of all groups.

    Attributes:
        groups: for each group its layers' specs by name.
        specs: the specs of all groups.
        num_blocks: logical blocks, including the null block.
        buffers: in the order in which layers first use them.
        placements: where each layer is, by name.
    """

    groups: Groups
    specs: Mapping[str, Spec]
    num_blocks: int
    buffers: tuple[BufferPlan, ...]
    placements: Mapping[str, LayerPlacement]


def arrange(groups: Groups, num_blocks: int, order: Order, shared: Sequence[Sequence[str]] | None = None) -> CachePlan:
    """Return the layout of all layers of all groups.

    Args:
        groups: for each group its layers' specs by name; the order of the layers gives the slots.
        num_blocks: logical blocks, including the null block.
        order: stride order.
        shared: for each slot the layers that share it, instead of the j-th layers of all groups.

    Raises:
        LayoutError: this layout is impossible; the text names layers and values.
    """
    specs = _check_groups(groups, num_blocks, order)
    classes = {name: page_class(spec, order) for name, spec in specs.items()}
    slots = _slots(groups, classes, order) if shared is None else _given_slots(groups, classes, shared)
    buffers: list[BufferPlan] = []
    for pages, of_class in slots.items():
        # With blocks outermost all slots of a class are in one buffer, otherwise each slot has a separate buffer.
        by_buffer = [of_class] if pages.form == "blocks" else [[slot] for slot in of_class]
        buffers += [plan_buffer(pages, of_buffer, specs, num_blocks, order) for of_buffer in by_buffer]
    placements: dict[str, LayerPlacement] = {}
    for index, buffer in enumerate(buffers):
        for group in groups:
            placements |= place_layers(buffer, index, group)
    return CachePlan(groups, specs, num_blocks, tuple(buffers), placements)


def _check_groups(groups: Groups, num_blocks: int, order: str) -> dict[str, Spec]:
    if order not in get_args(Order):
        raise LayoutError(f"layout {order!r}: known are {', '.join(get_args(Order))}")
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise LayoutError(f"num_blocks {num_blocks!r}: must be an integer of at least 1")
    specs: dict[str, Spec] = {}
    for index, group in enumerate(groups):
        if not group:
            raise LayoutError(f"group {index} has no layers")
        for name, spec in group.items():
            if name in specs:
                raise LayoutError(f"layer {name!r} is in two groups, the second is {index}")
            if problem := _problem(spec, order):
                raise LayoutError(f"layer {name!r}: {problem}")
            specs[name] = spec
        _check_block_table(index, group)
    if not specs:
        raise LayoutError("groups (): there is no layer")
    return specs


def _check_block_table(index: int, group: Mapping[str, Spec]) -> None:
    """Refuse layers that cannot share a block table."""
    first, *rest = group
    expected = group[first].group()
    for name in rest:
        found = group[name].group()
        for field in fields(Group):
            old, new = getattr(expected, field.name), getattr(found, field.name)
            if old != new:
                raise LayoutError(
                    f"group {index}: {field.name} of layer {first!r} is {old}, of layer {name!r} {new}; "
                    "layers of a group share block tables"
                )


def _problem(spec: object, order: str) -> str | None:
    if not isinstance(spec, Spec):
        return f"spec is {type(spec).__name__}; OpaqueSpec takes any bytes"
    return spec.problem() or _padding_problem(spec, order)


def _padding_problem(spec: Spec, order: str) -> str | None:
    if not isinstance(spec, TokenSpec) or spec.padded_bytes == spec.nbytes:
        return None
    sizes = f"page padded from {spec.nbytes} to {spec.padded_bytes} bytes"
    if spec.ratio > 1:
        return (
            f"{sizes}: the block is not dense, so its {spec.ratio} kernel blocks of {spec.kernel_block_size} tokens "
            f"are not evenly spaced; kernel_block {spec.block_size} would be, or page_bytes {spec.nbytes}"
        )
    if page_class(spec, order).form in ("heads", "apart"):
        return (
            f"{sizes}: kv {spec.kv!r} in layout {order!r} has no place for padding; page_bytes {spec.nbytes} would "
            "fit, or kv 'packed' in a layout with blocks before heads"
        )
    return None


Slots: TypeAlias = dict[PageClass, list[tuple[str, ...]]]
"""For each class of pages its slots; for each slot the layers that share it, at most one of each group."""


def _slots(groups: Groups, classes: Mapping[str, PageClass], order: str) -> Slots:
    """Assign the j-th layers of each class of pages to the same slot, over all groups."""
    slots: Slots = {}
    for group in groups:
        used: Counter[PageClass] = Counter()  # number of slots of each class that layers of this group use
        for name in group:
            pages = classes[name]
            of_class = slots.setdefault(pages, [])
            slot = len(of_class) if pages.form == "opaque" else used[pages]  # opaque bytes are not shared
            used[pages] += 1
            if slot == len(of_class):
                of_class.append((name,))
            else:
                of_class[slot] += (name,)
    _check_equal_pages(groups, classes, order)
    return slots


def _check_equal_pages(groups: Groups, classes: Mapping[str, PageClass], order: str) -> None:
    """Refuse layers of different groups whose pages have the same size but cannot share memory."""
    first: dict[int, tuple[int, str]] = {}  # group and name of the first layer with pages of that size
    for index, group in enumerate(groups):
        for name in group:
            pages = classes[name]
            if pages.form == "opaque":
                continue
            first_group, first_name = first.setdefault(pages.page_bytes, (index, name))
            if first_group != index and classes[first_name] != pages:
                raise LayoutError(
                    f"layout {order!r}: layers {first_name!r} and {name!r} would share memory, but {first_name!r} has "
                    f"{classes[first_name]}, and {name!r} {pages}; use a layout with contiguous pages, such as "
                    "BLHNC or LBHNC with kv 'packed'"
                )


def _given_slots(groups: Groups, classes: Mapping[str, PageClass], shared: Sequence[Sequence[str]]) -> Slots:
    """Check the slots that an engine has selected."""
    group_of = {name: index for index, group in enumerate(groups) for name in group}
    slots: Slots = {}
    seen: set[str] = set()
    for index, slot in enumerate(shared):
        if not slot:
            raise LayoutError(f"shared[{index}] has no layers")
        by_group: dict[int, str] = {}
        for name in slot:
            if name not in group_of:
                raise LayoutError(f"shared[{index}]: layer {name!r} is in no group")
            if name in seen:
                raise LayoutError(f"shared[{index}]: layer {name!r} has a tensor already")
            seen.add(name)
            group = group_of[name]
            first = by_group.setdefault(group, name)
            if first != name:
                raise LayoutError(
                    f"shared[{index}]: layers {first!r} and {name!r} of group {group} would write the same blocks"
                )
            _check_slot(index, slot[0], name, classes)
        slots.setdefault(classes[slot[0]], []).append(tuple(slot))
    if missing := [name for name in group_of if name not in seen]:
        raise LayoutError(f"shared: no tensor for {', '.join(map(repr, missing))}")
    return slots


def _check_slot(index: int, first: str, name: str, classes: Mapping[str, PageClass]) -> None:
    """Refuse a layer that cannot share memory with the first layer of its slot."""
    expected, pages = classes[first], classes[name]
    if pages.page_bytes != expected.page_bytes:
        raise LayoutError(
            f"shared[{index}]: a page of layer {first!r} has {expected.page_bytes} bytes, of layer {name!r} "
            f"{pages.page_bytes}; page_bytes pads the smaller one"
        )
    if pages != expected or (pages.form == "opaque" and first != name):
        raise LayoutError(f"shared[{index}]: layer {first!r} has {expected}, layer {name!r} {pages}")
