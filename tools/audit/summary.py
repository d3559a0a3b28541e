# SPDX-License-Identifier: Apache-2.0
"""The table of docs/audit-results.md and its sentence, counted from the rows that `make audit` wrote to benches/audit.

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
_ROW = re.compile(r"^\| `([\w/-]+)` \| ([a-z ]+) \|", re.MULTILINE)


def rows(name: str) -> dict[str, str]:
    """The verdict of each row of a file."""
    text = (ROOT / f"benches/audit/{name}.md").read_text(encoding="utf-8")
    return dict(_ROW.findall(text.partition("## All rows")[2]))


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
        counts = Counter(rows(name).values())
        numbers = " | ".join(str(counts[verdict]) for verdict in ("right", "wrong", "refused"))
        link = f"[{name}.md](https://github.com/kvhma/kvhma/blob/main/benches/audit/{name}.md)"
        lines.append(f"| {connector[1]} | {how} | {counts.total()} | {numbers} | {link} |")
    return "\n".join(lines)


def confirmed() -> str:
    """Say how many wrong rows of NixlConnector are of kinds that tests/e2e/test_audit_kinds.py shows in engines.

    Rows of the other kind are right without D's prefix hit.
    """
    of = rows("results")
    wrong = [row for row, verdict in of.items() if verdict == "wrong"]
    hit = [row for row in wrong if "hit0" not in row and of[re.sub("hit[0-9]+", "hit0", row)] == "right"]
    text = f"Real engines confirm the kinds of {len(wrong) - len(hit)} of the {len(wrong)} wrong hand-offs of"
    return f"{text} `NixlConnector`. The other {len(hit)} are wrong only because D\nhas part of the prompt."


def filled(page: str) -> str:
    """Return the page with the table and the sentence of today.

    Raises:
        ValueError: it has no place for the table.
    """
    return MARKS.filled(page, f"\n{table()}\n\n{confirmed()}\n")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
