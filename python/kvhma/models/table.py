# SPDX-License-Identifier: Apache-2.0
"""What public models cache in each layer: the facts from their configurations, and nothing about any engine.

The table is ``data/models.json``; :mod:`kvhma.models.vllm_layout` turns a model into the geometry of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from kvhma.errors import GeometryError, UnknownModelError

AttentionKind: TypeAlias = Literal["full", "sliding", "chunked", "mla", "indexer"]
StateKind: TypeAlias = Literal["mamba1", "mamba2", "gdn", "kda", "linear", "short_conv"]
CacheKind: TypeAlias = AttentionKind | StateKind

ATTENTION_KINDS: frozenset[str] = frozenset(get_args(AttentionKind))
STATE_KINDS: frozenset[str] = frozenset(get_args(StateKind))
LATENT_KINDS: frozenset[str] = frozenset(("mla", "indexer"))
"""Kinds with one vector for each token, on every rank whole."""

_MODULES = {"indexer": "self_attn.indexer.k_cache", **dict.fromkeys(STATE_KINDS, "mixer")}
"""Where in its layer a cache is; attention is in ``self_attn.attn``."""

_LETTERS = {
    "f": "full",
    "s": "sliding",
    "c": "chunked",
    "l": "mla",
    "j": "mamba1",
    "m": "mamba2",
    "g": "gdn",
    "k": "kda",
    "b": "full+mamba2",
    "i": "indexer+mla",
    "-": "none",
}
"""Letters of the layer patterns in the table."""

INDEX_KEY, INDEX_SCALE = 128, 4
"""Bytes of a token's key in a sparse-attention index, and of its scale."""

_ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


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
    gated delta net (GDN) and Kimi delta attention (KDA) convolve ``q``, ``k`` (``n_groups`` key heads of
    ``d_state``) and ``v``; Mamba1 only ``x``, and each of its channels is a head of one row. A short convolution
    has nothing but that ``x``; linear attention convolves nothing and has heads alone.

    Attributes:
        kind: ``"mamba1"``, ``"mamba2"``, ``"gdn"``, ``"kda"``, ``"linear"`` or ``"short_conv"``.
        conv_dim: channels of the convolution state; 0 for linear attention.
        d_conv: taps of the convolution; the state keeps ``d_conv - 1`` rows. 1 for linear attention.
        n_heads: heads of the recurrent state (value heads for GDN and KDA).
        head_dim: rows of a head.
        d_state: columns of a head; 0 for a short convolution.
        n_groups: groups of ``B`` and ``C``, or key heads for GDN and KDA; 0 for the other kinds.
        conv_dtype: dtype of the convolution state.
        ssm_dtype: dtype of the recurrent state.
        draft_rows: rows after those ``d_conv - 1`` that an engine keeps for draft tokens, one for each. They are
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
        if min(self.n_heads, self.head_dim) < 1 or self.draft_rows < 0:
            raise GeometryError(f"state sizes must be positive and draft_rows not negative: {self}")
        if self.is_convolved and (self.conv_dim < 1 or self.d_conv < 2):
            raise GeometryError(f"conv_dim must be positive and d_conv at least 2: {self}")
        if not self.is_convolved and (self.d_conv, self.draft_rows) != (1, 0):
            rows = f"d_conv {self.d_conv}, draft_rows {self.draft_rows}"
            raise GeometryError(f"{rows} of a {self.kind} state, which has none: must be 1 and 0")
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
    def is_convolved(self) -> bool:
        """Whether there is a convolution's state."""
        return self.kind != "linear"

    @property
    def is_grouped(self) -> bool:
        """Whether the convolution has parts that are shared by groups of heads."""
        return self.kind not in ("mamba1", "linear", "short_conv")

    @property
    def conv_parts(self) -> tuple[tuple[str, int], ...]:
        """Parts of the convolution state in memory order: name and channels over all ranks."""
        inner, grouped = self.n_heads * self.head_dim, self.n_groups * self.d_state
        if not self.is_convolved:
            return ()
        if not self.is_grouped:
            return (("x", inner),)
        if self.kind in ("gdn", "kda"):
            return (("q", grouped), ("k", grouped), ("v", inner))
        return (("x", inner), ("B", grouped), ("C", grouped))


