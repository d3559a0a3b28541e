# SPDX-License-Identifier: Apache-2.0
"""One worker's KV cache: regions, groups, pages and layers, as frozen values.

A :class:`Geometry` describes one rank. Rust reads and checks it once, when it is made. So no address of an existing
geometry overflows or leaves its region. docs/geometry.md has the JSON form and the meaning of every field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvhma._kvhma import CheckedGeometry
from kvhma.errors import GeometryError
from kvhma.types import Span as Span

Kind = Literal["full", "sliding", "chunked", "mla", "ssm", "opaque"]
Memory = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous range of memory, registered for transfer as a whole.

    Attributes:
        base: address of the first byte.
        bytes: length of the range.
        memory: ``"DRAM"`` or ``"VRAM"``.
        device: device id of the memory, 0 for DRAM.
    """

    base: int
    bytes: int
    memory: Memory = "DRAM"
    device: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    Attributes:
        kind: what the blocks hold; ``sliding`` needs `window`, ``chunked`` needs `chunk`.
        block_size: tokens per *logical* block, on one rank. For ``ssm`` and ``opaque`` it only describes the manager.
        ratio: kernel blocks per logical block; a page is the bytes of one *kernel* block.
        window: tokens that a query sees, including itself (``sliding`` only).
        chunk: tokens per attention chunk (``chunked`` only).
        speculative: extra state slots after the slot with the state (``ssm`` only).
        cp_rank: number of this rank among the context-parallel ranks.
        cp_size: number of context-parallel ranks, which take turns: token ``t`` is held by rank
            ``t // turn % cp_size``. An entry of the block table covers ``block_size * cp_size`` tokens of the sequence;
            the block of each rank holds that rank's tokens of them, in their order.
        cp_interleave: tokens of a turn, vLLM's ``cp_kv_cache_interleave_size``: a divisor of `block_size`, for ``full``
            and ``mla`` groups. None for `block_size`: the ranks take turns by whole blocks.
    """

    kind: Kind
    block_size: int
    ratio: int = 1
    window: int | None = None
    chunk: int | None = None
    speculative: int = 0
    cp_rank: int = 0
    cp_size: int = 1
    cp_interleave: int | None = None

    @property
    def turn(self) -> int:
        """Tokens that a context-parallel rank holds before the next rank's turn."""
        return self.cp_interleave or self.block_size

    @property
    def tokens_per_entry(self) -> int:
        """Tokens of the sequence that an entry of the block table covers."""
        return self.block_size * self.cp_size

    @property
    def kernel_block_size(self) -> int:
        """Tokens of a kernel block."""
        return self.block_size // self.ratio


