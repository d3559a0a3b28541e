# SPDX-License-Identifier: Apache-2.0
"""The table of docs/audit-results.md, counted from the rows that `make audit` has written into benches/audit.

PYTHONPATH=tools python -m audit.summary
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from marks import Marks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "audit-results.md"
MARKS = Marks(PAGE.name, "<!-- audit: made by tools/audit/summary.py -->", "<!-- end of audit -->")
HOW = {"results": "D reads", "results-push": "P writes", "results-mooncake": "P writes"}
"""The files of connectors, and who moves the bytes."""

_CONNECTOR = re.compile(r"^# What was audited: (\w+ of vLLM [\d.]+)$", re.MULTILINE)
_ROW = re.compile(r"^\| `[\w/-]+` \| ([a-z ]+) \|", re.MULTILINE)


def table() -> str:
    """Return the number of rows by connector and verdict, as Markdown."""
    lines = [
        "| connector | moves | hand-offs | right | wrong | refused | every row |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, how in HOW.items():
        text = (ROOT / f"benches/audit/{name}.md").read_text(encoding="utf-8")
        connector = _CONNECTOR.search(text)
        assert connector is not None, name
        counts = Counter(_ROW.findall(text.partition("## All rows")[2]))
        numbers = " | ".join(str(counts[verdict]) for verdict in ("right", "wrong", "refused"))
        link = f"[{name}.md](https://github.com/kvhma/kvhma/blob/main/benches/audit/{name}.md)"
        lines.append(f"| {connector[1]} | {how} | {counts.total()} | {numbers} | {link} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with the table of today.

    Raises:
        ValueError: it has no place for the table.
    """
    return MARKS.filled(page, f"\n{table()}\n")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
