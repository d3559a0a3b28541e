# SPDX-License-Identifier: Apache-2.0
"""The page of test runs: made from the record alone, by a mapping whose tests exist."""

from __future__ import annotations

import pytest

from support.programs import program

features = program("tools/features.py")
compatibility = program("tools/compatibility.py")
Feature = features.Feature
ALL = [one for some in features.FEATURES.values() for one in some]
TESTS = sorted({test for one in ALL for proof in features.PROOFS for test in getattr(one, proof)})

OF = {"vllm": None, "nixl": "1.5.1", "on": "CPU, x86_64"}
RUN = "vLLM none, NIXL 1.5.1, CPU, x86_64"
REPORT = """<testsuites><testsuite timestamp="2026-01-02T03:04:05">
<testcase classname="tests.nixl.test_axes" name="test_axis[a]"/>
<testcase classname="tests.nixl.test_axes.TestX" name="test_axis[b]"><skipped/></testcase>
<testcase classname="tests.nixl.test_models" name="test_model[a]"/>
<testcase classname="tests.nixl.test_models" name="test_model[b]"><failure/></testcase>

<testcase classname="tests.e2e.test_http" name="test_the_proxy[a]"><error/></testcase>
<testcase classname="tests.e2e.test_http" name="test_the_proxy[b]"><skipped/></testcase>
<testcase classname="tests.e2e.test_http" name="test_the_proxy[c]"><skipped message="no bridge"/></testcase>
<testcase classname="tests.nixl.test_axes" name="test_that_is_gone"/>
<testcase classname="tests.unit.test_plan" name="test_e"/></testsuite></testsuites>"""
READ = {
    "nixl/test_axes.py::test_axis": ("passed", "2026-01-02"),
    "nixl/test_models.py::test_model": ("failed", "2026-01-02"),
    "e2e/test_http.py::test_the_proxy[a]": ("failed", "2026-01-02"),
    "e2e/test_http.py::test_the_proxy[b]": ("skipped", "2026-01-02"),
    "e2e/test_http.py::test_the_proxy[c]": ("skipped", "2026-01-02", "no bridge"),
    "nixl/test_axes.py::test_that_is_gone": ("passed", "2026-01-02"),
}


@pytest.mark.parametrize("test", TESTS)
def test_each_named_test_exists(test):
    assert compatibility.exists(test)
    assert "[" not in test or test.startswith("e2e/"), "only results of real engines are kept by parameters"


def test_the_page_is_made_of_the_record():
    page = compatibility.PAGE.read_text(encoding="utf-8")
    record = compatibility.RECORD.read_text(encoding="utf-8")
    assert compatibility.filled(page, compatibility.load(record)) == page, "make compatibility"
    assert compatibility.dump(compatibility.load(record)) == record
    assert len(page.splitlines()) < 100, "one screen"


def test_a_report_is_read(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert compatibility.read_report(tmp_path / "report.xml") == READ


def test_results_are_replaced_kept_and_dropped():
    old = {
        RUN: {"nixl/test_axes.py::test_axis": ("failed", "2026-01-01"), "nixl/gone.py::test_x": ("passed", "2026")},
        "vLLM 1": {"e2e/test_http.py::test_the_proxy[a]": ("passed", "2026-01-01")},
    }
    record = compatibility.merged(old, compatibility.run_name(OF), READ)
    assert record[RUN] == {test: result for test, result in sorted(READ.items()) if "gone" not in test}
    assert record["vLLM 1"] == old["vLLM 1"]
    assert compatibility.merged(record, RUN, READ) == record
    assert compatibility.load(compatibility.dump(record)) == record


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({}, "–"),
        ({"e2e/a.py::f[x]": "passed", "b.py::g": "passed"}, "engine"),
        ({"e2e/a.py::f[y]": "passed", "b.py::g": "passed"}, "imitation"),
        ({"e2e/a.py::f[x]": "skipped", "b.py::g": "passed"}, "imitation"),
        ({"e2e/a.py::f[x]": "failed", "b.py::g": "passed"}, "**engine failed**"),
        ({"c.py::h": "passed", "b.py::gg": "passed"}, "refused"),
    ],
)
def test_the_strongest_proof_counts(results, expected):
    one = Feature("a", ("e2e/a.py::f[x*]",), (), ("b.py::g",), ("c.py::h",))
    assert compatibility.proof(one, {test: (result, "") for test, result in results.items()}) == expected


@pytest.mark.parametrize(
    ("pattern", "test", "expected"),
    [
        ("a.py::f", "a.py::f", True),
        ("a.py::f", "a.py::f[x]", True),
        ("a.py::f", "a.py::ff", False),
        ("a.py::f[x]", "a.py::f[x]", True),
        ("a.py::f[x]", "a.py::f[x-1]", False),
        ("a.py::f[x*]", "a.py::f[x-1]", True),
        ("a.py::f[x]", "a.py::f", False),
    ],
)
def test_which_tests_are_meant(pattern, test, expected):
    assert compatibility.matches(pattern, test) is expected
