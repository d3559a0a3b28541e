# SPDX-License-Identifier: Apache-2.0
"""Clients and peers cannot write lines of their choice, or control characters, to the log of an engine."""

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvhma.vllm
from support.tries import TRIES

FORGED = "request\n\x1b[31mERROR 01-01 00:00:00 [core.py:1] forged\u2028\x85\x00"
NAMES = ("vllm.kvhma", "vllm.kvhma.peers")


class Lines(logging.Handler):
    """What a handler writes."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(self.format(record))


@pytest.fixture(params=NAMES)
def log(request, monkeypatch):
    logger, lines = logging.getLogger(request.param), Lines()
    logger.addHandler(lines)
    yield logger, lines.texts
    logger.removeHandler(lines)


def test_the_connector_has_no_other_loggers():
    """What holds for these two loggers holds for every line, so no line has to take care of its texts."""
    folder, found = Path(kvhma.vllm.__file__).parent, []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                found.append(ast.unparse(node.args[0]))
    assert set(found) == {repr(name) for name in NAMES}


def test_the_loggers_are_protected_before_any_module_uses_them():
    code = f"import logging, kvhma.vllm.counters; print([len(logging.getLogger(name).filters) for name in {NAMES}])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[1, 1]\n"


@given(value=st.text() | st.builds(ValueError, st.text()) | st.dictionaries(st.text(), st.text()) | st.binary())
@settings(max_examples=100 * TRIES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@pytest.mark.parametrize("form", ["%s", "%r", "%20s"])
@pytest.mark.parametrize("name", NAMES)
def test_any_value_is_printed_in_one_line(name, form, value):
    record = logging.LogRecord(name, logging.WARNING, "file", 1, f"kvhma: request {form}: %d", (value, 7), None)
    (protecting,) = logging.getLogger(name).filters
    assume(protecting.filter(record))  # a peer has few lines
    assert record.getMessage().isprintable()
    # A line after many that were left out counts them.
    assert re.search(r": 7( \(and \d+ like it\))?$", record.getMessage())


def test_a_forged_line_is_part_of_the_line_that_has_it(log):
    logger, written = log
    logger.warning("kvhma: request %s failed: %s", FORGED, ValueError(FORGED))
    (line,) = written
    assert line.isprintable()
    assert line.count("forged") == 2


def test_a_long_text_hides_nothing_after_it(log):
    logger, written = log
    logger.warning("kvhma: request %s (%r) failed: %s", "x" * 1_000_000, ["y" * 1_000_000], "reason")
    (line,) = written
    assert line.endswith("failed: reason")
    assert len(line) < 5000


def test_no_line_of_a_traceback_looks_like_one_of_the_log(log):
    logger, written = log
    try:
        raise ValueError(FORGED + "\n" * 1000)
    except ValueError:
        logger.exception("kvhma: internal error of %s", FORGED)
    first, *others = written[0].split("\n")
    assert first.isprintable()
    assert any("forged" in line for line in others)
    assert all(line.startswith("| ") and line.isprintable() for line in others)
    assert len(others) <= 201
    assert not any(letter in written[0] for letter in "\r\x1b\x85\u2028")


def test_a_long_traceback_ends_with_the_error(log):
    logger, written = log

    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("the reason")
        try:
            fall(depth - 1)
        except ValueError as error:
            raise ValueError(f"at {depth}") from error

    try:
        fall(60)
    except ValueError:
        logger.exception("kvhma: internal error")
    lines = written[0].split("\n")
    assert len(lines) == 202
    assert any(line.startswith("| ... ") and line.endswith(" lines left out") for line in lines)
    assert lines[-1] == "| ValueError: at 60"
