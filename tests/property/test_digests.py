# SPDX-License-Identifier: Apache-2.0
"""Sums over the content of P's ranks and over the reads of D's ranks, for generated engines and the oracle's bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import kvhma
from kvhma.digests import RANGE_TOKENS, ContentDigest, Difference, content_digest, differences
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Geometry, Group
from kvhma.oracle import fill_source, fill_stale
from kvhma.oracle.content import batches, spread, view_of
from kvhma.oracle.labels import blocks_of, parts_of
from support.generate import Case, generate
from support.memory import Memory, carry_out, empty
from support.mutate import mutations, plain
from support.recipe import EQUAL_RANK, draw
from support.tries import TRIES

CHUNKS = 10
PER_CHUNK = 40 * TRIES
SEED = 0x1234_5678_9ABC_DEF0


class Loaded(NamedTuple):
    """A rank of D after its load."""

    geometry: Geometry
    names: set[str]
    """Layers that P has."""
    transfer: Any
    memory: Memory

    def digest(self, case: Case, memory: Memory | None = None, seed: int = SEED) -> ContentDigest:
        return content_digest(
            self.geometry,
            bytes_of(memory or self.memory),
            case.num_tokens,
            case.local_spans,
            seed,
            first_tokens=self.transfer.first_tokens,
            cp_tp_size=cp_ranks(self.geometry),
            names=self.names,
        )


def bytes_of(memory: Memory) -> Callable[[int, int], NDArray[np.uint8]]:
    return lambda region, offset: memory[region][offset:]


def cp_ranks(geometry: Geometry) -> int:
    return max((group.cp_size for group in geometry.groups), default=1)


def moved(geometry: Geometry, transfer: Any, sources: Sequence[tuple[Geometry, Memory]]) -> Memory:
    memory = empty(geometry)
    fill_stale(memory)
    return carry_out(geometry, memory, transfer, sources)


def hand_over(case: Case) -> tuple[ContentDigest, list[Loaded], list[tuple[Geometry, Memory]]]:
    """Return the sum of P's ranks, and each rank of D after its load."""
    decode, prefill = case.engines()
    sources, sums = [], []
    for geometry, spans in prefill:
        memory = empty(geometry)
        fill_source(memory, geometry, spans)
        sources.append((geometry, memory))
        of_rank = content_digest(
            geometry, bytes_of(memory), case.num_tokens, spans, SEED, cp_tp_size=cp_ranks(geometry)
        )
        sums.append(of_rank)
    loaded = []
    for geometry in decode:
        plan = kvhma.plan(geometry, [source for source, _ in sources])
        transfer = plan.transfer(case.num_tokens, case.local_spans, [spans for _, spans in prefill])
        names = {layer.name for source, _ in sources for layer in source.layers}
        loaded.append(Loaded(geometry, names, transfer, moved(geometry, transfer, sources)))
    return reduce(add, sums), loaded, sources


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_sums_of_both_engines_agree(chunk: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed))
        try:
            prefill, loaded, _ = hand_over(case)
            decode = reduce(add, (one.digest(case) for one in loaded))
            found, tokens = differences(prefill, decode, SEED)
        except UnsupportedPairError as error:
            counted[expected_refusal(case, error)] += 1
            continue
        assert not found, f"{case}: {', '.join(map(str, found))}"
        counted["agree"] += 1
        counted["with tokens"] += tokens > 0
    print(dict(counted))
    assert counted["with tokens"] > PER_CHUNK // 3


def expected_refusal(case: Case, error: kvhma.KvhmaError) -> str:
    if case.recipe.layers == "one-sided" or other_kinds(case):
        return "other layers"
    assert case.recipe.tp in ("uneven", "replicated"), f"{case}: {error}"
    return "uneven shards"


def other_kinds(case: Case) -> bool:
    """Whether the two sides keep layers in groups of other kinds."""

    def kinds(geometries: Sequence[Geometry]) -> set[tuple[str, str]]:
        names = {"mla": "full"}
        return {
            (layer.name, names.get(kind := geometry.groups[layer.group].kind, kind))
            for geometry in geometries
            for layer in geometry.layers
        }

    decode, prefill = case.engines()
    return kinds(decode) != kinds([geometry for geometry, _ in prefill])


