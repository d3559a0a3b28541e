# SPDX-License-Identifier: Apache-2.0
"""Parts of cases: real engines, small enough to be simulated, and a part has nothing that the whole does not have."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import kvhma
from kvhma import Geometry, RequestError, Span, live_spans
from kvhma.models import model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.oracle import cases, part
from kvhma.oracle.cases import Case, Expected
from support.cli_run import cli
from support.generate import generate
from support.mutate import plain
from support.recipe import draw
from support.reference import Transfer
from support.save import as_case

SEEDS = range(40)
BLOCKS = 9000


def real(name: str, tokens: int = 8192, order: str = "LBHNC") -> Case:
    """P with two ranks, D's rank 1 of four, pools as of a GPU, and scattered blocks."""

    def rank(index: int, of: int, base: int) -> Geometry:
        options = LayoutOptions(num_blocks=BLOCKS, tp_rank=index, tp_size=of, base=base << 44, order=order)
        return layout(model(name), options)

    def spans(geometry: Geometry, seed: int) -> tuple[Span, ...]:
        ids = random.Random(seed).sample(range(1, BLOCKS), BLOCKS - 1)
        counts = [1 if group.kind == "ssm" else -(-tokens // group.block_size) for group in geometry.groups]
        return tuple(live_spans(geometry, tokens, [[ids.pop() for _ in range(count)] for count in counts]))

    local, remotes = rank(1, 4, 1), (rank(0, 2, 2), rank(1, 2, 3))
    return Case(local, remotes, tokens, spans(local, 1), spans(remotes[0], 2))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma-3-27b", "2 of 62 layers, the last 512 of 8,192 tokens"),
        ("Qwen3-Next-80B-A3B", "2 of 48 layers, the last 4,096 of 8,192 tokens"),
        ("DeepSeek-V3", "1 of 61 layers, the last 4,096 of 8,192 tokens"),
    ],
)
def test_cases_of_real_engines(name: str, said: str) -> None:
    case = real(name)
    with pytest.raises(RequestError, match=r"too large to simulate: [\d,]+ bytes in .*, at most [\d,]+$"):
        cases.check(case)
    verdict, of = part.check_part(case)
    assert (verdict.outcome, verdict.text, str(of)) == ("right", "", said)
    assert of is not None
    assert verdict.report is not None
    assert verdict.report.moved == verdict.bytes > 1 << 20
    assert of.case.num_tokens == case.num_tokens
    assert [group.window for group in of.case.local.groups] == ([1024, None] if "gemma" in name else [None] * of.layers)


def test_layers_of_each_group_where_they_fit() -> None:
    """gemma-3-27b has seven groups; if that is too much, equal groups have one layer together."""
    of = part.part_of(real("gemma-3-27b", 200))
    assert (of.layers, of.tokens, len(of.case.local.groups)) == (7, 200, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_generated_cases_are_right(seed: int) -> None:
    """For all engines: context parallelism, opaque groups, unequal blocks, hits, layouts."""
    case = as_case(generate(seed, draw(seed)), 1 << 17)
    assert part.check_part(case)[0].outcome == "right"
    for by_group in (True, False):
        kept = part._one_of_each_sort(case, by_group=by_group)
        for tokens in {1, case.num_tokens // 3, case.num_tokens - 1} - {0}:
            small = part._numbered_anew(part._last_tokens(kept, tokens))
            verdict = cases.check(small)
            assert (verdict.outcome, verdict.text) == ("right", ""), (by_group, tokens)
            assert _neighbours(small.local_spans) <= _neighbours(kept.local_spans)


def _neighbours(spans: tuple[Span, ...]) -> int:
    used = sorted({block for span in spans for block in span.ids})
    return sum(after == block + 1 for block, after in pairwise(used))


class Broken:
    """Plans, but reads the first block one byte too late."""

    def __init__(self, *sides: object, descriptor_bytes: int) -> None:
        self.plan = kvhma.plan(*sides, descriptor_bytes=descriptor_bytes)

    def transfer(self, *request: object) -> Transfer:
        good = plain(self.plan.transfer(*request))
        first = good.reads[0]
        remote = first.remote.copy()
        remote[0, 0] += 1
        return replace(good, reads=(replace(first, remote=remote), *good.reads[1:]))


def test_a_wrong_plan_is_seen_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "plan", Broken)
    verdict, of = part.check_part(real("granite-4.0-h-tiny", 3000))
    assert (verdict.outcome, verdict.code) == ("wrong", "wrong-bytes")
    assert of is not None


def test_refusals_of_the_whole() -> None:
    """A refusal applies to the whole case: a part may lack the block that is refused."""
    case = real("gemma-3-27b")
    ids = [*case.local_spans[6].ids]
    spans = (*case.local_spans[:6], Span(0, [ids[1], *ids[1:]]))
    verdict, of = part.check_part(replace(case, local_spans=spans))
    assert (verdict.outcome, verdict.code, of) == ("refused", "duplicate-block", None)
    verdict, of = part.check_part(replace(case, local_spans=spans, expect=Expected("BlockIdError")))
    assert (verdict.outcome, of) == ("right", None)
    verdict, of = part.check_part(replace(case, expect=Expected("BlockIdError")))
    assert (verdict.outcome, verdict.code, of) == ("wrong", "accepted", None)


def test_no_part_is_small_enough() -> None:
    """Heads outside of blocks: a page is spread over the whole pool."""
    with pytest.raises(RequestError, match=r"too large to simulate: [\d,]+ bytes in all regions") as refused:
        part.check_part(real("gemma-3-27b", order="LHBNC"))
    assert (refused.value.code, refused.value.expected) == ("too-large-to-simulate", 1 << 25)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    cases.save(real("granite-4.0-h-tiny", 3000), path)
    ended = cli("check", path)
    assert ended.code == 2
    assert "at most 16,777,216; --part checks what fits" in ended.out
    ended = cli("check", "--part", path)
    assert (ended.code, ended.out.split(":")[1]) == (0, " of 2 of 40 layers, the last 3,000 of 3,000 tokens")
    (row,) = json.loads(cli("check", "--part", "--json", path).out)["cases"]
    assert row["part"] == {"layers": 2, "of_layers": 40, "tokens": 3000, "of_tokens": 3000}
    cases.save(real("gemma-3-27b", order="LHBNC"), path)
    ended = cli("check", "--part", path)
    assert ended.code == 2
    assert "--part" not in ended.out
