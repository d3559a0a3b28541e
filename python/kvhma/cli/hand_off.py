# SPDX-License-Identifier: Apache-2.0
"""One request between two engines, planned and counted for every rank: what all commands print."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from kvhma._kvhma import Plan
from kvhma.baselines import Count, sequence_blocks
from kvhma.cli.rivals import Relay, plain_counts, vllm_counts
from kvhma.cli.sides import Side, named
from kvhma.errors import KvhmaError, RequestError, UnsupportedPairError
from kvhma.geometry import Geometry, Group, Span
from kvhma.models import Model
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, live_spans
from kvhma.planning import plan as make_plan

MAX_TOKENS = 1 << 22
"""Of one request: more than any model takes, and block tables of it still take only seconds."""

Pool: TypeAlias = Literal["fresh", "used"]
Tables: TypeAlias = list[list[int]]
Watch: TypeAlias = Callable[[Sequence[Geometry]], Iterable[Geometry]]
"""Shows progress over the ranks of D while they are planned."""

_STRETCHES = (1, 1, 1, 2, 3, 5, 8)


@dataclass(frozen=True, slots=True)
class HandOff:
    """Two engines and a request between them.

    Attributes:
        name: what is handed over.
        d: ranks of the decode engine.
        p: ranks of the prefill engine.
        tokens: tokens that P computed.
        cached: leading tokens that D holds already, as asked for.
        held: per group of D, the block table entries that this makes.
        local: D's block tables.
        remote: P's block tables.
        flat: blocks of the whole sequence on D and P, as a connector without groups would have them.
        relay: lays D out with another kernel block; None where D came as a geometry.
    """

    name: str
    d: list[Geometry]
    p: list[Geometry]
    tokens: int
    cached: int
    held: list[int]
    local: Tables
    remote: Tables
    flat: tuple[list[int], list[int]]
    relay: Relay | None = None

    def spans(self, local: Geometry) -> tuple[list[Span], list[Span]]:
        """Return the spans to fill on a rank of D, and those P holds."""
        mine = live_spans(local, self.tokens, self.local, self.held)
        return mine, live_spans(self.p[0], self.tokens, self.remote)

    def plan(self, local: Geometry, descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES) -> Plan:
        """Pair a rank of D with all of P.

        Raises:
            UnsupportedPairError: they cannot be paired.
        """
        return make_plan(local, self.p, descriptor_bytes=descriptor_bytes)


@dataclass(frozen=True, slots=True)
class PairCount:
    """What one rank of D reads from one of P.

    Attributes:
        d: index of the decode rank.
        p: index of the prefill rank.
        total: descriptors and bytes of the read.
        groups: for each group, what it would be alone; neighbours of different groups can become one descriptor, so
            descriptors may add up to more than the total.
    """

    d: int
    p: int
    total: Count
    groups: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Rival:
    """What another connector would move: by D rank, or why it refuses."""

    ranks: tuple[Count, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """A request, counted.

    Attributes:
        pairs: every pair of ranks that moves anything.
        excess: bytes behind the last token that come along.
        zeroed: bytes that are zeroed on D.
        findings: warnings, each once.
        vllm: vLLM 0.32's own selection.
        plain: a connector without groups.
    """

    pairs: tuple[PairCount, ...]
    excess: int
    zeroed: int
    findings: tuple[str, ...]
    vllm: Rival
    plain: Rival

    @property
    def total(self) -> Count:
        """All pairs together."""
        return summed(pair.total for pair in self.pairs)

    def of_rank(self, d: int) -> Count:
        """What one rank of D reads from all its sources."""
        return summed(pair.total for pair in self.pairs if pair.d == d)


def summed(counts: Iterable[Count]) -> Count:
    """Add counts up."""
    found = list(counts)
    return Count(sum(c.descriptors for c in found), sum(c.bytes for c in found))


def of_model(one: Model, p: Side, d: Side, tokens: int, cached: int, pool: Pool = "fresh", seed: int = 0) -> HandOff:
    """Lay a model out on two engines, with room for one request.

    Raises:
        KvhmaError: the model cannot be laid out so, or the request does not fit; the text names the option.
    """
    _check_tokens(tokens, cached)
    sizes = []
    for name, side in (("prefill", p), ("decode", d)):
        try:
            sketch = side.rank(one, 0, 2, 1 << 20)
        except KvhmaError as error:
            raise named(name, error) from error
        # Enough for the connector without groups too, which drops no block behind a window.
        most = max(sum(map(len, sequence_blocks(sketch, tokens))), -(-tokens // main_group(sketch).block_size))
        blocks = 1 + most * (1 if pool == "fresh" else 2)
        sizes.append((max(blocks, 2), sum(region.bytes + 4096 for region in sketch.regions) // 2))
    step = 1 << max(blocks * size + (1 << 20) for blocks, size in sizes).bit_length()
    remote = p.ranks(one, sizes[0][0], step, step)
    start = step * (1 + p.tp)
    local = d.ranks(one, sizes[1][0], start, step)
    return _hand_off(
        one.name, local, remote, tokens, cached, pool, seed, partial(d.ranks, one, sizes[1][0], start, step)
    )


def of_geometries(
    name: str, d: list[Geometry], p: list[Geometry], tokens: int, cached: int, pool: Pool = "fresh", seed: int = 0
) -> HandOff:
    """Take geometries as they are.

    Raises:
        KvhmaError: the request does not fit into one of them.
    """
    _check_tokens(tokens, cached)
    return _hand_off(name, d, p, tokens, cached, pool, seed, None)


def _hand_off(
    name: str,
    d: list[Geometry],
    p: list[Geometry],
    tokens: int,
    cached: int,
    pool: Pool,
    seed: int,
    relay: Relay | None,
) -> HandOff:
    local, remote = (block_tables(side[0], tokens, pool, seed + at) for at, side in enumerate((d, p)))
    held = [0 if g.kind == "ssm" else cached // (g.block_size * g.cp_size) for g in d[0].groups]
    flat = [_flat_table(side[0], tokens, pool, seed + at) for at, side in enumerate((d, p))]
    return HandOff(name, d, p, tokens, cached, held, local, remote, (flat[0], flat[1]), relay)


def _check_tokens(tokens: int, cached: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise RequestError(f"--tokens {tokens}: must be 1 to {MAX_TOKENS:,}")
    if not 0 <= cached <= tokens:
        raise RequestError(f"--cached {cached}: must be 0 to the {tokens:,} of --tokens")


def block_tables(geometry: Geometry, tokens: int, pool: Pool, seed: int) -> Tables:
    """Return the block tables of an engine.

    Args:
        geometry: a rank of it.
        tokens: tokens of the request.
        pool: ``"fresh"``: ids count up; ``"used"``: stretches of 1 to 8 blocks, up and down, with jumps, as a pool
            hands them out after many requests.
        seed: another seed, another used pool.

    Raises:
        RequestError: the pool has not enough blocks.
    """
    tables = [table.tolist() for table in sequence_blocks(geometry, tokens)]
    blocks = min(layer.num_blocks for layer in geometry.layers)
    most = max((max(table, default=0) for table in tables), default=0)
    if most >= blocks:
        raise RequestError(
            f"--tokens {tokens} takes {most} blocks; the geometry has {blocks - 1} beside the null block"
        )
    ids = _ids(blocks, pool, seed)
    return [[ids[block] for block in table] for table in tables]


def _flat_table(geometry: Geometry, tokens: int, pool: Pool, seed: int) -> list[int]:
    """Return blocks for every token of the sequence; ids behind the pool if it has not enough."""
    count = -(-tokens // main_group(geometry).block_size)
    blocks = min(layer.num_blocks for layer in geometry.layers)
    return list(_ids(blocks, pool, seed)[1 : count + 1]) if count < blocks else list(range(1, count + 1))


def main_group(geometry: Geometry) -> Group:
    """Return the first group of attention, or of what there is."""
    return next((group for group in geometry.groups if group.kind != "ssm"), geometry.groups[0])


def _ids(blocks: int, pool: Pool, seed: int) -> Sequence[int]:
    """Return the ids of a pool in the order it hands them out, the null block first."""
    if pool == "fresh":
        return range(blocks)
    rng, free = random.Random(seed), list(range(blocks - 1, 0, -1))  # noqa: S311 - block ids, not secrets
    stretches = []
    while free:
        stretch = [free.pop() for _ in range(min(rng.choice(_STRETCHES), len(free)))]
        stretches.append(stretch if rng.random() < 0.5 else stretch[::-1])
    rng.shuffle(stretches)
    return [0, *(block for stretch in stretches for block in stretch)]


def count(one: HandOff, descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES, watch: Watch = list) -> Counted:
    """Plan the request on every rank of D.

    Raises:
        UnsupportedPairError: a rank of D cannot be paired.
        RequestError: the request does not fit the pair.
    """
    pairs: list[PairCount] = []
    excess = zeroed = 0
    findings: dict[str, None] = {}
    for index, local in enumerate(watch(one.d)):
        planned = one.plan(local, descriptor_bytes)
        findings |= dict.fromkeys(finding.text for _, finding in planned.findings)
        mine, theirs = one.spans(local)
        whole = planned.transfer(one.tokens, mine, theirs)
        excess += whole.excess_bytes
        zeroed += int(whole.zero[:, 1].sum())
        alone = [
            {
                read.source: Count(read.descriptors, read.bytes)
                for read in planned.transfer(one.tokens, spans, theirs).reads
            }
            for spans in _one_group_each(mine, one.local)
        ]
        pairs += [
            PairCount(
                index,
                read.source,
                Count(read.descriptors, read.bytes),
                tuple(group.get(read.source, Count(0, 0)) for group in alone),
            )
            for read in whole.reads
        ]
    return Counted(tuple(pairs), excess, zeroed, tuple(findings), *_rivals(one))


def _one_group_each(spans: list[Span], tables: Tables) -> list[list[Span]]:
    """For each group, the spans with all other groups held already."""
    empty = [Span(len(table), []) for table in tables]
    return [[span if at == group else empty[at] for at, span in enumerate(spans)] for group in range(len(spans))]


def _rivals(one: HandOff) -> tuple[Rival, Rival]:
    # vLLM pairs lists from their ends, so what D holds already is cut off at the front.
    local = [table[held:] for table, held in zip(one.local, one.held, strict=True)]
    found = []
    for counts in (
        partial(vllm_counts, one.d, one.p, (local, one.remote), one.relay),
        partial(plain_counts, one.d, one.p, one.flat, one.relay),
    ):
        try:
            sizes = {len(side): side[0].tp_size for side in (one.d, one.p)}
            if any(has != size for has, size in sizes.items()):
                raise UnsupportedPairError("not all ranks of both engines are given")
            found.append(Rival(tuple(counts())))
        except KvhmaError as error:
            found.append(Rival(refused=str(error)))
    return found[0], found[1]
