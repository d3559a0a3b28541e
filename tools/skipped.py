#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""List the tests that no run has run, and what each of them needs.

    python tools/skipped.py .reports/none/test.xml .reports/0.32.0/smoke/*.xml

The files are reports of pytest's --junitxml. Tests that one run skips and another runs are not listed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def skipped(reports: Iterable[Path]) -> Counter[tuple[str, str]]:
    """Return how many tests were skipped and never run, by reason and file."""
    run: set[str] = set()
    found: dict[str, tuple[str, str]] = {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            reason = case.find("skipped")
            if reason is None:
                run |= {module, f"{module}::{name}"}
            elif module:
                found[f"{module}::{name}"] = reason.get("message", ""), module
            else:  # a file whose imports are missing counts as one test without a file
                found[name] = (reason.text or "").rpartition("Skipped: ")[2].removesuffix("')"), name
    return Counter(why for test, why in found.items() if test not in run)


def main(reports: list[str]) -> int:
    """Print a line for each reason and file."""
    found = skipped(map(Path, reports))
    print(f"{sum(found.values())} tests were skipped" + (":" if found else ""))
    for (reason, module), count in sorted(found.items()):
        print(f"{count:>5}  {module.replace('.', '/')}.py: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
