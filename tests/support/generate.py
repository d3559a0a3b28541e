# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines and a request between them, as a pure function of a seed and a recipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd

import numpy as np

from kvhma.geometry import Geometry, Span
from kvhma.oracle.labels import by_source
from kvhma.types import IdsLike
from support.engine import ORDERS, GroupShape, Placement, Rank, Shape
from support.model import Family, make_model
from support.recipe import Recipe
from support.request import draw_place, draw_positions, draw_tokens

Cut = tuple[int, int]
"""Tokens of a kernel block, and kernel blocks in a logical block."""


Engines = tuple[list[Geometry], list[tuple[Geometry, Sequence[Span]]]]
"""All ranks of D, and all of P with the spans of each."""


@dataclass(frozen=True)
class Case:
    """One D rank, the P ranks it reads from, and a request.

    Attributes:
        seed: what it was drawn from.
        recipe: what it was drawn from.
        local: the D rank.
        remotes: the P ranks.
        num_tokens: tokens that P computed.
        local_spans: D's blocks by D's groups.
        remote_spans: P's blocks by P's groups, for all sources; or a list of such for each source.
        features: what the case has, for counting.
        engines: returns all ranks of D, and all ranks of P, each with its spans. Those that share the tokens of a group
            are neighbours.
    """

    seed: int
    recipe: Recipe
    local: Geometry
    remotes: tuple[Geometry, ...]
    num_tokens: int
    local_spans: tuple[Span, ...]
    remote_spans: tuple[Span, ...] | tuple[tuple[Span, ...], ...]
    features: frozenset[str]
    engines: Callable[[], Engines] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"generate({self.seed}, {self.recipe})"

    def spans_of(self, source: int) -> Sequence[Span]:
        """Return P's spans of one source."""
        return by_source(self.remote_spans, len(self.remotes))[source]


def generate(seed: int, recipe: Recipe, *, max_tokens: int | None = None) -> Case:
    """Return the case of `seed` and `recipe`.

    Args:
        seed: source of chance.
        recipe: in which ways P and D differ.
        max_tokens: bound of the request's tokens, for slow checks.
    """
    rng = random.Random(f"case {seed}")
    tp = _ranks(rng, recipe)
    families = make_model(rng, recipe, tp)
    cuts = _cuts(rng, recipe, families)
    local, remote = _shapes(rng, recipe, families, cuts, tp)
    # A separate generator, so that adding this draw does not change what a seed means otherwise.
    turns = random.Random(f"turns {seed}")
    local, remote = _with_turns(turns, local), _with_turns(turns, remote)
    tokens = draw_tokens(rng, recipe, local, remote)
    if max_tokens is not None:
        tokens = min(tokens, max_tokens)
    entries, extras = draw_positions(rng, recipe, local, remote, tokens)
    place = draw_place(rng, [count for _, count in entries[0]])
    local_spans = _spans(entries[0], place)

    rank = rng.randrange(local.tp)
    stage = rng.randrange(local.pp)
    geometry = Rank(local, place, rank, rng.randrange(local.cp), stage, _stages(local)[stage]).geometry()
    sources = _ranks_of(remote)
    if recipe.equal_rank or (recipe.tp == "equal" and remote.overlap == local.overlap and rng.random() < 0.5):
        sources = [source for source in sources if source[0] == rank]
    rng.shuffle(sources)
    engines = _engines(rng, remote, entries[1])
    spans = tuple(engines[s][2] for _, _, s in sources)
    remotes = tuple(Rank(engines[s][0], engines[s][1], r, c, s, _stages(remote)[s]).geometry() for r, c, s in sources)
    own = len({id(engine[1]) for engine in engines}) > 1
    if own:
        extras.add("spans by source")
    features = _features(local, place, local_spans, geometry, remotes, tokens) | extras
    nested = own or rng.random() < 0.1
    remote_spans = spans if nested else spans[0]

    def all_ranks() -> Engines:
        decode = [numbered(local, Rank(local, place, *at, _stages(local)[at[2]])) for at in _ranks_of(local)]
        prefill = [
            (numbered(remote, Rank(engines[s][0], engines[s][1], r, c, s, _stages(remote)[s])), engines[s][2])
            for r, c, s in _ranks_of(remote)
        ]
        return decode, prefill

    def numbered(shape: Shape, rank: Rank) -> Geometry:
        # As vLLM does: context-parallel ranks are neighbouring tensor-parallel ones.
        number = rank.tp_rank * shape.cp + rank.cp_rank
        return replace(rank.geometry(), tp_rank=number, tp_size=shape.tp * shape.cp)

    return Case(seed, recipe, geometry, remotes, tokens, local_spans, remote_spans, frozenset(features), all_ranks)