@dataclass(frozen=True, slots=True)
class Attention:
    """What one sort of attention layers caches, over all ranks.

    Attributes:
        kind: ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, or ``"indexer"``: the keys of a sparse-attention
            index.
        kv_heads: KV heads; 1 for MLA and an index.
        head_dim: items of a K vector; for MLA the latent and the rotary items together.
        v_head_dim: items of a V vector; None for as many as K has.
        dtype: dtype of K and V; None for the model's. Of an index it is that of its keys (MiniMax-M3); None for keys of
            128 items of 8 bits with a scale of 4 bytes for each (DeepSeek-V3.2).
        window: tokens a query of a ``sliding`` layer sees, itself included; None for the model's.
        chunk: tokens of an attention chunk of a ``chunked`` layer; None for the model's.
        name: what `Model.layers` calls such a layer; None for `kind`.

    Raises:
        GeometryError: an unknown kind or dtype, or sizes that this kind cannot have.
    """

    kind: AttentionKind
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str | None = None
    window: int | None = None
    chunk: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the sizes that the layout relies on."""
        if self.kind not in ATTENTION_KINDS:
            raise GeometryError(f"attention kind {self.kind!r}: known are {', '.join(sorted(ATTENTION_KINDS))}")
        for field in ("kv_heads", "head_dim", "v_head_dim", "window", "chunk"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise GeometryError(f"{field} {value} of {self.kind} attention: must be at least 1")
        if self.kind in LATENT_KINDS and (self.kv_heads, self.v_head_dim) != (1, None):
            raise GeometryError(
                f"kv_heads {self.kv_heads}, v_head_dim {self.v_head_dim} of {self.kind} attention: "
                "one vector for each token, on every rank whole"
            )
        if self.has_scales and self.head_dim != INDEX_KEY:
            raise GeometryError(f"head_dim {self.head_dim} of an index in 8 bits: known are {INDEX_KEY} items")
        if self.dtype is not None:
            item_bytes(self.dtype)

    @property
    def has_scales(self) -> bool:
        """Whether it is an index in 8 bits, with a scale beside each key."""
        return self.kind == "indexer" and self.dtype is None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one head; those of an index with its scale.

        Raises:
            GeometryError: `dtype` is None and this is no index.
        """
        if self.has_scales:
            return self.head_dim + INDEX_SCALE
        if self.dtype is None:
            raise GeometryError(f"dtype None of {self.kind} attention: a model's layer has one")
        return self.items * item_bytes(self.dtype)

    @property
    def items(self) -> int:
        """Items of a token in one head: K and V, or the one vector."""
        return self.head_dim if self.kind in LATENT_KINDS else self.head_dim + (self.v_head_dim or self.head_dim)


