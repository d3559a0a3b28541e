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

_CONNECTOR = re.compile(r"^# What was audited: (\w+ of vLLM [\d.]+)$", re.MULTILINE)
_REQUEST = re.compile(r"`(hit\d+/\d+)`")
_ROW = re.compile(r"^\| `([\w/-]+)` \| (.*) \|$", re.MULTILINE)


def results(name: str) -> tuple[str, dict[str, str]]:
    """The connector of a file, and the verdict of each row."""
    head, _, rows = (ROOT / f"benches/audit/{name}.md").read_text(encoding="utf-8").partition("## All rows")
    connector = _CONNECTOR.search(head)
    blocks = re.search(r"^\| \| (.*) \|$", rows, re.MULTILINE)
    assert connector is not None, name
    assert blocks is not None, name
    requests, found = _REQUEST.findall(rows), {}
    for engines, cells in _ROW.findall(rows):
        for block, cell in zip(blocks[1].split(" | "), cells.split(" | "), strict=True):
            # Models with states have no prefix hits.
            asked = [one for one in requests if block != "block" or one.startswith("hit0/")]
            verdicts = cell.strip().split(" / ")
            if verdicts != [""]:
                verdicts *= len(asked) // len(verdicts)
                found |= {f"{engines}/{block}/{one}": each for one, each in zip(asked, verdicts, strict=True)}
    return connector[1], found


def table() -> str:
    """Return the number of rows by connector and verdict, as Markdown."""
    lines = [
        "| connector | moves | hand-offs | right | wrong | refused | every row |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, how in HOW.items():
        connector, rows = results(name)
        counts = Counter(rows.values())
        numbers = " | ".join(str(counts[verdict]) for verdict in ("right", "wrong", "refused"))
        link = f"[{name}.md](https://github.com/kvhma/kvhma/blob/main/benches/audit/{name}.md)"
        lines.append(f"| {connector} | {how} | {counts.total()} | {numbers} | {link} |")
    return "\n".join(lines)


_KINDS_IN_ENGINES = re.compile(r"/303$|^gemma4/tp1-2/|^nemotron_h/tp(?!(\d)-\1)")
"""Rows of the kinds of tests/e2e/test_audit_kinds.py: a window, gemma-4's global head, Mamba2's groups."""


def confirmed() -> str:
    """Say how many rows of NixlConnector with equal blocks are wrong: only their kinds were run in engines.

    Raises:
        ValueError: a wrong row is of another kind.
    """
    rows = dict(one for one in results("results")[1].items() if not re.search(r"/block(\d+)-(?!\1/)", one[0]))
    for row, verdict in rows.items():
        if verdict == "wrong" and not _KINDS_IN_ENGINES.search(row):
            raise ValueError(f"no engine has run the kind of {row}")
    counts = Counter(rows.values())
    text = f"With equal blocks `NixlConnector` refuses {counts['refused']} of {counts.total()} hand-offs, and "
    return text + f"{counts['wrong']} are wrong. Real engines confirm each\nkind of these."


def filled(page: str) -> str:
    """Return the page with the table and the sentence of today.

    Raises:
        ValueError: it has no place for the table.
    """
    return MARKS.filled(page, f"\n{table()}\n\n{confirmed()}\n")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
