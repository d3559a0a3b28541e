# SPDX-License-Identifier: Apache-2.0
"""The shape of a region: which layers share a slot of it, and its dimensions.

The order of slots s and blocks b in memory::

    blocks outermost    | b0: s0 s1 s2 | b1: s0 s1 s2 | ...          one buffer, a page for each layer in each block
    heads next          | b0: head 0: s0 s1 s2, head 1: .. | ...     the same, a slice of heads is contiguous
    layers outermost    | b0 | b1 | b2 | ...                         a buffer for each slot

A block id belongs to one group at a time, so the j-th layers of all groups share slot j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Literal, TypeAlias

from kvhma.geometry import Geometry, Layer
from kvhma.torch.views import Strided, even_stride, token_cut

BufferKind: TypeAlias = Literal["ordered", "default", "isolated"]

_NAMES = {"S": "kv", "H": "heads", "B": "blocks", "L": "layers"}


@dataclass(frozen=True, slots=True)
class BufferShape:
    """What is in a region.

    Attributes:
        kind: as of :class:`kvhma.torch.Buffer`.
        shape: sizes of its dimensions as int8 by name, outermost first.
        layers: for each slot the layers that share it.
        cross: the region over all its layers, with the dimension L; None if they differ in form.
    """

    kind: BufferKind
    shape: Mapping[str, int]
    layers: tuple[tuple[str, ...], ...]
    cross: Strided | None


def describe(geometry: Geometry, region: int) -> BufferShape:
    """Return the shape of a region, by the index of the region."""
    groups: dict[int, list[Layer]] = {}
    for layer in sorted(geometry.layers, key=lambda layer: layer.offset):
        if layer.region == region:
            groups.setdefault(layer.group, []).append(layer)
    slots = tuple(tuple(layer.name for layer in slot if layer is not None) for slot in zip_longest(*groups.values()))
    flat = {"bytes": geometry.regions[region].bytes}
    # Groups whose blocks consist of other kernel blocks place their layers otherwise: then those of whole blocks count.
    ratios = {geometry.groups[index].ratio for index in groups}
    found = [layers for index, layers in groups.items() if geometry.groups[index].ratio == min(ratios)]
    longest = max(found, key=len, default=[])
    spread = _spread(geometry, longest)
    if spread is None:
        return BufferShape("isolated", flat, slots, None)
    # Of dimensions with equal stride, one has a single index.
    spread = spread._replace(dims=dict(sorted(spread.dims.items(), key=lambda item: -item[1][1])))
    letters = [letter for letter, (size, _) in spread.dims.items() if size > 1 or letter in "BL"]
    last = max(letters.index(letter) for letter in "BL" if letter in letters)
    outer = {letter: spread.dims[letter] for letter in letters[: last + 1]}
    shape = {_NAMES.get(letter, letter): size for letter, (size, _) in outer.items()}
    shape["bytes"] = outer[letters[last]][1]
    is_dense = all(wide == size * stride for (_, wide), (size, stride) in pairwise(outer.values()))
    if not is_dense or math.prod(shape.values()) != flat["bytes"]:
        return BufferShape("isolated", flat, slots, None)
    is_shared = "L" in outer and letters[0] == "B"
    kind: BufferKind = "isolated" if not is_shared else "ordered" if "H" in outer else "default"
    same = all(_is_alike(geometry, layers, longest) for layers in groups.values())
    return BufferShape(kind, shape, slots, spread if same else None)


def _spread(geometry: Geometry, layers: list[Layer]) -> Strided | None:
    """Return a group's layers as one cut with a dimension L for its slots; None if they are not evenly spaced."""
    steps = {after.offset - before.offset for before, after in pairwise(layers)}
    if not layers or len(steps) > 1 or even_stride(geometry, layers[0]) is None:
        return None
    first = layers[0]
    cut = token_cut(geometry, first)
    if cut is None:
        cut = Strided("int8", 1, first.offset, {"B": (first.num_blocks, first.block_stride)})
    return cut._replace(dims={**cut.dims, "L": (len(layers), steps.pop())} if steps else cut.dims)


def _is_alike(geometry: Geometry, layers: list[Layer], longest: list[Layer]) -> bool:
    """Return whether each layer of a group has the tokens of the layer of the same slot in the longest group."""
    cuts = [[token_cut(geometry, layer) for layer in some] for some in (layers, longest)]
    return None not in cuts[0] and cuts[0] == cuts[1][: len(layers)]
