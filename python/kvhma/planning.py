# SPDX-License-Identifier: Apache-2.0
"""Functions over geometries: pair them, find a request's live blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvhma._kvhma import Plan, first_entries, leading_nulls, table_lengths
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span
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
    spans, null = [], geometry.null_block
    for group, table, live in zip(geometry.groups, block_tables, entries, strict=True):
        # Slices keep a list a list and an array an array: the ids are read once, where they are used.
        first: int = live.start
        if null is not None and first < live.stop and table[first] == null:
            first += leading_nulls(table, first, null)
        spans.append(Span(0 if group.kind == "ssm" else first, table[first : live.stop]))
    return spans


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
    entries = []
    for group, length, start in zip(groups, lengths, starts, strict=True):
        first, stop = min(start, length), length
        if group.kind == "ssm":
            first = max(first, length - 1 - group.speculative)
            stop = min(first + 1, length)
        entries.append(slice(first, stop))
    return entries
