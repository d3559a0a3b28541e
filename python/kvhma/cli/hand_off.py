# SPDX-License-Identifier: Apache-2.0
"""One request between two engines, planned and counted for every rank: the data that all commands print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvhma._kvhma import Plan
from kvhma.cli.block_tables import BlockTables, Pool, block_tables, sequence_blocks
from kvhma.cli.columns import Count, total, whole_blocks, whole_prompt
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.format import watched
from kvhma.costs import Link
from kvhma.errors import KvhmaError, LayoutError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.models import Model
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, DEFAULT_MAX_DESCRIPTORS, live_spans
from kvhma.planning import plan as make_plan

MAX_TOKENS = 1 << 22
"""Limit of a request: more than any model supports, and its block tables still take only seconds."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan, as for `kvhma.plan`."""

    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The request and its blocks.

    Attributes:
        tokens: tokens that P computed.
        cached: leading tokens that D holds already.
        pool: whether block ids count up or are scattered.
        seed: another seed, another used pool.
    """

    tokens: int
    cached: int = 0
    pool: Pool = "fresh"
    seed: int = 0

    def check(self) -> None:
        """Refuse invalid numbers.

        Raises:
            RequestError: a number is out of range.
        """
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise RequestError(f"--tokens {self.tokens}: must be 1 to {MAX_TOKENS:,}")
        if not 0 <= self.cached <= self.tokens:
            raise RequestError(f"--cached {self.cached}: must be 0 to the {self.tokens:,} of --tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """All ranks of a decode engine (D) and a prefill engine (P), and a request between them.

    Attributes:
        decode: ranks of the engine that reads.
        prefill: ranks of the engine that is read from.
        name: name of the model or of the geometries.
        tokens: tokens that P computed.
        cached: leading tokens that D holds already, as requested.
        cached_blocks: per group of D, the block table entries that these tokens fill.
        local_tables: D's block tables.
        remote_tables: P's block tables.
        dp_sizes: number of engines like D, and like P, that share the requests.
        layout: the source of the cache layout; None if geometries were given.
    """

    decode: Sequence[Geometry]
    prefill: Sequence[Geometry]
    name: str
    tokens: int
    cached: int
    cached_blocks: list[int]
    local_tables: BlockTables
    remote_tables: BlockTables
    dp_sizes: tuple[int, int] = (1, 1)
    layout: str | None = None

    @property
    def kernel_blocks(self) -> tuple[int | None, int | None]:
        """Tokens of a kernel block of attention on both sides; None for a model without attention."""
        local, remote = (
            next((group.kernel_block_size for group in ranks[0].groups if group.kind != "ssm"), None)
            for ranks in (self.decode, self.prefill)
        )
        return local, remote

    @property
    def decode_ranks(self) -> list[int]:
        """Rank numbers of D, in the order of `decode`."""
        return rank_numbers(self.decode)

    @property
    def prefill_ranks(self) -> list[int]:
        """Rank numbers of P, in the order of `prefill`."""
        return rank_numbers(self.prefill)

    @property
    def held(self) -> dict[str, int]:
        """Tokens of a block of P, by layer."""
        return {layer.name: rank.groups[layer.group].tokens_per_entry for rank in self.prefill for layer in rank.layers}

    def spans(self, local: Geometry) -> tuple[list[Span], list[Span]]:
        """Return the spans to fill on a rank of D, and the spans that P holds."""
        local_spans = live_spans(local, self.tokens, self.local_tables, self.cached_blocks)
        return local_spans, live_spans(self.prefill[0], self.tokens, self.remote_tables)

    def plan(self, local: Geometry, options: PlanOptions | None = None) -> Plan:
        """Pair a rank of D with all of P.

        Raises:
            UnsupportedPairError: they cannot be paired.
        """
        given = options or PlanOptions()
        return make_plan(
            local, self.prefill, descriptor_bytes=given.descriptor_bytes, max_descriptors=given.max_descriptors
        )


def rank_numbers(ranks: Sequence[Geometry]) -> list[int]:
    """Return names for ranks: their tensor-parallel rank, or their index if that is ambiguous."""
    return list(range(len(ranks))) if len(ranks) > ranks[0].tp_size else [rank.tp_rank for rank in ranks]


@dataclass(frozen=True, slots=True)
class ReadCount:
    """The read of one rank of D from one rank of P.

    Attributes:
        decode_index: index of the decode rank.
        prefill_index: index of the prefill rank.
        total: descriptors and bytes of the read.
        groups: the same for each group of D. A descriptor that continues from one group into another counts for the
            group of its first byte.
    """

    decode_index: int
    prefill_index: int
    total: Count
    groups: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a request.

    Attributes:
        reads: every pair of ranks that moves bytes.
        excess: bytes after the last token that are read with it.
        zeroed: bytes that are zeroed on D.
        findings: warnings, each once.
        whole_blocks: by rank of D, each live block of each layer whole.
        whole_prompt: by rank of D, each block of the prompt.
    """

    reads: tuple[ReadCount, ...]
    excess: int
    zeroed: int
    findings: tuple[str, ...]
    whole_blocks: tuple[Count, ...]
    whole_prompt: tuple[Count, ...]

    @property
    def total(self) -> Count:
        """All pairs together."""
        return total(read.total for read in self.reads)

    def of_rank(self, decode_index: int) -> Count:
        """The read of one rank of D from all its sources."""
        return total(read.total for read in self.reads if read.decode_index == decode_index)