@dataclass(frozen=True, slots=True)
class Shard:
    """The half-open range of an axis that one rank holds.

    Attributes:
        extent: size of the axis over all ranks.
        start: first index of this rank.
        length: number of indices of this rank; None for all indices from `start` on.
    """

    extent: int
    start: int = 0
    length: int | None = None

    @property
    def held(self) -> int:
        """Number of indices of this rank."""
        return self.extent - self.start if self.length is None else self.length

    def problem(self, field: str) -> str | None:
        """Return an error text, or None; the text calls the range `field`."""
        for name, value in (("extent", self.extent), ("start", self.start), ("length", self.length or 0)):
            if not isinstance(value, int):
                return f"{field}: {name} {value!r}: must be an integer"
        if self.start < 0 or self.held < 1 or self.start + self.held > self.extent:
            return f"{field} {self.start}..{self.start + self.held}: must be a range within the extent {self.extent}"
        return None


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a part.

    Attributes:
        name: axes of the two sides are paired by name. ``"tokens"`` is special: its extent is the tokens of one kernel
            block and may differ between the sides. Every other axis must have the same extent on both sides.
        extent: size of the axis over all ranks, in items.
        stride: bytes from one index to the next.
        start: first global index that this rank holds.
        length: how many indices this rank holds; None for all indices from `start` on. An axis that several ranks hold
            whole is replicated: any of these ranks can be read.
        may_repeat: this rank holds one index, and an unknown number of neighbouring ranks may hold the same index.
            `extent` then counts ranks and `start` is this rank: the true extent is a divisor of `extent`. Two sides
            that know no more than this can still be paired: for every divisor, the paired ranks hold the same index.
        spare: how many of the last indices are written before they are read, like rows for draft tokens. They move if
            both sides have equally many, because a gap costs more, and are left out otherwise. Only for an axis that
            this rank holds whole.
    """

    name: str
    extent: int
    stride: int
    start: int = 0
    length: int | None = None
    may_repeat: bool = False
    spare: int = 0

    def __post_init__(self) -> None:
        """Fill in the default length, so that equal axes compare equal."""
        if self.length is None:
            object.__setattr__(self, "length", self.extent - self.start)

    @property
    def shard(self) -> Shard:
        """The range of the axis that this rank holds."""
        return Shard(self.extent, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Part:
    """A named piece of a page: ``kv``; or ``x``, ``B``, ``C``, ``q``, ``k``, ``v``, ``ssm`` of a recurrent state.

    The byte of item ``(i0, i1, ...)`` (local indices) is at ``offset + sum(i * axis.stride)`` in the page.
    An attention part without a ``tokens`` axis is never cut by tokens; a part with a single axis of bytes is opaque.

    Attributes:
        name: parts of the two sides are paired by name.
        dtype: name of the item's encoding, e.g. ``"bfloat16"``; must be equal on both sides. A packing that only some
            machines use belongs into this name (``"bfloat16/amx-32"``).
        item_bytes: bytes of one item.
        offset: bytes from the start of the page.
        axes: the dimensions, in any order.
    """

    name: str
    dtype: str
    item_bytes: int
    offset: int
    axes: tuple[Axis, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part that this rank holds in one page."""
        total = self.item_bytes
        for axis in self.axes:
            total *= axis.length or 0
        return total

    def halves(self) -> tuple[Part, ...]:
        """Return ``k`` and ``v`` of a ``kv`` with heads, whose content is K, then V of the same size.

        Return another part as it is, and a ``kv`` whose content this rank does not hold whole.
        """
        axes = {axis.name: axis for axis in self.axes}
        content = axes.get("content")
        if self.name != "kv" or "heads" not in axes or content is None:
            return (self,)
        half, odd = divmod(content.extent, 2)
        if odd or content != Axis("content", content.extent, content.stride):
            return (self,)
        cut = tuple(replace(axis, extent=half, length=half) if axis is content else axis for axis in self.axes)
        second = self.offset + half * content.stride
        return replace(self, name="k", axes=cut), replace(self, name="v", axes=cut, offset=second)


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """The bytes of one layer in one kernel block, as parts. Bytes outside of parts are padding and never move.

    Attributes:
        parts: named pieces of the page, which do not overlap.
    """

    parts: tuple[Part, ...]

    def __repr__(self) -> str:
        """Describe the content in a line."""
        return f"Page({', '.join(part.name for part in self.parts)}: {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of content in the page, without padding."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """Where the pages of one layer are.

    The page of kernel block ``k`` of logical block ``b`` starts at
    ``region.base + offset + b * block_stride + k * kernel_stride``.

    Attributes:
        name: layers of the two sides are paired by name.
        group: index into `Geometry.groups`.
        region: index into `Geometry.regions`; layers of different groups may alias the same bytes.
        offset: bytes from the region's base to the page of block 0.
        num_blocks: logical blocks, including the null block.
        block_stride: bytes between logical blocks. Blocks may be interleaved, but those in use must not share bytes.
            This is not checked here; a request that would write a byte twice is refused.
        page: the content of a page.
        kernel_stride: bytes between the kernel blocks of a logical block; None for ``block_stride / ratio``.
    """

    name: str
    group: int
    region: int
    offset: int
    num_blocks: int
    block_stride: int
    page: Page
    kernel_stride: int | None = None