def _ranks_of(shape: Shape) -> list[tuple[int, int, int]]:
    return [(r, c, s) for r in range(shape.tp) for c in range(shape.cp) for s in range(shape.pp)]


def _spans(entries: Sequence[tuple[int, int]], place: Placement) -> tuple[Span, ...]:
    def ids_as(ids: tuple[int, ...]) -> IdsLike:
        return list(ids) if place.id_type == "list" else np.array(ids, place.id_type)

    return tuple(Span(first, ids_as(ids)) for (first, _), ids in zip(entries, place.ids, strict=True))


def _engines(
    rng: random.Random, shape: Shape, entries: Sequence[tuple[int, int]]
) -> list[tuple[Shape, Placement, tuple[Span, ...]]]:
    """Return shape, placement and spans of each stage of P: mostly one engine, sometimes one for each stage."""
    if shape.pp == 1 or rng.random() < 0.6:
        place = draw_place(rng, [count for _, count in entries])
        return [(shape, place, _spans(entries, place))] * shape.pp
    engines = []
    for names in _stages(shape):
        kept = [i for i, group in enumerate(shape.groups) if set(group.layers) & set(names)]
        mine = [entries[i] for i in kept]
        place = draw_place(rng, [count for _, count in mine])
        part = replace(shape, groups=tuple(shape.groups[i] for i in kept))
        engines.append((part, place, _spans(mine, place)))
    return engines


def _ranks(rng: random.Random, recipe: Recipe) -> tuple[int, int]:
    """Return the tensor-parallel ranks of D and P."""
    small = recipe.cp != "none" or recipe.layers == "stages"
    choices = {
        "equal": [(1, 1), (2, 2), (4, 4)],
        "fewer": [(2, 1), (4, 2), (4, 1)],
        "more": [(1, 2), (2, 4), (1, 4)],
        "uneven": [(2, 3), (3, 2), (4, 3)] if small else [(2, 3), (3, 2), (3, 4), (4, 3), (4, 6)],
        "replicated": [(4, 1), (1, 4), (4, 4)] if small else [(4, 1), (1, 4), (4, 2), (2, 8), (8, 2), (4, 4), (3, 4)],
    }[recipe.tp]
    if recipe.state == "whole-groups" and recipe.tp == "equal":
        choices = [(2, 2), (4, 4)]
    return rng.choice(choices)


def _cuts(rng: random.Random, recipe: Recipe, families: Sequence[Family]) -> dict[str, tuple[Cut, Cut]]:
    """Return how D and P cut each attention family into blocks."""
    shared = rng.random() < 0.6
    cuts: dict[str, tuple[Cut, Cut]] = {}
    first: tuple[Cut, Cut] | None = None
    for family in families:
        if family.kind == "ssm":
            cuts[family.name] = ((1, 1), (1, 1))
            continue
        if family.kind == "opaque":
            cut = (rng.choice([1, 4]), rng.choice([1, 1, 3]))
            cuts[family.name] = (cut, cut)
            continue
        if first is not None and shared and not family.packed and not families[0].packed:
            cuts[family.name] = first
            continue
        alone = shared or len(families) == 1
        cuts[family.name] = _cut_pair(rng, recipe.blocks, family.packed, alone and first is None)
        first = first or cuts[family.name]
    return cuts


