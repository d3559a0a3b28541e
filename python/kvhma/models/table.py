# SPDX-License-Identifier: Apache-2.0
"""What public models cache in each layer, from their configurations and independent of any engine.

The table is ``data/models.json``; :mod:`kvhma.models.vllm_layout` turns a model into the geometry of one rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
"""Kinds with one vector for each token, which every rank holds whole."""

_NOT_ATTENTION = STATE_KINDS | {"none"}
"""Names in `Model.layers` that no attention may have."""

_LIMITS = {"sliding": "window", "chunked": "chunk"}
"""The field that limits the tokens of a kind of attention, which a layer of that kind needs."""

_MODULES = {"indexer": "self_attn.indexer.k_cache", **dict.fromkeys(STATE_KINDS, "mixer")}
"""The place of a cache within its layer; attention is in ``self_attn.attn``."""

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
        GeometryError: no model of the table uses this dtype.
    """
    if dtype not in _ITEM_BYTES:
        raise GeometryError(f"dtype {dtype!r}: known are {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class State:
    """The recurrent state of one layer, over all ranks.

    The parts of a state depend on its kind. Mamba2 convolves ``x`` (``n_heads * head_dim`` channels), and ``B`` and
    ``C`` (``n_groups * d_state`` each). A gated delta net (GDN) and Kimi delta attention (KDA) convolve ``q``, ``k``
    (``n_groups`` key heads of ``d_state``) and ``v``. Mamba1 convolves only ``x``, and each channel is a head of one
    row. A short convolution has only that ``x``. Linear attention has heads without a convolution.

    Attributes:
        kind: ``"mamba1"``, ``"mamba2"``, ``"gdn"``, ``"kda"``, ``"linear"`` or ``"short_conv"``.
        conv_dim: channels of the convolution state; 0 for linear attention.
        d_conv: taps of the convolution; the state has ``d_conv - 1`` rows. 1 for linear attention.
        n_heads: heads of the recurrent state (value heads for GDN and KDA).
        head_dim: rows of a head.
        d_state: columns of a head; 0 for a short convolution.
        n_groups: groups of ``B`` and ``C``, or key heads for GDN and KDA; 0 for the other kinds.
        conv_dtype: dtype of the convolution state.
        ssm_dtype: dtype of the recurrent state.
        draft_rows: additional rows that an engine holds for draft tokens, one for each. They are written before they
            are read, so their number may differ on the other side.

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
        """Check the values on which the split over ranks relies."""
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
        """Refuse a part without bytes, which no geometry can describe, and bytes of a part that the kind lacks."""
        if exists and size < 1:
            raise GeometryError(f"{field} {size} of a {self.kind} state: must be positive")
        if not exists and size != 0:
            raise GeometryError(f"{field} {size} of a {self.kind} state, which has none: must be 0")

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a state besides the convolution's."""
        return self.kind != "short_conv"

    @property
    def is_convolved(self) -> bool:
        """Whether there is a convolution state."""
        return self.kind != "linear"

    @property
    def is_grouped(self) -> bool:
        """Whether the convolution has parts that groups of heads share."""
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
    """The cache of one sort of attention layers, over all ranks.

    Attributes:
        kind: ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, or ``"indexer"``: the keys of a sparse-attention
            index.
        kv_heads: KV heads; 1 for MLA and an index.
        head_dim: items of a K vector; for MLA the latent and the rotary items together.
        v_head_dim: items of a V vector; None for as many as K has.
        dtype: dtype of K and V; None for the model's. For an index: the dtype of its keys (MiniMax-M3), or None for
            keys of 128 items of 8 bits with a scale of 4 bytes each (DeepSeek-V3.2).
        window: tokens that a query of a ``sliding`` layer sees, including itself; None for the model's.
        chunk: tokens of an attention chunk of a ``chunked`` layer; None for the model's.
        name: the name of such a layer in `Model.layers`; None for `kind`.

    Raises:
        GeometryError: an unknown kind or dtype, or sizes that are impossible for the kind.
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
        """Check the sizes on which the layout relies."""
        if self.kind not in ATTENTION_KINDS:
            raise GeometryError(f"attention kind {self.kind!r}: known are {', '.join(sorted(ATTENTION_KINDS))}")
        for name in ("kv_heads", "head_dim", "v_head_dim", "window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GeometryError(f"{name} {value} of {self.kind} attention: must be at least 1")
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
    def layer_name(self) -> str:
        """The name of such a layer in `Model.layers`."""
        return self.name or self.kind

    @property
    def has_scales(self) -> bool:
        """Whether it is an index in 8 bits, with a scale next to each key."""
        return self.kind == "indexer" and self.dtype is None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one head; for an index including the scale.

        Raises:
            GeometryError: `dtype` is missing and this is not an index.
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
    """The caches of a model.

    Most models have one sort of heads, described by `kv_heads` and `head_dim`. If heads differ by layer, `attention`
    has the numbers of the layers with that name; all other layers have the model's.

    Attributes:
        name: name of the model in the table.
        layers: the kind of each layer: ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, ``"indexer"``,
            ``"mamba1"``, ``"mamba2"``, ``"gdn"``, ``"kda"``, ``"linear"``, ``"short_conv"``, or a name in `attention`.
            ``"none"`` is an MLP layer, or a layer that uses another layer's cache. Several kinds are joined by ``+``.
        kv_heads: KV heads over all ranks; 1 for MLA.
        head_dim: items of one K or V vector; for MLA the latent and the rotary items together.
        dtype: dtype of K and V.
        window: tokens that a query of a ``sliding`` layer sees, including itself.
        chunk: tokens of an attention chunk of a ``chunked`` layer.
        state: the state of the recurrent layers.
        v_head_dim: items of one V vector; None for `head_dim`.
        attention: layers with other heads than the model's, by name.
        query_heads: query heads over all ranks, which must divide over the ranks of an engine; None if unknown.
        specs: name and content of every cache in model order, with the model's own values filled in. A ``full+mamba2``
            layer has two.

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
    specs: tuple[tuple[str, Attention | State], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check that every kind has the values that it needs."""
        item_bytes(self.dtype)
        sizes = (("kv_heads", self.kv_heads), ("head_dim", self.head_dim), ("query_heads", self.query_heads))
        given = {name: size for name, size in sizes if size is not None}
        if min(given.values()) < 1:
            text = ", ".join(f"{name} {size}" for name, size in given.items())
            raise GeometryError(f"{self.name}: {text}; need at least 1")
        for name, times in Counter(attention.layer_name for attention in self.attention).items():
            if times > 1 or name in _NOT_ATTENTION or "+" in name:
                raise GeometryError(f"{self.name}: attention {name!r} appears twice, or is the name of something else")
        object.__setattr__(self, "specs", self._specs())
        if len(dict(self.specs)) < len(self.specs):
            raise GeometryError(f"{self.name}: a layer has two caches of one place")
        for _, spec in self.specs:
            if isinstance(spec, Attention):
                self._check_attention(spec)

    def _check_attention(self, spec: Attention) -> None:
        """Check a layer's attention, with the model's own values filled in."""
        limit = _LIMITS.get(spec.kind)
        if limit is not None and getattr(spec, limit) is None:
            raise GeometryError(f"{self.name}: {spec.kind} layers, but {limit} is missing")
        if spec.has_scales and item_bytes(self.dtype) == 1:
            raise GeometryError(
                f"{self.name}: dtype {self.dtype} next to an index: which of two formats of 8 bits the latent has is "
                "the attention kernel's choice"
            )

    def _specs(self) -> tuple[tuple[str, Attention | State], ...]:
        named = {cache.layer_name: self._complete(cache) for cache in self.attention}
        found: list[tuple[str, Attention | State]] = []
        for index, layer in enumerate(self.layers):
            for word in () if layer == "none" else layer.split("+"):
                spec = named.get(word) or self._plain(word, index, layer)
                found.append((f"model.layers.{index}.{_MODULES.get(spec.kind, 'self_attn.attn')}", spec))
        return tuple(found)

    @property
    def has_attention(self) -> bool:
        """Whether any layer caches tokens."""
        return any(isinstance(spec, Attention) for _, spec in self.specs)

    def token_spec(self) -> Attention:
        """Return the model's own heads, for the kind of most of its attention layers."""
        is_mla = any(spec.kind == "mla" for _, spec in self.specs)
        return self._own("mla" if is_mla else "full", None)

    def _plain(self, word: str, index: int, layer: str) -> Attention | State:
        """Return the cache of a layer of a known kind, with the model's own heads."""
        if word in STATE_KINDS:
            if self.state is None or self.state.kind != word:
                have = self.state.kind if self.state else None
                raise GeometryError(f"{self.name}: {word} layers, but state is {have}")
            return self.state
        if word == "indexer":
            return Attention("indexer", 1, INDEX_KEY)
        if word not in ATTENTION_KINDS:
            known = ", ".join(sorted(ATTENTION_KINDS | STATE_KINDS))
            raise GeometryError(f"{self.name}: layer {index} is {layer!r}; known: none, {known}")
        return self._own(cast("AttentionKind", word), self.v_head_dim)

    def _own(self, kind: AttentionKind, v_head_dim: int | None) -> Attention:
        """Return attention with the model's own heads."""
        if kind == "mla":
            return self._complete(Attention(kind, 1, self.head_dim))
        return self._complete(Attention(kind, self.kv_heads, self.head_dim, v_head_dim))

    def _complete(self, cache: Attention) -> Attention:
        return replace(
            cache,
            # Without a v_head_dim, V vectors are as long as K vectors.
            v_head_dim=cache.v_head_dim if cache.v_head_dim != cache.head_dim else None,
            dtype=cache.dtype if cache.kind == "indexer" else cache.dtype or self.dtype,
            window=(cache.window or self.window) if cache.kind == "sliding" else None,
            chunk=(cache.chunk or self.chunk) if cache.kind == "chunked" else None,
            name=None,
        )


@cache
def models() -> Mapping[str, Model]:
    """Return the table: models by name, in a fixed order."""
    return MappingProxyType({name: _model(name, row) for name, row in _rows().items()})


@cache
def hub_ids() -> Mapping[str, str]:
    """Return the names in the table by Hugging Face id; checkpoints with equal caches share a name."""
    return MappingProxyType({hub_id: name for name, row in _rows().items() for hub_id in row["hub"]})


def model(name: str) -> Model:
    """Return one model of the table.

    Args:
        name: its name, or the Hugging Face id of one of its checkpoints, in upper or lower case. The organisation is
            ignored, because it may have published a copy.

    Raises:
        UnknownModelError: no such model; the text lists the known ones.
    """
    found = _names().get(name.rpartition("/")[2].lower())
    if found is None:
        raise UnknownModelError(f"unknown model {name!r}; known are {', '.join(models())}")
    return models()[found]


@cache
def _names() -> Mapping[str, str]:
    """Return the names in the table by every other name of a model, in lower case."""
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
        attention=tuple(Attention(**sizes) for sizes in row.get("attention", ())),
        **sizes,
    )
