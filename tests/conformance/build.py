# SPDX-License-Identifier: Apache-2.0
"""Two engines and a request between them, described in a line or two."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvhma.geometry import Span
from kvhma.oracle.cases import Case
from support.engine import GroupShape, Placement, Rank, Shape
from support.model import AxisSpec, Family, PartSpec

D_BASE, P_BASE = 1 << 20, 1 << 40
"""Below 2**53, so that every reader of JSON keeps them exactly."""

Cut = tuple[int, int]
"""Tokens of a kernel block, and kernel blocks in a logical block."""


@dataclass(frozen=True)
class Draft:
    """A case before it is numbered and its answer is computed.

    Attributes:
        title: what is special about it, in a line.
        case: the case.
        difficulty: 1: one thing differs; 2: two things, or a boundary; 3: more.
        refuse: reasons for which it has to be refused, the first the best; empty if it has an answer.
    """

    title: str
    case: Case
    difficulty: int = 1
    refuse: tuple[str, ...] = ()


# --- What layers cache ----------------------------------------------------------------------------------


def heads_part(heads: int = 4, content: int = 4, item: int = 2, *, apart: bool = False, name: str = "kv") -> PartSpec:
    """K and V of a token and head in one row, or `apart`."""
    axes = (AxisSpec("heads", heads, "split"), AxisSpec("tokens", 0), AxisSpec("content", content))
    return PartSpec(name, f"type{item}", item, (AxisSpec("kv", 2), *axes) if apart else axes)


def full(layers: int = 2, **part: Any) -> Family:
    return Family("full", "full", (heads_part(**part),), _count(layers))


def sliding(window: int, layers: int = 2, **part: Any) -> Family:
    return Family("sliding", "sliding", (heads_part(**part),), _count(layers), limit=window)


def chunked(chunk: int, layers: int = 2, **part: Any) -> Family:
    return Family("chunked", "chunked", (heads_part(**part),), _count(layers), limit=chunk)


def mla(layers: int = 2, content: int = 6, item: int = 2, *, index: bool = False) -> Family:
    """A latent for all heads; with `index` also the keys of an indexer."""
    tokens = AxisSpec("tokens", 0)
    parts = (PartSpec("kv", f"type{item}", item, (tokens, AxisSpec("content", content))),)
    if index:
        parts += (PartSpec("index", "uint8", 1, (tokens, AxisSpec("content", 3))),)
    return Family("mla", "mla", parts, _count(layers))


def data_and_scales(layers: int = 2, content: int = 8, scale: int = 4) -> Family:
    """All tokens of a block, then all their scales."""
    tokens = AxisSpec("tokens", 0)
    data = PartSpec("data", "fp8", 1, (tokens, AxisSpec("content", content)))
    return Family(
        "mla", "mla", (data, PartSpec("scales", "float32", scale, (tokens, AxisSpec("content", 1)))), _count(layers)
    )


def packed(layers: int = 2, heads: int = 4) -> Family:
    """Heads whose tokens are packed by an instruction set: no token can be cut out."""
    part = PartSpec("kv", "bfloat16/amx-32", 1, (AxisSpec("heads", heads, "split"), AxisSpec("packed", 12)))
    return Family("packed", "full", (part,), _count(layers))


def opaque(layers: int = 1, size: int = 21) -> Family:
    return Family("opaque", "opaque", (PartSpec("raw", "bytes", 1, (AxisSpec("bytes", size),)),), _count(layers))


def _conv(name: str, channels: int, rows: int, item: int, rule: str = "split", unit: int = 1) -> PartSpec:
    return PartSpec(name, f"conv{item}", item, (AxisSpec("rows", rows), AxisSpec("channels", channels, rule, unit)))


def _scan(heads: int, dim: int, state: int, item: int) -> PartSpec:
    return PartSpec(
        "ssm", f"ssm{item}", item, (AxisSpec("heads", heads, "split"), AxisSpec("dim", dim), AxisSpec("state", state))
    )


def mamba2(layers: int = 2, heads: int = 4, groups: int = 4, *, speculative: int = 0, item: int = 2) -> Family:
    """Convolution of x, B and C, then the state. B and C are whole on a rank if the ranks do not divide `groups`."""
    shared = [_conv(name, groups * 2, 3, item, "groups", 2) for name in ("B", "C")]
    parts = (_conv("x", heads * 2, 3, item, unit=2), *shared, _scan(heads, 2, 3, 4))
    return Family("mamba2", "ssm", parts, _count(layers), speculative=speculative)


def gdn(layers: int = 2, heads: int = 4, *, speculative: int = 0, item: int = 2) -> Family:
    """Convolution of q, k and v: three parts, of which v is the wider one."""
    conv = [_conv(name, heads * wide, 3, item, unit=wide) for name, wide in (("q", 1), ("k", 1), ("v", 2))]
    return Family("gdn", "ssm", (*conv, _scan(heads, 2, 2, 4)), _count(layers), speculative=speculative)


def mamba1(layers: int = 2, channels: int = 8, *, speculative: int = 0) -> Family:
    scan = PartSpec("ssm", "ssm4", 4, (AxisSpec("channels", channels, "split"), AxisSpec("state", 2)))
    return Family("mamba1", "ssm", (_conv("x", channels, 3, 2), scan), _count(layers), speculative=speculative)


def _count(layers: int) -> tuple[str, ...]:
    return ("",) * layers


def model(*families: Family) -> tuple[Family, ...]:
    """Name the layers of a model: of each family in turn, so that families interleave."""
    names: list[list[str]] = [[] for _ in families]
    number = 0
    for turn in range(max(len(family.layers) for family in families)):
        for index, family in enumerate(families):
            if turn < len(family.layers):
                names[index].append(f"model.layers.{number}.{family.name}")
                number += 1
    taken: dict[str, int] = {}
    named = []
    for family, layers in zip(families, names, strict=True):
        taken[family.name] = taken.get(family.name, -1) + 1
        name = family.name + (str(taken[family.name]) if taken[family.name] else "")
        named.append(replace(family, name=name, layers=tuple(layers)))
    return tuple(named)


# --- How an engine cuts it ------------------------------------------------------------------------------


def engine(
    families: Sequence[Family],
    cut: Cut | Mapping[str, Cut] = (4, 1),
    *,
    split: int = 9,
    kinds: Mapping[str, Any] | None = None,
    **options: Any,
) -> Shape:
    """Cut a model into groups of at most `split` layers; `options` are fields of `Shape`.

    Args:
        families: the model.
        cut: blocks of all attention families, or of each by name.
        split: layers of a group.
        kinds: kind of a family's groups where this engine keeps more than it needs.
        options: fields of `Shape`.
    """
    base = Shape(
        tp=1,
        cp=1,
        pp=1,
        groups=(),
        order="LBNHC",
        kv="outer",
        conv="DS",
        shared=False,
        split_kernel=False,
        spread=False,
        row_pad=0,
        page_pad=0,
        block_pad=0,
        overlap=False,
    )
    base = replace(base, **options)
    groups = []
    for family in families:
        kernel, ratio = cut.get(family.name, (4, 1)) if isinstance(cut, Mapping) else cut
        if family.kind in ("ssm", "opaque"):
            kernel, ratio = (4, 1)
        kind = (kinds or {}).get(family.name, family.kind)
        for start in range(0, len(family.layers), split):
            layers = family.layers[start : start + split]
            groups.append(GroupShape(family, kind, layers, kernel, ratio, base.cp > 1 and family.attention))
    return replace(base, groups=tuple(groups))


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        tokens: tokens that P computed.
        hit: tokens that D has already, of all groups or by family.
        clip: whether windows and chunks begin where they are read, as in vLLM's tables.
        dropped: blocks at the front of P's table that are gone, by family.
        more: blocks after the last token: of D, of P.
        slots: state slots, speculative ones included: of D, of P.
        ids: ``up``, ``down`` or ``mixed``: of D, of P.
        null: the null block: of D, of P.
        regions: one region for all layers, or ``each``: of D, of P.
        place: fields of `Placement`, for both.
        own: whether each source has separate spans.
    """

    tokens: int
    hit: int | Mapping[str, int] = 0
    clip: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    more: tuple[int, int] = (0, 0)
    slots: tuple[int, int] = (1, 1)
    ids: tuple[str, str] = ("mixed", "mixed")
    null: tuple[int | None, int | None] = (0, 0)
    regions: tuple[str, str] = ("each", "each")
    place: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False


