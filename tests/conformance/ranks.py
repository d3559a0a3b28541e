# SPDX-License-Identifier: Apache-2.0
"""Cases about the division into ranks: tensor, context and pipeline parallelism, repeated heads, missing layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.build import Ask, Draft, engine, full, gdn, mamba2, mla, model, opaque, packed, pair, sliding
from support.engine import Shape

BOTH = model(full(heads=12), gdn(heads=12))
"""Divided by 2, 3, 4 and 6."""


def tp() -> Iterator[Draft]:
    """Ranks of D and P, of which one divides the other or neither does."""
    for d, p in [
        (1, 1),
        (2, 2),
        (4, 4),
        (1, 2),
        (1, 4),
        (2, 4),
        (2, 1),
        (4, 1),
        (4, 2),
        (2, 3),
        (3, 2),
        (4, 3),
        (6, 4),
    ]:
        for rank in sorted({0, d - 1} if d != 6 else {1, 4}):
            uneven = max(d, p) % min(d, p)
            title = f"D {d} ranks, P {p}, rank {rank} of D"
            local, remote = (engine(BOTH, tp=size, order="LBNHC") for size in (d, p))
            yield Draft(title, pair(local, remote, 10, rank=rank), 2 if uneven else 1)
    for d, p, rank in [(2, 1, 1), (4, 2, 2), (2, 4, 0), (3, 2, 1)]:
        local, remote = (engine(BOTH, (4, 2), tp=size, order="LBHNC") for size in (d, p))
        yield Draft(f"heads outside of blocks: D {d} ranks, P {p}, rank {rank}", pair(local, remote, 13, rank=rank), 3)


def repeated_heads() -> Iterator[Draft]:
    """More ranks than heads: ranks that hold the same head, of which any can be read."""
    for heads, d, p, rank in [
        (1, 2, 1, 1), (1, 1, 2, 0), (1, 4, 4, 3), (2, 4, 1, 1), (2, 4, 1, 2), (2, 4, 2, 3), (2, 1, 4, 0), (2, 2, 4, 1),
        (2, 4, 4, 1), (2, 8, 2, 5), (2, 2, 8, 1), (3, 6, 2, 4), (2, 3, 4, 1),
    ]:  # fmt: skip
        local, remote = (engine(model(full(heads=heads)), tp=size) for size in (d, p))
        yield Draft(
            f"{heads} heads, D {d} ranks, P {p}, rank {rank}",
            pair(local, remote, 9, rank=rank),
            2 if d % p and p % d else 1,
        )
    for d, p, rank in [(2, 3, 0), (3, 2, 1), (4, 3, 2)]:
        local, remote = (engine(model(full(heads=7)), tp=size, overlap=True) for size in (d, p))
        yield Draft(
            f"7 heads, ranges that overlap: D {d} ranks, P {p}, rank {rank}", pair(local, remote, 9, rank=rank), 3
        )


def heads_by_layer() -> Iterator[Draft]:
    """Layers with other numbers of heads, or other sizes of a head, in one engine."""
    two = model(sliding(6, heads=4, content=4), full(heads=2, content=8))
    for d, p, rank in [(1, 1, 0), (2, 1, 1), (1, 2, 0), (4, 2, 3), (2, 4, 1), (4, 1, 2)]:
        local, remote = (engine(two, tp=size) for size in (d, p))
        yield Draft(f"4 heads of 4 and 2 of 8: D {d} ranks, P {p}, rank {rank}", pair(local, remote, 11, rank=rank), 2)
    for d, p, rank in [(1, 2, 0), (2, 1, 0), (4, 2, 1)]:
        local, remote = (engine(two, tp=size, shared=True, order="BLNHC") for size in (d, p))
        case = pair(local, remote, 11, rank=rank)
        yield Draft(f"they share memory, blocks outside: D {d} ranks, P {p}, rank {rank}", case, 3)
    mixed = model(mla(), full(heads=4))
    for d, p, rank in [(4, 1, 3), (1, 4, 0), (2, 4, 1)]:
        local, remote = (engine(mixed, tp=size) for size in (d, p))
        yield Draft(
            f"a latent and a draft model's heads: D {d} ranks, P {p}, rank {rank}", pair(local, remote, 7, rank=rank), 2
        )


def layers() -> Iterator[Draft]:
    """Which layers, in which groups, on which stage: layers are matched by name."""
    families = model(full(layers=3), sliding(6, layers=4))
    plain = engine(families)

    def without(shape: Shape, *numbers: int) -> Shape:
        groups = [
            replace(g, layers=tuple(n for n in g.layers if int(n.split(".")[2]) not in numbers)) for g in shape.groups
        ]
        return replace(shape, groups=tuple(groups))

    yield Draft("D has a layer that P has not", pair(plain, without(plain, 2), 10))
    yield Draft("P has a layer that D has not", pair(without(plain, 0), plain, 10))
    yield Draft("each has a layer that the other lacks", pair(without(plain, 1), without(plain, 4), 10), 2)
    state = engine(model(full(), mamba2()))
    yield Draft("D has a state that P has not", pair(state, without(state, 3), 10), 2)
    yield Draft("P groups layers by two", pair(plain, engine(families, split=2), 10), 2)
    yield Draft("D has each layer in a separate group", pair(engine(families, split=1), plain, 10), 2)
    backwards = replace(plain, groups=tuple(replace(g, layers=g.layers[::-1]) for g in plain.groups[::-1]))
    yield Draft("P has its layers and groups in another order", pair(plain, backwards, 10))
    yield Draft("that, in shared memory", pair(replace(plain, shared=True), replace(backwards, shared=True), 10), 2)
    yield Draft(
        "P keeps all of what D sees through a window", pair(plain, engine(families, kinds={"sliding": "full"}), 14), 2
    )
    yield Draft("D keeps all blocks that P could free", pair(engine(families, kinds={"sliding": "full"}), plain, 14), 2)
    for d, p, stage in [(1, 2, 0), (2, 1, 1), (2, 2, 0), (2, 3, 1), (3, 2, 1)]:
        local, remote = (engine(families, pp=size, split=2) for size in (d, p))
        yield Draft(f"D {d} stages, P {p}, stage {stage} of D", pair(local, remote, 10, stage=stage), 2)
    local, remote = engine(families, tp=2), engine(families, tp=4, pp=2)
    yield Draft("P has stages of ranks, with separate spans", pair(local, remote, Ask(10, own=True), rank=1), 3)
    yield Draft("opaque content beside attention", pair(*[engine(model(full(), opaque()))] * 2, Ask(9, more=(0, 1))), 2)


def context_parallel() -> Iterator[Draft]:
    """Ranks that alternate by whole blocks."""
    latent, heads = model(mla()), model(full(heads=2), packed(heads=2))
    for d, p, rank in [(1, 2, 0), (2, 1, 0), (2, 1, 1), (2, 2, 1), (2, 4, 1), (4, 2, 3), (1, 3, 0), (3, 1, 2)]:
        for tokens in (17, 24):
            local, remote = (engine(latent, cp=size) for size in (d, p))
            yield Draft(f"D {d} in turn, P {p}, rank {rank}, {tokens} tokens", pair(local, remote, tokens, cp=rank), 2)
    for d, p, rank in [(2, 1, 1), (1, 2, 0)]:
        local, remote = (engine(heads, cp=size, tp=2) for size in (d, p))
        yield Draft(
            f"with heads and packed blocks: D {d} in turn, P {p}, rank {rank}",
            pair(local, remote, 21, cp=rank, rank=1),
            3,
        )
    local, remote = engine(latent, (4, 1)), engine(latent, (2, 1), cp=2)
    yield Draft("P 2 in turn, with smaller blocks", pair(local, remote, 15), 3)
    local, remote = engine(latent, (2, 2), cp=2), engine(latent, (4, 1))
    yield Draft("D 2 in turn, with other kernel blocks", pair(local, remote, 15, cp=1), 3)
    local, remote = engine(latent, cp=2), engine(latent)
    yield Draft("D 2 in turn, and a prefix hit", pair(local, remote, Ask(22, hit=8), cp=1), 3)
