# SPDX-License-Identifier: Apache-2.0
"""List the tests that no run has run, by what they need.

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
    """Print a line for each reason, with its file or their number."""
    found = skipped(map(Path, reports))
    print(f"{sum(found.values())} tests were skipped" + (":" if found else ""))
    for reason in sorted({reason for reason, _ in found}):
        counts = {module: count for (why, module), count in found.items() if why == reason}
        where = f"{len(counts)} files" if len(counts) > 1 else f"{min(counts).replace('.', '/')}.py"
        print(f"{sum(counts.values()):>5}  {where}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
