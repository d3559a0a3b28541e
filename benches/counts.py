# SPDX-License-Identifier: Apache-2.0
"""Count descriptors and bytes of one request for every model, kvhma against vLLM 0.32: what benches/COUNTS.md holds.

No clock is read and every random number is seeded, so the output is the same on every machine.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import kvhma
from kvhma.cli.block_tables import BlockTables, Pool, block_tables
from kvhma.cli.compare.engines import Engines, count_vllm, kernel_block_size, total
from kvhma.cli.compare.selection import Count
from kvhma.errors import LayoutError, UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.models import Model, models
from kvhma.models.block_size import hybrid_block_size
from kvhma.models.grouping import Members, group_layers, layer_specs
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.permute import permuted_reads
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES

Reason: TypeAlias = Literal["", "heads", "absent", "last", "strided", "unexplained"]

PROMPTS = (128, 1_000, 5_000, 32_000)
POOLS: tuple[Pool, ...] = ("fresh", "used")
FEW = 20
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


def padded_slots(one: Model) -> int:
    """Return the places ``(group, tensor)`` that no layer uses."""
    groups = groups_of(one)
    return len(groups) * max(map(len, groups)) - sum(map(len, groups))


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
        vllm: descriptors after NIXL's merging, and bytes; None where vLLM refuses the pair.
        kvhma: the same for `Plan.transfer`.
        whole: the same with last blocks that are never cut.
        exact: the same with last blocks that are always cut.
        ids: the same for `Plan.ids`.
    """

    pairing: Pairing
    model: str
    tokens: int
    pool: Pool
    vllm: Count | None
    kvhma: Count
    whole: Count
    exact: Count
    ids: Count
    permuted: Count

    def has_more(self, ours: Count | None = None) -> bool:
        return self.vllm is not None and (ours or self.kvhma).descriptors > self.vllm.descriptors

    @property
    def reason(self) -> Reason:
        """Why `Plan.transfer` has more descriptors, if it has."""
        return self._reason(self.kvhma)

    @property
    def reason_of_ids(self) -> Reason:
        """Why `Plan.ids` has more descriptors, if it has."""
        return self._reason(self.ids)

    @property
    def reason_of_permuted(self) -> Reason:
        """Why there are more even if blocks of P are read in P's order, if there are."""
        if not self.has_more(self.permuted) or self._is_absent(self.permuted):
            return "absent" if self.has_more(self.permuted) else ""
        block = self.pairing.d.options.get("block_size", 1)
        whole = row(self.pairing, self.model, self.tokens // block * block, self.pool)
        return (
            "unexplained" if whole.tokens == self.tokens or whole.reason_of_permuted not in ("", "absent") else "last"
        )

    def _is_absent(self, ours: Count) -> bool:
        assert self.vllm is not None
        return self.pool == "fresh" and ours.descriptors - self.vllm.descriptors <= padded_slots(models()[self.model])

    def _reason(self, ours: Count) -> Reason:
        if not self.has_more(ours):
            return ""
        one = models()[self.model]
        d, p = (kernel_block_size(side.ranks(one, 2, 1 << 20)[0]) for side in (self.pairing.d, self.pairing.p))
        if d != p and self.pairing.d.options.get("order") != "LBNHC" and one.kv_heads > self.pairing.d.tp:
            return "heads"
        if self._is_absent(ours):
            return "absent"
        return "strided" if d != p and ours is self.ids else "unexplained"


def vllm_count(one: Model, pairing: Pairing, sides: Sequence[list[Geometry]], tables: Sequence[BlockTables]) -> Count:
    """Count what vLLM posts for a request.

    Raises:
        UnsupportedPairError: vLLM refuses the pair or the request.
    """
    locals_, remotes = sides
    blocks, base = locals_[0].layers[0].num_blocks, locals_[0].regions[0].base
    engines = Engines(locals_, remotes, lambda kernel: pairing.d.ranks(one, blocks, base, kernel_block=kernel))
    return total(count_vllm(engines, *tables))


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
    try:
        vllm = vllm_count(one, pairing, sides, tables)
    except UnsupportedPairError:
        vllm = None
    ours = [kvhma_count(sides, tokens, tables, limit) for limit in (DEFAULT_DESCRIPTOR_BYTES, NEVER_CUT, 0)]
    ids = kvhma_count(sides, tokens, tables, ids=True)
    permuted = kvhma_count(sides, tokens, tables, permute_bytes=ALWAYS)
    return Row(pairing, name, tokens, pool, vllm, *ours, ids, permuted)


def rows(pairing: Pairing, names: Sequence[str] | None = None, prompts: Sequence[int] = PROMPTS) -> Iterator[Row]:
    for name, one in models().items():
        if pairing.takes(one) and (names is None or name in names):
            for tokens in prompts:
                for pool in POOLS:
                    yield row(pairing, name, tokens, pool)


REASONS = {
    "heads": "P's blocks are shorter and heads are outside of tokens in a page. So in D's longer block the tokens of each "
    "head are contiguous: kvhma copies each head of each of P's blocks separately. vLLM reads a block of P unchanged and "
    "lets D's device move the tokens afterwards, in every block of the request. With the setting `permute_bytes` kvhma "
    "does the same, in whole blocks (below). With tokens outside of heads, or where D's kernel addresses blocks of P's "
    "size, no row is of this kind.",
    "last": "Only whole blocks of D are read in P's order. In its last block, of 64 tokens, the existing tokens of each head "
    "are contiguous. For the prompt's tokens up to that block no row has more.",
    "absent": "In a fresh pool the blocks of all groups follow each other, and vLLM sends all groups from all shared "
    "tensors. Where a group has no layer in a tensor, kvhma leaves its blocks out, and two runs remain where vLLM has "
    "one: at most one more for each empty place. The bytes between belong to no layer, and keep their old content.",
    "strided": "Only as ids. The kernel blocks differ, and each piece of the longer one has a separate view. Entries of these "
    "views are not adjacent, so NIXL merges none of them. `Plan.transfer` does.",
}


def mib(count: Count) -> str:
    return f"{count.bytes / 2**20:,.1f}"


def write(text: str) -> None:
    """Print paragraphs in lines of at most 120 characters, and an empty line."""
    for paragraph in text.split("\n\n"):
        print(textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False) + "\n")


