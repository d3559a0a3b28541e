# SPDX-License-Identifier: Apache-2.0
"""What a loaded model does to a cache besides its weights: scales, switches and position tables of each layer.

vLLM derives these when it builds the model: from the configuration, and also from ``max_model_len``, a generation
configuration and its own defaults. So engines compare what was built, not what was asked for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

POSITIONS = (0, 1, 2, 3, 5, 8, 13, 21, *(2**power - 1 for power in range(5, 24)))
"""Positions at which tables are compared. Tables may differ in length: only positions that both have count."""

COLUMNS = 8
"""How many entries of a row are compared, spread evenly over the row."""

_MAX_DIFFERENCE, _MEAN_DIFFERENCE = 2**-6, 2**-10
"""Largest and mean difference of two tables, relative to their largest entry, that rounding explains.

Some platforms round a table to bfloat16, others do not. Then entries differ by up to 2^-8, and most by less.
"""

Field = Annotated[str, msgspec.Meta(max_length=256)]
Scalar = bool | float | Annotated[str, msgspec.Meta(max_length=64)]
Row = Annotated[list[float], msgspec.Meta(max_length=COLUMNS)]


class BuiltLayer(msgspec.Struct, frozen=True):
    """Values of a layer, by the path of their field.

    Attributes:
        scalars: numbers, also ``"inf"`` and ``"nan"``, and switches.
        tables: position tables, as their rows at some positions; a short table has fewer rows.
    """

    scalars: Annotated[dict[Field, Scalar], msgspec.Meta(max_length=1024)]
    tables: Annotated[dict[Field, Annotated[list[Row], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=64)]


class BuiltLayers(msgspec.Struct, frozen=True):
    """The layers of a worker whose caches are transferred.

    Attributes:
        kinds: the different layers.
        layers: index in `kinds` of each layer, by its name in vLLM.
    """

    kinds: Annotated[list[BuiltLayer], msgspec.Meta(max_length=256)] = []
    layers: Annotated[dict[Field, Annotated[int, msgspec.Meta(ge=0, lt=256)]], msgspec.Meta(max_length=4096)] = {}

    def difference(self, remote: BuiltLayers) -> str | None:
        """Return the first difference of the layers that both sides have, with both values; None without one.

        A field of only one side is not compared: another version of vLLM has other fields, and a rank of another
        pipeline stage has other layers.
        """
        seen = set()
        for layer, index in self.layers.items():
            pair = index, remote.layers.get(layer, -1)
            if pair in seen or not 0 <= pair[1] < len(remote.kinds):
                continue
            seen.add(pair)
            found = _difference(self.kinds[index], remote.kinds[pair[1]])
            if found is not None:
                return f"{layer}: {found}"
        return None


def _difference(local: BuiltLayer, remote: BuiltLayer) -> str | None:
    for field in sorted(local.scalars.keys() & remote.scalars.keys()):
        values = local.scalars[field], remote.scalars[field]
        if values[0] != values[1]:
            return f"{field} is {values[0]!r} here, {values[1]!r} at the prefill engine"
    for field in sorted(local.tables.keys() & remote.tables.keys()):
        rows = zip(POSITIONS, local.tables[field], remote.tables[field], strict=False)
        entries = [
            (abs(on_local - on_remote), at, on_local, on_remote)
            for at, *row in rows
            for on_local, on_remote in zip(*row, strict=False)
        ]
        scale = max((max(abs(on_local), abs(on_remote)) for _, _, on_local, on_remote in entries), default=0.0)
        largest, at, on_local, on_remote = max(entries, default=(0.0, 0, 0.0, 0.0))
        mean = sum(difference for difference, *_ in entries) / max(1, len(entries))
        if largest > _MAX_DIFFERENCE * scale or mean > _MEAN_DIFFERENCE * scale:
            return f"{field} at position {at} is {on_local:.5g} here, {on_remote:.5g} at the prefill engine"
    return None
