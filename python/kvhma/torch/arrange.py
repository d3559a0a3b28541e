# SPDX-License-Identifier: Apache-2.0
"""Which layer gets which bytes: groups of layers become few buffers, in numbers only.

A block id belongs to one group at a time, so the layers of different groups share memory: the j-th of each group has
slot j. What may share a buffer is decided by the *key* of a layer's pages: how many bytes one has, and how the bytes
of a block lie in the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from kvhma.hybrid import LayoutError, Order
from kvhma.torch.attention import AttentionSpec, MLASpec
from kvhma.torch.plots import Key, Plot, Pool, Spec, key_of, plots_of
from kvhma.torch.state import OpaqueSpec, StateSpec

Groups: TypeAlias = Sequence[Mapping[str, Spec]]
BufferKind: TypeAlias = Literal["ordered", "default", "isolated"]

_SPECS = (AttentionSpec, MLASpec, StateSpec, OpaqueSpec)


@dataclass(frozen=True, slots=True)
class Lot:
    """One buffer.

    Attributes:
        kind: ``ordered``: heads before layers; ``default``: layers before all but blocks; ``isolated``: one slot.
        key: what its layers have in common.
        slots: for each slot the layers that share it.
        shape: of the buffer as int8.
        dims: names of its dimensions.
    """

    kind: BufferKind
    key: Key
    slots: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape)


def arrange(
    groups: Groups, num_blocks: int, layout: Order, shared: Sequence[Sequence[str]] | None
) -> tuple[tuple[Lot, ...], dict[str, Plot]]:
    """Lay out all layers of all groups.

    Args:
        groups: for each group its layers' specs by name; the order gives the slots.
        num_blocks: logical blocks, the null block included.
        layout: stride order.
        shared: for each slot the layers that share it, instead of the j-th of all groups.

    Returns:
        The buffers, in the order in which layers first use them, and the place of every layer.

    Raises:
        LayoutError: the groups cannot be laid out so; the text names layers and values.
    """
    specs = _check_groups(groups, num_blocks, layout)
    keys = {name: key_of(spec, layout) for name, spec in specs.items()}
    slots = _slots(groups, keys, layout) if shared is None else _given_slots(groups, keys, shared)
    lots: list[Lot] = []
    plots: dict[str, Plot] = {}
    for key, members in slots.items():
        for part in [tuple(members)] if key.form == "blocks" else [(slot,) for slot in members]:
            lots.append(_lot(key, part, specs, num_blocks, layout))
            for group in groups:
                mine = [(at, name) for at, slot in enumerate(part) for name in slot if name in group]
                plots |= plots_of(mine, specs, Pool(len(lots) - 1, key, len(part), num_blocks, layout))
    return tuple(lots), plots


def _check_groups(groups: Groups, num_blocks: int, layout: str) -> dict[str, Spec]:
    if layout not in get_args(Order):
        raise LayoutError(f"layout {layout!r}: known are {', '.join(get_args(Order))}")
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise LayoutError(f"num_blocks {num_blocks!r}: must be an integer of at least 1")
    specs: dict[str, Spec] = {}
    for index, group in enumerate(groups):
        if not group:
            raise LayoutError(f"group {index} has no layers")
        first = next(iter(group))
        for name, spec in group.items():
            if name in specs:
                raise LayoutError(f"layer {name!r} is in two groups, the second is {index}")
            if not isinstance(spec, _SPECS):
                raise LayoutError(f"layer {name!r}: spec is {type(spec).__name__}; OpaqueSpec takes any bytes")
            if problem := spec.problem() or _padding_problem(spec, layout):
                raise LayoutError(f"layer {name!r}: {problem}")
            ours, theirs = group[first].group(), spec.group()
            for field in fields(ours):
                one, other = getattr(ours, field.name), getattr(theirs, field.name)
                if one != other:
                    raise LayoutError(
                        f"group {index}: {field.name} of layer {first!r} is {one}, of layer {name!r} {other}; layers "
                        "of a group share block tables"
                    )
            specs[name] = spec
    if not specs:
        raise LayoutError("groups (): there is no layer")
    return specs


def _padding_problem(spec: Spec, layout: str) -> str | None:
    if not isinstance(spec, AttentionSpec | MLASpec) or spec.padded_bytes == spec.nbytes:
        return None
    sizes = f"page padded from {spec.nbytes} to {spec.padded_bytes} bytes"
    if spec.ratio > 1:
        return (
            f"{sizes}: the block is not dense, so its {spec.ratio} kernel blocks of {spec.kernel_tokens} tokens are "
            f"not evenly spaced; kernel_block {spec.block_size} would be, or page_bytes {spec.nbytes}"
        )
    if key_of(spec, layout).form in ("heads", "apart"):
        return (
            f"{sizes}: kv {spec.kv!r} in layout {layout!r} has no place for padding; page_bytes {spec.nbytes} would "
            "fit, or kv 'packed' in a layout with blocks before heads"
        )
    return None


def _slots(groups: Groups, keys: Mapping[str, Key], layout: str) -> dict[Key, list[tuple[str, ...]]]:
    """Give the j-th layers of equal pages of all groups the same slot."""
    first: dict[int, tuple[int, str]] = {}
    slots: dict[Key, list[tuple[str, ...]]] = {}
    for index, group in enumerate(groups):
        used: dict[Key, int] = {}
        for name in group:
            key = keys[name]
            members = slots.setdefault(key, [])
            if key.form == "own":
                members.append((name,))
                continue
            before, other = first.setdefault(key.page_bytes, (index, name))
            if before != index and keys[other] != key:
                raise LayoutError(
                    f"layout {layout!r}: layers {other!r} and {name!r} are to share memory, but {other!r} has "
                    f"{keys[other]}, and {name!r} {key}; a layout whose pages are contiguous would do, as BLHNC or "
                    "LBHNC with kv 'packed'"
                )
            at = used[key] = used.get(key, -1) + 1
            members += [()] * (at + 1 - len(members))
            members[at] += (name,)
    return slots


def _given_slots(
    groups: Groups, keys: Mapping[str, Key], shared: Sequence[Sequence[str]]
) -> dict[Key, list[tuple[str, ...]]]:
    """Check the slots somebody else has chosen."""
    place = {name: index for index, group in enumerate(groups) for name in group}
    slots: dict[Key, list[tuple[str, ...]]] = {}
    seen: set[str] = set()
    for index, slot in enumerate(shared):
        if not slot:
            raise LayoutError(f"shared[{index}] has no layers")
        for at, name in enumerate(slot):
            if name not in place:
                raise LayoutError(f"shared[{index}]: layer {name!r} is in no group")
            if name in seen:
                raise LayoutError(f"shared[{index}]: layer {name!r} has a tensor already")
            seen.add(name)
            for other in slot[:at]:
                if place[other] == place[name]:
                    raise LayoutError(
                        f"shared[{index}]: layers {other!r} and {name!r} of group {place[name]} would write the same "
                        "blocks"
                    )
            _check_share(index, slot[0], keys[slot[0]], name, keys[name])
        slots.setdefault(keys[slot[0]], []).append(tuple(slot))
    if missing := [name for name in place if name not in seen]:
        raise LayoutError(f"shared: no tensor for {', '.join(map(repr, missing))}")
    return slots


def _check_share(index: int, first: str, key: Key, name: str, other: Key) -> None:
    if key.page_bytes != other.page_bytes:
        raise LayoutError(
            f"shared[{index}]: a page of layer {first!r} has {key.page_bytes} bytes, of layer {name!r} "
            f"{other.page_bytes}; page_bytes pads the smaller one"
        )
    if key != other or (key.form == "own" and first != name):
        raise LayoutError(f"shared[{index}]: layer {first!r} has {key}, layer {name!r} {other}")


def _lot(key: Key, slots: tuple[tuple[str, ...], ...], specs: Mapping[str, Spec], num_blocks: int, layout: str) -> Lot:
    """Describe a buffer. The finest shape that is true of all its layers, else bytes of pages."""
    page, members = key.page_bytes, [specs[name] for slot in slots for name in slot]
    if key.form == "apart":
        heads = (key.heads,) if key.heads > 1 else ()
        shape = (2, *heads, num_blocks, page // 2 // key.heads)
        return Lot("isolated", key, slots, shape, ("kv", *("heads" for _ in heads), "blocks", "bytes"))
    if key.form == "heads":
        return Lot("isolated", key, slots, (key.heads, num_blocks, page // key.heads), ("heads", "blocks", "bytes"))
    if key.form != "blocks":
        return Lot("isolated", key, slots, (num_blocks, page), ("blocks", "bytes"))
    tokens = [spec for spec in members if isinstance(spec, AttentionSpec | MLASpec)]
    mixed = len(tokens) < len(members)
    ratios = {1} if mixed else {spec.ratio for spec in tokens}
    ratio = ratios.pop() if len(ratios) == 1 else 1
    blocks, kernel_page = num_blocks * ratio, page // ratio
    counts = {spec.sizes["H"] if (spec.nbytes, spec.ratio) == (page, ratio) else 0 for spec in tokens}
    count = counts.pop() if len(counts) == 1 and not mixed else 0
    if layout == "BHLNC" and count:
        shape = (blocks, count, len(slots), kernel_page // count)
        return Lot("ordered", key, slots, shape, ("blocks", "heads", "layers", "bytes"))
    return Lot("default", key, slots, (blocks, len(slots), kernel_page), ("blocks", "layers", "bytes"))