@dataclass(frozen=True, slots=True)
class Model:
    """What a model caches.

    Most models have one sort of heads, for which `kv_heads` and `head_dim` are enough. Where heads differ by layer,
    `attention` says how: layers of that name have its numbers, all others the model's.

    Attributes:
        name: its name in the table.
        layers: per layer ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, ``"indexer"``, ``"mamba1"``,
            ``"mamba2"``, ``"gdn"``, ``"kda"``, ``"linear"``, ``"short_conv"``, a name of `attention`, ``"none"`` (an
            MLP layer, or one that uses the cache of another layer), or several joined by ``+``.
        kv_heads: KV heads over all ranks; 1 for MLA.
        head_dim: items of one K or V vector; for MLA the latent and the rotary items together.
        dtype: dtype of K and V.
        window: tokens a query of a ``sliding`` layer sees, itself included.
        chunk: tokens of an attention chunk of a ``chunked`` layer.
        state: the state of the recurrent layers.
        v_head_dim: items of one V vector; None for `head_dim`.
        attention: layers with other heads than the model's, by name.
        query_heads: query heads over all ranks, which have to divide over the ranks of an engine; None if not known.

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
    v_head_dim: int | None = None
    attention: tuple[Attention, ...] = ()
    query_heads: int | None = None

    def __post_init__(self) -> None:
        """Check that every kind has what it needs."""
        item_bytes(self.dtype)
        sizes = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "query_heads": self.query_heads}
        if min(1 if value is None else value for value in sizes.values()) < 1:
            told = ", ".join(f"{field} {value}" for field, value in sizes.items() if value is not None)
            raise GeometryError(f"{self.name}: {told}; need at least 1")
        names = [one.name or one.kind for one in self.attention]
        for name in names:
            if names.count(name) > 1 or name in STATE_KINDS | {"none"} or "+" in name:
                raise GeometryError(f"{self.name}: attention {name!r} is there twice, or the name of something else")
        found = self.specs()
        if len({name for name, _ in found}) < len(found):
            raise GeometryError(f"{self.name}: a layer has two caches of one place")
        for kind, field in (("sliding", "window"), ("chunked", "chunk")):
            if any(spec.kind == kind and getattr(spec, field) is None for _, spec in found):
                raise GeometryError(f"{self.name}: {kind} layers, but {field} is None")
        scaled = any(isinstance(spec, Attention) and spec.has_scales for _, spec in found)
        if scaled and item_bytes(self.dtype) == 1:
            raise GeometryError(
                f"{self.name}: dtype {self.dtype} beside an index: which of two formats of 8 bits the latent has is "
                "the attention kernel's choice"
            )

    def specs(self) -> tuple[tuple[str, Attention | State], ...]:
        """Return name and content of every cache in model order, with nothing left to the model's own fields.

        A ``full+mamba2`` layer has two.

        Raises:
            GeometryError: a layer kind that is not known, or a state that the model does not have.
        """
        named = {one.name or one.kind: self._complete(one) for one in self.attention}
        found: list[tuple[str, Attention | State]] = []
        for index, layer in enumerate(self.layers):
            for word in () if layer == "none" else layer.split("+"):
                spec = named.get(word) or self._plain(word, index, layer)
                found.append((f"model.layers.{index}.{_MODULES.get(spec.kind, 'self_attn.attn')}", spec))
        return tuple(found)

    def token_spec(self) -> Attention:
        """Return the heads of the model's own fields, of the kind that most of its attention is."""
        is_mla = any(spec.kind == "mla" for _, spec in self.specs())
        return self._own("mla" if is_mla else "full", None)

    def _plain(self, word: str, index: int, layer: str) -> Attention | State:
        """Return what a layer of a known kind caches, with the model's own heads."""
        if word in STATE_KINDS:
            if self.state is None or self.state.kind != word:
                have = self.state.kind if self.state else None
                raise GeometryError(f"{self.name}: {word} layers, but state is {have}")
            return self.state
        if word == "indexer":
            return Attention("indexer", 1, INDEX_KEY)
        if word not in ATTENTION_KINDS:
            known = ", ".join(sorted(ATTENTION_KINDS | STATE_KINDS))
            raise GeometryError(f"{self.name}: layer {index} is {layer!r}; known are none, {known}")
        return self._own(cast("AttentionKind", word), self.v_head_dim)

    def _own(self, kind: AttentionKind, v_head_dim: int | None) -> Attention:
        """Return attention with the model's own heads."""
        if kind == "mla":
            return self._complete(Attention(kind, 1, self.head_dim))
        return self._complete(Attention(kind, self.kv_heads, self.head_dim, v_head_dim))

    def _complete(self, one: Attention) -> Attention:
        return replace(
            one,
            # One vector of K has another length than the next of V only where that is said.
            v_head_dim=one.v_head_dim if one.v_head_dim != one.head_dim else None,
            dtype=one.dtype if one.kind == "indexer" else one.dtype or self.dtype,
            window=(one.window or self.window) if one.kind == "sliding" else None,
            chunk=(one.chunk or self.chunk) if one.kind == "chunked" else None,
            name=None,
        )


@cache
def models() -> Mapping[str, Model]:
    """Return the table: models by name, in a fixed order."""
    return MappingProxyType({name: _model(name, row) for name, row in _rows().items()})


@cache
def hub_ids() -> Mapping[str, str]:
    """Return the names in the table by Hugging Face id: checkpoints whose caches are alike have one name."""
    return MappingProxyType({hub_id: name for name, row in _rows().items() for hub_id in row["hub"]})


def model(name: str) -> Model:
    """Return one model of the table.

    Args:
        name: its name, or the Hugging Face id of one of its checkpoints, in any case. An organisation in front counts
            for nothing: it may be one that publishes a copy.

    Raises:
        UnknownModelError: no such model; the text lists the known ones.
    """
    found = _names().get(name.rpartition("/")[2].lower())
    if found is None:
        raise UnknownModelError(f"unknown model {name!r}; known are {', '.join(models())}")
    return models()[found]


@cache
def _names() -> Mapping[str, str]:
    """Return the names in the table by everything that they are called, in lower case."""
    ids = {hub_id.rpartition("/")[2]: name for hub_id, name in hub_ids().items()}
    return {word.lower(): name for word, name in (ids | {name: name for name in models()}).items()}


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads(files("kvhma").joinpath("data/models.json").read_text("utf-8"))
    return rows


def _model(name: str, row: Mapping[str, Any]) -> Model:
    sizes = {field: value for field, value in row.items() if field not in ("hub", "layers", "state", "attention")}
    state = row.get("state")
    letters = "".join(pattern * repeats for pattern, repeats in row["layers"])
    return Model(
        name=name,
        layers=tuple(_LETTERS[letter] for letter in letters),
        state=State(**state) if state else None,
        attention=tuple(Attention(**one) for one in row.get("attention", ())),
        **sizes,
    )
