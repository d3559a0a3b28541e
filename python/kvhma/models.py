# SPDX-License-Identifier: Apache-2.0
"""What public models cache in each layer: the facts from their configurations, and nothing about any engine.

The table is ``data/models.json``; :mod:`kvhma.hybrid` turns a model into the geometry of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from kvhma.errors import GeometryError, KvhmaError

AttentionKind: TypeAlias = Literal["full", "sliding", "chunked", "mla"]
StateKind: TypeAlias = Literal["mamba1", "mamba2", "gdn", "short_conv"]
CacheKind: TypeAlias = Literal["full", "sliding", "chunked", "mla", "mamba1", "mamba2", "gdn", "short_conv"]

ATTENTION_KINDS: frozenset[str] = frozenset(get_args(AttentionKind))
STATE_KINDS: frozenset[str] = frozenset(get_args(StateKind))

_LETTERS = {
    "f": "full",
    "s": "sliding",
    "c": "chunked",
    "l": "mla",
    "j": "mamba1",
    "m": "mamba2",
    "g": "gdn",
    "b": "full+mamba2",
    "-": "none",
}
"""Letters of the layer patterns in the table."""

_ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class UnknownModelError(KvhmaError, LookupError):
    """No model of that name is in the table; the text lists those that are."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of one item of `dtype`.

    Raises:
        GeometryError: a dtype that no model of the table uses.
    """
    if dtype not in _ITEM_BYTES:
        raise GeometryError(f"dtype {dtype!r}: known are {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class State:
    """The recurrent state of one layer, over all ranks.

    Mamba2 convolves ``x`` (``n_heads * head_dim`` channels), ``B`` and ``C`` (``n_groups * d_state`` each); a
    gated delta net (GDN) convolves ``q``, ``k`` (``n_groups`` key heads of ``d_state``) and ``v``; Mamba1
    only ``x``, and each of its channels is a head of one row. A short convolution has nothing but that ``x``.

    Attributes:
        kind: ``"mamba1"``, ``"mamba2"``, ``"gdn"`` or ``"short_conv"``.
        conv_dim: channels of the convolution state.
        d_conv: taps of the convolution; the state keeps ``d_conv - 1`` rows.
        n_heads: heads of the recurrent state (value heads for GDN).
        head_dim: rows of a head.
        d_state: columns of a head; 0 for a short convolution.
        n_groups: groups of ``B`` and ``C``, or key heads for GDN; 0 for Mamba1 and a short convolution.
        conv_dtype: dtype of the convolution state.
        ssm_dtype: dtype of the recurrent state.
        draft_rows: rows behind those ``d_conv - 1`` that an engine keeps for draft tokens, one for each. They are
            written before they are read, so the other side may have another number of them.

    Raises:
        GeometryError: an unknown kind or dtype, or `conv_dim` is not the sum of its parts.
    """

    kind: StateKind
    conv_dim: int
    d_conv: int
    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_dtype: str
    ssm_dtype: str
    draft_rows: int = 0

    def __post_init__(self) -> None:
        """Check what the split over ranks relies on."""
        if self.kind not in STATE_KINDS:
            raise GeometryError(f"state kind {self.kind!r}: known are {', '.join(sorted(STATE_KINDS))}")
        item_bytes(self.conv_dtype)
        item_bytes(self.ssm_dtype)
        if min(self.conv_dim, self.n_heads, self.head_dim) < 1 or self.d_conv < 2 or self.draft_rows < 0:
            raise GeometryError(f"state sizes must be positive, d_conv at least 2 and draft_rows not negative: {self}")
        self._check_part("d_state", self.d_state, self.is_recurrent)
        self._check_part("n_groups", self.n_groups, self.is_grouped)
        total = sum(columns for _, columns in self.conv_parts)
        if total != self.conv_dim:
            raise GeometryError(f"conv_dim {self.conv_dim} of a {self.kind} state whose parts have {total} channels")

    def _check_part(self, field: str, size: int, exists: bool) -> None:
        """Refuse a part of no bytes, which no geometry can hold, and bytes of a part that is not there."""
        if exists and size < 1:
            raise GeometryError(f"{field} {size} of a {self.kind} state: must be positive")
        if not exists and size != 0:
            raise GeometryError(f"{field} {size} of a {self.kind} state, which has none: must be 0")

    @property
    def is_recurrent(self) -> bool:
        """Whether there is more than the convolution's."""
        return self.kind != "short_conv"

    @property
    def is_grouped(self) -> bool:
        """Whether the convolution has parts that are shared by groups of heads."""
        return self.kind not in ("mamba1", "short_conv")

    @property
    def conv_parts(self) -> tuple[tuple[str, int], ...]:
        """Parts of the convolution state in memory order: name and channels over all ranks."""
        inner, grouped = self.n_heads * self.head_dim, self.n_groups * self.d_state
        if not self.is_grouped:
            return (("x", inner),)
        if self.kind == "gdn":
            return (("q", grouped), ("k", grouped), ("v", inner))
        return (("x", inner), ("B", grouped), ("C", grouped))


