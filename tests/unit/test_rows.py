# SPDX-License-Identifier: Apache-2.0
"""A stopped run continues where it stopped: it skips tests that passed, and repeats failed or changed ones."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFTEST = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from support.rows import Rows

def pytest_addoption(parser):
    parser.addoption("--sources")

def pytest_configure(config):
    config.pluginmanager.register(Rows(Path("rows"), config.getoption("sources"), again=bool(config.option.keyword)))
"""
TESTS = """
import os
import pytest
from pathlib import Path

@pytest.mark.parametrize("name", ["good", "bad", "lacking", "last"])
def test_row(name):
    with Path("ran").open("a") as ran:
        ran.write(name + " ")
    if name == "lacking":
        pytest.skip("no such kernel")
    if name == "last" and os.environ.get("STOPPED"):
        os._exit(9)
    assert name != "bad" or Path("repaired").exists()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the tests, or those named; return the exit status, which ones ran, and what was printed."""
    folder = tmp_path / "tests" / "e2e"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(HERE.parent)))
    (folder / "test_rows.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*arguments, sources="1", stopped=""):
        monkeypatch.setenv("STOPPED", stopped)
        ran = tmp_path / "ran"
        ran.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--sources", sources, *arguments]
        ended = subprocess.run([*command, "tests/e2e"], cwd=tmp_path, capture_output=True, text=True, check=False)
        return ended.returncode, ran.read_text().split(), ended.stdout

    return run


def test_a_stopped_run_continues(run, tmp_path):
    assert run(stopped="yes")[:2] == (9, ["good", "bad", "lacking", "last"])
    assert run()[:2] == (1, ["bad", "last"])
    (tmp_path / "repaired").touch()
    assert run()[:2] == (0, ["bad"])
    status, ran, said = run()
    assert (status, ran) == (0, [])
    assert "4 ended before, with these sources: test_row[good], " in said


def test_named_and_changed_tests_run_again(run, tmp_path):
    (tmp_path / "repaired").touch()
    rows = ["good", "bad", "lacking", "last"]
    assert run()[:2] == (0, rows)
    assert run("-k", "good")[:2] == (0, ["good"])
    assert run(sources="2")[:2] == (0, rows)
    assert run(sources="2")[:2] == (0, [])
    file = tmp_path / "tests" / "e2e" / "test_rows.py"
    file.write_text(file.read_text() + "\n")
    assert run(sources="2")[:2] == (0, rows)


def test_a_report_for_each(run, tmp_path):
    run()
    found = {}
    for path in (tmp_path / "rows").iterdir():
        (suite,) = ET.parse(path).getroot()
        assert len(suite.get("timestamp")) > 10
        case = suite.find("testcase")
        assert case.get("classname") == "tests.e2e.test_rows"
        found[path.name] = (case.get("name"), [(child.tag, child.get("message")) for child in case])
    assert found == {
        "test_row-good.xml": ("test_row[good]", []),
        "test_row-last.xml": ("test_row[last]", []),
        "test_row-bad.xml": ("test_row[bad]", [("failure", None)]),
        "test_row-lacking.xml": ("test_row[lacking]", [("skipped", "no such kernel")]),
    }
