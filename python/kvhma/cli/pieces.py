# SPDX-License-Identifier: Apache-2.0
"""The contiguous pieces of a page's bytes."""

from __future__ import annotations

from itertools import product

from kvhma.geometry import Axis, Page, Part


def contiguous_pieces(part: Part, *, limit: int | None = None) -> list[tuple[int, int]]:
    """Return offset in the page and length of a part's contiguous pieces, by address.

        heads      |<------- stride ------->|             The innermost axes form one piece as long as each entry
        tokens     |t0 t1 t2|               |t0 t1 t2|    starts where the previous entry ends. The outer axes are
        pieces      ^^^^^^^^                 ^^^^^^^^     walked.

    Args:
        part: the part.
        limit: return the whole part as one piece if it has more pieces; None for all pieces.
    """
    length, outer = part.item_bytes, list[Axis]()
    for axis in sorted(part.axes, key=lambda axis: axis.stride):
        if not outer and axis.stride == length:
            length *= axis.shard.held
        elif axis.length != 1:
            outer.append(axis)
    if limit is not None and part.nbytes // length > limit:
        return [(part.offset, part.nbytes)]
    steps = product(*(range(0, axis.shard.held * axis.stride, axis.stride) for axis in outer))
    return sorted((part.offset + sum(offsets), length) for offsets in steps)


def page_runs(page: Page) -> list[tuple[int, int]]:
    """Return offset and length of the runs of a page's bytes, across its parts, by address."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(piece for part in page.parts for piece in contiguous_pieces(part)):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return runs
