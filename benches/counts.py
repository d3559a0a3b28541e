# SPDX-License-Identifier: Apache-2.0
"""Count descriptors and bytes of one request for every model, beside whole blocks: what benches/COUNTS.md holds.

No clock is read and every random number is seeded, so the output is the same on every machine.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import kvhma
from harness import table
from kvhma.cli.block_tables import BlockTables, Pool, block_tables
from kvhma.cli.columns import Count, total, whole_blocks
from kvhma.errors import LayoutError
from kvhma.geometry import Geometry
from kvhma.models import Model, models
from kvhma.models.block_size import hybrid_block_size
from kvhma.models.grouping import Members, group_layers, layer_specs
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.permute import permuted_reads
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES

PROMPTS = (128, 1_000, 5_000, 32_000)
SHOWN = 5_000
"""The prompt with a line for each model; all prompts are in the short tables."""
POOLS: tuple[Pool, ...] = ("fresh", "used")
NEVER_CUT = 2**62
"""As `descriptor_bytes`: a last block is always moved whole."""
ALWAYS = 2**62
"""As `permute_bytes`: every possible block of P is read in P's order."""


@dataclass(frozen=True)
class Engine:
    """One side of a pair.

    Attributes:
        tp: tensor-parallel ranks.
        options: further options of `layout`.
    """

    tp: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def ranks(self, one: Model, num_blocks: int, base: int, **other: Any) -> list[Geometry]:
        options = {"kernel_block": "flashinfer", **self.options, **other}
        return [
            layout(
                one,
                LayoutOptions(
                    num_blocks=num_blocks, tp_rank=rank, tp_size=self.tp, base=base + (rank << 50), **options
                ),
            )
            for rank in range(self.tp)
        ]


@dataclass(frozen=True)
class Pairing:
    """A prefill and a decode engine.

    Attributes:
        name: heading of its table.
        p: the prefill engine.
        d: the decode engine.
        models: ``"all"``; ``"state"`` for those with recurrent state; ``"block"`` for those whose logical blocks the
            two TP sizes make different.
    """

    name: str
    p: Engine
    d: Engine
    models: Literal["all", "state", "block"] = "all"

    def takes(self, one: Model) -> bool:
        """Whether vLLM starts both engines, and the table is of such models."""
        if not {self.p.tp, self.d.tp} <= set(tp_sizes(one)):
            return False
        if self.models == "block":
            blocks = {hybrid_block_size(one, tp_size=side.tp) for side in (self.p, self.d)}
            return one.state is not None and len(blocks) == 2
        return self.models == "all" or one.state is not None


def groups_of(one: Model) -> list[Members]:
    """Return the groups that vLLM's allocator forms on one rank."""
    return group_layers(layer_specs(one), block_major=False)


def tp_sizes(one: Model) -> list[int]:
    """Return with how many ranks vLLM starts an engine."""
    found = []
    for tp in (1, 2, 4):
        with contextlib.suppress(LayoutError):
            layer_specs(one, tp_size=tp)
            found.append(tp)
    return found


TOKENS_OUTSIDE = {"order": "LBNHC"}
LONG = {"block_size": 64}

PAIRINGS = (
    Pairing("equal ranks", Engine(), Engine()),
    Pairing("equal ranks, kernel block = logical block", *[Engine(1, {"kernel_block": None})] * 2, models="state"),
    Pairing("P TP 1 → D TP 2", Engine(1), Engine(2)),
    Pairing("P TP 2 → D TP 1", Engine(2), Engine(1)),
    Pairing("P TP 2 → D TP 4, logical blocks differ", Engine(2), Engine(4), models="block"),
    Pairing("P TP 4 → D TP 2, logical blocks differ", Engine(4), Engine(2), models="block"),
    Pairing("P block 16 → D block 64, heads outside of tokens", Engine(), Engine(1, LONG)),
    Pairing(
        "P block 16 → D block 64, tokens outside of heads",
        Engine(1, TOKENS_OUTSIDE),
        Engine(1, LONG | TOKENS_OUTSIDE),
    ),
    Pairing(
        "P block 16 → D block 64, kernel blocks of P",
        Engine(1, {"kernel_block": 16}),
        Engine(1, LONG | {"kernel_block": 16}),
    ),
)


