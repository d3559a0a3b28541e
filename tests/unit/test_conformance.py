# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: its cases follow from the bytes, it catches wrong planners, and other projects can run it."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from conformance.__main__ import runner
from conformance.mutants import QUESTIONS, SPOILS, answer, mutant
from conformance.suite import FILE, FOLDER, entries
from kvhma.oracle import Oracle
from kvhma.oracle.cases import Case
from support import reference

ROOT = Path(__file__).parents[2]
kit = runner()
HEADER, CASES = kit.load(FILE)
BY_ID = {entry["id"]: entry for entry in CASES}
ANSWERED = [entry for entry in CASES if "runs" in entry["expect"]]


def case_of(entry):
    return Case.from_json(json.dumps(entry["case"]))


@pytest.fixture(scope="module")
def wanted():
    """Labelled memory of every case that has an answer."""
    return {entry["id"]: kit.expected(entry) for entry in ANSWERED}


def judged(wanted, rows_of, rules=kit.EXACT):
    """Return the verdicts that are not right, by case."""
    found = {e["id"]: kit.judge(e, rows_of(e), rules, wanted.get(e["id"])) for e in CASES}
    return {name: verdict for name, verdict in found.items() if verdict.outcome != "right"}


# --- The cases ------------------------------------------------------------------------------------------


def test_the_file_equals_the_generated_cases():
    made = []
    for entry in entries():
        if "runs" in entry["expect"]:
            entry["expect"]["digest"] = BY_ID.get(entry["id"], entry)["expect"].get("digest")
        made.append(entry)
    same = made == CASES
    assert same, "run `make conformance`"
    assert {"kvhma_conformance": kit.VERSION, "cases": len(made)} == HEADER


def test_cases_are_what_they_say(wanted):
    faults = {entry["id"]: kit.verify(entry, wanted.get(entry["id"])) for entry in CASES}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_the_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FOLDER / "case.schema.json").read_text())
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    whole, case = validator(schema), validator({**schema, "oneOf": [{"$ref": "#/$defs/case"}]})
    whole.validate(HEADER)
    for entry in CASES[::5]:
        whole.validate(entry)
        case.validate(json.loads(case_of(entry).to_json()))
    page = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    documented = json.loads(page.split("```json\n")[1].split("```")[0])
    case.validate(documented)
    for wrong in ({**documented, "kvhma_case": 2}, {**documented, "more": 1}, {**documented, "expect": {}}):
        assert not case.is_valid(wrong)


# --- Who agrees -----------------------------------------------------------------------------------------


def test_kvhma_agrees(wanted):
    sys.path.insert(0, str(FOLDER))
    try:
        import kvhma_adapter
    finally:
        sys.path.remove(str(FOLDER))
    strict = kit.Rules(codes=True, complete=True)
    assert judged(wanted, lambda entry: kvhma_adapter.answer(entry["case"]), strict) == {}


def test_blocks_that_are_moved_whole_are_right_too(wanted):
    def rows(entry):
        return kvhma_rows({**entry["case"], "descriptor_bytes": 1 << 20})

    assert judged(wanted, rows) == {}
    other = [entry for entry in ANSWERED if rows(entry) != kvhma_rows(entry["case"] | {"descriptor_bytes": 0})]
    assert len(other) > 10, "freedom that no planner uses is not tested"


def test_unread_bytes_may_be_copied_or_zero(wanted):
    def rows(entry, free):
        expect = entry["expect"]
        copies = [*expect["runs"], *(expect["either"] if free else [])]
        zero = expect["zero"] + [[to, size] for _, _, to, size in expect["either"] if not free]
        found = [{"source": s, "from": start, "to": to, "bytes": size} for s, start, to, size in copies]
        return [*found, *({"zero": at, "bytes": size} for at, size in zero)]

    for entry in ANSWERED:
        for free in (False, True):
            assert kit.judge(entry, rows(entry, free), kit.EXACT, wanted[entry["id"]]).outcome == "right", entry["id"]
    assert sum(bool(entry["expect"]["either"]) for entry in ANSWERED) > 200


def kvhma_rows(form):
    return answer(Case.from_json(json.dumps(form)), descriptor_bytes=form["descriptor_bytes"])


def table(rows, geometry):
    """Address and length, with the device of the region."""

    def device(address):
        return next(r.device for r in geometry.regions if r.base <= address < r.base + r.bytes)

    return np.array([(at, size, device(at)) for at, size in rows], np.uint64).reshape(-1, 3)


