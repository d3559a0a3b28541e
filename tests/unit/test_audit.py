# SPDX-License-Identifier: Apache-2.0
"""The auditor: right traces pass, wrong traces of every sort are found, and no trace file can do harm."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvhma
from conformance.__main__ import runner
from conformance.mutants import QUESTIONS, SPOILS, mutant
from conformance.suite import FILE
from kvhma.errors import RequestError
from kvhma.geometry import Span
from kvhma.oracle import cases, traces
from kvhma.oracle.audit import Judged, audit, judge
from kvhma.oracle.cases import Case
from kvhma.oracle.moves import byte_moves
from kvhma.oracle.smallest import answered, smallest, trace_of
from kvhma.oracle.traces import Step, Trace
from support.cli_run import cli, refused
from support.generate import generate
from support.pairs import HERE, THERE
from support.recipe import draw
from support.save import as_case
from support.traced import RUNS, SSM, rows_of, small, steps_of, traced
from support.tries import TRIES

SEEDS = range(60)
kit = runner()
NEEDED = kit.Rules(needed=True)
_, CASES = kit.load(FILE)
ANSWERED = [entry for entry in CASES if "runs" in entry["expect"]]


def answered_steps(rows: list[dict[str, int]]) -> list[Step]:
    """The answer of one of the kit's planners as steps."""
    zeros = [(row["zero"], row["bytes"]) for row in rows if "zero" in row]
    steps = [Step("zero", 0, rows_of(*zeros))] if zeros else []
    copies = [row for row in rows if "source" in row]
    return steps + [Step("transfer", row["source"], rows_of((row["from"], row["to"], row["bytes"]))) for row in copies]


# --- Right traces ---------------------------------------------------------------------------------------


