# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prefill rank read as they lie, and permuted on the decode rank: fewer descriptors where D's are longer.

Where heads lie outside of tokens in a page and P's block is the shorter one, D's block has a place of its own for each
head of each of P's blocks, and a plan needs as many descriptors. Read as it lies, a block of P takes one::

    D's block    head 0: tokens of block a, of block b | head 1: tokens of block a, of block b | ...
    as it lies   block a: head 0, head 1, ... | block b: head 0, head 1, ...

Only whole blocks of D that are filled from one rank by one transfer can be read like that; all others stay as planned.
docs/tuning.md says when it is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Transfer, permuted_rows
from kvhma.errors import RequestError
from kvhma.geometry import Geometry


@dataclass(frozen=True, slots=True, eq=False)
class PermutedRead:
    """What is read from one source, and what has to be done once it has arrived.

    Attributes:
        source: index of the source in the plan.
        local: shape (n, 3): address, length in bytes, device; sorted by address.
        remote: shape (n, 3): row i is read into row i of `local`.
        permutes: shape (k, 5): address, device, blocks, heads, bytes of a head in a block. There ``blocks x heads``
            arrive, where ``heads x blocks`` belong; the ranges are disjoint.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    permutes: NDArray[np.uint64]


def permuted_reads(
    transfer: Transfer, local: Geometry, remote: Sequence[Geometry | None], permute_bytes: int
) -> list[PermutedRead]:
    """Return the reads of a transfer with whole blocks read as they lie in the source, where that saves descriptors.

    The same bytes are read to the same ranges. :func:`kvhma.tensors.permute` puts those into order; until then nothing
    may look at them.

    Args:
        transfer: from :meth:`kvhma.Plan.transfer`.
        local: the geometry that the plan was made for.
        remote: those of its sources, in the plan's order; None where nothing is read.
        permute_bytes: how many bytes may be permuted to save one descriptor; 0 changes nothing.

    Raises:
        RequestError: a transfer of ids, which has no rows.
    """
    bounds = _bounds(local)
    return [
        PermutedRead(
            read.source,
            *permuted_rows(read.local, read.remote, bounds, _bounds(remote[read.source]), permute_bytes),
        )
        for read in transfer.reads
    ]


def _bounds(geometry: Geometry | None) -> NDArray[np.uint64]:
    """Return where regions begin or end."""
    if geometry is None:
        raise RequestError("the transfer reads from a source without a geometry")
    return np.unique(
        np.array([(region.base, region.base + region.bytes) for region in geometry.regions], np.uint64).ravel()
    )
