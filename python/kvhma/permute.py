# SPDX-License-Identifier: Apache-2.0
"""Reads of a prefill rank's blocks in its own order, permuted on the decode rank, which need fewer descriptors.

If heads are outside of tokens in a page and P's block is shorter than D's, a plan needs a descriptor for each head of
each
of P's blocks. In P's own order, a block of P is one descriptor::

    D's block    head 0: tokens of block a, of block b | head 1: tokens of block a, of block b | ...
    P's order    block a: head 0, head 1, ... | block b: head 0, head 1, ...

This is possible only for whole blocks of D that one transfer fills from one rank; all others stay as planned.
docs/tuning.md says when it pays off.
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
    """The reads from one source, and the permutation after they arrive.

    Attributes:
        source: index of the source in the plan.
        local: shape (n, 3): address, length in bytes, device; sorted by address.
        remote: shape (n, 3): row i is read into row i of `local`.
        permutes: shape (k, 5): address, device, blocks, heads, bytes of a head in a block. Such a range arrives as
            ``blocks x heads`` and must become ``heads x blocks``. The ranges are disjoint.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    permutes: NDArray[np.uint64]


def permuted_reads(
    transfer: Transfer, local: Geometry, remote: Sequence[Geometry | None], permute_bytes: int
) -> list[PermutedRead]:
    """Return a transfer's reads, with whole blocks in the source's order if that saves descriptors.

    The same bytes are read to the same ranges. :func:`kvhma.tensors.permute` puts them into order; they must not be
    used before that.

    Args:
        transfer: the result of :meth:`kvhma.Plan.transfer`.
        local: the geometry that the plan was made for.
        remote: the geometries of its sources, in the plan's order; None if nothing is read from a source.
        permute_bytes: how many bytes may be permuted to save one descriptor; 0 where rows are not read through NIXL,
            because a copied row costs less: then nothing changes.

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
    """Return the addresses where regions begin or end."""
    if geometry is None:
        raise RequestError("the transfer reads from a source without a geometry")
    return np.unique(
        np.array([(region.base, region.base + region.bytes) for region in geometry.regions], np.uint64).ravel()
    )
