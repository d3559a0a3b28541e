# SPDX-License-Identifier: Apache-2.0
"""Digests of the content of blocks: which errors they find, what cannot be compared, and how they are sent."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import replace
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhma.digests import ContentDigest, Difference, content_digest, differences
from kvhma.errors import GeometryError, RequestError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from support.pairs import HERE, THERE, heads, latent, rank, state

SEED = 99
SIZES = (1, 2, 4, 8)


def random_memory(geometry: Geometry, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, region.bytes, np.uint8) for region in geometry.regions]


def digest(of: Geometry, memory: list[np.ndarray], tokens: int, spans: list[Span], **more: Any) -> ContentDigest:
    return content_digest(of, lambda region, offset: memory[region][offset:], tokens, spans, SEED, **more)


def alone(tokens: int = 40, blocks: int = 20) -> tuple[Geometry, list[np.ndarray], list[Span]]:
    """One rank with a layer of four heads, a window of 9, latent attention and a state; a block has 4 tokens."""
    groups = [Group("full", 4), Group("sliding", 4, window=9), Group("mla", 4), Group("ssm", 1)]
    layers = [("a", 0, heads(4)), ("b", 1, heads(4)), ("c", 2, latent(4, 6)), ("d", 3, state(4))]
    geometry = rank(HERE, groups, layers, blocks=4 * blocks + 1)
    need = -(-tokens // 4)
    spans = [Span(0, list(range(1 + blocks * at, 1 + blocks * at + need))) for at in range(3)]
    return geometry, random_memory(geometry), [*spans, Span(0, [4 * blocks])]


ALONE = alone()
FULL, WINDOW, STATE = ("full", 0), ("sliding", 9), ("ssm", 0)


def after(change: Any, tokens: int = 40) -> list[Difference]:
    """Compare a cache with itself after a change of its memory."""
    geometry, memory, spans = ALONE
    changed = [region.copy() for region in memory]
    change(changed, spans)
    both = digest(geometry, memory, tokens, spans), digest(geometry, changed, tokens, spans)
    return differences(*both, SEED)[0]


def test_the_same_bytes_agree_and_say_how_many_tokens() -> None:
    geometry, memory, spans = ALONE
    both = digest(geometry, memory, 40, spans), digest(geometry, memory, 40, spans)
    assert differences(*both, SEED) == ([], 40 + 8)  # the window of the next token sees 8 more
    assert set(both[0].from_tokens) == {FULL, WINDOW, STATE}


def test_every_bit_of_every_block_counts() -> None:
    """Only those: a bit in free blocks, after the last token or before the window changes nothing."""
    rng = random.Random(1)
    geometry, memory, spans = ALONE
    tokens = 38
    seen = {"shows": 0, "does not count": 0}
    for _ in range(400):
        region = rng.randrange(4)
        layer = geometry.layers[region]
        byte, bit = rng.randrange(memory[region].size), rng.randrange(8)
        block, inside = divmod(byte, layer.block_stride)
        group = geometry.groups[layer.group]
        position = spans[region].ids.index(block) if block in spans[region].ids else None

        def flip(changed: list[np.ndarray], _: Any, where: tuple[int, int, int] = (region, byte, bit)) -> None:
            changed[where[0]][where[1]] ^= 1 << where[2]

        found = after(flip, tokens)
        if group.kind == "ssm":
            counts = position is not None
        else:
            row = 2 if group.kind != "mla" else 6
            token = None if position is None else 4 * position + inside // row % 4
            counts = token is not None and (30 if group.kind == "sliding" else 0) <= token < tokens
        assert bool(found) is counts, (region, byte, bit)
        seen["shows" if counts else "does not count"] += 1
    assert min(seen.values()) > 20


def swap(region: int, one: slice, other: slice) -> Any:
    def change(changed: list[np.ndarray], _: Any) -> None:
        kept = changed[region][one].copy()
        changed[region][one] = changed[region][other]
        changed[region][other] = kept

    return change


# A block of layer a: four heads of four tokens of two bytes.
@pytest.mark.parametrize(
    ("what", "change", "where"),
    [
        ("two heads of a block", swap(0, slice(32, 40), slice(40, 48)), "full layers, tokens 0..39"),
        ("two tokens of a head", swap(0, slice(32, 34), slice(34, 36)), "full layers, tokens 0..39"),
        ("two bytes of a row", swap(0, slice(32, 33), slice(33, 34)), "full layers, tokens 0..39"),
        ("two blocks", swap(0, slice(32, 64), slice(64, 96)), "full layers, tokens 0..39"),
        ("two layers' blocks", lambda m, _: swap_layers(m), "full layers, tokens 0..39"),
        ("a stale block", lambda m, _: m[0].__setitem__(slice(32, 64), m[0][-32:]), "full layers, tokens 0..39"),
        ("a block of zeros", lambda m, _: m[1].__setitem__(slice(30 * 32, 31 * 32), 0), "sliding 9 layers"),
        ("shifted rows", lambda m, _: m[2].__setitem__(slice(984, 1008), np.roll(m[2][984:1008], 6)), "full layers"),
        ("a stale state", lambda m, _: m[3].__setitem__(slice(-12, None), m[3][:12]), "ssm layers"),
        ("heads of a state", swap(3, slice(960, 963), slice(963, 966)), "ssm layers"),
    ],
)
def test_what_happens_to_caches_shows(what: str, change: Any, where: str) -> None:
    found = after(change)
    assert [str(one)[: len(where)] for one in found] == [where], what


def swap_layers(memory: list[np.ndarray]) -> None:
    """Blocks of the window layer's row bytes are as long as those of the full one."""
    kept = memory[0][32:64].copy()
    memory[0][32:64] = memory[1][33 * 32 - 32 : 33 * 32]
    assert not (kept == memory[0][32:64]).all()


