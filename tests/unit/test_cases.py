# SPDX-License-Identifier: Apache-2.0
"""Case files: read, checked, shrunk; and no case file can do harm."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvhma
from kvhma import Group, RequestError, Span
from kvhma.cli.app import app
from kvhma.oracle import cases
from kvhma.oracle.cases import Case, Expected
from kvhma.oracle.shrink import failure, shrink, spans_of
from support.generate import generate
from support.mutate import plain
from support.pairs import HERE, THERE, latent, rank, state
from support.recipe import Recipe, draw
from support.reference import Transfer
from support.save import as_case

SEEDS = range(120)


def small(tokens: int = 6, **changes: object) -> Case:
    """Two layers of blocks of four one-byte tokens, and a state: small enough to count what moves."""
    groups = (Group("full", 4), Group("ssm", 4))

    def side(base: int) -> kvhma.Geometry:
        return rank(base, groups, [("fa", 0, latent(4, 1)), ("ssm", 1, state(2, content=2))], blocks=8)

    spans = (Span(0, [3, 5]), Span(0, [2])), (Span(0, [1, 2]), Span(0, [4]))
    return replace(Case(side(HERE), (side(THERE),), tokens, *spans, 0), **changes)


FORM = json.loads(small().to_json())
SSM = HERE + 8 * 4 + 64, THERE + 8 * 4 + 64
RUNS = ((0, HERE + 12, THERE + 4, 4), (0, HERE + 20, THERE + 8, 2), (0, SSM[0] + 8, SSM[1] + 16, 4))
ZERO = ((HERE + 22, 2),)


# --- The format -----------------------------------------------------------------------------------------


def test_round_trip() -> None:
    nested = 0
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), seed % 3)
        assert Case.from_json(case.to_json()) == case
        assert Case.from_json(case.to_json(indent=2)) == case
        nested += not isinstance(case.remote_spans[0], Span)
    assert nested > 10
    for expect in (Expected("BlockIdError"), Expected(runs=RUNS), Expected(runs=(), zero=ZERO)):
        case = small(expect=expect)
        assert Case.from_json(case.to_json().decode()) == case


def test_arrays_of_ids_become_lists() -> None:
    case = small(local_spans=(Span(np.int64(0), np.array([3, 5], np.int32)), Span(0, np.array([2]))))
    assert case == small()
    assert cases.check(case).outcome == "right"


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    cases.save(small(), path)
    assert cases.load(path) == small()
    with path.open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(RequestError, match="more than 16777216 bytes"):
        cases.load(path)
    with pytest.raises(RequestError, match="more than 16777216 bytes"):
        cases.load(Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        cases.load(tmp_path / "none.json")


# --- Verdicts -------------------------------------------------------------------------------------------


def test_generated_cases_are_right() -> None:
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        verdict = cases.check(case)
        assert (verdict.outcome, verdict.text) == ("right", "")
        assert verdict.report is not None
        assert verdict.bytes == verdict.report.moved
        assert failure(case) is None


@pytest.mark.parametrize(
    ("expect", "outcome", "text"),
    [
        (Expected(runs=RUNS, zero=ZERO), "right", ""),
        (Expected(runs=RUNS[::-1]), "right", ""),
        (Expected(zero=ZERO), "right", ""),
        (Expected(runs=RUNS[:2]), "wrong", f"runs: 3 instead of 2, but with [0, {SSM[0] + 8}, {SSM[1] + 16}, 4]"),
        (Expected(zero=()), "wrong", f"zero: 1 instead of 0, but with [{HERE + 22}, 2]"),
        (
            Expected(zero=((HERE + 23, 1),)),
            "wrong",
            f"zero: 1 instead of 1, without [{HERE + 23}, 1], but with [{HERE + 22}, 2]",
        ),
        (Expected("RequestError"), "wrong", "expected error 'RequestError', was accepted"),
    ],
)
def test_what_an_accepted_case_expects(expect: Expected, outcome: str, text: str) -> None:
    verdict = cases.check(small(expect=expect))
    assert (verdict.outcome, verdict.text) == (outcome, text)


@pytest.mark.parametrize(
    ("expect", "outcome", "text"),
    [
        (None, "refused", "RequestError: local group 0: blocks hold no token 8"),
        (Expected("RequestError"), "right", "RequestError: local group 0"),
        (Expected("RequestError: local group 0: blocks hold no token 8"), "right", "RequestError"),
        (Expected("BlockIdError"), "wrong", "expected error 'BlockIdError', refused with RequestError: local"),
        (Expected(runs=RUNS), "wrong", "expected runs, refused with RequestError"),
    ],
)
def test_what_a_refused_case_expects(expect: Expected | None, outcome: str, text: str) -> None:
    verdict = cases.check(small(9, expect=expect))
    assert verdict.outcome == outcome
    assert text in verdict.text


def test_sorts_of_failure() -> None:
    assert failure(small()) is None
    one, other = small(9), small(11)
    assert failure(one) == failure(other)
    assert failure(one) == "refused missing-tokens ids"
    doubled = small(local_spans=(Span(0, [3, 3]), Span(0, [2])))
    assert failure(doubled) == "refused duplicate-block ids"


# --- A planner with a bug -------------------------------------------------------------------------------


class Broken:
    """Plans, but loses the last row of the last read where a sliding window or a chunk is wider than four tokens."""

    def __init__(self, local: kvhma.Geometry, remotes: list[kvhma.Geometry], descriptor_bytes: int) -> None:
        self.plan = kvhma.plan(local, remotes, descriptor_bytes=descriptor_bytes)
        self.fails = any((local.groups[layer.group].window or 0) > 4 for layer in local.layers)

    def transfer(self, tokens: int, local: object, remote: object) -> Transfer:
        good = plain(self.plan.transfer(tokens, local, remote))
        if not self.fails or not good.reads:
            return good
        last = good.reads[-1]
        return replace(good, reads=(*good.reads[:-1], replace(last, local=last.local[:-1], remote=last.remote[:-1])))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cases, "plan", lambda local, remotes, descriptor_bytes: Broken(local, remotes, descriptor_bytes)
    )


def failing() -> Case:
    """A large pair that the broken planner gets wrong: unequal ranks, windows, prefix hits."""
    recipe = Recipe(tp="fewer", state="same", blocks="coprime", layouts="any", positions="prefix", layers="regrouped")
    for seed in range(200):
        case = as_case(generate(seed, recipe), 1 << 17)
        if len(case.local.groups) > 3 and len(case.remotes) > 1 and failure(case):
            return case
    raise AssertionError("no such pair")


@pytest.mark.usefixtures("broken")
def test_a_failing_case_shrinks_to_what_matters() -> None:
    case = failing()
    sort = failure(case)
    assert sort is not None
    assert sort == "wrong wrong-bytes"
    found = shrink(case, lambda c: failure(c) == sort)
    assert failure(found) == sort
    assert [group.kind for group in found.local.groups] == ["sliding"]
    assert len(found.local.layers) == len(found.remotes) == len(found.local.regions) == 1
    assert [len(span.ids) for span in (*found.local_spans, *spans_of(found, 0))] == [1, 1]
    assert found.num_tokens <= case.num_tokens
    assert found.descriptor_bytes == 0
    assert max(found.local_spans[0].ids) <= 1
    assert found.local.regions[0].bytes < case.local.regions[0].bytes
    assert found == shrink(case, lambda c: failure(c) == sort)
    assert found == shrink(found, lambda c: failure(c) == sort)


def test_shrinking_ends() -> None:
    case = as_case(generate(3, draw(3)), 64)
    smallest = shrink(case, lambda _: True)
    assert len(smallest.local.layers) <= 1
    assert smallest.num_tokens == 1
    assert not any(len(span.ids) for span in smallest.local_spans)
    assert shrink(case, lambda _: False) == shrink(case, lambda _: True, max_tries=0)
    calls = []
    shrink(case, lambda c: bool(calls.append(c)), max_tries=7)
    assert len(calls) == 7


def test_a_predicate_that_refuses_does_not_stop_it() -> None:
    def fails(case: Case) -> bool:
        if case.num_tokens % 2:
            raise RequestError("odd")
        return case.num_tokens >= 2

    case = replace(as_case(generate(3, draw(3)), 64), num_tokens=64)
    assert shrink(case, fails).num_tokens == 2


# --- Files that no reader should trust ------------------------------------------------------------------


def changed(path: list[object], value: object) -> bytes:
    form = json.loads(json.dumps(FORM))
    target = form
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(form).encode()


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["kvhma_case"], 2, "kvhma_case is 2, this build reads 1"),
        (["kvhma_case"], True, "kvhma_case is a boolean, not an integer"),
        (["kvhma_case"], ..., "case: field 'kvhma_case' is missing"),
        (["surprise"], 1, "case: unknown field 'surprise'"),
        (["local"], [], "local is a list, not an object"),
        (["local"], None, "local is null, not an object"),
        (["local", "kvhma"], 9, "local: "),
        (["local", "regions", 0, "bytes"], -1, "local: "),
        (["local", "regions", 0, "base"], 2**64, "local: "),
        (["local", "regions", 0, "base"], 1.5, "local: "),
        (["local", "regions", 0, "base"], float("nan"), "local: "),
        (["local", "layers", 0, "name"], "\ud800", "local: "),
        (["remote"], {}, "remote is an object, not a list"),
        (["remote", 0], "x", "remote[0] is a string, not an object"),
        (["remote", 0, "groups", 0, "ratio"], 0, "remote[0]: group 0: ratio is 0"),
        (["num_tokens"], "6", "num_tokens is a string, not an integer"),
        (["num_tokens"], 6.0, "num_tokens is a float, not an integer"),
        (["num_tokens"], None, "num_tokens is null, not an integer"),
        (["local_spans"], {}, "local_spans is an object, not a list"),
        (["local_spans", 0], 7, "local_spans[0] is an integer, not an object"),
        (["local_spans", 0, "first"], ..., "local_spans[0]: field 'first' is missing"),
        (["local_spans", 0, "extra"], 0, "local_spans[0]: unknown field 'extra'"),
        (["local_spans", 0, "first"], [], "local_spans[0].first is a list, not an integer"),
        (["local_spans", 0, "ids"], "12", "local_spans[0].ids is a string, not a list"),
        (["local_spans", 0, "ids", 1], None, "local_spans[0].ids[1] is null, not an integer"),
        (["local_spans", 0, "ids", 1], False, "local_spans[0].ids[1] is a boolean, not an integer"),
        (["remote_spans", 1], [], "remote_spans[0] is an object, not a list"),
        (["remote_spans"], [[{"first": 0}]], "remote_spans[0][0]: field 'ids' is missing"),
        (["descriptor_bytes"], -1, "descriptor_bytes is -1, has to be 0 to 2**62"),
        (["descriptor_bytes"], 2**70, "descriptor_bytes is"),
        (["expect"], {}, "expect has either"),
        (["expect"], [], "expect is a list, not an object"),
        (["expect"], {"error": "x", "runs": []}, "expect has either"),
        (["expect"], {"error": 3}, "expect.error is an integer, not a string"),
        (["expect"], {"runs": 3}, "expect.runs is an integer, not a list"),
        (["expect"], {"runs": [3]}, "expect.runs[0] is an integer, not a list"),
        (["expect"], {"runs": [[1, 2, 3]]}, "expect.runs[0] has 3 numbers, expected 4"),
        (["expect"], {"zero": [[1, 2, 3]]}, "expect.zero[0] has 3 numbers, expected 2"),
        (["expect"], {"zero": [[1, "2"]]}, "expect.zero[0][1] is a string, not an integer"),
        (["expect"], {"verdict": "right"}, "expect: unknown field 'verdict'"),
    ],
)
def test_one_wrong_field(path: list[object], value: object, text: str) -> None:
    with pytest.raises(RequestError) as info:
        Case.from_json(changed(path, value))
    assert text in str(info.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"kvhma_case":1}',
        b'{"kvhma_case":' + b"9" * 10_000 + b"}",
        b" " * ((1 << 24) + 1),
        json.dumps(FORM).replace('"num_tokens"', '"num_tokens": 3, "num_tokens"').encode(),
        json.dumps(FORM).replace('"bytes"', '"bytes": 3, "bytes"').encode(),
    ],
    ids=range(13),
)
def test_not_a_case(data: bytes) -> None:
    with pytest.raises(RequestError):
        Case.from_json(data)


@pytest.mark.parametrize("number", [0, -1, 2**31, 2**40, 2**63, 2**64, 10**400])
@pytest.mark.parametrize(
    "path", [["num_tokens"], ["local_spans", 0, "first"], ["local_spans", 0, "ids", 0], ["remote_spans", 1, "ids", 0]]
)
def test_numbers_of_a_request_are_the_plans_to_refuse(path: list[object], number: int) -> None:
    assert outcome(Case.from_json(changed(path, number))) in ("right", "refused", "too large to simulate")


def outcome(case: Case) -> str:
    try:
        return cases.check(case).outcome
    except RequestError as error:
        return str(error).split(":")[0]


def large(**changes: object) -> Case:
    layer = small().local.layers[0]
    local = small().local
    return small(local=replace(local, layers=(replace(layer, **changes), local.layers[1])))


def test_large_cases_are_not_simulated() -> None:
    wide = latent(4, 1 << 22)
    regions = tuple(replace(region, bytes=1 << 40) for region in small().local.regions)
    hostile = {
        "bytes in all regions": small(local=replace(small().local, regions=regions)),
        "bytes in the request's blocks": small(
            local=replace(
                small().local,
                regions=regions,
                layers=(replace(small().local.layers[0], block_stride=1 << 24, page=wide),),
            )
        ),
        "bytes of all ranks": small(local_spans=(Span(1 << 36, [3]), Span(0, [2]))),
    }
    for text, case in hostile.items():
        with pytest.raises(RequestError, match=text):
            cases.check(case)
    # An axis whose whole is beyond 64 bits; no rank holds all of it.
    part = small().local.layers[0].page.parts[0]
    axes = (part.axes[0], kvhma.Axis("content", 1 << 63, 1, 0, 1), kvhma.Axis("more", 1 << 63, 1, 0, 1))
    page = kvhma.Page((replace(part, axes=axes),))
    with pytest.raises(RequestError, match="too large to simulate"):
        cases.check(large(page=page))


def test_aliased_layers_count_every_time() -> None:
    local = small().local
    layer = local.layers[0]
    page = latent(4, 1 << 18)
    many = tuple(replace(layer, name=f"layer.{i}", num_blocks=1, block_stride=1 << 20, page=page) for i in range(40))
    geometry = replace(local, layers=many, groups=local.groups[:1], regions=(replace(local.regions[0], bytes=1 << 20),))
    spans = (Span(0, [0]),)
    case = Case(geometry, (geometry,), 4, spans, spans, 0)
    with pytest.raises(RequestError, match=f"{80 << 20:,} bytes in the request's blocks"):
        cases.check(case)


def test_ranks_of_no_global_cache_are_not_simulated() -> None:
    case = small()
    bases = [replace(region, base=HERE) for region in case.local.regions]
    overlapping = small(local=replace(case.local, regions=tuple(bases)), local_spans=(Span(0, [3, 5]), Span(0, [7])))
    with pytest.raises(RequestError, match="cannot be simulated: regions 0 and 1 overlap"):
        cases.check(overlapping)


def test_random_damage_never_raises_anything_else() -> None:
    raw = bytearray(small(expect=Expected(runs=RUNS, zero=ZERO)).to_json())
    rng = random.Random(5)
    read = 0
    for _ in range(3000):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'0123456789-{}[],:"e.x')
        try:
            cases.check(Case.from_json(bytes(damaged)))
            read += 1
        except RequestError:
            pass
    assert read > 30


# --- The command ----------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {
        "right": small(),
        "wrong": small(expect=Expected(zero=())),
        "refused": small(9),
        "refusal": small(9, expect=Expected("RequestError")),
    }
    for name, case in found.items():
        cases.save(case, tmp_path / f"{name}.json")
    (tmp_path / "bad.json").write_text("{")
    return {path.stem: path for path in tmp_path.iterdir()}


def test_exit_codes(files: dict[str, Path]) -> None:
    codes = {name: run(path)[0] for name, path in files.items()}
    assert codes == {"right": 0, "wrong": 1, "refused": 2, "refusal": 0, "bad": 2}
    assert run(files["right"], files["refusal"])[0] == 0
    assert run(files["right"], files["wrong"])[0] == 1
    assert run(files["bad"], files["wrong"])[0] == 2
    assert run()[0] == 2
    assert run("/does/not/exist.json")[0] == 2


def test_json_output(files: dict[str, Path]) -> None:
    code, output = run("--json", files["right"], files["refused"], files["bad"])
    form = json.loads(output)
    assert form["kvhma_check"] == 1
    rows = form["cases"]
    assert code == 2
    assert [row["verdict"] for row in rows] == ["right", "refused", "unreadable"]
    assert rows[0] == {
        "case": str(files["right"]),
        "verdict": "right",
        "text": "",
        "descriptors": 3,
        "bytes": 10,
        "moved": 10,
        "excess": 0,
        "zeroed": 2,
        "untouched": 2 * 8 * 4 - 12,
        "mergeable": 0,
    }


@pytest.mark.usefixtures("broken")
def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    case = failing()
    renamed = [
        replace(g, layers=tuple(replace(layer, name=f"{layer.name}\x1b[2J\u202e") for layer in g.layers))
        for g in (case.local, *case.remotes)
    ]
    cases.save(replace(case, local=renamed[0], remotes=tuple(renamed[1:])), tmp_path / "case.json")
    code, output = run(tmp_path / "case.json")
    assert code == 1
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert r"\x1b[2J" in output