@dataclass(frozen=True, slots=True)
class Model:
    """What a model caches.

    Attributes:
        name: its name in the table.
        layers: per layer ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, ``"mamba1"``, ``"mamba2"``,
            ``"gdn"``, ``"none"`` (an MLP layer), or two caches joined by ``+``.
        kv_heads: KV heads over all ranks; 1 for MLA.
        head_dim: items of one K or V vector; for MLA the latent and the rotary items together.
        dtype: dtype of K and V.
        window: tokens a query of a ``sliding`` layer sees, itself included.
        chunk: tokens of an attention chunk of a ``chunked`` layer.
        state: the state of the recurrent layers.

    Raises:
        GeometryError: an unknown layer kind or dtype, a size below 1, or a kind whose `window`, `chunk` or
            `state` is missing.
    """

    name: str
    layers: tuple[str, ...]
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    window: int | None = None
    chunk: int | None = None
    state: State | None = None

    def __post_init__(self) -> None:
        """Check that every kind has what it needs."""
        item_bytes(self.dtype)
        if min(self.kv_heads, self.head_dim) < 1:
            raise GeometryError(f"{self.name}: kv_heads {self.kv_heads}, head_dim {self.head_dim}; need at least 1")
        kinds = {kind for _, kind in self.caches()}
        state = self.state.kind if self.state else None
        for kind in sorted(kinds):
            if kind in STATE_KINDS and kind != state:
                raise GeometryError(f"{self.name}: {kind} layers, but state is {state}")
        if "sliding" in kinds and self.window is None:
            raise GeometryError(f"{self.name}: sliding layers, but window is None")
        if "chunked" in kinds and self.chunk is None:
            raise GeometryError(f"{self.name}: chunked layers, but chunk is None")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one item of K or V."""
        return item_bytes(self.dtype)

    def caches(self) -> tuple[tuple[str, CacheKind], ...]:
        """Return name and kind of every cache in model order; a ``full+mamba2`` layer has two.

        Raises:
            GeometryError: a layer kind that is not known.
        """
        found: list[tuple[str, CacheKind]] = []
        for index, layer in enumerate(self.layers):
            for kind in () if layer == "none" else layer.split("+"):
                if kind not in ATTENTION_KINDS | STATE_KINDS:
                    known = ", ".join(sorted(ATTENTION_KINDS | STATE_KINDS))
                    raise GeometryError(f"{self.name}: layer {index} is {layer!r}; known are none, {known}")
                module = "self_attn.attn" if kind in ATTENTION_KINDS else "mixer"
                found.append((f"model.layers.{index}.{module}", cast("CacheKind", kind)))
        return tuple(found)


def models() -> Mapping[str, Model]:
    """Return the table: models by name, in a fixed order."""
    return _table()


def model(name: str) -> Model:
    """Return one model of the table.

    Raises:
        UnknownModelError: no such model; the text lists the known ones.
    """
    table = _table()
    if name not in table:
        raise UnknownModelError(f"unknown model {name!r}; known are {', '.join(table)}")
    return table[name]


@cache
def _table() -> Mapping[str, Model]:
    text = files("kvhma").joinpath("data/models.json").read_text(encoding="utf-8")
    return MappingProxyType({name: _model(name, row) for name, row in json.loads(text).items()})


def _model(name: str, row: dict[str, Any]) -> Model:
    state = row.pop("state", None)
    letters = "".join(pattern * repeats for pattern, repeats in row.pop("layers"))
    return Model(
        name=name,
        layers=tuple(_LETTERS[letter] for letter in letters),
        state=State(**state) if state else None,
        **row,
    )