def test_ranges_of_tokens_say_where() -> None:
    axes = (Axis("tokens", 64, 2), Axis("content", 2, 1))
    page = Page((Part("kv", "uint8", 1, 0, axes),))
    geometry = Geometry((Region(HERE, 128 * 64),), (Group("full", 64),), (Layer("a", 0, 0, 0, 64, 128, page),))
    memory, spans = random_memory(geometry), [Span(0, list(range(1, 62)))]
    theirs = digest(geometry, memory, 3900, spans)
    spoiled = [memory[0].copy()]
    spoiled[0][128 * 40] ^= 1  # token 39 * 64 = 2496
    found, tokens = differences(theirs, digest(geometry, spoiled, 3900, spans), SEED)
    assert ([str(one) for one in found], tokens) == (["full layers, tokens 2048..3071"], 3900)
    # D's own tokens are not P's, and the digest covers only whole ranges after them.
    hit = digest(geometry, spoiled, 3900, [Span(20, spans[0].ids[20:])], first_tokens=[1280])
    found, tokens = differences(theirs, hit, SEED)
    assert ([one.first for one in found], tokens) == ([2048], 3900 - 2048)
    # If D loads fewer tokens than P has, the last range is incomplete.
    fewer = digest(geometry, memory, 3800, spans)
    assert differences(theirs, fewer, SEED) == ([], 3072)