def of_model(
    model: Model, prefill: EngineOptions, decode: EngineOptions, request: RequestOptions, room: int = 0
) -> HandOff:
    """Make the geometries of a model on two engines, with room for one request, and at least for `room` tokens.

    Raises:
        KvhmaError: this layout is impossible, or the request does not fit; the text names the option.
    """
    request.check()
    sizes = []
    for name, engine in (("prefill", prefill), ("decode", decode)):
        try:
            sketches = [engine.rank(model, stage * engine.tp_size, 2, 1 << 20) for stage in range(engine.pp_size)]
        except KvhmaError as error:
            raise LayoutError(f"--{name}: {error}") from error
        needed = sum(map(len, sequence_blocks(sketches[0], max(request.tokens, room))))
        blocks = 1 + needed * (1 if request.pool == "fresh" else 2)
        largest = max(sum(region.bytes + 4096 for region in rank.regions) for rank in sketches)
        sizes.append((max(blocks, 2), largest // 2))
    (prefill_blocks, _), (decode_blocks, _) = sizes
    step = 1 << max(blocks * size + (1 << 20) for blocks, size in sizes).bit_length()
    local = decode.ranks(model, decode_blocks, step * (1 + prefill.num_ranks), step)
    hand_off = of_geometries(model.name, local, prefill.ranks(model, prefill_blocks, step, step), request)
    return replace(hand_off, dp_sizes=(decode.dp_size, prefill.dp_size))


def of_geometries(
    name: str, decode: Sequence[Geometry], prefill: Sequence[Geometry], request: RequestOptions
) -> HandOff:
    """Use given geometries.

    Raises:
        KvhmaError: the request does not fit into one of them.
    """
    request.check()
    return HandOff(
        decode=decode,
        prefill=prefill,
        name=name,
        tokens=request.tokens,
        cached=request.cached,
        cached_blocks=[0 if g.kind == "ssm" else request.cached // g.tokens_per_entry for g in decode[0].groups],
        local_tables=block_tables(decode[0], request.tokens, request.pool, request.seed),
        remote_tables=block_tables(prefill[0], request.tokens, request.pool, request.seed + 1),
    )


def count(hand_off: HandOff, options: PlanOptions | None = None, quiet: bool = True) -> Counted:
    """Plan the request on every rank of D, with a progress bar on a terminal unless `quiet`.

    Raises:
        UnsupportedPairError: a rank of D cannot be paired.
        RequestError: the request does not fit the pair.
    """
    reads: list[ReadCount] = []
    excess = zeroed = 0
    findings: dict[str, None] = {}
    held = hand_off.held
    blocks, prompt = list[Count](), list[Count]()
    # A pipeline stage naturally lacks layers that D and P have; it is not worth a warning.
    both = _layers(hand_off.decode) & held.keys()
    for index, local in enumerate(watched("planning", hand_off.decode, quiet)):
        plan = hand_off.plan(local, options)
        found = (finding for _, finding in plan.findings)
        findings |= dict.fromkeys(
            finding.text for finding in found if not (finding.code == "one-sided-layer" and finding.layer in both)
        )
        spans = hand_off.spans(local)
        transfer = plan.transfer(hand_off.tokens, *spans)
        blocks.append(whole_blocks(local, held, spans[0]))
        prompt.append(whole_prompt(local, held, hand_off.tokens))
        excess += transfer.excess_bytes
        zeroed += int(transfer.zero[:, 1].sum())
        reads += [
            ReadCount(
                index,
                read.source,
                Count(read.descriptors, read.bytes),
                tuple(map(Count, read.descriptors_by_group, read.bytes_by_group)),
            )
            for read in transfer.reads
        ]
    return Counted(tuple(reads), excess, zeroed, tuple(findings), tuple(blocks), tuple(prompt))


def slowest(counts: Sequence[Count], link: Link) -> float:
    """Return the predicted time of ranks that read in parallel, each from its sources one after the other."""
    return max(link.seconds(total.descriptors, total.bytes) for total in counts)


def own_seconds(hand_off: HandOff, counted: Counted, link: Link) -> float:
    """Return the predicted seconds of a request."""
    return slowest([counted.of_rank(index) for index in range(len(hand_off.decode))], link)


def _layers(ranks: Sequence[Geometry]) -> set[str]:
    return {layer.name for rank in ranks for layer in rank.layers}