@pytest.mark.parametrize("chunk", range(5))
def test_every_mutation_of_a_transfer_shows_where_bytes_that_count_differ(chunk: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * 20 * TRIES, (chunk + 1) * 20 * TRIES):
        case = generate(seed, draw(seed, EQUAL_RANK))
        if {"one-sided"} & {case.recipe.layers}:
            continue
        prefill, loaded, sources = hand_over(case)
        rng = random.Random(seed)
        which = rng.randrange(len(loaded))
        rank, others = loaded[which], [one for index, one in enumerate(loaded) if index != which]
        rest = [one.digest(case) for one in others]
        for name, wrong in mutations(rng, plain(rank.transfer)):
            try:
                memory = moved(rank.geometry, wrong, sources)
            except (AssertionError, ValueError):  # it leaves the regions, or its rows do not fit each other
                continue
            spoiled = differs(case, rank, memory)
            found, _ = differences(prefill, reduce(add, rest, rank.digest(case, memory)), SEED)
            assert set(found) == spoiled, f"{name}: {case}"
            counted[f"{name}: {'shows' if spoiled else 'nothing that counts'}"] += 1
    print(dict(counted))
    assert counted["run dropped: shows"] > 5
    assert counted["source shifted by 1: shows"] > 5


def differs(case: Case, rank: Loaded, memory: Memory) -> set[Difference]:
    """Which tokens of which layers differ from the right load, by the oracle's own way through memory."""
    found = set()
    step = RANGE_TOKENS
    for layer, part in parts_of(rank.geometry):
        group = rank.geometry.groups[layer.group]
        views = [view_of(of, rank.geometry, layer, part) for of in (rank.memory, memory)]
        for ids, tokens in batches(blocks_of(group, case.local_spans[layer.group]), part, group):
            bad = views[0][ids] != views[1][ids]
            wrong = np.array([(bad & spread(tokens == token, part)).any() for token in np.unique(tokens)])
            for token in np.unique(tokens)[wrong].tolist():
                found |= counts(case, rank, layer.group, group, part, token, step)
    return found


def counts(case: Case, rank: Loaded, index: int, group: Group, part: Any, token: int, step: int) -> set[Difference]:
    if group.kind == "opaque":
        return set()
    if group.kind == "ssm":
        states = [case.local_spans[at] for at, other in enumerate(rank.geometry.groups) if other.kind == "ssm"]
        return set() if any(not len(span.ids) for span in states) else {Difference(("ssm", 0), 0, 0)}
    first = kvhma_first(group, case.num_tokens)
    begin = max(first, rank.transfer.first_tokens[index])
    cut = any(axis.name == "tokens" for axis in part.axes)
    last = token if cut else token + group.kernel_block_size * group.cp_size - 1
    if token >= case.num_tokens or last < begin:
        return set()
    kind = "full" if group.kind == "mla" else group.kind
    low = max(first, max(token, first) // step * step)
    # D's own prefix hit is not compared, nor is the range in which it ends.
    hits = max(
        (rank.transfer.first_tokens[at] for at, other in enumerate(rank.geometry.groups) if same(other, group)),
        default=0,
    )
    if hits > low:
        return set()
    end = min(case.num_tokens, (max(token, first) // step + 1) * step)
    return {Difference((kind, group.window or group.chunk or 0), low, end)}


def same(one: Group, other: Group) -> bool:
    kinds = [{"mla": "full"}.get(group.kind, group.kind) for group in (one, other)]
    return kinds[0] == kinds[1] and (one.window, one.chunk) == (other.window, other.chunk)


def kvhma_first(group: Group, num_tokens: int) -> int:
    """First token that the next step reads, from the definition of a window and of a chunk."""
    if group.window is not None:
        return max(0, num_tokens + 1 - group.window)
    return num_tokens - num_tokens % group.chunk if group.chunk is not None else 0


def test_a_stale_block_swapped_heads_and_a_flipped_bit_show() -> None:
    """Changes of caches, each in the memory of one rank of D, at every place that matters."""
    case = next(
        case
        for case in (generate(seed, draw(seed)) for seed in range(1000))
        if (case.recipe.tp, case.recipe.layers, case.recipe.positions) == ("fewer", "equal", "start")
        and case.num_tokens > 12
    )
    prefill, loaded, _ = hand_over(case)
    sums = [one.digest(case) for one in loaded]
    assert differences(prefill, reduce(add, sums), SEED)[0] == []
    rng = random.Random(5)
    for which, rank in enumerate(loaded):
        rest = [one for index, one in enumerate(sums) if index != which]
        for _ in range(60 * TRIES):
            memory = [region.copy() for region in rank.memory]
            region = rng.randrange(len(memory))
            memory[region][rng.randrange(memory[region].size)] ^= 1 << rng.randrange(8)
            found, _ = differences(prefill, reduce(add, rest, rank.digest(case, memory)), SEED)
            assert set(found) == differs(case, rank, memory)


def test_another_seed_is_another_digest() -> None:
    case = generate(3, draw(3, EQUAL_RANK))
    _, (rank, *_), _ = hand_over(case)
    one, other = rank.digest(case), rank.digest(case, seed=SEED + 1)
    assert all(other.layers[name] != sums for name, sums in one.layers.items() if any(sums))
