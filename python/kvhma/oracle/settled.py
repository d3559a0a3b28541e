# SPDX-License-Identifier: Apache-2.0
"""Resolves axes that a rank does not fully know, from the knowledge of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvhma.geometry import Axis, Geometry, Layer
from kvhma.oracle.labels import parts_of

_Key = tuple[str, str, str]
"""Layer, part and axis."""


@dataclass(slots=True)
class _Meaning:
    """The ranks' descriptions of one axis."""

    known: int | None = None
    ranks: int = 0
    spares: frozenset[int] = frozenset()

    def add(self, axis: Axis) -> None:
        self.spares |= {axis.spare}
        if axis.may_repeat:
            self.ranks = math.gcd(self.ranks, axis.extent)
        else:
            self.known = axis.extent

    def settle(self, axis: Axis) -> Axis:
        if axis.may_repeat:
            whole = self.ranks if self.known is None else self.known
            if axis.extent % whole:
                return axis
            return Axis(axis.name, whole, axis.stride, axis.start * whole // axis.extent, 1)
        if axis.spare and len(self.spares) > 1:
            return Axis(axis.name, axis.extent - axis.spare, axis.stride)
        return axis


def settled(geometries: Sequence[Geometry]) -> list[Geometry]:
    """Replace every axis that may repeat, and every axis with spare indices that not all ranks have.

    A rank that knows an extent decides it. If no rank does, the true extent divides the number of ranks of every
    engine. Indices of the greatest common divisor then distinguish all that can differ.

    Args:
        geometries: ranks of both sides.
    """
    meanings: dict[_Key, _Meaning] = {}
    for geometry in geometries:
        for layer, part in parts_of(geometry):
            for axis in part.axes:
                meanings.setdefault((layer.name, part.name, axis.name), _Meaning()).add(axis)
    return [_settle(geometry, meanings) for geometry in geometries]


def _settle(geometry: Geometry, meanings: dict[_Key, _Meaning]) -> Geometry:
    if not any(axis.may_repeat or axis.spare for _, part in parts_of(geometry) for axis in part.axes):
        return geometry
    return replace(geometry, layers=tuple(_settle_layer(layer, meanings) for layer in geometry.layers))


def _settle_layer(layer: Layer, meanings: dict[_Key, _Meaning]) -> Layer:
    parts = []
    for part in layer.page.parts:
        axes = [meanings[layer.name, part.name, axis.name].settle(axis) for axis in part.axes]
        parts.append(replace(part, axes=tuple(axes)))
    return replace(layer, page=replace(layer.page, parts=tuple(parts)))