@dataclass(frozen=True, repr=False)
class Geometry:
    """One worker's cache, checked.

    It is immutable, so a copy is the geometry itself. Pickle stores its JSON. If it was read from JSON, regions, groups
    and layers become Python values on first access.

    Attributes:
        regions: registered memory.
        groups: KV cache groups, in the order of the engine's block tables.
        layers: every layer with a cache.
        tp_rank: number among the `tp_size` ranks; it only selects between equally good sources.
        tp_size: tensor-parallel ranks of this engine.
        null_block: the logical block id that stands for "no block", or None.
        core: the same, checked, as the Rust extension has it.

    Raises:
        GeometryError: a field is out of range or does not fit another; the message has both values.
        AddressOverflowError: an address does not fit 64 bits.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    tp_rank: int = 0
    tp_size: int = 1
    null_block: int | None = 0
    core: CheckedGeometry = field(init=False, compare=False)
    """The checked form that plans are made from."""

    def __post_init__(self) -> None:
        """Check everything once, so that no later code has to."""
        object.__setattr__(self, "core", CheckedGeometry.from_values(self))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make the attributes that a geometry read from JSON does not have yet."""
            make = _VALUES.get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__.setdefault(name, make(self.core))

    @cached_property
    def layer_by_name(self) -> dict[str, Layer]:
        """Layers by their name."""
        return {layer.name: layer for layer in self.layers}

    def kernel_stride(self, layer: Layer) -> int:
        """Return the bytes between the kernel blocks of a logical block of one layer.

        Args:
            layer: one of `layers`.
        """
        return layer.kernel_stride or layer.block_stride // self.groups[layer.group].ratio

    def by_parts(self, layer_name: Callable[[str], str] = str) -> Geometry:
        """Describe each part as a separate layer, named ``LAYER.PART``: for engines that keep a layer's parts apart.

        A ``kv`` with heads becomes ``k`` and ``v``, the halves of its content. If both sides are described so, the same
        copies move. If V is smaller than K, the halves are not K and V, and they pair only with halves of equal sizes.

        Args:
            layer_name: makes the name that layers of both engines meet by, from a layer's name here.
        """
        layers = []
        for layer in self.layers:
            for part in layer.page.parts:
                for of_layer in part.halves():
                    name = f"{layer_name(layer.name)}.{of_layer.name}"
                    layers.append(replace(layer, name=name, page=Page((of_layer,))))
        return replace(self, layers=tuple(layers))

    def to_json(self, *, indent: int | None = None) -> bytes:
        """Return the UTF-8 JSON form of docs/geometry.md: as it was read, else with equal pages written once.

        Args:
            indent: spaces for each level; None for one line.
        """
        return self.core.to_json(indent)

    def to_form(self) -> dict[str, Any]:
        """Return what :meth:`to_json` writes as plain dictionaries, lists, texts and integers."""
        form: dict[str, Any] = json.loads(self.to_json())
        return form

    @classmethod
    def from_json(cls, data: bytes | str) -> Geometry:
        """Read the JSON form. Safe on any input: sizes are bounded and every field is checked.

        Args:
            data: UTF-8 text of at most 16 MiB.

        Returns:
            The geometry, checked.

        Raises:
            GeometryError: no JSON, an unknown or missing field, another version, too large, or a failed check.
            AddressOverflowError: an address does not fit 64 bits.
        """
        if not isinstance(data, str | bytes | bytearray | memoryview):
            found, reason = type(data).__name__, "is no JSON text: has to be bytes or a string"
            raise GeometryError(f"data: {found} {reason}", code="type", field="data", value=found, reason=reason)
        # The parser finds a lone surrogate, which is not UTF-8.
        core = CheckedGeometry(data.encode(errors="surrogatepass") if isinstance(data, str) else bytes(data))
        made = cls.__new__(cls)
        made.__dict__.update(core=core, tp_rank=core.tp_rank, tp_size=core.tp_size, null_block=core.null_block)
        return made

    def __reduce__(self) -> tuple[Callable[[bytes], Geometry], tuple[bytes]]:
        """Pickle the JSON form."""
        return type(self).from_json, (self.to_json(),)

    def __copy__(self) -> Geometry:
        """Return the geometry itself, because it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Geometry:
        """Return the geometry itself, because it is immutable."""
        return self

    def __repr__(self) -> str:
        """Describe it in a line; `to_json` returns everything."""
        return repr(self.core).removeprefix("Checked")


def _layers(core: CheckedGeometry) -> tuple[Layer, ...]:
    pages = []
    for parts in core.pages:
        made = []
        for name, dtype, item_bytes, offset, axes in parts:
            made.append(Part(name, dtype, item_bytes, offset, tuple(Axis(*arguments) for arguments in axes)))
        pages.append(Page(tuple(made)))
    return tuple(
        Layer(name, group, region, offset, num_blocks, block_stride, pages[page], kernel_stride)
        for name, group, region, offset, num_blocks, block_stride, page, kernel_stride in core.layers
    )


_VALUES: dict[str, Callable[[CheckedGeometry], object]] = {
    "regions": lambda core: tuple(Region(*arguments) for arguments in core.regions),
    "groups": lambda core: tuple(Group(*arguments) for arguments in core.groups),
    "layers": _layers,
}
"""Makes the Python values of a geometry that was read from JSON."""
