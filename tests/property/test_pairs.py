# SPDX-License-Identifier: Apache-2.0
"""Every byte of D when the engines differ: ranks, blocks, layouts, positions, layers, context parallelism."""

from __future__ import annotations

from collections import Counter

import pytest

import kvhma
from kvhma.errors import OracleError
from kvhma.oracle import Oracle
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.generate import generate
from support.recipe import AXES, all_pairs, draw, pairs_of
from support.save import saved
from support.show import show
from support.tries import PAIRS

CHUNKS = 40
PER_CHUNK = -(-PAIRS // CHUNKS)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_byte_of_unequal_engines(chunk: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed))
        oracle = Oracle(case.local, case.remotes)
        descriptor_bytes = (0, 64, DEFAULT_DESCRIPTOR_BYTES)[seed % 3]
        try:
            plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes)
            transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
            report = oracle.check(case.num_tokens, case.local_spans, case.remote_spans, transfer)
        except (OracleError, kvhma.KvhmaError) as error:
            pytest.fail(f"{case} descriptor_bytes={descriptor_bytes}: {error}\n{saved(case, descriptor_bytes)}")
        assert report.mergeable == 0, f"{case}: {report.mergeable} too many\n{saved(case, descriptor_bytes)}"
        assert descriptor_bytes or not report.excess, f"{case}: exact, but {report}\n{saved(case, descriptor_bytes)}"
        counted["pairs"] += 1
        counted["sources"] += len(case.remotes)
        counted["bytes moved"] += report.moved
        counted["bytes zeroed"] += report.zeroed
    print(dict(counted))


def test_kernel_blocks_that_cut_each_other_in_thousands_of_ways() -> None:
    def rank(kernel_tokens: int, base: int) -> kvhma.Geometry:
        axes = (kvhma.Axis("heads", 2, kernel_tokens), kvhma.Axis("tokens", kernel_tokens, 1))
        page = kvhma.Page((kvhma.Part("kv", "uint8", 1, 0, axes),))
        layer = kvhma.Layer("layer.0", 0, 0, 0, 8, 2 * kernel_tokens, page)
        region = kvhma.Region(base, 16 * kernel_tokens)
        return kvhma.Geometry((region,), (kvhma.Group("full", kernel_tokens),), (layer,))

    local, remote = rank(2049, 4096), rank(2051, 1 << 40)
    plan = kvhma.plan(local, remote, descriptor_bytes=0)
    for num_tokens in (1, 2049, 2052, 6200):
        request = (num_tokens, [kvhma.Span(0, [5, 3, 1, 2])], [kvhma.Span(0, [7, 2, 4, 1])])
        report = Oracle(local, [remote]).check(*request, plan.transfer(*request))
        assert (report.moved, report.mergeable) == (2 * num_tokens, 0)


def test_every_combination_of_two_axes_is_hit(request: pytest.FixtureRequest) -> None:
    hits: Counter[tuple[str, str]] = Counter()
    for seed in range(CHUNKS * PER_CHUNK):
        hits.update(pairs_of(draw(seed)))
    show(request.config, _table(hits))
    assert [pair for pair in all_pairs() if not hits[pair]] == []


def _table(hits: Counter[tuple[str, str]]) -> str:
    """Arrange how often two choices met: a row for each choice, a column for each choice of the axes before it."""
    choices = [f"{axis}={choice}" for axis, of in AXES.items() for choice in of]
    lines = [f"{'':>22}" + "".join(f"{number:>6}" for number in range(len(choices)))]
    for number, choice in enumerate(choices):
        cells = (hits[other, choice] for other in choices[:number])
        lines.append(f"{number:>3} {choice:<18}" + "".join(f"{cell or '':>6}" for cell in cells))
    return "\n".join(lines)