def head_ranks(size: int, total: int, base: int, *, knows: bool = False) -> list[Geometry]:
    """Ranks that know how many heads they hold, and that vLLM repeats heads only where it has to."""
    ranks = []
    for index in range(size):
        each = max(1, total // size)
        may_repeat = each == 1 and size > 1 and not knows
        start = index * total // size if knows else index * each
        axis = Axis("heads", total if knows else each * size, 24, start, each, may_repeat=may_repeat)
        axes = (axis, Axis("tokens", 4, 6), Axis("content", 3, 2))
        part = Part("kv", "bfloat16", 2, 0, axes)
        layer = Layer("a", 0, 0, 0, 8, part.nbytes, Page((part,)))
        region = Region(base + (index << 20), 8 * part.nbytes)
        ranks.append(Geometry((region,), (Group("full", 4),), (layer,), index, size))
    return ranks


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(SIZES, SIZES)))
@pytest.mark.parametrize("total", SIZES)
@pytest.mark.parametrize("who_knows", ["P", "D", "both", "none"])
def test_heads_that_ranks_repeat(mine: int, theirs: int, total: int, who_knows: str) -> None:
    """One side may know how many heads there are, for example because it has fewer ranks."""
    rng = np.random.default_rng(total)
    whole = rng.integers(0, 256, (total, 8, 24), np.uint8)

    def memory(size: int, index: int) -> list[np.ndarray]:
        each = max(1, total // size)
        first = index * total // size
        return [whole[first : first + each].swapaxes(0, 1).reshape(-1).copy()]

    spans = [Span(0, [3, 1, 2])]
    prefill = head_ranks(theirs, total, THERE, knows=who_knows in ("P", "both"))
    sums = [digest(one, memory(theirs, index), 11, spans) for index, one in enumerate(prefill)]
    sent = reduce(add, sums)
    ranks = head_ranks(mine, total, HERE, knows=who_knows in ("D", "both"))
    read = [digest(one, memory(mine, index), 11, spans) for index, one in enumerate(ranks)]
    assert differences(sent, reduce(add, read), SEED) == ([], 11)
    for index, one in enumerate(ranks):  # each rank's copy counts, also one of many
        spoiled = memory(mine, index)
        spoiled[0][spoiled[0].size // 8 + 5] ^= 4  # in block 1
        wrong = [*read[:index], digest(one, spoiled, 11, spans), *read[index + 1 :]]
        assert differences(sent, reduce(add, wrong), SEED)[0]
    if mine > 1 and total > 1:
        turned = [digest(one, memory(mine, (index + mine // 2) % mine), 11, spans) for index, one in enumerate(ranks)]
        assert differences(sent, reduce(add, turned), SEED)[0]


@pytest.mark.parametrize(("mine", "theirs"), [(1, 8), (8, 1), (8, 8), (3, 2)])
def test_one_wrong_copy_of_a_latent_cache_shows(mine: int, theirs: int) -> None:
    def ranks(size: int) -> list[Geometry]:
        return [rank(HERE, [Group("mla", 4)], [("a", 0, latent(4, 6))], blocks=5, tp=(r, size)) for r in range(size)]

    memory = random_memory(ranks(1)[0])
    spans = [Span(0, [4, 2])]
    sent = reduce(add, [digest(one, memory, 7, spans) for one in ranks(theirs)])
    read = [digest(one, memory, 7, spans) for one in ranks(mine)]
    assert differences(sent, reduce(add, read), SEED)[0] == []
    for index, one in enumerate(ranks(mine)):
        spoiled = [memory[0].copy()]
        spoiled[0][4 * 24] ^= 0x80
        assert differences(
            sent, reduce(add, [*read[:index], *read[index + 1 :]], digest(one, spoiled, 7, spans)), SEED
        )[0]


def test_what_cannot_be_compared_is_refused() -> None:
    geometry, memory, spans = ALONE
    whole = digest(geometry, memory, 40, spans)
    fewer = replace(geometry, groups=geometry.groups[:2], layers=geometry.layers[:2])
    with pytest.raises(UnsupportedPairError, match="D sums full layers, sliding 9 layers, P full layers, sliding 9"):
        differences(whole, digest(fewer, memory, 40, spans[:2]), SEED)
    other = replace(geometry, layers=(replace(geometry.layers[0], name="e"), *geometry.layers[1:]))
    with pytest.raises(
        UnsupportedPairError, match="content_digests: full layers: D sums these items, P different items"
    ):
        differences(whole, digest(other, memory, 40, spans), SEED)
    with pytest.raises(UnsupportedPairError, match="different items or ranks"):
        differences(whole, whole + whole, SEED)
    with pytest.raises(RequestError, match="digests of 40 and of 39 tokens"):
        whole + digest(geometry, memory, 39, spans)
    axis = Axis("heads", 3, 8, 0, 2)
    page = Page((Part("kv", "uint8", 1, 0, (axis, Axis("tokens", 4, 2), Axis("content", 2, 1))),))
    uneven = rank(HERE, [Group("full", 4)], [("a", 0, page)], blocks=4, tp=(0, 2))
    half = rank(HERE, [Group("full", 4)], [("a", 0, heads(3, 3, 0))], blocks=4, tp=(0, 3))
    of_both = [digest(one, random_memory(one), 4, [Span(0, [1])]) for one in (uneven, half)]
    with pytest.raises(UnsupportedPairError, match="different items or ranks"):
        differences(of_both[0], of_both[1], SEED)
    wrong = Axis("rows", 2, 8, 0, 1, may_repeat=True)
    page = Page((Part("kv", "uint8", 1, 0, (wrong, Axis("tokens", 4, 2), Axis("content", 2, 1))),))
    repeats = rank(HERE, [Group("full", 4)], [("a", 0, page)], blocks=4, tp=(0, 2))
    with pytest.raises(GeometryError, match="may repeat, expected only the heads"):
        digest(repeats, random_memory(repeats), 4, [Span(0, [1])])


@pytest.mark.parametrize("block", [-1, 20])
def test_blocks_that_a_layer_does_not_have_are_refused(block: int) -> None:
    geometry = rank(HERE, [Group("full", 4)], [("a", 0, heads(4))], blocks=20)
    with pytest.raises(RequestError, match=r"blocks \[.*\], expected 0..19"):
        digest(geometry, random_memory(geometry), 4, [SimpleNamespace(first=0, ids=[block])])  # type: ignore[list-item]


def defined_key(name: str, index: int) -> int:
    """The key of an index of an axis."""
    mask = (1 << 64) - 1
    value = (index * 0x9E3779B97F4A7C15 + salt("axis", name)) & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return (value ^ value >> 31) | 1


def salt(*names: str) -> int:
    text = b"".join(len(name).to_bytes(8, "little") + name.encode() for name in names)
    return int.from_bytes(hashlib.blake2b(SEED.to_bytes(8, "little") + text, digest_size=8).digest(), "little")


def defined(geometry: Geometry, memory: list[np.ndarray], spans: list[Span], name: str, first: int, end: int) -> int:
    """The sum of a layer with one part on one rank, byte by byte: docs/digests.md."""
    layer = geometry.layer_by_name[name]
    (part,), group = layer.page.parts, geometry.groups[layer.group]
    row = max((axis for axis in part.axes if axis.name not in ("tokens", "heads")), key=lambda axis: axis.extent)
    total = 0
    for index in itertools.product(*(range(axis.extent) for axis in part.axes)):
        at = part.offset + sum(one * axis.stride for one, axis in zip(index, part.axes, strict=True))
        key, token, place = salt("part", name, part.name) | 1, 0, 0
        for one, axis in zip(index, part.axes, strict=True):
            if axis is row:
                place = one * part.item_bytes
            elif axis.name == "tokens":
                token = one
            else:
                key *= defined_key(axis.name, one)
        for position, block in enumerate(spans[layer.group].ids):
            of_block = token + (position * group.block_size if group.kind != "ssm" else 0)
            for byte in range(part.item_bytes if first <= of_block < end else 0):
                word = defined_key("words", (place + byte) // 4) >> 32 | 1
                value = int(memory[layer.region][layer.offset + block * layer.block_stride + at + byte])
                total += key * defined_key("tokens", of_block) * word * (value << 8 * ((place + byte) % 4))
    return total % (1 << 64)


def test_the_sums_are_those_of_the_definition() -> None:
    """Engines of two versions compare these numbers, so they must not change."""
    geometry, memory, spans = ALONE
    found = digest(geometry, memory, 38, spans).layers
    assert found[FULL, -4][1] == defined(geometry, memory, spans, "a", 0, 38)
    assert found[WINDOW, -4][1] == defined(geometry, memory, spans, "b", 30, 38)
    assert found[FULL, 0][1] == defined(geometry, memory, spans, "c", 0, 38)
    assert found[STATE, -4][1] == defined(geometry, memory, spans, "d", 0, 38)
