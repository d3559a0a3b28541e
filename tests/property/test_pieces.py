# SPDX-License-Identifier: Apache-2.0
"""Requests in pieces, over generated pairs of engines: together the pieces equal the one transfer, byte for byte.

P overwrites every byte that no rule protects: blocks that are not settled, windows and chunks, states.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest

import kvhma
from kvhma.errors import OracleError
from kvhma.geometry import Span
from kvhma.oracle import Request, check_memory, fill_source, fill_stale
from kvhma.pieces import piece, piece_end, rest, settled_tokens, settling_groups
from support.generate import Case, generate
from support.memory import Memory, carry_out, empty
from support.recipe import draw
from support.show import show
from support.tries import PAIRS

CHUNKS = 24
BYTES_EVERY = 6
"""One pair of this many is also checked by its bytes, which takes longer."""

Spans = list[list[Span]]


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    total: Counter[str] = Counter()
    yield total
    show(request.config, "\n".join(f"  {count:>13,}  {name}" for name, count in sorted(total.items())))


def schedule(case: Case, rng: random.Random) -> list[int]:
    """Return how many tokens P has computed after some of its steps."""
    if rng.randrange(3):
        step = rng.randrange(1, max(2, case.num_tokens // 2))
        return list(range(step, case.num_tokens + 1, step))
    return sorted(rng.randrange(case.num_tokens + 1) for _ in range(rng.randrange(1, 7)))


def settled_spans(case: Case, tokens: int) -> Spans:
    """Return what P announces after this many tokens, for each source: whole blocks of groups that settle, no
    others."""
    found = []
    for source, remote in enumerate(case.remotes):
        settling = settling_groups(remote)
        found.append(
            [
                Span(span.first, span.ids[: max(0, tokens // group.block_size - span.first)])
                if index in settling
                else Span(span.first, span.ids[:0])
                for index, (group, span) in enumerate(zip(remote.groups, case.spans_of(source), strict=True))
            ]
        )
    return found


def pieces(case: Case, rng: random.Random, counted: Counter[str]) -> Iterator[tuple[kvhma.Transfer, Spans | None]]:
    """Return the transfers of a request in pieces, with what P surely holds while each is read; None for all."""
    plan = kvhma.plan(case.local, case.remotes)
    done = 0
    for tokens in schedule(case, rng):
        end = piece_end(case.local, min(settled_tokens(remote, tokens) for remote in case.remotes))
        local = piece(case.local, case.local_spans, done, end) if end > done else []
        if any(len(span.ids) for span in local):
            told = settled_spans(case, tokens)
            yield plan.transfer(end, local, told), told
            counted["pieces before the last"] += 1
        done = max(done, end)
    yield plan.transfer(case.num_tokens, rest(case.local, case.local_spans, done), case.remote_spans), None


Moved = dict[tuple[int, ...], list[list[int]]]


def moved(transfers: list[kvhma.Transfer]) -> tuple[Moved, list[list[int]]]:
    """Return what is read, joined where it is contiguous on both sides, and what is zeroed; no byte is written
    twice."""
    reads, zeroed = defaultdict(list), []
    for transfer in transfers:
        for read in transfer.reads:
            for (to, size, device), (start, _, other) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
                reads[read.source, device, other, start - to].append([to, to + size])
        zeroed += [[start, start + size] for start, size, _ in transfer.zero.tolist()]
    written = sorted([*zeroed, *(one for rows in reads.values() for one in rows)])
    assert all(a[1] <= b[0] for a, b in pairwise(written)), "a byte is written twice"
    return {key: joined(rows) for key, rows in reads.items()}, joined(zeroed)


def joined(ranges: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found


def apply(case: Case, transfer: kvhma.Transfer, local: Memory, held: Spans | None, seed: int) -> None:
    """Apply a transfer to D's bytes, from a P that holds junk wherever it may."""
    sources = []
    for source, remote in enumerate(case.remotes):
        sources.append((remote, empty(remote)))
        fill_source(sources[-1][1], remote, case.spans_of(source) if held is None else held[source], seed=seed)
    carry_out(case.local, local, transfer, sources)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_pieces_are_the_one_transfer(chunk: int, counted: Counter[str]) -> None:
    for seed in range(chunk * PAIRS // CHUNKS, (chunk + 1) * PAIRS // CHUNKS):
        case = generate(seed, draw(seed))
        rng = random.Random(f"pieces {seed}")
        found = list(pieces(case, rng, counted))
        whole = kvhma.plan(case.local, case.remotes).transfer(case.num_tokens, case.local_spans, case.remote_spans)
        assert moved([transfer for transfer, _ in found]) == moved([whole]), str(case)
        counted["requests"] += 1
        counted["requests in pieces"] += len(found) > 1
        counted["descriptors of the one transfer"] += whole.descriptors
        counted["descriptors of pieces"] += sum(transfer.descriptors for transfer, _ in found)
        if seed % BYTES_EVERY == 0:
            local = empty(case.local)
            fill_stale(local, seed=seed % 2)
            for transfer, held in found:
                apply(case, transfer, local, held, seed % 2)
            request = Request(case.num_tokens, case.local_spans, case.remote_spans)
            check_memory(local, case.local, case.remotes, request, excess_bytes=whole.excess_bytes, seed=seed % 2)
            counted["requests whose bytes were compared"] += 1


def test_a_piece_that_is_read_too_early_is_found() -> None:
    """Checks the check: it detects any read of a byte before it is settled."""
    missed = found = 0
    for seed in range(400):
        case = generate(seed, draw(seed))
        held = settled_spans(case, 0)
        local = empty(case.local)
        fill_stale(local)
        whole = kvhma.plan(case.local, case.remotes).transfer(case.num_tokens, case.local_spans, case.remote_spans)
        if not whole.bytes:
            continue
        apply(case, whole, local, held, 0)
        request = Request(case.num_tokens, case.local_spans, case.remote_spans)
        try:
            check_memory(local, case.local, case.remotes, request)
            missed += 1
        except OracleError:
            found += 1
    assert (missed, found > 300) == (0, True)
