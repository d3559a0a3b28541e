# SPDX-License-Identifier: Apache-2.0
"""Every byte of D, over thousands of generated engines of equal shape: the centre of the tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import kvhma
from kvhma.oracle import Oracle, OracleError, check_memory, fill_source, fill_stale
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.generate import Case, generate
from support.mutate import mutations, plain
from support.recipe import EQUAL_RANK, draw

CHUNKS = 40
PER_CHUNK = 250


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    total: Counter[str] = Counter()
    yield total
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and total:
        reporter.write_line("")
        for name, count in sorted(total.items()):
            reporter.write_line(f"  {count:>9,}  {name}")


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
            counted["bytes behind the last token"] += report.excess
            counted["descriptors"] += transfer.descriptors
        counted["geometries"] += 1
        counted.update(case.features)


def test_the_oracle_rejects_what_is_wrong(counted: Counter[str]) -> None:
    missed = []
    for seed in range(150):
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


def test_excess_bytes_must_be_told() -> None:
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


def _slice(geometry: kvhma.Geometry, memory: list[np.ndarray], row: list[int]) -> np.ndarray:
    for region, content in zip(geometry.regions, memory, strict=True):
        if region.base <= row[0] and row[0] + row[1] <= region.base + region.bytes:
            return content[row[0] - region.base : row[0] - region.base + row[1]]
    raise AssertionError(f"{row} is in no region")


def test_real_memory_agrees_with_labels() -> None:
    for seed in range(300):
        case = generate(seed, draw(seed, EQUAL_RANK) if seed % 2 else draw(seed))
        oracle, transfer = run(case, DEFAULT_DESCRIPTOR_BYTES)
        report = oracle.check(case.num_tokens, case.local_spans, case.remote_spans, transfer)
        local = [np.empty(region.bytes, np.uint8) for region in case.local.regions]
        fill_stale(local, seed=seed)
        for row in transfer.zero.tolist():
            _slice(case.local, local, row)[:] = 0
        for read in transfer.reads:
            remote = case.remotes[read.source]
            memory = [np.empty(region.bytes, np.uint8) for region in remote.regions]
            fill_source(memory, remote, case.remote_spans, seed=seed)
            for to, start in zip(read.local.tolist(), read.remote.tolist(), strict=True):
                _slice(case.local, local, to)[:] = _slice(remote, memory, start)
        request = (case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
        found = check_memory(local, *request, excess_bytes=transfer.excess_bytes, seed=seed)
        assert (found.moved, found.excess, found.zeroed) == (report.moved, report.excess, report.zeroed), str(case)
        rng = random.Random(seed)
        region = rng.choice([content for content in local if content.size])
        region[rng.randrange(region.size)] ^= 0x5A
        with pytest.raises(OracleError, match="the first: region"):
            check_memory(local, *request, seed=seed)
