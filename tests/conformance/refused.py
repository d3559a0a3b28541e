# SPDX-License-Identifier: Apache-2.0
"""Cases without a right answer: the two engines contradict each other, or the request does.

The reasons are derived from the engines by hand; no planner is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from conformance.build import Ask, Draft, chunked, engine, full, mamba2, mla, model, opaque, packed, pair, sliding
from kvhma.geometry import Geometry, Part, Span
from kvhma.oracle.cases import Case


def pairs() -> Iterator[Draft]:
    """Engines that do not fit each other."""

    def two(d: Any, p: Any, **options: Any) -> Case:
        return pair(engine(model(d)), engine(model(p)), 9, **options)

    plain = pair(engine(model(full())), engine(model(full())), 9)
    other_type = _parts(plain, lambda part: replace(part, dtype="float8"))
    yield Draft("other types of equal size", other_type, refuse=("dtype",))
    yield Draft("items of other sizes", two(full(item=2), full(item=1)), refuse=("dtype",))
    yield Draft("other numbers of heads", two(full(heads=4), full(heads=2)), refuse=("extent",))
    yield Draft("other sizes of a head", two(full(content=4), full(content=6)), refuse=("extent",))
    yield Draft("other sizes of a state", _state_of(5), refuse=("extent",))
    yield Draft("K and V apart on one side", two(full(apart=True, content=2), full(content=4)), refuse=("axes",))
    yield Draft("a latent has an indexer on one side", _same_names(two(mla(index=True), mla())), refuse=("parts",))
    yield Draft("attention meets a state", _same_names(two(full(), mamba2())), refuse=("kind", "parts"))
    yield Draft("attention meets opaque content", _same_names(two(full(), opaque(layers=2))), refuse=("kind", "parts"))
    yield Draft("opaque content of other sizes", two(opaque(size=21), opaque(size=20)), refuse=("opaque", "extent"))
    case = pair(engine(model(packed()), (4, 2)), engine(model(packed()), (8, 1)), 9)
    yield Draft("packed blocks of other kernel blocks", case, 2, ("block-size",))
    yield Draft("no layer in common", _renamed(plain), refuse=("no-common-layer",))
    wide = pair(engine(model(full())), engine(model(full()), tp=4), 9)
    yield Draft(
        "the rank with the last head is missing", replace(wide, remotes=wide.remotes[:3]), refuse=("no-source",)
    )
    yield Draft(
        "the rank with a head between is missing",
        replace(wide, remotes=(wide.remotes[0], *wide.remotes[2:])),
        2,
        ("no-source",),
    )
    states = pair(engine(model(mamba2(groups=1))), engine(model(mamba2(groups=1)), tp=2, conv="SD"), 9)
    yield Draft(
        "a rank with half of a state is missing", replace(states, remotes=states.remotes[:1]), 2, ("no-source",)
    )


def requests() -> Iterator[Draft]:
    """Requests that do not fit their engines."""
    shape, both = engine(model(full())), engine(model(full(), sliding(6)))
    good = pair(shape, shape, 14)

    local, remote = partial(_with, good, "local_spans"), partial(_with, good, "remote_spans")
    here, there = good.local_spans[0].ids, good.remote_spans[0].ids  # type: ignore[union-attr]
    missing = ("missing-tokens",)
    yield Draft("P lacks the last block", remote(*there[:3]), refuse=missing)
    yield Draft("P lacks the first block", remote(*there[1:], first=1), refuse=missing)
    yield Draft("P has no block", remote(), refuse=missing)
    yield Draft("D lacks the last block", local(*here[:3]), refuse=missing)
    yield Draft("D has no block", local(), refuse=missing)
    window = pair(both, both, 15)
    late = (window.remote_spans[0], Span(3, list(window.remote_spans[1].ids[3:])))  # type: ignore[union-attr]
    yield Draft("P has freed a block that the window still reads", replace(window, remote_spans=late), 2, missing)
    hit = pair(shape, shape, Ask(14, hit=4, dropped={"full": 2}))
    yield Draft("P has freed more than D has", hit, 2, missing)
    chunks = engine(model(chunked(8)))
    case = pair(chunks, chunks, Ask(15, dropped={"chunked": 3}))
    yield Draft("P has freed the first block of the chunk", case, 2, missing)
    small = pair(engine(model(full()), (8, 1)), engine(model(full()), (2, 1)), Ask(13, dropped={"full": 1}))
    yield Draft("P lacks the first two tokens of a block of eight", small, 2, missing)
    turns = pair(engine(model(mla())), engine(model(mla()), cp=2), 14)
    yield Draft(
        "the rank whose turn it is every other block is missing",
        replace(turns, remotes=turns.remotes[:1]),
        3,
        ("no-source", *missing),
    )


def numbers() -> Iterator[Draft]:
    """Invalid numbers in requests."""
    shape, both = engine(model(full())), engine(model(full(), sliding(6)))
    good, window = pair(shape, shape, 14), pair(both, both, 15)

    local, remote = partial(_with, good, "local_spans"), partial(_with, good, "remote_spans")
    here, there = good.local_spans[0].ids, good.remote_spans[0].ids  # type: ignore[union-attr]
    blocks = good.local.layers[0].num_blocks
    yield Draft("D's block does not exist", local(*here[:3], blocks), refuse=("block-range",))
    yield Draft("P's block does not exist", remote(*there[:3], 1 << 40), refuse=("block-range",))
    yield Draft("a negative block", local(*here[:3], -1), refuse=("block-range",))
    yield Draft("D's block is the null block", local(0, *here[1:]), refuse=("null-block",))
    yield Draft("P's block is the null block", remote(*there[:3], 0), refuse=("null-block",))
    yield Draft("D's block is there twice", local(*here[:3], here[0]), refuse=("duplicate-block",))
    yield Draft("no token", replace(good, num_tokens=0), refuse=("value",))
    yield Draft("a negative number of tokens", replace(good, num_tokens=-4), refuse=("value", "type"))
    yield Draft("a position that is negative", local(*here, first=-1), refuse=("value", "type"))
    yield Draft("blocks of one group of two", replace(window, local_spans=window.local_spans[:1]), refuse=("count",))
    yield Draft(
        "P's blocks of one group of two", replace(window, remote_spans=window.remote_spans[:1]), refuse=("count",)
    )


def _with(case: Case, side: str, *ids: int, first: int = 0) -> Case:
    """Give a side other blocks of its one group."""
    spans: Any = {side: (Span(first, list(ids)),)}
    return replace(case, **spans)


def _parts(case: Case, change: Callable[[Part], Part]) -> Case:
    """Change every part of every source."""

    def of(geometry: Geometry) -> Geometry:
        layers = [
            replace(layer, page=replace(layer.page, parts=tuple(change(part) for part in layer.page.parts)))
            for layer in geometry.layers
        ]
        return replace(geometry, layers=tuple(layers))

    return replace(case, remotes=tuple(of(remote) for remote in case.remotes))


def _same_names(case: Case) -> Case:
    """Give P's layers the names of D's."""
    names = [layer.name for layer in case.local.layers]

    def of(geometry: Geometry) -> Geometry:
        return replace(
            geometry,
            layers=tuple(replace(layer, name=name) for layer, name in zip(geometry.layers, names, strict=True)),
        )

    return replace(case, remotes=tuple(of(remote) for remote in case.remotes))


def _renamed(case: Case) -> Case:
    def of(geometry: Geometry) -> Geometry:
        return replace(geometry, layers=tuple(replace(layer, name=f"other.{layer.name}") for layer in geometry.layers))

    return replace(case, remotes=tuple(of(remote) for remote in case.remotes))


def _state_of(rows: int) -> Case:
    """A convolution with other rows, all of them state."""
    case = pair(engine(model(mamba2()), conv="SD"), engine(model(mamba2()), conv="SD"), 9)

    def change(part: Part) -> Part:
        axes = [replace(a, extent=rows - 3, length=rows - 3) if a.name == "rows" else a for a in part.axes]
        return replace(part, axes=tuple(axes))

    return _parts(case, change)