def pair(local: Shape, remote: Shape, ask: Ask | int, *, rank: int = 0, cp: int = 0, stage: int = 0) -> Case:
    """Return the case of one rank of D that may read from all ranks of P."""
    if isinstance(ask, int):
        ask = Ask(ask)
    spans = [_entries(shape, ask, side) for side, shape in enumerate((local, remote))]
    places = [_placement(ask, side, [count for _, count in spans[side]]) for side in (0, 1)]
    tables = [
        tuple(Span(first, list(ids)) for (first, _), ids in zip(spans[side], places[side].ids, strict=True))
        for side in (0, 1)
    ]
    geometry = Rank(local, places[0], rank, cp, stage, stages(local)[stage]).geometry()
    ranks = [(r, c, s) for s in range(remote.pp) for c in range(remote.cp) for r in range(remote.tp)]
    sources = tuple(Rank(remote, places[1], r, c, s, stages(remote)[s]).geometry() for r, c, s in ranks)
    remote_spans: Any = (tables[1],) * len(sources) if ask.own else tables[1]
    return Case(geometry, sources, ask.tokens, tables[0], remote_spans, 0)


def stages(shape: Shape) -> list[list[str]]:
    """Cut the layers into pipeline stages."""
    names = sorted({name for group in shape.groups for name in group.layers}, key=lambda name: int(name.split(".")[2]))
    return [names[i * len(names) // shape.pp : (i + 1) * len(names) // shape.pp] for i in range(shape.pp)]


def _entries(shape: Shape, ask: Ask, side: int) -> list[tuple[int, int]]:
    """Return first entry and number of blocks of each group."""
    found = []
    for group in shape.groups:
        family = group.family
        if family.kind == "ssm":
            found.append((0, ask.slots[side] + family.speculative))
            continue
        unit = group.block_size * (shape.cp if group.cp else 1)
        entries = -(-ask.tokens // unit)
        hit = ask.hit if isinstance(ask.hit, int) else ask.hit.get(family.name, 0)
        first = hit // unit if side == 0 else ask.dropped.get(family.name, 0)
        if ask.clip and group.kind in ("sliding", "chunked"):
            first = max(first, group.needed(ask.tokens) // unit)
        first = min(first, entries)
        found.append((first, entries - first + ask.more[side]))
    return found


def _placement(ask: Ask, side: int, counts: Sequence[int]) -> Placement:
    null = ask.null[side]
    pool = [block for block in range(sum(counts) + 3) if block != null]
    if ask.ids[side] == "down":
        pool.reverse()
    elif ask.ids[side] == "mixed":
        random.Random(f"ids {side}").shuffle(pool)
    ids, at = [], 0
    for count in counts:
        ids.append(tuple(pool[at : at + count]))
        at += count
    made = Placement(
        ids=tuple(ids),
        null_block=null,
        regions=ask.regions[side],
        base=(D_BASE, P_BASE)[side],
        gap=64,
        lead=0,
        spare=1,
        memory="DRAM",
        device=0,
        devices=1,
        id_type="list",
    )
    return replace(made, **ask.place)
