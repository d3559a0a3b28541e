# SPDX-License-Identifier: Apache-2.0
"""Cases about blocks and tokens: their sizes, where they begin, which are read, and their ids."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.build import Ask, Draft, chunked, engine, full, mamba2, mla, model, packed, pair, sliding

SIZES = [(4, 2), (2, 4), (8, 2), (2, 8), (6, 4), (4, 6), (12, 8), (8, 12), (5, 3), (3, 5), (7, 4), (9, 6), (16, 24)]


def block_ratio() -> Iterator[Draft]:
    """Other block sizes on the two sides: blocks meet by position."""
    for d, p in SIZES:
        tokens = 2 * max(d, p) + 1 if max(d, p) < 12 else max(d, p) + 5
        divides = max(d, p) % min(d, p) == 0
        case = pair(engine(model(full()), (d, 1)), engine(model(full()), (p, 1)), tokens)
        yield Draft(f"D {d} tokens, P {p}, a request of {tokens}", case, 1 if divides else 2)
    for d, p in [(8, 2), (6, 4), (5, 3)]:
        cuts = {"full": (d, 1), "sliding": (d, 1)}, {"full": (p, 1), "sliding": (p, 1)}
        families = model(full(layers=1), sliding(9))
        case = pair(engine(families, cuts[0]), engine(families, cuts[1]), Ask(23, clip=True))
        yield Draft(f"D {d} tokens, P {p}, and a window of 9", case, 3)
        case = pair(engine(model(mla()), (d, 1)), engine(model(mla()), (p, 1)), 2 * d)
        yield Draft(f"D {d} tokens, P {p}, a latent, whole blocks", case, 2)
    local, remote = (
        engine(model(full(), mamba2()), (8, 1), shared=True),
        engine(model(full(), mamba2()), (4, 1), shared=True),
    )
    yield Draft("D 8 tokens, P 4, and a state that fills a block", pair(local, remote, 13), 2)


def kernel_ratio() -> Iterator[Draft]:
    """Several kernel blocks in a logical block, and other kernel blocks on the other side."""
    for d, p in [
        ((4, 3), (4, 3)),
        ((4, 3), (12, 1)),
        ((12, 1), (4, 3)),
        ((2, 6), (3, 4)),
        ((6, 2), (4, 3)),
        ((1, 12), (12, 1)),
    ]:
        for order in ("LBNHC", "LBHNC"):
            case = pair(engine(model(full()), d, order=order), engine(model(full()), p, order=order), 17)
            yield Draft(f"D {d[1]} of {d[0]}, P {p[1]} of {p[0]}, {order}", case, 1 if d == p else 2)
    for d, p in [((2, 6), (2, 10)), ((2, 10), (2, 6)), ((4, 3), (2, 4))]:
        families = model(mla(), mamba2())
        case = pair(engine(families, d), engine(families, p), 21)
        yield Draft(f"logical blocks of {d[0] * d[1]} and {p[0] * p[1]}, a latent and a state", case, 2)
        case = pair(engine(families, d), engine(families, p), Ask(23, hit=d[0] * d[1]))
        yield Draft(f"logical blocks of {d[0] * d[1]} and {p[0] * p[1]}, and a prefix hit", case, 3)
    for spread in (False, True):
        options = {"spread": spread, "block_pad": 12}
        case = pair(
            engine(model(full()), (2, 3), **options),
            engine(model(full()), (2, 3), split_kernel=True, order="BLNHC"),
            10,
        )
        yield Draft(f"padding {'between' if spread else 'behind'} kernel blocks", case, 2)
    case = pair(engine(model(packed()), (4, 2)), engine(model(packed()), (4, 3)), 18)
    yield Draft("packed kernel blocks, 2 and 3 in a logical one", case, 2)
    case = pair(engine(model(full(layers=1)), (1, 40)), engine(model(full(layers=1)), (1, 24)), 37)
    yield Draft("40 kernel blocks of a token in a logical one, P 24", case, 2)


def prefix_hit() -> Iterator[Draft]:
    """D holds the first tokens already: what it lacks is found by position, not counted from an end."""
    for d, p, hit, tokens in [
        (4, 4, 4, 11), (4, 4, 8, 11), (4, 4, 12, 14), (8, 4, 8, 19), (4, 8, 4, 19), (4, 8, 12, 19),
        (6, 4, 6, 20), (5, 3, 10, 14),
    ]:  # fmt: skip
        case = pair(engine(model(full()), (d, 1)), engine(model(full()), (p, 1)), Ask(tokens, hit=hit))
        yield Draft(f"{hit} of {tokens} tokens are there, blocks of {d} and {p}", case, 1 if d == p else 2)
    plain = engine(model(full(), sliding(6)))
    for full_hit, window_hit in [(8, 4), (4, 12), (0, 8), (8, 0)]:
        case = pair(plain, plain, Ask(15, hit={"full": full_hit, "sliding": window_hit}))
        yield Draft(f"{full_hit} tokens are there of full layers, {window_hit} of windows", case, 2)
    yield Draft("all tokens are there of full layers", pair(plain, plain, Ask(12, hit={"full": 12})), 2)
    state = engine(model(full(), mamba2()))
    yield Draft("a hit in attention, none in the state", pair(state, state, Ask(13, hit=8)), 2)
    case = pair(plain, plain, Ask(18, hit=8, dropped={"full": 2, "sliding": 1}))
    yield Draft("P has freed what D has", case, 2)
    case = pair(plain, plain, Ask(18, hit={"full": 8}, dropped={"full": 1, "sliding": 3}))
    yield Draft("P has freed what D has, and what is before the window", case, 3)


def window() -> Iterator[Draft]:
    """Where a window or a chunk begins: the token after N sees itself and what is before it."""
    for limit, tokens in [
        (1, 9),
        (2, 9),
        (3, 8),
        (4, 12),
        (5, 12),
        (5, 13),
        (6, 13),
        (8, 16),
        (8, 17),
        (9, 16),
        (9, 17),
        (17, 16),
        (18, 17),
        (40, 17),
    ]:
        shape = engine(model(sliding(limit)))
        yield Draft(
            f"window {limit}, {tokens} tokens",
            pair(shape, shape, Ask(tokens, clip=limit % 2 == 0)),
            2 if tokens % 4 else 1,
        )
    for limit, tokens in [(8, 7), (8, 8), (8, 9), (8, 15), (8, 16), (8, 17), (6, 11), (6, 13), (5, 11), (12, 12)]:
        shape = engine(model(chunked(limit)))
        yield Draft(
            f"chunk {limit}, {tokens} tokens",
            pair(shape, shape, Ask(tokens, clip=limit == 8 and tokens % 8 > 0)),
            2 if limit % 4 else 1,
        )
    shape = engine(model(sliding(6), full(layers=1)))
    for dropped in (1, 2):
        case = pair(shape, shape, Ask(15, dropped={"sliding": dropped}))
        yield Draft(f"P has freed {dropped} blocks before the window, D asks for all", case, 2)
    for d, p, tokens in [(8, 4, 19), (4, 8, 19), (6, 4, 16), (8, 2, 14)]:
        case = pair(engine(model(sliding(7)), (d, 1)), engine(model(sliding(7)), (p, 1)), Ask(tokens, clip=True))
        yield Draft(f"window 7, {tokens} tokens, blocks of {d} and {p}, both clipped", case, 3)
    local, remote = engine(model(sliding(6), chunked(8)), tp=2), engine(model(sliding(6), chunked(8)), tp=1)
    yield Draft("a window and a chunk, D 2 ranks", pair(local, remote, Ask(14, clip=True), rank=1), 3)


def lengths() -> Iterator[Draft]:
    """Where the last token falls, and blocks after it."""
    shape = engine(model(full(layers=1), mamba2(layers=1)))
    for tokens in (1, 3, 4, 5, 7, 8, 9, 15, 16, 17):
        yield Draft(f"{tokens} tokens in blocks of 4", pair(shape, shape, tokens))
    ratio = engine(model(full()), (4, 3))
    for tokens in (1, 4, 5, 11, 12, 13):
        yield Draft(f"{tokens} tokens in 3 kernel blocks of 4", pair(ratio, ratio, tokens))
    for more in [(1, 0), (0, 1), (2, 0), (1, 2)]:
        yield Draft(f"D has {more[0]} blocks more, P {more[1]}", pair(shape, shape, Ask(6, more=more)), 2)
    case = pair(engine(model(full()), (16, 1)), engine(model(full()), (2, 1)), 1)
    yield Draft("1 token, blocks of 16 and 2", case, 2)
    case = pair(engine(model(packed()), (4, 2)), engine(model(packed()), (4, 2)), 5)
    yield Draft("packed blocks are moved whole", case, 2)


def block_ids() -> Iterator[Draft]:
    """Ids of blocks: which blocks are neighbours, and the null block."""
    shape = engine(model(full(), sliding(6)), shared=True)
    for ids in [("up", "up"), ("up", "down"), ("down", "down"), ("mixed", "up"), ("up", "mixed"), ("mixed", "mixed")]:
        yield Draft(f"ids {ids[0]} on D, {ids[1]} on P", pair(shape, shape, Ask(18, ids=ids)))
    for null in [(None, None), (0, None), (None, 0), (1, 2), (0, 3)]:
        case = pair(shape, shape, Ask(18, null=null, ids=("up", "up")))
        yield Draft(f"null block {null[0]} on D, {null[1]} on P", case)
    heads = engine(model(full()), order="LBHNC")
    yield Draft("heads outside, ids up on both sides", pair(heads, heads, Ask(19, ids=("up", "up"))))
    blocks = engine(model(full(), sliding(6)), order="BLNHC", shared=True)
    yield Draft("layers of a block are neighbours", pair(blocks, blocks, Ask(16, ids=("up", "up"))))
