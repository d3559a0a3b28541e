# SPDX-License-Identifier: Apache-2.0
"""Small made-up models: what their layers cache, before an engine divides it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvhma.geometry import Kind
from support.recipe import Recipe


@dataclass(frozen=True)
class AxisSpec:
    """A dimension over all ranks.

    Attributes:
        name: name of the axis.
        extent: items; of ``tokens`` it is the engine's to say.
        rule: ``whole`` on every rank; ``split``, and shared by several ranks if there are more ranks than
            units; ``groups``: split if the ranks divide the units, else whole.
        unit: items that stay together.
    """

    name: str
    extent: int
    rule: str = "whole"
    unit: int = 1


@dataclass(frozen=True)
class PartSpec:
    name: str
    dtype: str
    item_bytes: int
    axes: tuple[AxisSpec, ...]


@dataclass(frozen=True)
class Family:
    """Layers that cache the same thing.

    Attributes:
        name: distinguishes families.
        kind: kind of their groups.
        parts: what a page holds.
        layers: names of the layers.
        limit: window or chunk, 0 for neither.
        speculative: extra state slots.
    """

    name: str
    kind: Kind
    parts: tuple[PartSpec, ...]
    layers: tuple[str, ...]
    limit: int = 0
    speculative: int = 0

    @property
    def attention(self) -> bool:
        """Whether tokens have places in its blocks."""
        return self.kind not in ("ssm", "opaque")

    @property
    def packed(self) -> bool:
        """Whether it is attention whose pages tokens cannot cut."""
        return self.attention and all(axis.name != "tokens" for part in self.parts for axis in part.axes)


@dataclass(frozen=True)
class Extents:
    """Sizes that the tensor-parallel ranks of the recipe ask for."""

    heads: int
    state_heads: int
    channels: int
    groups: int


def make_model(rng: random.Random, recipe: Recipe, tp: tuple[int, int]) -> tuple[Family, ...]:
    """Draw one to three attention families, and a recurrent one if the recipe has state.

    Args:
        rng: source of chance.
        recipe: choices.
        tp: tensor-parallel ranks of D and P.
    """
    extents = _extents(rng, recipe, tp)
    kinds = [
        rng.choice(["full", "full", "sliding", "sliding", "chunked", "mla"]) for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    if recipe.tokens == "packed":
        kinds[0] = "packed"
    if recipe.cp != "none" and not {"full", "mla"} & set(kinds[recipe.tokens == "packed" :]):
        kinds.append(rng.choice(["mla", "full"]))
    if recipe.state != "none":
        kinds.append(rng.choice(["mamba2", "gdn", "mamba1"] if recipe.state != "whole-groups" else ["mamba2"]))
    elif len(kinds) == 1 and rng.random() < 0.3:
        kinds.append("sliding")
    if rng.random() < 0.1:
        kinds.append("opaque")
    counts = [rng.choice([1, 1, 2, 2, 3, 4]) for _ in kinds]
    names: list[list[str]] = [[] for _ in kinds]
    order = [i for i, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(order)
    for number, i in enumerate(order):
        names[i].append(f"model.layers.{number}.{kinds[i]}")
    return tuple(_family(rng, f"{kind}{i}", kind, tuple(names[i]), extents) for i, kind in enumerate(kinds))


def _extents(rng: random.Random, recipe: Recipe, tp: tuple[int, int]) -> Extents:
    most = max(tp)
    if recipe.tp == "uneven":
        heads = rng.choice([6, 12, 5, 7])
        state = rng.choice([6, 12, 7])
    elif recipe.tp == "replicated":
        heads = rng.choice([1, 2])
        state = rng.choice([most, 2])
    else:
        heads = most * rng.choice([1, 1, 2])
        state = most * rng.choice([1, 2])
    groups = rng.choice([1, 2]) if recipe.state == "whole-groups" else most
    if recipe.state == "whole-groups" and groups >= most:
        groups = 1
    return Extents(heads, state, state * rng.choice([1, 2]), groups)


def _family(rng: random.Random, name: str, kind: str, layers: tuple[str, ...], extents: Extents) -> Family:
    if kind in ("mamba1", "mamba2", "gdn"):
        return Family(name, "ssm", _state_parts(rng, kind, extents), layers, speculative=rng.choice([0, 0, 1, 2]))
    if kind == "opaque":
        raw = PartSpec("raw", "bytes", 1, (AxisSpec("bytes", rng.randint(1, 40)),))
        return Family(name, "opaque", (raw,), layers)
    item = rng.choice([1, 2, 2])
    heads = AxisSpec("heads", extents.heads, "split")
    if kind == "packed":
        part = PartSpec("kv", "bfloat16/amx-32", 1, (heads, AxisSpec("packed", rng.choice([6, 16, 24]))))
        masks: list[Kind] = ["full", "full", "sliding"]
        return Family(name, rng.choice(masks), (part,), layers, limit=rng.choice([5, 16]))
    tokens, content = AxisSpec("tokens", 0), AxisSpec("content", rng.choice([1, 2, 3, 4, 8]))
    if kind == "mla":
        parts: tuple[PartSpec, ...] = (PartSpec("kv", f"type{item}", item, (tokens, content)),)
        if rng.random() < 0.3:
            parts += (PartSpec("index", "uint8", 1, (tokens, AxisSpec("content", 2))),)
        return Family(name, "mla", parts, layers)
    axes: tuple[AxisSpec, ...] = (heads, tokens, content)
    if rng.random() < 0.3:
        axes = (AxisSpec("kv", 2), *axes)
    limit = 0 if kind == "full" else rng.choice([1, 2, 3, 5, 8, 12, 16, 24, 40])
    mask: Kind = "full" if kind == "full" else "sliding" if kind == "sliding" else "chunked"
    return Family(name, mask, (PartSpec("kv", f"type{item}", item, axes),), layers, limit=limit)


def _state_parts(rng: random.Random, kind: str, extents: Extents) -> tuple[PartSpec, ...]:
    item, rows, width = rng.choice([1, 2]), AxisSpec("rows", rng.choice([1, 2, 3])), rng.choice([1, 2, 3])
    ssm_item = rng.choice([item, 4])

    def conv(name: str, extent: int, rule: str = "split", unit: int = 1) -> PartSpec:
        return PartSpec(name, f"conv{item}", item, (rows, AxisSpec("channels", extent, rule, unit)))

    if kind == "mamba1":
        scan = (AxisSpec("channels", extents.channels, "split"), AxisSpec("state", width))
        return conv("x", extents.channels), PartSpec("ssm", f"ssm{ssm_item}", ssm_item, scan)
    unit = rng.choice([1, 2])
    axes = (
        AxisSpec("heads", extents.state_heads, "split"),
        AxisSpec("dim", rng.choice([1, 2])),
        AxisSpec("state", width),
    )
    ssm = PartSpec("ssm", f"ssm{ssm_item}", ssm_item, axes)
    if kind == "gdn":
        key = extents.channels * unit
        value = extents.state_heads * unit
        return conv("q", key, unit=unit), conv("k", key, unit=unit), conv("v", value, unit=unit), ssm
    shared = extents.groups * width
    return (
        conv("x", extents.channels),
        conv("B", shared, "groups", width),
        conv("C", shared, "groups", width),
        ssm,
    )