@dataclass(frozen=True)
class Row:
    """One request of one model over one pairing, summed over all ranks of D and their sources.

    Attributes:
        pairing: the engines.
        model: name of the model.
        tokens: length of the prompt.
        pool: whose block ids.
        blocks: descriptors and bytes of whole blocks, see `kvhma.cli.columns`.
        kvhma: the same for `Plan.transfer`.
        whole: the same with last blocks that are never cut.
        exact: the same with last blocks that are always cut.
        ids: the same for `Plan.ids`.
    """

    pairing: Pairing
    model: str
    tokens: int
    pool: Pool
    blocks: Count
    kvhma: Count
    whole: Count
    exact: Count
    ids: Count
    permuted: Count

    def has_more(self, ours: Count | None = None) -> bool:
        return (ours or self.kvhma).descriptors > self.blocks.descriptors


def blocks_count(sides: Sequence[list[Geometry]], tokens: int, tables: BlockTables) -> Count:
    """Count whole blocks, over all ranks of D."""
    held = {layer.name: rank.groups[layer.group].tokens_per_entry for rank in sides[1] for layer in rank.layers}
    return total(whole_blocks(local, held, kvhma.live_spans(local, tokens, tables)) for local in sides[0])


def kvhma_count(
    sides: Sequence[list[Geometry]],
    tokens: int,
    tables: Sequence[BlockTables],
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES,
    *,
    ids: bool = False,
    permute_bytes: int = 0,
) -> Count:
    locals_, remotes = sides
    descriptors = total = 0
    theirs = kvhma.live_spans(remotes[0], tokens, tables[1])
    for local in locals_:
        plan = kvhma.plan(local, remotes, descriptor_bytes=descriptor_bytes)
        mine = kvhma.live_spans(local, tokens, tables[0])
        if ids:
            moved = plan.ids(tokens, mine, theirs)
            descriptors += moved.descriptors
        else:
            moved = plan.transfer(tokens, mine, theirs)
            descriptors += sum(len(read.local) for read in permuted_reads(moved, local, remotes, permute_bytes))
        total += moved.bytes
    return Count(descriptors, total)


