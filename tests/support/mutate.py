# SPDX-License-Identifier: Apache-2.0
"""Transfers that are slightly wrong: the oracle must reject them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import kvhma
from support.reference import Read, Transfer


def plain(transfer: kvhma.Transfer) -> Transfer:
    """Copy a transfer into one that can be changed, with its counts following from its rows."""
    reads = tuple(Read(read.source, read.local.copy(), read.remote.copy()) for read in transfer.reads)
    return Transfer(reads, transfer.zero.copy(), transfer.excess_bytes)


def mutations(rng: random.Random, good: Transfer) -> Iterator[tuple[str, Transfer]]:
    """Yield transfers with one thing wrong, by name. All counts agree with the rows, so only bytes reveal it."""
    if len(good.zero):
        row = rng.randrange(len(good.zero))
        yield "zero range dropped", replace(good, zero=np.delete(good.zero, row, axis=0))
        yield "zero range one byte short", replace(good, zero=_longer(good.zero, row, -1))
    candidates = [i for i, read in enumerate(good.reads) if len(read.local)]
    if not candidates:
        return
    which = rng.choice(candidates)
    read = good.reads[which]
    row = rng.randrange(len(read.local))

    def with_read(other: Read) -> Transfer:
        return replace(good, reads=(*good.reads[:which], other, *good.reads[which + 1 :]))

    yield (
        "run dropped",
        with_read(replace(read, local=np.delete(read.local, row, 0), remote=np.delete(read.remote, row, 0))),
    )
    yield (
        "run doubled",
        with_read(
            replace(
                read,
                local=np.insert(read.local, row, read.local[row], 0),
                remote=np.insert(read.remote, row, read.remote[row], 0),
            )
        ),
    )
    for step in (1, -1):
        yield f"source shifted by {step}", with_read(replace(read, remote=_shifted(read.remote, row, step)))
        yield (
            f"destination shifted by {step}",
            with_read(replace(read, local=_shifted(read.local, row, step))),
        )
        changed = replace(read, local=_longer(read.local, row, step), remote=_longer(read.remote, row, step))
        yield f"run longer by {step}", with_read(changed)
    same = [i for i in range(len(read.local)) if i != row and read.local[i, 1] == read.local[row, 1]]
    if same:
        other = rng.choice(same)
        remote = read.remote.copy()
        remote[[row, other]] = remote[[other, row]]
        yield "two sources swapped", with_read(replace(read, remote=remote))


def _shifted(rows: NDArray[np.uint64], row: int, step: int) -> NDArray[np.uint64]:
    rows = rows.copy()
    rows[row, 0] = int(rows[row, 0]) + step
    return rows


def _longer(rows: NDArray[np.uint64], row: int, step: int) -> NDArray[np.uint64]:
    rows = rows.copy()
    rows[row, 1] = int(rows[row, 1]) + step
    return rows