def report(found: Sequence[Row]) -> None:
    print("# Descriptors and bytes of one request, kvhma against vLLM 0.32\n")
    write(
        "Made by `make counts`. No times: the same on every machine. Descriptors are what is left after NIXL's own "
        "merging, bytes are what moves; both are summed over all ranks of D and their sources. vLLM's selection is "
        "`kvhma.cli.compare.selection.select_vllm`; `make bench-vllm` compares it with vLLM's own functions.\n\n"
        "*fresh*: block ids ascend, group after group, on both sides. *used*: seeded stretches of 1 to 8 blocks, up "
        "and down, with jumps. Kernel blocks are FlashInfer's choice, pages have heads outside of tokens (LBHNC), "
        "unless the heading says otherwise. *refused*: by vLLM's handshake, or by an assertion while it reads. Where "
        "vLLM requires prefix caching to be off for a pair, it is off."
    )
    print("## In short: `Plan.transfer`\n")
    in_short(found, "kvhma")
    print("No row has more bytes.\n" if not any(more_bytes(one) for one in found) else "Some rows have more bytes.\n")
    reasons([one for one in found if one.reason], "reason")
    print("## In short: `Plan.transfer`, and whole blocks of P in its order\n")
    print("`kvhma.permute`: D permutes what it read in its memory. Bytes are those of `Plan.transfer`.\n")
    in_short(found, "permuted")
    reasons([one for one in found if one.reason_of_permuted], "reason_of_permuted")
    print("## In short: `Plan.ids`\n")
    in_short(found, "ids")
    shown = {one.reason for one in found}
    print("More descriptors for the reasons above, and besides:\n")
    reasons([one for one in found if one.reason_of_ids not in shown], "reason_of_ids")
    print("## `descriptor_bytes`\n")
    write(
        "When `Plan.transfer` may cut a last block to save bytes. Rows with more descriptors than vLLM, and descriptors "
        "and MiB of all rows together:"
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
        print(
            "| model | tokens | fresh: vLLM | kvhma | used: vLLM | kvhma | MiB: vLLM | kvhma |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        mine = [one for one in found if one.pairing is pairing]
        for fresh, used in zip(mine[::2], mine[1::2], strict=True):
            print(line(fresh, used))
        print()


def in_short(found: Sequence[Row], of: str) -> None:
    print(
        "| pairing | rows | refused by vLLM | fewer descriptors | equal | more | fewer bytes | equal | more |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for pairing in PAIRINGS:
        mine = [one for one in found if one.pairing is pairing]
        pairs = [(getattr(one, of), one.vllm) for one in mine if one.vllm is not None]
        cells = []
        for both in (
            [(ours.descriptors, theirs.descriptors) for ours, theirs in pairs],
            [(ours.bytes, theirs.bytes) for ours, theirs in pairs],
        ):
            signs = Counter((ours > theirs) - (ours < theirs) for ours, theirs in both)
            cells += [signs[sign] for sign in (-1, 0, 1)]
        print(f"| {pairing.name} | {len(mine)} | {len(mine) - len(pairs)} | {' | '.join(map(str, cells))} |")
    print()


def reasons(found: Sequence[Row], of: str) -> None:
    """Print why rows have more descriptors; the rows themselves where there are few."""
    for reason in dict.fromkeys(getattr(one, of) for one in found):
        mine = [one for one in found if getattr(one, of) == reason]
        write(f"More descriptors, **{reason}** ({len(mine)} rows). {REASONS.get(reason, 'Not known.')}")
        if len(mine) > FEW:
            continue
        for one in mine:
            assert one.vllm is not None
            ours = {"reason": one.kvhma, "reason_of_ids": one.ids, "reason_of_permuted": one.permuted}[of]
            print(
                f"* {one.pairing.name}, {one.model}, {one.tokens:,} tokens, {one.pool}: {one.vllm.descriptors:,} → "
                f"{ours.descriptors:,}, {one.vllm.bytes - ours.bytes:,} bytes fewer"
            )
        print()


def line(fresh: Row, used: Row) -> str:
    """Return a row of a pairing's table: one request with block ids of both kinds."""
    cells = [fresh.model, f"{fresh.tokens:,}"]
    for one in (fresh, used):
        cells.append("refused" if one.vllm is None else f"{one.vllm.descriptors:,}")
        cells.append(f"{one.kvhma.descriptors:,}" + (" **more**" if one.has_more() else ""))
    # The number of bytes does not depend on where blocks are.
    assert fresh.kvhma.bytes == used.kvhma.bytes
    cells += ["refused" if fresh.vllm is None else mib(fresh.vllm), mib(fresh.kvhma)]
    return f"| {' | '.join(cells)} |"


def more_bytes(one: Row) -> bool:
    return one.vllm is not None and max(one.kvhma.bytes, one.ids.bytes) > one.vllm.bytes


def main() -> None:
    report([one for pairing in PAIRINGS for one in rows(pairing)])


if __name__ == "__main__":
    main()
