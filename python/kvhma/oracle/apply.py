# SPDX-License-Identifier: Apache-2.0
"""Applies a transfer to labelled memory, and refuses invalid transfers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Read, Transfer
from kvhma.errors import OracleError
from kvhma.oracle.labels import Ints, Side, joinable


def apply_zero(side: Side, rows: NDArray[np.uint64], memory: Ints) -> None:
    """Zero the ranges of the zero list."""
    rows = _rows(rows, "zero")
    flat, _ = side.locate(rows, "zero")
    memory[bytes_of(flat, rows[:, 1].astype(np.int64))] = 0


def reads_by_source(transfer: Transfer, sources: int) -> list[list[Read]]:
    """Sort reads by source and check the sums."""
    reads: list[list[Read]] = [[] for _ in range(sources)]
    total = rows = 0
    for read in transfer.reads:
        if not 0 <= read.source < sources:
            raise OracleError(f"read from source {read.source} of {sources}", code="source")
        reads[read.source].append(read)
        size = int(read.local[:, 1].sum())
        if size != read.bytes:
            raise OracleError(f"source {read.source}: bytes is {read.bytes}, the rows have {size}", code="counts")
        total += size
        rows += len(read.local)
    if (total, rows) != (transfer.bytes, transfer.descriptors):
        claimed = (transfer.bytes, transfer.descriptors)
        raise OracleError(f"bytes and descriptors are {claimed}, the rows have {(total, rows)}", code="counts")
    return reads


def apply_read(
    local_side: Side, remote_side: Side, read: Read, source: Ints, memory: Ints
) -> tuple[tuple[Ints, Ints], int]:
    """Copy, and return the local ranges and how many neighbouring rows could have been joined."""
    where = f"source {read.source}"
    local, remote = _rows(read.local, f"{where} local"), _rows(read.remote, f"{where} remote")
    if len(local) != len(remote) or not np.array_equal(local[:, 1], remote[:, 1]):
        raise OracleError(f"{where}: local and remote lengths differ", code="lengths")
    to, to_region = local_side.locate(local, f"{where} local")
    start, start_region = remote_side.locate(remote, f"{where} remote")
    size = local[:, 1].astype(np.int64)
    if len(set(local[:, 2].tolist())) == 1 and np.any(local[1:, 0] < local[:-1, 0]):
        raise OracleError(f"{where}: not sorted by local address", code="order")
    memory[bytes_of(to, size)] = source[bytes_of(start, size)]
    joined = joinable(to, start, size) & (to_region[:-1] == to_region[1:]) & (start_region[:-1] == start_region[1:])
    return (to, size), int(np.count_nonzero(joined))


def refuse_overlap(side: Side, written: list[tuple[Ints, Ints]]) -> None:
    """Fail if two reads write the same byte."""
    if not written:
        return
    start = np.concatenate([start for start, _ in written])
    size = np.concatenate([size for _, size in written])
    order = np.argsort(start)
    start, size = start[order], size[order]
    twice = np.flatnonzero(start[:-1] + size[:-1] > start[1:])
    if twice.size:
        region, offset = side.name(int(start[twice[0] + 1]))
        raise OracleError(f"two reads write region {region} at {offset}", code="overlap")


def _rows(rows: NDArray[np.uint64], what: str) -> NDArray[np.uint64]:
    if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 3 or not rows.flags.c_contiguous:
        raise OracleError(
            f"{what}: rows are {rows.dtype} {rows.shape}, expected C-contiguous uint64 (n, 3)", code="rows"
        )
    return rows


def bytes_of(start: Ints, size: Ints) -> Ints:
    """Return the offsets of all bytes of some ranges, one range after the other."""
    ends = np.cumsum(size)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(start - (ends - size), size) + np.arange(total, dtype=np.int64)