def _cut_pair(rng: random.Random, blocks: str, packed: bool, large: bool) -> tuple[Cut, Cut]:
    if blocks == "equal":
        if large and rng.random() < 0.06:
            cut = (rng.choice([1, 2]), rng.randint(20, 300))
        else:
            cut = (rng.choice([1, 2, 3, 4, 8, 16]), rng.choice([1, 1, 1, 2, 3, 4, 6]))
        return cut, cut
    if blocks == "kernel":
        size = rng.choice([4, 6, 8, 12, 16])
        one, other = rng.sample(_divisors(size), 2)
        pair = (one, size // one), (other, size // other)
        return (pair[0], pair[0]) if packed else pair
    if blocks == "divides":
        small = rng.choice([2, 3, 4, 6, 8])
        sizes = [small, small * rng.choice([2, 3, 4])]
    else:
        sizes = list(rng.choice([(12, 8), (6, 10), (6, 4), (16, 24), (5, 3), (9, 6), (36, 8), (7, 4)]))
    rng.shuffle(sizes)
    if packed:
        kernel = rng.choice(_divisors(gcd(*sizes)))
        return (kernel, sizes[0] // kernel), (kernel, sizes[1] // kernel)
    kernels = [rng.choice(_divisors(size)) for size in sizes]
    return (kernels[0], sizes[0] // kernels[0]), (kernels[1], sizes[1] // kernels[1])


def _divisors(value: int) -> list[int]:
    return [i for i in range(1, value + 1) if value % i == 0]


def _shapes(
    rng: random.Random,
    recipe: Recipe,
    families: Sequence[Family],
    cuts: dict[str, tuple[Cut, Cut]],
    tp: tuple[int, int],
) -> tuple[Shape, Shape]:
    """Return the shapes of D and P: one shape, and the same with the differences of the recipe."""
    cp = {
        "none": (1, 1),
        "remote": (1, rng.choice([2, 3])),
        "local": (rng.choice([2, 3]), 1),
        "both": rng.choice([(2, 2), (2, 4), (4, 2), (3, 2)]),
    }[recipe.cp]
    also_full = rng.random() < 0.5 or not any(family.kind == "mla" for family in families)
    cp_kinds = {"mla", "full"} if also_full else {"mla"}
    if rng.random() < 0.4:
        cp_kinds |= {"sliding", "chunked"}
    if recipe.cp == "none":
        cp_kinds = set()
    names = sorted((name for family in families for name in family.layers), key=_number)
    pp = (1, 1)
    if recipe.layers == "stages" and len(names) > 1:
        pp = rng.choice([(1, 2), (1, min(3, len(names))), (2, 1), (2, 2)])
    split = {family.name: rng.choice([1, 2, 3, 4]) for family in families}
    only = _one_sided(rng, recipe, names)
    base = Shape(
        tp=tp[0],
        cp=cp[0],
        pp=pp[0],
        groups=_groups(families, split, cuts, 0, cp_kinds, only[0]),
        order=rng.choice(ORDERS),
        kv=rng.choice(["outer", "inner"]),
        conv=rng.choice(["SD", "DS"]),
        shared=rng.random() < 0.7,
        split_kernel=rng.random() < 0.5,
        spread=rng.random() < 0.3,
        row_pad=rng.choice([0, 0, 0, 0, 1]),
        page_pad=rng.choice([0, 0, 0, 4]),
        block_pad=rng.choice([0, 0, 16, 3]),
        overlap=rng.random() < 0.3,
    )
    other = replace(base, tp=tp[1], cp=cp[1], pp=pp[1])
    if recipe.layers == "regrouped":
        split = {name: rng.choice([1, 2, 3, 4]) for name in split}
    groups = list(_groups(families, split, cuts, 1, cp_kinds, only[1]))
    if recipe.layers == "regrouped":
        groups = [replace(group, layers=tuple(rng.sample(group.layers, len(group.layers)))) for group in groups]
        rng.shuffle(groups)
    other = replace(other, groups=tuple(groups))
    if recipe.state == "ds-sd":
        other = replace(other, conv="DS" if base.conv == "SD" else "SD")
    if recipe.layouts == "page":
        base, other = _page_orders(rng, base, other)
    elif recipe.layouts == "blocks":
        order = rng.choice(["BLHNC", "BHLNC"]) if base.order.startswith("L") else rng.choice(["LBHNC", "LHBNC"])
        other = replace(other, order=order)
    elif recipe.layouts == "any":
        other = replace(
            other,
            order=rng.choice(ORDERS),
            kv=rng.choice(["outer", "inner"]),
            shared=rng.random() < 0.7,
            split_kernel=rng.random() < 0.5,
            spread=rng.random() < 0.3,
            row_pad=rng.choice([0, 0, 1]),
            page_pad=rng.choice([0, 0, 4]),
            block_pad=rng.choice([0, 16, 3]),
            overlap=rng.random() < 0.3,
        )
    return base, other


def _with_turns(rng: random.Random, shape: Shape) -> Shape:
    """Make context-parallel ranks alternate after fewer tokens than a block in some groups."""
    groups = []
    for group in shape.groups:
        # Pages that tokens cannot cut move by kernel blocks, each of which belongs to one rank then.
        unit = group.kernel_tokens if group.family.packed else 1
        turn = rng.choice([None, *(unit * part for part in _divisors(group.block_size // unit))])
        able = group.cp and group.kind in ("full", "mla")
        groups.append(replace(group, turn=turn) if able else group)
    return replace(shape, groups=tuple(groups))


def _page_orders(rng: random.Random, base: Shape, other: Shape) -> tuple[Shape, Shape]:
    swap = {"LBHNC": "LBNHC", "LBNHC": "LBHNC", "BLHNC": "BLNHC", "BLNHC": "BLHNC"}
    if base.order not in swap:
        base = replace(base, order=rng.choice(list(swap)))
    return base, replace(other, order=swap[base.order], kv="inner" if base.kv == "outer" else "outer")


def _number(name: str) -> int:
    return int(name.split(".")[2])


def _one_sided(rng: random.Random, recipe: Recipe, names: list[str]) -> tuple[set[str], set[str]]:
    """Return the layers that D lacks, and those that P lacks."""
    if recipe.layers != "one-sided" or len(names) < 2:
        return set(), set()
    lost = rng.sample(names, rng.randint(1, min(3, len(names) - 1)))
    cut = rng.randint(0, len(lost))
    return set(lost[:cut]), set(lost[cut:])


def _groups(
    families: Sequence[Family],
    split: dict[str, int],
    cuts: dict[str, tuple[Cut, Cut]],
    side: int,
    cp_kinds: set[str],
    missing: set[str],
) -> tuple[GroupShape, ...]:
    """Cut families into groups of equal size, the last one smaller if it does not divide."""
    groups = []
    for family in families:
        layers = [name for name in family.layers if name not in missing]
        kernel, ratio = cuts[family.name][side]
        for start in range(0, len(layers), split[family.name]):
            part = tuple(layers[start : start + split[family.name]])
            groups.append(GroupShape(family, family.kind, part, kernel, ratio, family.kind in cp_kinds))
    return tuple(groups)


def _stages(shape: Shape) -> list[list[str]]:
    """Cut the layers into pipeline stages."""
    names = sorted((name for group in shape.groups for name in group.layers), key=_number)
    return [names[i * len(names) // shape.pp : (i + 1) * len(names) // shape.pp] for i in range(shape.pp)]


def _features(
    local: Shape,
    place: Placement,
    spans: Sequence[Span],
    geometry: Geometry,
    remotes: Sequence[Geometry],
    tokens: int,
) -> set[str]:
    kinds = {layer.group for layer in geometry.layers}
    found = {f"kind {geometry.groups[kind].kind}" for kind in kinds}
    for group in local.groups:
        name = "".join(sorted({part.name for part in group.family.parts}))
        found.add(f"parts {name}")
        if group.family.packed:
            found.add("packed content")
        if group.family.attention:
            found.add("ratio 1" if group.ratio == 1 else "ratio 2-8" if group.ratio <= 8 else "ratio 9-300")
            found.add("partial last block" if tokens % group.block_size else "whole last block")
    if len({len(group.layers) for group in local.groups}) > 1:
        found.add("groups of several sizes")
    starts = [(layer.region, layer.offset) for layer in geometry.layers]
    if len(set(starts)) < len(starts):
        found.add("aliased layers")
    if any(layer.kernel_stride is None and geometry.groups[layer.group].ratio > 1 for layer in geometry.layers):
        found.add("kernel_stride default")
    found |= {f"order {local.order}", f"regions {place.regions}", f"sources {min(len(remotes), 9)}"}
    if local.row_pad or local.page_pad or local.block_pad:
        found.add("padding")
    for span in spans:
        steps = {int(b) - int(a) for a, b in pairwise(span.ids)}
        if steps:
            name = "ascending" if steps == {1} else "descending" if steps == {-1} else "scattered"
            found.add(f"ids {name}")
    if tokens < min((group.kernel_tokens for group in local.groups if group.family.attention), default=0):
        found.add("less than a kernel block")
    return found
