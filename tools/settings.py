# SPDX-License-Identifier: Apache-2.0
"""The table of the connector's settings in docs/vllm.md, made of the rows of kvhma.vllm.settings.

python tools/settings.py    # writes the table of the page anew
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvhma.vllm.settings import rows

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
BEGIN, END = "<!-- settings: made by tools/settings.py -->", "<!-- end of settings -->"


def table() -> str:
    """Return the settings as Markdown."""
    lines = ["| setting | default | values | |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {row.shown} | {row.kind.expected} | {row.meaning} |" for name, row in rows().items()]
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with the table of today.

    Raises:
        ValueError: it has no place for the table.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE.name} has no line {BEGIN} or {END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the page anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
