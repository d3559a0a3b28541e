# SPDX-License-Identifier: Apache-2.0
"""Functions over geometries: pair them, count their readers, find a request's live blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhma._kvhma import Plan, first_entries, leading_nulls, table_lengths
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Group, Span
from kvhma.types import IdsLike

DEFAULT_DESCRIPTOR_BYTES = 131_072
"""Number of bytes that take about as long to move as posting another descriptor: 3 µs at 40 GB/s. On one host with
cross-memory attach (7 GB/s) the value is nearer to 16 KiB."""

DEFAULT_MAX_DESCRIPTORS = 1 << 22
"""Limit of a request's descriptors: 192 MiB, and at best 4 seconds in NIXL, which posts one in a microsecond."""


def plan(
    local: Geometry,
    remote: Geometry | Sequence[Geometry],
    *,
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES,
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS,
) -> Plan:
    """Pair a local (decode) rank with its sources, once for all requests.

    Args:
        local: the rank that reads.
        remote: the rank or ranks that it may read from: all tensor-parallel ranks and pipeline stages of the other
            engine.
        descriptor_bytes: how many additional bytes of a partial last block may be moved to save one descriptor; with 0
            no unrequested token is moved.
        max_descriptors: limit of a request's descriptors before neighbours are joined, including its ranges to zero. A
            larger request is refused before its descriptors are made. Each descriptor takes 48 bytes, and about 80
            while it is made.

    Returns:
        The plan of this rank, for any number of requests.

    Raises:
        UnsupportedPairError: a source cannot be paired, or no source holds a needed item; the text names the field and
            both values.
        RequestError: an argument has the wrong type.
    """
    return Plan(local, remote, descriptor_bytes=descriptor_bytes, max_descriptors=max_descriptors)


@dataclass(frozen=True, slots=True)
class Readers:
    """Which ranks read from which sources when all ranks of the decode side have planned.

    Attributes:
        counts: for each source, its number of notifications: one from each rank that reads from it, or one from the
            rank that only notifies it.
        notify_only: for each rank, the sources that it must notify without reading, because no rank reads from them.
    """

    counts: tuple[int, ...]
    notify_only: tuple[tuple[int, ...], ...]


def readers(plans: Sequence[Plan]) -> Readers:
    """Count the readers of every source.

    Args:
        plans: one plan for each rank of the decode side, all made with the same list of sources.

    Returns:
        How many decode ranks read from each source, and which ranks must notify without reading.

    Raises:
        RequestError: the plans differ in their number of sources, the list is empty, or an entry is not a plan.
    """
    if not isinstance(plans, Sequence):
        raise _wrong_type("plans", plans, "is not a list")
    for index, planned in enumerate(plans):
        if not isinstance(planned, Plan):
            raise _wrong_type(f"plans[{index}]", planned, "is not a Plan")
    numbers = {planned.num_sources for planned in plans}
    if len(numbers) != 1:
        text = f"plans have {sorted(numbers)} sources, expected one number for all"
        expected = "one number of sources for all"
        raise RequestError(text, code="count", field="plans", value=str(sorted(numbers)), expected=expected)
    counts = [0] * numbers.pop()
    for planned in plans:
        for source in planned.sources:
            counts[source] += 1
    idle: list[list[int]] = [[] for _ in plans]
    for source, count in enumerate(counts):
        if not count:
            idle[source * len(plans) // len(counts)].append(source)
            counts[source] = 1
    return Readers(tuple(counts), tuple(map(tuple, idle)))


def live_spans(
    geometry: Geometry,
    num_tokens: int | None,
    block_tables: Sequence[IdsLike],
    cached: Sequence[int] | None = None,
) -> list[Span]:
    """Return the spans of a request's live blocks, from block tables of vLLM's manager.

    Dropped blocks appear as the null block at the front of a table. Blocks wholly before the tokens that the token
    after `num_tokens` attends to are left out (the token-exact rule). Of a state group, only the slot with the state is
    used.

    Args:
        geometry: the rank whose blocks these are.
        num_tokens: number of tokens that the cache holds for the request, or will hold. None to use every block in the
            tables, for a reader whose larger blocks begin earlier.
        block_tables: logical block ids from position 0, for each group.
        cached: for each group, how many leading table entries must not be filled (a prefix hit); None for no hit.

    Returns:
        A span for each group.

    Raises:
        RequestError: a list has the wrong number of entries or the wrong type.
    """
    if not isinstance(geometry, Geometry):
        raise _wrong_type("geometry", geometry, "is not a Geometry")
    entries = live_entries(geometry, num_tokens, table_lengths(block_tables), cached)
    tables = zip(geometry.groups, block_tables, entries, strict=True)
    return [_live_span(group, table, live, geometry.null_block) for group, table, live in tables]


def _wrong_type(field: str, value: object, reason: str) -> RequestError:
    found = type(value).__name__
    return RequestError(f"{field}: {found} {reason}", code="type", field=field, value=found, reason=reason)


def live_entries(
    geometry: Geometry, num_tokens: int | None, lengths: Sequence[int], cached: Sequence[int] | None = None
) -> list[slice]:
    """Return the live entries of a request's block tables from their lengths alone, without skipping null blocks.

    Args:
        geometry: as for :func:`live_spans`.
        num_tokens: as for :func:`live_spans`.
        lengths: entries of each group's table.
        cached: as for :func:`live_spans`.

    Returns:
        A slice of each group's table.

    Raises:
        RequestError: a list has the wrong number of entries or the wrong type.
    """
    groups = geometry.groups
    if len(lengths) != len(groups):
        text = f"block tables have {len(lengths)} entries, expected {len(groups)}"
        raise RequestError(text, code="count", field="block_tables", value=len(lengths), expected=len(groups))
    starts = first_entries(geometry, num_tokens, [0] * len(groups) if cached is None else cached)
    return list(map(_live_entries, groups, lengths, starts))


def _live_entries(group: Group, length: int, start: int) -> slice:
    first = min(start, length)
    if group.kind == "ssm":
        state = max(first, length - 1 - group.speculative)
        return slice(state, min(state + 1, length))
    return slice(first, length)


def _live_span(group: Group, table: IdsLike, live: slice, null: int | None) -> Span:
    # Slices keep a list a list and an array an array: the ids are read once, where they are used.
    first: int = live.start
    if null is not None and first < live.stop and table[first] == null:
        first += leading_nulls(table, first, null)
    return Span(0 if group.kind == "ssm" else first, table[first : live.stop])
