# SPDX-License-Identifier: Apache-2.0
"""The table of the connector's settings in docs/vllm-settings.md, made of the rows of kvhma.vllm.config.settings.

python tools/settings.py    # writes the table of the page anew
"""

from __future__ import annotations

from pathlib import Path

from marks import put

from kvhma.vllm.config.settings import rows

PAGE = Path(__file__).parents[1] / "docs" / "vllm-settings.md"


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
    return put(page, "settings", "tools/settings.py", table())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
