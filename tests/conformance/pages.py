# SPDX-License-Identifier: Apache-2.0
"""Cases about the content of a page: kinds of layers, orders of axes, sizes of items, recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.build import (
    Ask,
    Draft,
    chunked,
    data_and_scales,
    engine,
    full,
    gdn,
    mamba1,
    mamba2,
    mla,
    model,
    opaque,
    packed,
    pair,
    sliding,
)
from kvhma.geometry import Geometry
from kvhma.oracle.cases import Case
from support.engine import ORDERS


def attention() -> Iterator[Draft]:
    """What layers attend to, alone and together."""
    families = {
        "full attention": (full(),),
        "a window": (sliding(6),),
        "chunks": (chunked(8),),
        "a latent": (mla(),),
        "packed blocks": (packed(),),
        "opaque content": (opaque(),),
        "a state of Mamba2": (mamba2(),),
        "full and window": (full(), sliding(6, layers=3)),
        "full and chunks": (full(layers=1), chunked(8, layers=3)),
        "full and two windows": (full(), sliding(4), sliding(9)),
        "full and state of GDN": (full(layers=1), gdn(layers=3)),
        "latent and window": (mla(), sliding(5)),
        "latent, state and window": (mla(), mamba2(), sliding(5)),
        "full and state of Mamba1": (full(layers=1), mamba1(layers=3)),
        "everything": (full(1), sliding(6, 1), chunked(8, 1), mla(1), gdn(1), packed(1), opaque(1)),
    }
    for name, found in families.items():
        shape = engine(model(*found))
        yield Draft(name, pair(shape, shape, 13), 1 if len(found) == 1 else 2)
        if len(found) > 1:
            shared = engine(model(*found), shared=True)
            yield Draft(f"{name}, in shared memory", pair(shared, shared, 13), 2)


def layout() -> Iterator[Draft]:
    """Orders of layers, blocks, heads and tokens in memory."""
    families = model(full(), sliding(6))
    for one, other in zip(ORDERS, (*ORDERS[1:], ORDERS[0]), strict=True):
        for local, remote in ((one, other), (other, one)):
            case = pair(engine(families, order=local), engine(families, order=remote), 11)
            yield Draft(f"D {local}, P {remote}", case, 2)
    for order in ORDERS:
        case = pair(engine(families, (4, 2), order=order), engine(families, (4, 2), order=order), 11)
        yield Draft(f"both {order}, 2 kernel blocks in a block", case)
    apart = model(full(apart=True))
    for d, p in [("outer", "outer"), ("outer", "inner"), ("inner", "outer")]:
        case = pair(engine(apart, kv=d), engine(apart, kv=p), 11)
        yield Draft(f"K and V apart, {d} on D, {p} on P", case, 1 if d == p else 2)
    for d, p, rank in [("LBHNC", "LBNHC", 1), ("LBNHC", "LHBNC", 0), ("BHLNC", "LBHNC", 1)]:
        case = pair(engine(families, (4, 2), order=d, tp=2), engine(families, (8, 1), order=p), 11, rank=rank)
        yield Draft(f"D {d} of 2 ranks, P {p}, other kernel blocks", case, 3)
    for option in ({"row_pad": 1}, {"page_pad": 4}, {"block_pad": 16}, {"block_pad": 3, "page_pad": 4, "row_pad": 1}):
        case = pair(engine(families, **option), engine(families), 11)
        yield Draft(f"padding on D: {', '.join(option)}", case)
    case = pair(engine(families, shared=True, block_pad=9), engine(families, order="BLNHC"), 11)
    yield Draft("padding on D, blocks outside on P", case, 2)


def latent() -> Iterator[Draft]:
    """One latent for all heads, which every rank holds."""
    for d, p, rank in [(1, 4, 0), (4, 1, 3), (2, 2, 1), (4, 2, 2)]:
        case = pair(engine(model(mla()), tp=d), engine(model(mla()), tp=p), 10, rank=rank)
        yield Draft(f"D {d} ranks, P {p}, rank {rank}", case)
    indexed = model(mla(index=True))
    yield Draft("with the keys of an indexer", pair(engine(indexed), engine(indexed), 10))
    yield Draft("that, other blocks", pair(engine(indexed, (4, 1)), engine(indexed, (2, 3)), 10), 2)
    scaled = model(data_and_scales())
    yield Draft("all data of a block, then all scales", pair(engine(scaled), engine(scaled), 10))
    for d, p in [((4, 2), (8, 1)), ((2, 1), (8, 1)), ((6, 1), (4, 1))]:
        case = pair(engine(scaled, d), engine(scaled, p), 11)
        yield Draft(f"data and scales, D {d[1]} blocks of {d[0]}, P {p[1]} of {p[0]}", case, 2)
    wide = model(data_and_scales(content=16, scale=2), sliding(6, heads=1, content=3))
    yield Draft(
        "data, scales and a window, blocks outside", pair(*[engine(wide, order="BLNHC", shared=True)] * 2, 14), 2
    )


def items() -> Iterator[Draft]:
    """Sizes of items and pages, and addresses, that are not powers of two."""
    for item, content in [(1, 1), (1, 3), (1, 7), (2, 5), (3, 3), (4, 2), (8, 1), (16, 1)]:
        shape = engine(model(full(item=item, content=content)))
        yield Draft(f"{content} items of {item} bytes", pair(shape, shape, 7))
    odd = engine(model(full(item=1, content=3, heads=3)), (3, 1), block_pad=5, page_pad=4)
    for name, place in {
        "an odd address": {"base": (1 << 45) + 1, "lead": 7},
        "regions that touch": {"gap": 0},
        "regions 5 bytes apart": {"gap": 5, "lead": 3},
        "memory of a device": {"memory": "VRAM", "device": 3},
        "regions on two devices": {"memory": "VRAM", "devices": 2},
    }.items():
        yield Draft(f"odd pages, {name}", pair(odd, odd, Ask(8, place=place)), 2)
    whole = engine(model(full(), sliding(6)), block_pad=7)
    yield Draft("all layers in one region", pair(whole, whole, Ask(9, regions=("one", "one"))))
    yield Draft("one region on D, one for each layer on P", pair(whole, whole, Ask(9, regions=("one", "each"))))


def state() -> Iterator[Draft]:
    """Recurrent layers: which slot has the state, which rank holds which part, and the order of the convolution."""
    kinds = {"Mamba2": mamba2, "GDN": gdn, "Mamba1": mamba1}
    for name, make in kinds.items():
        for d, p, rank in [(2, 1, 1), (1, 2, 0), (4, 2, 1), (2, 4, 0)]:
            case = pair(engine(model(make()), tp=d), engine(model(make()), tp=p), 5, rank=rank)
            yield Draft(f"{name}, D {d} ranks, P {p}, rank {rank}", case, 2 if name == "GDN" else 1)
        for d, p in [("DS", "SD"), ("SD", "SD")]:
            case = pair(engine(model(make()), conv=d), engine(model(make()), conv=p), 5)
            yield Draft(f"{name}, convolution {d} on D, {p} on P", case, 1 if d == p else 2)
    for d, p, rank in [(2, 4, 1), (4, 2, 3), (1, 2, 0)]:
        whole = model(mamba2(groups=1))
        case = pair(engine(whole, tp=d, conv="SD"), engine(whole, tp=p, conv="SD"), 5, rank=rank)
        yield Draft(f"B and C whole on every rank, D {d} ranks, P {p}, rank {rank}", case, 2)
    half = model(mamba2(groups=2))
    case = pair(engine(half, tp=4, conv="SD"), engine(half, tp=2, conv="DS"), 5, rank=3)
    yield Draft("B and C split on P, whole on D", case, 3)
    for slots in [(1, 1), (3, 1), (1, 4), (2, 2)]:
        for ahead in (0, 2):
            shape = engine(model(mamba2(layers=1, speculative=ahead)))
            yield Draft(
                f"{slots[0]} slots on D, {slots[1]} on P, {ahead} for draft tokens",
                pair(shape, shape, Ask(5, slots=slots)),
            )
    local, remote = engine(model(mamba2(layers=1, speculative=1))), engine(model(mamba2(layers=1)))
    yield Draft("a slot for a draft token on D only", pair(local, remote, Ask(5, slots=(1, 2))), 2)
    yield Draft("a slot for a draft token on P only", pair(remote, local, Ask(5, slots=(2, 1))), 2)
    for spare in [(2, 2), (2, 0), (0, 2), (2, 1)]:
        case = pair(engine(model(gdn()), tp=2), engine(model(gdn()), tp=1), 5, rank=1)
        yield Draft(f"rows for draft tokens: {spare[0]} on D, {spare[1]} on P", _with_spare(case, spare), 3)


def _with_spare(case: Case, spare: tuple[int, int]) -> Case:
    """Give the rows of convolutions this many more, for draft tokens; each convolution gets a separate place."""
    remotes = tuple(_longer(remote, spare[1]) for remote in case.remotes)
    return replace(case, local=_longer(case.local, spare[0]), remotes=remotes)


def _longer(geometry: Geometry, spare: int) -> Geometry:
    made = []
    for layer in geometry.layers:
        parts, offset = [], 0
        for part in layer.page.parts:
            names = [axis.name for axis in part.axes]
            if "rows" in names:
                channels = next(axis for axis in part.axes if axis.name == "channels")
                rows = next(axis for axis in part.axes if axis.name == "rows")
                rows = replace(
                    rows, extent=rows.extent + spare, length=rows.extent + spare, stride=part.item_bytes, spare=spare
                )
                channels = replace(channels, stride=rows.extent * part.item_bytes)
                part = replace(part, axes=(rows, channels))
            parts.append(replace(part, offset=offset))
            offset += part.nbytes
        stride = offset + 8
        made.append(
            replace(layer, page=replace(layer.page, parts=tuple(parts)), block_stride=stride, kernel_stride=None)
        )
    regions = tuple(
        replace(
            region,
            bytes=max(layer.offset + layer.num_blocks * layer.block_stride for layer in made if layer.region == index),
        )
        for index, region in enumerate(geometry.regions)
    )
    base, moved = geometry.regions[0].base, []
    for region in regions:
        moved.append(replace(region, base=base))
        base += region.bytes + 64
    return replace(geometry, layers=tuple(made), regions=tuple(moved))