def test_the_oracle_agrees():
    for entry in ANSWERED:
        case, expect = case_of(entry), entry["expect"]
        reads = []
        for source in sorted({run[0] for run in expect["runs"]}):
            rows = [(to, start, size) for s, start, to, size in expect["runs"] if s == source]
            local = table([(to, size) for to, _, size in rows], case.local)
            remote = table([(start, size) for _, start, size in rows], case.remotes[source])
            reads.append(reference.Read(source, local, remote))
        free = [(to, size) for _, _, to, size in expect["either"]]
        zero = table([*map(tuple, expect["zero"]), *free], case.local)
        transfer = reference.Transfer(tuple(reads), zero)
        Oracle(case.local, case.remotes).check(case.num_tokens, case.local_spans, case.remote_spans, transfer)


def test_the_plain_reference_agrees(wanted):
    for entry in ANSWERED[::8]:
        case = case_of(entry)
        found = reference.transfer(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
        rows = [{"zero": at, "bytes": size} for at, size, _ in found.zero.tolist()]
        for read in found.reads:
            pairs = zip(read.local.tolist(), read.remote.tolist(), strict=True)
            rows += [{"source": read.source, "from": b[0], "to": a[0], "bytes": a[1]} for a, b in pairs]
        assert kit.judge(entry, rows, kit.EXACT, wanted[entry["id"]]).outcome == "right", entry["id"]


def test_no_planner_needs_fewer_than_the_fewest():
    for entry in ANSWERED:
        copies = sum("source" in row for row in kvhma_rows(entry["case"] | {"descriptor_bytes": 0}))
        assert copies >= entry["expect"]["fewest"], entry["id"]


# --- Who does not ---------------------------------------------------------------------------------------


def test_every_mutant_is_caught_and_every_case_catches_one(wanted):
    caught = defaultdict(int)
    idle = []
    for entry in CASES:
        case, want = case_of(entry), wanted.get(entry["id"])
        # Questions that caught nothing come first. Once a case has caught one, others are tried only if never caught.
        questions = sorted(QUESTIONS, key=lambda name: caught[name]) if want else ["nothing refused"]
        done = False
        for name in [*questions, *SPOILS]:
            if done and caught[name]:
                continue
            rows = mutant(name, case)
            if rows is not None and kit.judge(entry, rows, kit.EXACT, want).outcome == "wrong":
                caught[name] += 1
                done = done or name in questions
        if not done:
            idle.append(entry["id"])
    assert [name for name in (*QUESTIONS, *SPOILS) if not caught[name]] == []
    assert idle == []


def test_errors_are_named(wanted):
    entry = BY_ID["lengths-04"]  # 5 tokens, blocks of 4: tokens 5 to 7 are zeroed
    right = answer(case_of(entry))
    copies = [row for row in right if "source" in row]

    def said(rows, **rules):
        return kit.judge(entry, rows, kit.Rules(**rules), wanted[entry["id"]])

    assert said(right) == kit.Verdict("right", "", len(copies))
    assert said([*reversed(right)]).outcome == "right"
    place = r"region \d at \d+ \(model.layers.0.full/kv token 5 content=0 heads=0 byte 0 in block \d\)"
    text = said(copies).text
    wrong = rf"96 bytes not zeroed, the first: {place}\n  expected zero\n  found    what was there before"
    assert re.fullmatch(wrong, text)
    assert said(copies, needed=True).outcome == "right"
    lost = said([row for row in right if row is not copies[0]]).text
    wrong = r"128 bytes missing, .* token 0 .*\n  expected source 0, .* token 0 .*\n  found    what was there before"
    assert re.fullmatch(wrong, lost)
    shifted = said([{**row, "from": row["from"] + 2} if row is copies[0] else row for row in right]).text
    wrong = r"128 bytes wrong, .* content=0 heads=0 .*\n  expected .* content=0 .*\n  found .* content=1 .*"
    assert re.fullmatch(wrong, shifted)
    more = [*right, {**copies[1], "to": case_of(entry).local.regions[0].base}]
    assert re.match(r"\d+ bytes extra, the first: region 0 at 0 \(.* not of the request ", said(more).text)
    both = [*right, {**copies[0], "from": copies[0]["from"] + 2}]
    assert said(both).text == "two copies write other bytes to one place"
    for row, words in (
        ({"source": 3, "from": 0, "to": 0, "bytes": 1}, "AnswerError: source 3 of 1"),
        ({"source": 0, "from": 0, "to": 0, "bytes": 1}, "AnswerError: 1 bytes at 0 are not inside one region"),
        ({"zero": 5, "bytes": 0}, "AnswerError: 0 bytes at 5"),
        ({"zero": "5", "bytes": 1}, "TypeError"),
        ({"from": 5}, "KeyError: 'bytes'"),
    ):
        assert said([*right, row]).text.startswith(words)
    assert said([{"refuse": "too hard"}]) == kit.Verdict("refused", "refused: too hard")
    assert said([{"refuse": "too hard"}], complete=True).outcome == "wrong"


def test_refusals():
    entry = BY_ID["refused-pair-01"]
    assert kit.judge(entry, []).text == "has to be refused: dtype"
    assert kit.judge(entry, [{"refuse": "other"}]).outcome == "right"
    assert kit.judge(entry, [{"refuse": "other"}], kit.Rules(codes=True)).text == "refused with 'other', not 'dtype'"
    assert kit.judge(entry, [{"refuse": "dtype"}], kit.Rules(codes=True)).outcome == "right"


# --- The runner -----------------------------------------------------------------------------------------


def test_the_runner_needs_nothing():
    """Not even the packages of this environment."""
    command = [sys.executable, "-I", "-S", str(FOLDER / "runner.py"), "--list", "--id", "tp-01"]
    assert "tp-01" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_command_and_a_report(tmp_path, capsys):
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(FOLDER / 'kvhma_adapter.py'))}"
    ids = ["--id", "tp-01", "--id", "refused-pair-01"]
    assert kit.main(["--command", command, *ids, "--codes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "2", "2", "0", "0", "8", "8"]
    assert kit.main(["--command", "cat > /dev/null", *ids, "--junit", str(tmp_path / "junit.xml")]) == 1
    out = capsys.readouterr().out
    assert "WRONG tp-01 (D 1 ranks, P 1, rank 0 of D)\n" in out
    assert "bytes missing, the first: " in out
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    assert suite.attrib == {"name": "kvhma conformance", "tests": "2", "failures": "2", "skipped": "0"}
    assert [test.attrib for test in suite] == [
        {"classname": "tp", "name": "tp-01"},
        {"classname": "refused-pair", "name": "refused-pair-01"},
    ]
    for words, text in (("false", "exit code 1"), ("echo no", "not JSON lines"), ("sleep 5", "no answer in 0.2 s")):
        assert kit.main(["--command", words, "--id", "tp-01", "--timeout", "0.2"]) == 1
        assert text in capsys.readouterr().out


def test_refused_cases_are_counted(capsys, tmp_path):
    refuse = """echo '{"refuse": "no"}'"""
    words = ["--command", refuse, "--id", "tp-01", "--junit", str(tmp_path / "junit.xml")]
    assert kit.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "1", "0", "1", "0", "0", "0"]
    assert ET.parse(tmp_path / "junit.xml").getroot().attrib["skipped"] == "1"
    assert kit.main([*words, "--complete"]) == 1


def test_options_without_a_planner(capsys, tmp_path):
    assert kit.main(["--list", "--axis", "latent"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum(entry["axis"] == "latent" for entry in CASES)
    assert kit.main(["--show", "--id", "tp-01"]) == 0
    assert json.loads(capsys.readouterr().out) == BY_ID["tp-01"]
    spoiled = json.loads(json.dumps(BY_ID["tp-01"]))
    spoiled["expect"]["runs"][0][1] += 1
    path = tmp_path / "spoiled.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"kvhma_conformance": "1.7", "cases": 1}, spoiled])))
    assert kit.main(["--verify", "--cases", str(path)]) == 1
    assert capsys.readouterr().out == "tp-01: the digest is another one\n"
    spoiled["expect"]["digest"] = kit.digests(kit.expected(spoiled).after)
    assert kit.verify(spoiled).startswith("a run brings source 0, ")


def test_what_cannot_be_run(capsys, tmp_path):
    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(gzip.compress(b'{"kvhma_conformance": "2.0", "cases": 0}\n'))
    for words in (["--cases", str(other)], ["--cases", str(tmp_path / "none")], ["--id", "tp-99"], ["--axis", "none"]):
        assert kit.main(["--list", *words]) == 2
    for name in ("no_such_module:f", "json:no_such_function"):
        assert kit.main(["--python", name, "--id", "tp-01"]) == 2
    assert kit.main(["--python", "json:dumps", "--id", "tp-01"]) == 1
    assert "no such case" in capsys.readouterr().err


# --- The page -------------------------------------------------------------------------------------------


def test_real_bytes_have_the_same_digest(wanted):
    """The real transfer that docs/conformance.md describes, done with bytes: fill, copy, zero what is free, hash."""
    for entry in ANSWERED[::9]:
        want, expect = wanted[entry["id"]], entry["expect"]
        narrow = [bytearray(value % 255 + 1 for value in m.labels) for m in (want.before, *want.sources)]
        local = narrow[0]
        free = [{"zero": to, "bytes": size} for _, _, to, size in expect["either"]]
        for row in [*answer(case_of(entry)), *free]:
            at, size = want.before.locate(row.get("to", row.get("zero")), row["bytes"]), row["bytes"]
            local[at : at + size] = bytes(size)
            if "source" in row:
                start = want.sources[row["source"]].locate(row["from"], size)
                local[at : at + size] = narrow[row["source"] + 1][start : start + size]
        assert hashlib.sha256(local).hexdigest() == expect["digest"]["bytes"], entry["id"]
