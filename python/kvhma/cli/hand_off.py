# SPDX-License-Identifier: Apache-2.0
"""One request between two engines, planned and counted for every rank: the data that all commands print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvhma._kvhma import Plan
from kvhma.cli.block_tables import BlockTables, Pool, block_tables, full_table, main_group, sequence_blocks
from kvhma.cli.compare.engines import Engines, count_all, count_vllm, total
from kvhma.cli.compare.selection import Count
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.format import watched
from kvhma.errors import KvhmaError, LayoutError, NotCountedError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.models import Model
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, DEFAULT_MAX_DESCRIPTORS, live_spans
from kvhma.planning import plan as make_plan

VLLM, NO_HMA = "vLLM 0.32", "no HMA"
"""Names of the two connectors next to kvhma: vLLM's own NIXL connector, and a connector without the hybrid KV cache
manager, which treats every layer as full attention."""

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


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of :func:`of_model`."""

    model: Model
    prefill: EngineOptions
    decode: EngineOptions
    request: RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff(Engines):
    """All ranks of a decode engine (D) and a prefill engine (P), and a request between them.

    Attributes:
        name: name of the model or of the geometries.
        tokens: tokens that P computed.
        cached: leading tokens that D holds already, as requested.
        cached_blocks: per group of D, the block table entries that these tokens fill.
        local_tables: D's block tables.
        remote_tables: P's block tables.
        full_tables: blocks of the whole sequence on D and P, as without the hybrid KV cache manager.
        dp_sizes: number of engines like D, and like P, that share the requests.
        asked: the arguments that it was made from; None if the engines are geometries.
        layout: the source of the cache layout; None if geometries were given.
    """

    name: str
    tokens: int
    cached: int
    cached_blocks: list[int]
    local_tables: BlockTables
    remote_tables: BlockTables
    full_tables: tuple[list[int], list[int]]
    dp_sizes: tuple[int, int] = (1, 1)
    asked: Asked | None = None
    layout: str | None = None

    @property
    def decode_ranks(self) -> list[int]:
        """Rank numbers of D, in the order of `decode`."""
        return rank_numbers(self.decode)

    @property
    def prefill_ranks(self) -> list[int]:
        """Rank numbers of P, in the order of `prefill`."""
        return rank_numbers(self.prefill)

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
class OtherCount:
    """What another connector would move, by D rank; or why it refuses; or why that is not known."""

    ranks: tuple[Count, ...] = ()
    refused: str | None = None
    not_counted: str | None = None

    @property
    def why_not(self) -> str | None:
        """A reason if there are no counts."""
        return f"refused: {self.refused}" if self.refused else self.not_counted and f"not counted: {self.not_counted}"

    @property
    def total(self) -> Count:
        """All ranks together."""
        return total(self.ranks)


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a request.

    Attributes:
        reads: every pair of ranks that moves bytes.
        excess: bytes after the last token that are read with it.
        zeroed: bytes that are zeroed on D.
        findings: warnings, each once.
        vllm: vLLM 0.32's own selection.
        no_hma: a connector that treats every layer as full attention.
    """

    reads: tuple[ReadCount, ...]
    excess: int
    zeroed: int
    findings: tuple[str, ...]
    vllm: OtherCount
    no_hma: OtherCount

    @property
    def total(self) -> Count:
        """All pairs together."""
        return total(read.total for read in self.reads)

    def of_rank(self, decode_index: int) -> Count:
        """The read of one rank of D from all its sources."""
        return total(read.total for read in self.reads if read.decode_index == decode_index)


def of_model(model: Model, prefill: EngineOptions, decode: EngineOptions, request: RequestOptions) -> HandOff:
    """Make the geometries of a model on two engines, with room for one request.

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
        sketch = sketches[0]
        # Enough for NO_HMA too, which drops no block before a window.
        needed = max(
            sum(map(len, sequence_blocks(sketch, request.tokens))),
            -(-request.tokens // main_group(sketch).block_size),
        )
        blocks = 1 + needed * (1 if request.pool == "fresh" else 2)
        largest = max(sum(region.bytes + 4096 for region in rank.regions) for rank in sketches)
        sizes.append((max(blocks, 2), largest // 2))
    (prefill_blocks, _), (decode_blocks, _) = sizes
    step = 1 << max(blocks * size + (1 << 20) for blocks, size in sizes).bit_length()
    lay_out_decode = partial(decode.ranks, model, decode_blocks, step * (1 + prefill.num_ranks), step)
    engines = Engines(lay_out_decode(), prefill.ranks(model, prefill_blocks, step, step), lay_out_decode)
    hand_off = of_geometries(model.name, engines, request)
    asked = Asked(model, prefill, decode, request)
    return replace(hand_off, dp_sizes=(decode.dp_size, prefill.dp_size), asked=asked)


def of_geometries(name: str, engines: Engines, request: RequestOptions) -> HandOff:
    """Use given geometries.

    Raises:
        KvhmaError: the request does not fit into one of them.
    """
    request.check()
    local, remote = engines.decode[0], engines.prefill[0]
    pools = ((local, request.pool, request.seed), (remote, request.pool, request.seed + 1))
    local_tables, remote_tables = (block_tables(rank, request.tokens, pool, seed) for rank, pool, seed in pools)
    local_table, remote_table = (full_table(rank, request.tokens, pool, seed) for rank, pool, seed in pools)
    return HandOff(
        decode=engines.decode,
        prefill=engines.prefill,
        lay_out_decode=engines.lay_out_decode,
        name=name,
        tokens=request.tokens,
        cached=request.cached,
        cached_blocks=[0 if g.kind == "ssm" else request.cached // g.tokens_per_entry for g in local.groups],
        local_tables=local_tables,
        remote_tables=remote_tables,
        full_tables=(local_table, remote_table),
    )


def count(hand_off: HandOff, options: PlanOptions | None = None, quiet: bool = True) -> Counted:
    """Plan the request on every rank of D, with a progress bar on a terminal unless `quiet`.

    Raises:
        UnsupportedPairError: a rank of D cannot be paired.
        RequestError: the request does not fit the pair.
    """
    reads: list[ReadCount] = []
    excess = zeroed = 0
    needed: list[int] = []
    findings: dict[str, None] = {}
    # A pipeline stage naturally lacks layers that D and P have; it is not worth a warning.
    both = _layers(hand_off.decode) & _layers(hand_off.prefill)
    for index, local in enumerate(watched("planning", hand_off.decode, quiet)):
        plan = hand_off.plan(local, options)
        found = (finding for _, finding in plan.findings)
        findings |= dict.fromkeys(
            finding.text for finding in found if not (finding.code == "one-sided-layer" and finding.layer in both)
        )
        transfer = plan.transfer(hand_off.tokens, *hand_off.spans(local))
        excess += transfer.excess_bytes
        needed.append(transfer.bytes - transfer.excess_bytes)
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
    vllm = _other(hand_off, partial(vllm_counts, hand_off), needed)
    no_hma = _other(hand_off, partial(count_all, hand_off, *hand_off.full_tables), needed)
    return Counted(tuple(reads), excess, zeroed, tuple(findings), vllm, no_hma)


def _layers(ranks: Sequence[Geometry]) -> set[str | None]:
    return {layer.name for rank in ranks for layer in rank.layers}


def vllm_counts(hand_off: HandOff) -> list[Count]:
    """Count what vLLM 0.32 would move, by D rank.

    Raises:
        UnsupportedPairError: vLLM refuses the pair or the request.
    """
    # vLLM pairs lists from their ends, so cut the blocks that D holds already off at the front.
    local_tables = [table[cached:] for table, cached in zip(hand_off.local_tables, hand_off.cached_blocks, strict=True)]
    return count_vllm(hand_off, local_tables, hand_off.remote_tables)


def _other(engines: Engines, counts: Callable[[], list[Count]], needed: Sequence[int]) -> OtherCount:
    """Count another connector; `needed` has the bytes that each rank of D needs.

    Fewer bytes than needed mean a wrong cache or a wrong count, and are not shown.
    """
    sides = (engines.decode, engines.prefill)
    if any(len(ranks) != ranks[0].tp_size for ranks in sides):
        staged = any(len(ranks) > ranks[0].tp_size for ranks in sides)
        return OtherCount(not_counted="pipeline stages" if staged else "not all ranks of both engines are given")
    try:
        found = tuple(counts())
    except NotCountedError as error:
        return OtherCount(not_counted=str(error))
    except KvhmaError as error:
        return OtherCount(refused=str(error))
    for rank, (count, minimum) in enumerate(zip(found, needed, strict=True)):
        if count.bytes < minimum:
            return OtherCount(not_counted=f"rank {rank} of D would read {count.bytes:,} bytes, and needs {minimum:,}")
    return OtherCount(found)