def test_what_the_bytes_say_is_right() -> None:
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        moves = byte_moves(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
        found = judge(traced(case, steps_of(case)))
        assert (found.outcome, found.signature, found.causes, found.stale, found.idle) == ("right", (), (), 0, 0)
        assert found.bytes == found.needed == sum(copy.length for copy in moves.copies)
        assert found.joined <= found.descriptors == len(moves.copies)
        assert found.planned is not None


def test_a_plan_is_right() -> None:
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        transfer = kvhma.plan(case.local, case.remotes, descriptor_bytes=0).transfer(
            case.num_tokens, case.local_spans, case.remote_spans
        )
        steps = [Step("zero", 0, transfer.zero[:, :2])]
        for read in transfer.reads:
            rows = np.column_stack((read.remote[:, 0], read.local[:, 0], read.local[:, 1]))
            steps.append(Step("transfer", read.source, rows))
        found = judge(traced(case, steps))
        assert found.outcome == "right"
        assert found.planned is not None
        assert (found.planned.descriptors, found.planned.bytes) == (found.descriptors, found.bytes)


def test_stale_bytes_that_are_not_read_are_right() -> None:
    stale = 0
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        found = judge(traced(case, [step for step in steps_of(case) if step.doing != "zero"]))
        assert found.outcome == "right"
        stale += found.stale > 0
    assert stale > 20


# --- Wrong traces ---------------------------------------------------------------------------------------

NOT_READ = {
    "nothing zeroed",
    "one token more",
    "last block as if it were full",
    "window one token more",
    "turns ignored",
    "window one block early",
    "window ignored",
    "chunk ignored",
    "chunk as a window",
}
"""Rules that only move more, or zero less: D reads none of these bytes."""


@cache
def posed(name: str) -> tuple[Case, Any]:
    """A case of the kit, and the answer that the kit expects."""
    entry = next(entry for entry in ANSWERED if entry["id"] == name)
    return Case.from_json(json.dumps(entry["case"])), kit.expected(entry)


@pytest.mark.parametrize("name", [*QUESTIONS, *SPOILS])
def test_it_agrees_with_the_kit_on_planners_that_are_wrong(name: str) -> None:
    """The kit's runner judges with its own labels."""
    outcomes: Counter[str] = Counter()
    for entry in ANSWERED:
        if sum(outcomes.values()) == 20 * TRIES:
            break
        case, want = posed(entry["id"])
        rows = mutant(name, case)
        if rows is None or any("refuse" in row for row in rows):
            continue
        verdict = kit.judge(entry, rows, NEEDED, want)
        found = judge(traced(case, answered_steps(rows)), with_plan=False)
        outcomes[found.outcome] += 1
        if found.outcome == "right" and verdict.outcome != "right":
            # The kit requires padding, the null block and blocks before the request's window to be unchanged.
            assert " bytes extra, the first" in verdict.text
        else:
            assert found.outcome == verdict.outcome, (entry["id"], verdict, found.causes)
    if name not in NOT_READ and outcomes:
        assert outcomes["wrong"] > 0, outcomes


MUTANTS: dict[str, tuple[list[Step], str, str]] = {
    "a run is not there": (
        [Step("transfer", 0, rows_of(*RUNS[1:]))],
        "missing",
        "4 bytes of fa/kv tokens 0 to 3: they hold what D held before",
    ),
    "another token": (
        [Step("transfer", 0, rows_of((THERE + 5, HERE + 12, 3), (THERE + 4, HERE + 15, 1), *RUNS[1:]))],
        "wrong",
        "4 bytes of fa/kv tokens 0 to 3: they hold other tokens",
    ),
    "another layer": (
        [Step("transfer", 0, rows_of((SSM[1] + 16, HERE + 12, 4), *RUNS[1:]))],
        "wrong",
        "they hold ssm/",
    ),
    "another part of the state": (
        [Step("transfer", 0, rows_of(*RUNS[:2], (SSM[1] + 18, SSM[0] + 8, 2), (SSM[1] + 16, SSM[0] + 10, 2)))],
        "wrong",
        "they hold other items of the same token or state",
    ),
    "another request's block of P": (
        [Step("transfer", 0, rows_of((THERE + 12, HERE + 12, 4), *RUNS[1:]))],
        "wrong",
        "they hold bytes of P that are no token of the request",
    ),
    "another request's block of D": (
        [Step("transfer", 0, rows_of(*RUNS, (THERE + 4, HERE + 16, 4)))],
        "extra",
        "4 bytes of fa/kv: they hold fa/kv",
    ),
    "zeroed afterwards": (
        [Step("transfer", 0, rows_of(*RUNS)), Step("zero", 0, rows_of((HERE + 12, 1)))],
        "missing",
        "1 bytes of fa/kv token 0: they are zero",
    ),
    "written twice": (
        [Step("transfer", 0, rows_of(*RUNS)), Step("transfer", 0, rows_of((THERE + 5, HERE + 12, 1)))],
        "wrong",
        "two transfers write them, each something else",
    ),
    "written twice by one step": (
        [Step("transfer", 0, rows_of((THERE + 5, HERE + 12, 1), *RUNS))],
        "wrong",
        "two transfers write them, each something else",
    ),
    "put in another order afterwards": (
        [
            Step("transfer", 0, rows_of(*RUNS)),
            Step("rearrange", 0, rows_of((HERE + 12, HERE + 13, 1), (HERE + 13, HERE + 12, 1))),
        ],
        "wrong",
        "2 bytes of fa/kv tokens 0 to 1: they hold other tokens",
    ),
    "outside of D": (
        [Step("transfer", 0, rows_of(*RUNS, (THERE + 4, 16, 4)))],
        "extra",
        "4 bytes of no region: written outside",
    ),
    "outside of P": (
        [Step("transfer", 0, rows_of((16, HERE + 12, 4), *RUNS[1:]))],
        "wrong",
        "they hold bytes of P that are no token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_every_sort_of_mistake_is_named(name: str) -> None:
    steps, what, text = MUTANTS[name]
    found = judge(traced(small(), steps))
    assert (found.outcome, found.signature) == ("wrong", (what,))
    assert text in str(found.causes[0])
    # The smallest request that shows the error shows the same error, for the same reason.
    small_one = smallest(traced(small(), steps))
    assert judge(small_one).signature == found.signature
    assert judge(small_one).causes[0].found == found.causes[0].found
    assert len(small_one.case.local.layers) <= (2 if name == "another layer" else 1)


def test_a_rearrangement_that_puts_right() -> None:
    mixed = [(THERE + 5, HERE + 12, 1), (THERE + 4, HERE + 13, 1), (THERE + 6, HERE + 14, 2), *RUNS[1:]]
    back = Step("rearrange", 0, rows_of((HERE + 12, HERE + 13, 1), (HERE + 13, HERE + 12, 1)))
    assert judge(traced(small(), [Step("transfer", 0, rows_of(*mixed)), back])).outcome == "right"


def test_a_state_after_other_tokens() -> None:
    steps = [Step("transfer", 0, rows_of(*RUNS))]
    assert judge(traced(small(), steps)).outcome == "right"
    found = judge(traced(small(), steps, remote_tokens=7))
    assert [str(cause) for cause in found.causes] == [
        "wrong: 4 bytes of ssm/ssm: they hold other tokens, or a state after other tokens"
    ]
    # If P has computed fewer tokens, the last ones have no source either.
    fewer = judge(traced(small(), steps, remote_tokens=5))
    assert fewer.wrong == 5
    assert fewer.unheld == 5


def test_blocks_that_were_filled_before() -> None:
    case = replace(small(), local_spans=(Span(1, [5]), Span(0, [2])))
    cached = (Span(0, [3]), Span(0, []))
    run = Step("transfer", 0, rows_of(*RUNS[1:]))
    assert judge(traced(case, [run])).outcome == "right"
    assert judge(traced(case, [run], cached=cached)).outcome == "right"
    same = Step("transfer", 0, rows_of(RUNS[0]))
    assert judge(traced(case, [run, same], cached=cached)).outcome == "right"
    other = Step("transfer", 0, rows_of((THERE + 5, HERE + 12, 1)))
    assert judge(traced(case, [run, other], cached=cached)).signature == ("wrong", "extra")
    # Without them D has nothing for the first tokens.
    found = judge(traced(case, [run], cached=(Span(0, []), Span(0, []))))
    assert [str(cause) for cause in found.causes] == [
        "missing: 4 bytes of fa/kv tokens 0 to 3: D has no block for them"
    ]


def test_blocks_of_one_pool() -> None:
    """Block 2 is the state's. No full layer uses it then, if all groups' blocks belong to one request."""
    steps = [Step("transfer", 0, rows_of(*RUNS, (THERE + 8, HERE + 8, 4)))]
    assert judge(traced(small(), steps)).signature == ("extra",)
    found = judge(traced(small(), steps, one_pool=True))
    assert (found.outcome, found.idle) == ("right", 4)


def test_a_refusal_is_no_verdict_on_bytes() -> None:
    found = judge(traced(small(), [], refusal="ValueError: no"))
    assert found == Judged("refused", refusal="ValueError: no")


def test_the_smallest_case_has_the_answer() -> None:
    steps = MUTANTS["another token"][0]
    case = answered(smallest(traced(small(), steps)).case)
    assert case.expect is not None
    assert case.expect.runs
    assert cases.check(case).outcome == "right"


# --- The format -----------------------------------------------------------------------------------------


def trace(steps: list[Step] | None = None) -> Trace:
    return trace_of(traced(small(), steps or [Step("transfer", 0, rows_of(*RUNS))]), "a test")


def test_round_trip(tmp_path: Path) -> None:
    for seed in SEEDS:
        case = as_case(generate(seed, draw(seed)), 0)
        one = trace_of(traced(case, steps_of(case), remote_tokens=case.num_tokens), "it")
        again = Trace.from_lines(one.to_lines())
        assert list(again.to_lines()) == list(one.to_lines())
        assert [found.outcome for _, found in audit(again)] == ["right"]
    path = tmp_path / "trace.jsonl"
    traces.save(trace(), path)
    assert list(traces.load(path).to_lines()) == list(trace().to_lines())


def test_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[2] / "conformance" / "trace.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    steps = [Step("rearrange", 0, rows_of((HERE, HERE, 1))), Step("zero", 0, rows_of((HERE, 1)))]
    whole = trace_of(traced(small(), [*trace().requests[0].steps[0], *steps], refusal="no"), "it")
    assert len(list(whole.to_lines())) == 6
    for line in whole.to_lines():
        validator.validate(json.loads(line))
    for line in ('{"zero": "r", "rank": 0, "rows": [[1]]}', '{"request": "r"}', "[]", '{"kvhma_trace": 2}'):
        assert not validator.is_valid(json.loads(line))


HEAD, REQUEST, *STEPS = trace().to_lines()
WRONG_LINES: list[tuple[list[str], str]] = [
    ([], "not a trace: the file is empty"),
    (["{"], "line 1: not JSON"),
    (["[]"], "line 1 is a list, not an object"),
    ([HEAD.replace('"kvhma_trace": 1', '"kvhma_trace": 2')], "kvhma_trace is 2, this build reads 1"),
    ([HEAD.replace('"one_pool": false', '"one_pool": 1')], "one_pool is an integer, not a boolean"),
    ([HEAD.replace('"kvhma": 1', '"kvhma": 9', 1)], "line 1: local[0]: "),
    (['{"kvhma_trace": 1, "local": [], "remote": []}'], "local has 0 ranks, has to have 1 to 64"),
    ([HEAD, "3"], "line 2 is an integer, not an object"),
    ([HEAD, STEPS[0]], "line 2: transfer: no request 'r' before this line"),
    ([HEAD, REQUEST, REQUEST], "line 3: request 'r' is given twice"),
    ([HEAD, REQUEST.replace('"num_tokens": 6', '"num_tokens": -6')], "num_tokens is -6, has to be 0 to 4294967296"),
    ([HEAD, REQUEST.replace("[3, 5]", "[3, 8]")], "a block id below 0 or from 8 on"),
    ([HEAD, REQUEST.replace('"ids"', '"blocks"')], "field 'ids' is missing"),
    ([HEAD, REQUEST, STEPS[0].replace('"rank": 0', '"rank": 1')], "line 3: rank is 1, there are 1"),
    ([HEAD, REQUEST, STEPS[0].replace('"source": 0', '"source": -1')], "line 3: source is -1, there are 1"),
    ([HEAD, REQUEST, '{"zero": "r", "rank": 0, "rows": [[1, 2, 3]]}'], "rows[0] has 3 numbers, expected 2"),
    ([HEAD, REQUEST, '{"zero": "r", "rank": 0, "rows": [[1, 2.5]]}'], "rows[0][1] is a float, not an integer"),
    ([HEAD, REQUEST, '{"nothing": 1}'], "has to be one of request, transfer"),
    ([HEAD, REQUEST, '{"refuse": "r", "rank": 0, "error": 3}'], "error is an integer, not a string"),
    ([HEAD, REQUEST, '{"zero": "r", "zero": "r", "rank": 0, "rows": []}'], "a field is given twice"),
]


@pytest.mark.parametrize(("lines", "text"), WRONG_LINES, ids=[text[:40] for _, text in WRONG_LINES])
def test_invalid_traces(lines: list[str], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as info:
        Trace.from_lines(lines)
    assert text in str(info.value)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    done = cli("audit", path)
    assert done.code == 2
    (line,) = done.out.splitlines()
    assert line.startswith("unreadable")


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 1 << 31},
        {"num_tokens": 1 << 62},
        {"remote_tokens": 1 << 61},
        {"local_spans": [{"first": 0, "ids": [3] * 4_200_000}, {"first": 0, "ids": [2]}]},
        {"local_spans": [{"first": 1 << 31, "ids": [3]}, {"first": 0, "ids": [2]}]},
    ],
)
def test_traces_that_are_too_large(change: dict[str, object]) -> None:
    lines = [HEAD, json.dumps(json.loads(REQUEST) | change), *STEPS]
    with pytest.raises(RequestError):
        audit(Trace.from_lines(lines))


def test_steps_that_are_too_large() -> None:
    rows = [[THERE, HERE, 1 << 61]] * 3
    lines = [HEAD, REQUEST, json.dumps({"transfer": "r", "rank": 0, "source": 0, "rows": rows})]
    with pytest.raises(RequestError, match="a step of more than"):
        audit(Trace.from_lines(lines))


def test_spoiled_files_raise_nothing_else() -> None:
    data = "\n".join(trace().to_lines()).encode()
    rng = random.Random(1)
    verdicts: Counter[str] = Counter()
    for _ in range(600):
        spoiled = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            digits = [at for at, byte in enumerate(spoiled) if chr(byte).isdecimal()]
            spoiled[rng.choice(digits)] = rng.choice(b"0123456789" * 9 + b'{}[]",:-e. \x00\xff')
        try:
            verdicts.update(found.outcome for _, found in audit(Trace.from_lines(bytes(spoiled).split(b"\n"))))
        except RequestError:
            verdicts["unreadable"] += 1
    assert min(verdicts["unreadable"], verdicts["right"], verdicts["wrong"]) > 10, verdicts


def test_files_without_an_end() -> None:
    with pytest.raises(RequestError, match="more than 67108864 bytes"):
        traces.load(Path("/dev/zero"))


# --- The command ----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.jsonl"
    traces.save(trace(), right)
    traces.save(trace(MUTANTS["another token"][0]), wrong)
    assert cli("audit", right).out == f"right      {right} r D0: 3 descriptors, 10 B; kvhma 3, 10 B\n"
    assert cli("audit", "-q", right).out == ""
    small_case, small_trace = (tmp_path / name for name in ("case.json", "small.jsonl"))
    done = cli("audit", right, wrong, "--case", small_case, "--trace", small_trace)
    assert done.code == 1
    assert "wrong: 4 bytes of fa/kv tokens 0 to 3: they hold other tokens" in done.words
    assert cases.check(cases.load(small_case)).outcome == "right"
    assert cli("audit", small_trace).code == 1
    form = cli("audit", "--json", right, wrong).form
    assert form["verdict"] == "wrong"
    assert [row["verdict"] for row in form["results"]] == ["right", "wrong"]
    assert form["results"][1]["causes"][0]["bytes"] == 4


def test_a_refusal_of_the_connector(tmp_path: Path) -> None:
    path = tmp_path / "refused.jsonl"
    traces.save(trace_of(traced(small(), [], refusal="RuntimeError: no\x1b[31m")), path)
    done = cli("audit", path)
    assert done.code == 2
    assert done.out == f"refused    {path} r D0: RuntimeError: no\\x1b[31m\n"


def test_what_the_command_refuses(tmp_path: Path) -> None:
    assert "does not exist" in refused("audit", tmp_path / "none.jsonl")
