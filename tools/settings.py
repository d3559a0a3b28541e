# SPDX-License-Identifier: Apache-2.0
"""The tables of the connector's settings in docs/vllm-settings.md, made of the rows of kvhma.vllm.config.settings.

python tools/settings.py    # writes the tables of the page anew
"""

from __future__ import annotations

import sys
from pathlib import Path

from marks import Marks

from kvhma.vllm.config.settings import deprecated_rows, rows

PAGE = Path(__file__).parents[1] / "docs" / "vllm-settings.md"
DEPRECATED = (
    "**Deprecated.** These settings have effect in this release, and the engine warns when it starts. The next\n"
    "release ignores them:"
)
MARKS = Marks(PAGE.name, "<!-- settings: made by tools/settings.py -->", "<!-- end of settings -->")


def tables() -> str:
    """Return the settings as Markdown: those that stay, then the deprecated ones."""
    lines = ["| setting | default | values | |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {row.shown} | {row.kind.expected} | {row.meaning} |" for name, row in rows().items()]
    lines += ["", DEPRECATED, "", "| deprecated | what holds without it | |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.decided} | [why]({row.reasons}) |" for name, row in deprecated_rows().items()]
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with the tables of today.

    Raises:
        ValueError: it has no place for the tables.
    """
    return MARKS.filled(page, f"\n{tables()}\n")


def main() -> int:
    """Write the page anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