@cache
def pool_blocks(one: Model, tokens: int) -> int:
    """Return the number of blocks for the layout: about twice the request's on the side with the shorter blocks."""
    shortest = min(hybrid_block_size(one, tp_size=tp) for tp in tp_sizes(one))
    return 2 * len(groups_of(one)) * (-(-tokens // shortest) + 1) + 32


def row(pairing: Pairing, name: str, tokens: int, pool: Pool) -> Row:
    one = models()[name]
    blocks = pool_blocks(one, tokens)
    sides = pairing.d.ranks(one, blocks, 1 << 40), pairing.p.ranks(one, blocks, 1 << 56)
    tables = [block_tables(side[0], tokens, pool, seed) for seed, side in enumerate(sides)]
    ours = [kvhma_count(sides, tokens, tables, limit) for limit in (DEFAULT_DESCRIPTOR_BYTES, NEVER_CUT, 0)]
    ids = kvhma_count(sides, tokens, tables, ids=True)
    permuted = kvhma_count(sides, tokens, tables, permute_bytes=ALWAYS)
    return Row(pairing, name, tokens, pool, blocks_count(sides, tokens, tables[0]), *ours, ids, permuted)


def rows(pairing: Pairing, names: Sequence[str] | None = None, prompts: Sequence[int] = PROMPTS) -> Iterator[Row]:
    for name, one in models().items():
        if pairing.takes(one) and (names is None or name in names):
            for tokens in prompts:
                for pool in POOLS:
                    yield row(pairing, name, tokens, pool)


def mib(count: Count) -> str:
    return f"{count.bytes / 2**20:,.1f}"


def write(text: str) -> None:
    """Print paragraphs in lines of at most 120 characters, and an empty line."""
    for paragraph in text.split("\n\n"):
        print(textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False) + "\n")


def report(found: Sequence[Row]) -> None:
    print("# Descriptors and bytes of one request, beside whole blocks\n")
    write(
        "Made by `make counts`. No times: the same on every machine. Both are summed over all ranks of D and their "
        "sources. *Whole blocks* is what a mover needs that reads each live block of each layer whole, a descriptor for "
        "each. It takes P's ranks for one, so it is a least where heads come from several.\n\n"
        "*fresh*: block ids ascend, group after group, on both sides. *used*: seeded stretches of 1 to 8 blocks, up "
        "and down, with jumps. Prompts have 128, 1,000, 5,000 and 32,000 tokens; the last tables show 5,000. Kernel blocks are FlashInfer's choice, pages have heads outside of tokens (LBHNC), "
        "unless the heading says otherwise.\n\n"
        "P's blocks may be shorter, with heads outside of tokens. Then kvhma copies each head of each of P's blocks "
        "separately: more descriptors. If D's caches are on a device, it reads whole blocks of P, and the device permutes "
        "them."
    )
    print("## In short\n")
    write(
        "Of all rows of a pairing: how many have fewer, as many and more descriptors or bytes than whole blocks. *In P's "
        "order*: `Plan.transfer` with whole blocks of P in its order."
    )
    in_short(found)
    print("No row has more bytes.\n" if not any(more_bytes(one) for one in found) else "Some rows have more bytes.\n")
    print("## `descriptor_bytes`\n")
    write(
        "When `Plan.transfer` may cut a last block to save bytes. Rows with more descriptors than whole blocks, and "
        "descriptors and MiB of all rows together:"
    )
    print("| | rows with more | descriptors | MiB |\n|---|---|---|---|")
    for name, of in (("0: always cut", "exact"), ("128 KiB, the default", "kvhma"), ("never cut", "whole")):
        counts = [getattr(one, of) for one in found]
        more = sum(one.has_more(count) for one, count in zip(found, counts, strict=True))
        total = Count(sum(count.descriptors for count in counts), sum(count.bytes for count in counts))
        print(f"| {name} | {more} | {total.descriptors:,} | {mib(total)} |")
    print()
    for pairing in PAIRINGS:
        print(f"## {pairing.name}\n")
        head = ("model", "tokens", "whole blocks", "kvhma, fresh", "kvhma, used", "MiB: whole blocks", "kvhma")
        print(table(head, ()))
        mine = [one for one in found if one.pairing is pairing and one.tokens == SHOWN]
        for fresh, used in zip(mine[::2], mine[1::2], strict=True):
            print(line(fresh, used))
        print()


def in_short(found: Sequence[Row]) -> None:
    ways = (("kvhma", "`Plan.transfer`"), ("permuted", "in P's order"), ("ids", "`Plan.ids`"))
    head = ["pairing", "rows", *(f"{title}: {unit}" for _, title in ways for unit in ("descriptors", "bytes"))]
    lines = []
    for pairing in PAIRINGS:
        mine = [one for one in found if one.pairing is pairing]
        cells = []
        for of, _ in ways:
            for unit in ("descriptors", "bytes"):
                ours = [(getattr(getattr(one, of), unit), getattr(one.blocks, unit)) for one in mine]
                signs = Counter((own > whole) - (own < whole) for own, whole in ours)
                cells.append(" / ".join(str(signs[sign]) for sign in (-1, 0, 1)))
        lines.append((pairing.name, len(mine), *cells))
    print(table(head, lines) + "\n")


def line(fresh: Row, used: Row) -> str:
    """Return a row of a pairing's table: one request with block ids of both kinds."""
    cells = [fresh.model, f"{fresh.tokens:,}", f"{fresh.blocks.descriptors:,}"]
    cells += [f"{one.kvhma.descriptors:,}" + (" **more**" if one.has_more() else "") for one in (fresh, used)]
    # The number of bytes does not depend on where blocks are.
    assert fresh.kvhma.bytes == used.kvhma.bytes
    cells += [mib(fresh.blocks), mib(fresh.kvhma)]
    return f"| {' | '.join(cells)} |"


def more_bytes(one: Row) -> bool:
    return max(one.kvhma.bytes, one.ids.bytes) > one.blocks.bytes


def main() -> None:
    report([one for pairing in PAIRINGS for one in rows(pairing)])


if __name__ == "__main__":
    main()
