# SPDX-License-Identifier: Apache-2.0
"""A request in pieces: full-attention and MLA blocks as a prefill engine finishes them, the rest at the end.

Windows, chunks and recurrent state are in the last piece, because a prefill engine frees or overwrites them as it
continues. Pieces are disjoint, and together they move the same as one transfer of the whole request::

    tokens   0          settled 1            settled 2     num_tokens
    full     |--- piece 1 --|---- piece 2 ------|--- rest ---|
    window                                            |-rest-|
    state                                             (rest) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span

SETTLING = ("full", "mla")
"""Kinds of groups whose blocks do not change once their tokens are computed."""


def settling_groups(geometry: Geometry) -> list[int]:
    """Return the indices of the groups that can be read before the prompt's end, because each block keeps its tokens.

    Empty for an engine whose ranks share the tokens of a block.
    """
    if any(group.cp_size > 1 for group in geometry.groups):
        return []
    return [index for index, group in enumerate(geometry.groups) if group.kind in SETTLING]


def settled_tokens(geometry: Geometry, tokens: int) -> int:
    """Return how many of a source's computed `tokens` fill whole blocks of all its settling groups."""
    return min((tokens // size * size for size in _block_sizes(geometry)), default=0)


def piece_end(geometry: Geometry, tokens: int) -> int:
    """Return the token up to which a piece can extend for a reader, of `tokens` that are settled.

    A block of each of its settling groups ends there, so the piece is a request of that many tokens.
    """
    sizes = _block_sizes(geometry)
    return tokens // math.lcm(*sizes) * math.lcm(*sizes) if sizes else 0


def piece(geometry: Geometry, spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Return the local blocks of a piece.

    Args:
        geometry: geometry of the rank that reads.
        spans: spans of the whole request, see :func:`kvhma.live_spans`.
        begin: number of tokens in earlier pieces.
        end: end of this piece, see :func:`piece_end`; the transfer is a transfer of that many tokens.

    Raises:
        RequestError: no piece can begin or end there.
    """
    _check(geometry, begin, end)
    settling = set(settling_groups(geometry))
    cut = enumerate(zip(geometry.groups, spans, strict=True))
    return [
        _between(span, begin // group.block_size, end // group.block_size) if index in settling else _nothing(span)
        for index, (group, span) in cut
    ]


def rest(geometry: Geometry, spans: Sequence[Span], begin: int) -> list[Span]:
    """Return the local blocks of the last piece, after pieces up to token `begin`; arguments as for :func:`piece`."""
    _check(geometry, begin, begin)
    settling = set(settling_groups(geometry))
    cut = enumerate(zip(geometry.groups, spans, strict=True))
    return [
        _between(span, begin // group.block_size, span.first + len(span.ids)) if index in settling and begin else span
        for index, (group, span) in cut
    ]


def _between(span: Span, first: int, end: int) -> Span:
    """Return the part of a span between two blocks, by their positions in the request."""
    low = min(max(span.first, first), span.first + len(span.ids))
    high = max(low, min(end, span.first + len(span.ids)))
    return Span(low, span.ids[low - span.first : high - span.first])


def _nothing(span: Span) -> Span:
    return Span(span.first + len(span.ids), span.ids[:0])


def _block_sizes(geometry: Geometry) -> list[int]:
    return [geometry.groups[index].block_size for index in settling_groups(geometry)]


def _check(geometry: Geometry, begin: int, end: int) -> None:
    if not 0 <= begin <= end or piece_end(geometry, begin) != begin or piece_end(geometry, end) != end:
        raise RequestError(
            f"a piece from token {begin} to {end}: expected 0 <= begin <= end, in whole blocks of "
            f"{_block_sizes(geometry)} tokens"
        )
