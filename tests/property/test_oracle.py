# SPDX-License-Identifier: Apache-2.0
"""Every byte of D, over thousands of generated engines of equal shape: the centre of the tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import kvhma
from kvhma.errors import OracleError
from kvhma.oracle import Oracle, Report, Request, check_memory, fill_source, fill_stale
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.generate import Case, generate
from support.memory import carry_out, empty
from support.mutate import mutations, plain
from support.recipe import EQUAL_RANK, draw
from support.reference import Read, Transfer
from support.show import show
from support.tries import PAIRS, TRIES

CHUNKS = 40
PER_CHUNK = -(-PAIRS // CHUNKS)


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    total: Counter[str] = Counter()
    yield total
    show(request.config, "\n".join(f"  {count:>13,}  {name}" for name, count in sorted(total.items())))


def run(case: Case, descriptor_bytes: int) -> tuple[Oracle, kvhma.Transfer]:
    transfer = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes).transfer(
        case.num_tokens, case.local_spans, case.remote_spans
    )
    return Oracle(case.local, case.remotes), transfer


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_byte_of_equal_ranks(chunk: int, counted: Counter[str]) -> None:
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed, EQUAL_RANK))
        oracle = Oracle(case.local, case.remotes)
        for descriptor_bytes in (0, 64, DEFAULT_DESCRIPTOR_BYTES):
            plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes)
            transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
            try:
                report = oracle.check(case.num_tokens, case.local_spans, case.remote_spans, transfer)
            except OracleError as error:
                pytest.fail(f"{case} descriptor_bytes={descriptor_bytes}: {error}")
            assert report.mergeable == 0, f"{case}: {report.mergeable} descriptors too many"
            assert descriptor_bytes or not report.excess, f"{case}: exact, but {report}"
            counted["transfers"] += 1
            counted["bytes moved"] += report.moved
            counted["bytes zeroed"] += report.zeroed
            counted["bytes untouched"] += report.untouched
            counted["bytes after the last token"] += report.excess
            counted["descriptors"] += transfer.descriptors
        counted["geometries"] += 1
        counted.update(case.features)


def test_the_oracle_rejects_wrong_transfers(counted: Counter[str]) -> None:
    missed = []
    for seed in range(60 * TRIES):
        case = generate(seed, draw(seed, EQUAL_RANK) if seed % 2 else draw(seed))
        oracle, transfer = run(case, 0)
        good = plain(transfer)
        oracle.check(case.num_tokens, case.local_spans, case.remote_spans, good)
        for name, wrong in mutations(random.Random(seed), good):
            counted[f"rejected: {name}"] += 1
            try:
                oracle.check(case.num_tokens, case.local_spans, case.remote_spans, wrong)
            except OracleError:
                continue
            missed.append(f"{name}: {case}")
    assert not missed


def rows(*found: tuple[int, int]) -> NDArray[np.uint64]:
    return np.array([(address, size, 0) for address, size in found], np.uint64).reshape(-1, 3)


def tiny(base: int) -> kvhma.Geometry:
    """One layer of two tokens a block, two bytes a token, one byte of padding: blocks of 5 bytes."""
    axes = (kvhma.Axis("tokens", 2, 2), kvhma.Axis("content", 2, 1))
    page = kvhma.Page((kvhma.Part("kv", "uint8", 1, 0, axes),))
    layer = kvhma.Layer("layer.0", 0, 0, 0, 5, 5, page)
    return kvhma.Geometry((kvhma.Region(base, 25),), (kvhma.Group("full", 2),), (layer,))


def test_a_transfer_by_hand() -> None:
    # Three tokens: P has them in blocks 4 and 1, D needs them in blocks 2 and 3. P's last block holds one more.
    oracle = Oracle(tiny(1000), [tiny(2000)])
    request = (3, [kvhma.Span(0, [2, 3])], [kvhma.Span(0, [4, 1])])
    zero = rows((1017, 2))

    def transfer(local: NDArray[np.uint64], remote: NDArray[np.uint64], excess: int = 0) -> Transfer:
        return Transfer((Read(0, local, remote),), zero, excess)

    exact = oracle.check(*request, transfer(rows((1010, 4), (1015, 2)), rows((2020, 4), (2005, 2))))
    assert exact == Report(moved=6, excess=0, zeroed=2, untouched=17, mergeable=0)
    whole = oracle.check(*request, transfer(rows((1010, 4), (1015, 4)), rows((2020, 4), (2005, 4)), excess=2))
    assert whole == Report(moved=8, excess=2, zeroed=0, untouched=17, mergeable=0)
    split = oracle.check(
        *request, transfer(rows((1010, 1), (1011, 3), (1015, 2)), rows((2020, 1), (2021, 3), (2005, 2)))
    )
    assert split.mergeable == 1

    wrong = {
        r"region 0 at 15 \(layer.0/kv token 2\): expected .* token 2 content=0 byte 0, found .* token 0 content=0": (
            rows((1010, 4), (1015, 2)),
            rows((2020, 4), (2020, 2)),
        ),
        r"at 16 .*found junk of source 0, region 0 at 0": (
            rows((1010, 4), (1015, 1), (1016, 1)),
            rows((2020, 4), (2005, 1), (2000, 1)),
        ),
        r"at 14 \(padding\): expected stale byte of region 0 at 14": (rows((1010, 7)), rows((2018, 7))),
        r"at 24 \(padding\)": (rows((1010, 4), (1015, 2), (1024, 1)), rows((2020, 4), (2005, 2), (2007, 1))),
        r"row 1 \(1024, 2, 0\) is not inside one region": (rows((1010, 4), (1024, 2)), rows((2020, 4), (2005, 2))),
        r"source 0 remote: row 0": (rows((1010, 4), (1015, 2)), rows((2024, 4), (2005, 2))),
        r"two reads write region 0 at 13": (rows((1010, 4), (1013, 2)), rows((2020, 4), (2005, 2))),
        r"not sorted": (rows((1015, 2), (1010, 4)), rows((2005, 2), (2020, 4))),
        r"lengths differ": (rows((1010, 4), (1015, 2)), rows((2020, 4), (2005, 1))),
    }
    for message, sides in wrong.items():
        with pytest.raises(OracleError, match=message):
            oracle.check(*request, transfer(*sides))


def test_excess_bytes_must_be_counted() -> None:
    for seed in range(400):
        case = generate(seed, draw(seed, EQUAL_RANK))
        oracle, transfer = run(case, 1 << 20)
        if transfer.excess_bytes:
            wrong = plain(transfer)
            object.__setattr__(wrong, "excess_bytes", transfer.excess_bytes - 1)
            with pytest.raises(OracleError, match="excess_bytes"):
                oracle.check(case.num_tokens, case.local_spans, case.remote_spans, wrong)
            return
    pytest.fail("no case moves a last block whole")


def test_real_memory_agrees_with_labels() -> None:
    for seed in range(120 * TRIES):
        case = generate(seed, draw(seed, EQUAL_RANK) if seed % 2 else draw(seed))
        oracle, transfer = run(case, DEFAULT_DESCRIPTOR_BYTES)
        report = oracle.check(case.num_tokens, case.local_spans, case.remote_spans, transfer)
        local, sources = empty(case.local), []
        fill_stale(local, seed=seed % 2)
        for source, remote in enumerate(case.remotes):
            sources.append((remote, empty(remote)))
            fill_source(sources[-1][1], remote, case.spans_of(source), seed=seed % 2)
        carry_out(case.local, local, transfer, sources)
        request = (case.local, case.remotes, Request(case.num_tokens, case.local_spans, case.remote_spans))
        found = check_memory(local, *request, excess_bytes=transfer.excess_bytes, seed=seed % 2)
        assert (found.moved, found.excess, found.zeroed) == (report.moved, report.excess, report.zeroed), str(case)
        rng = random.Random(seed)
        region = rng.choice([content for content in local if content.size])
        region[rng.randrange(region.size)] ^= 0x5A
        with pytest.raises(OracleError, match="the first: region"):
            check_memory(local, *request, seed=seed % 2)
