# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of each layer are in a buffer, and which layers a buffer can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvhma.hybrid import LayoutError
from kvhma.torch.attention import AttentionSpec, MLASpec
from kvhma.torch.state import OpaqueSpec, StateSpec

TokenSpec: TypeAlias = AttentionSpec | MLASpec
Spec: TypeAlias = TokenSpec | StateSpec | OpaqueSpec

_INNER: Mapping[str, str] = {"LBHNC": "SHNC", "LBNHC": "SNHC", "LHBNC": "HSNC", "BLHNC": "SHNC", "BLNHC": "SNHC"}
"""Order of a kernel block's bytes where a page is contiguous, outermost first."""

_APART: Mapping[str, str] = {"LHBNC": "SHBKNC", "LBNHC": "SBKNHC", "BLNHC": "SBKNHC"}
"""Order of a buffer with K and V apart; SBKHNC for the other layouts."""


@dataclass(frozen=True, slots=True)
class Key:
    """What the pages of layers that share bytes have in common.

    Attributes:
        form: ``blocks``: the bytes of a block over all layers lie together; ``pages``: those of a layer; ``heads``: a
            head's bytes of all blocks lie together; ``apart``: K of all blocks, then V; ``own``: nobody else knows.
        page_bytes: bytes of a logical block of one layer, padding included.
        heads: heads outside of blocks; 1 where they are inside.
    """

    form: Literal["blocks", "pages", "heads", "apart", "own"]
    page_bytes: int
    heads: int = 1

    def __str__(self) -> str:
        words = {
            "blocks": "each block contiguous over layers",
            "pages": "each page contiguous",
            "heads": f"{self.heads} heads outside of blocks",
            "apart": f"K and V apart, {self.heads} outside of blocks" if self.heads > 1 else "K and V apart",
            "own": "opaque",
        }
        return f"pages of {self.page_bytes} bytes, {words[self.form]}"


@dataclass(frozen=True, slots=True)
class Pool:
    """A buffer, as far as its layers' places depend on it.

    Attributes:
        buffer: its index.
        key: what its layers have in common.
        slots: how many pages of a group's layers there are.
        num_blocks: logical blocks.
        layout: stride order.
    """

    buffer: int
    key: Key
    slots: int
    num_blocks: int
    layout: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Where the bytes of one layer are.

    Attributes:
        buffer: index of the buffer.
        offset: bytes from its start to block 0.
        strides: bytes from one index to the next: B logical blocks, K kernel blocks, and S, H, N, C as in a spec's
            `sizes`; for state and opaque bytes B only.
    """

    buffer: int
    offset: int
    strides: Mapping[str, int]


def key_of(spec: Spec, layout: str) -> Key:
    """Return what layers must have in common with one of `spec` to share its bytes."""
    page = spec.padded_bytes
    if isinstance(spec, OpaqueSpec):
        return Key("own", page)
    heads = 1
    if not isinstance(spec, StateSpec):
        heads = spec.sizes["H"] if layout == "LHBNC" else 1
        if spec.kv == "apart":
            return Key("apart", page, heads)
    if layout[0] == "B":
        return Key("blocks", page)
    return Key("heads" if heads > 1 else "pages", page, heads)


def plots_of(members: Sequence[tuple[int, str]], specs: Mapping[str, Spec], pool: Pool) -> dict[str, Plot]:
    """Return the places of the layers that one group has in a buffer.

    Args:
        members: slot and name, by slot.
        specs: of all layers.
        pool: the buffer.

    Raises:
        LayoutError: heads before layers would leave a layer's items unaligned.
    """
    page, over_layers = pool.key.page_bytes, pool.key.form == "blocks"
    plots: dict[str, Plot] = {}
    families: dict[tuple[int, int], list[tuple[str, TokenSpec]]] = {}
    for slot, name in members:
        spec = specs[name]
        if isinstance(spec, StateSpec | OpaqueSpec):
            stride = page * (pool.slots if over_layers else 1)
            plots[name] = Plot(pool.buffer, slot * page if over_layers else 0, {"B": stride})
        elif over_layers and pool.layout == "BHLNC":
            families.setdefault((spec.sizes["H"], spec.nbytes), []).append((name, spec))
        elif over_layers:
            step = page // spec.ratio
            strides = _inner(spec, pool.layout) | {"K": pool.slots * step, "B": pool.slots * page}
            plots[name] = Plot(pool.buffer, slot * step, strides)
        elif pool.key.form == "pages":
            strides = _inner(spec, pool.layout) | {"K": page // spec.ratio, "B": page}
            plots[name] = Plot(pool.buffer, 0, strides)
        else:
            order = "HBKSNC" if pool.key.form == "heads" else _APART.get(pool.layout, "SBKHNC")
            sizes = spec.sizes | {"B": pool.num_blocks, "K": spec.ratio}
            plots[name] = Plot(pool.buffer, 0, _dense(order, sizes, spec.dtype.itemsize))
    before = 0
    for family in families.values():
        plots |= _heads_first(family, before, pool)
        before += sum(spec.nbytes // spec.ratio for _, spec in family)
    return plots


def _heads_first(family: Sequence[tuple[str, TokenSpec]], before: int, pool: Pool) -> dict[str, Plot]:
    """Interleave layers of equal pages by heads: the layers of *this* group, so that a short group has no gaps."""
    plots = {}
    for rank, (name, spec) in enumerate(family):
        if before % spec.dtype.itemsize:
            raise LayoutError(
                f"layout {pool.layout!r}: layer {name!r} of {spec.dtype} would start at byte {before} of a block, "
                f"behind layers of another dtype; {spec.dtype.itemsize} bytes an item need a multiple"
            )
        inner = _dense("SNC", spec.sizes, spec.dtype.itemsize)
        unit = spec.nbytes // spec.ratio // spec.sizes["H"]
        block = pool.slots * pool.key.page_bytes
        strides = inner | {"H": len(family) * unit, "K": block // spec.ratio, "B": block}
        plots[name] = Plot(pool.buffer, before + rank * unit, strides)
    return plots


def _inner(spec: TokenSpec, layout: str) -> dict[str, int]:
    """Return the strides of a kernel block whose page is dense."""
    return _dense(_INNER[layout], spec.sizes, spec.dtype.itemsize)


def _dense(order: str, sizes: Mapping[str, int], item: int) -> dict[str, int]:
    strides, step = {}, item
    for letter in reversed(order):
        strides[letter] = step
        step *= sizes[letter]
    return strides
