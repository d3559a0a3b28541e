# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/assets anew, by the commands that the pages themselves show.

    python tools/pictures.py    # in an environment with kvhma and its command line

A page shows a picture below the `kvhma map` or `kvhma audit` that made it into assets/NAME.svg;
tests/unit/test_docs.py compares them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_KVHMA = "from kvhma.cli import main; main()"
_COMMAND = re.compile(r"^\$ kvhma ((?:map .*-o|audit .*--svg) assets/[\w.-]+)$", re.MULTILINE)
_DRAWN = {"map": (0,), "audit": (0, 1)}
"""Exit codes of a command that has drawn: 1 is a verdict."""


def main() -> int:
    """Run every command that draws into docs/assets."""
    for page in sorted(DOCS.glob("*.md")):
        for command in _COMMAND.findall(page.read_text(encoding="utf-8")):
            ended = subprocess.run([sys.executable, "-c", _KVHMA, *shlex.split(command)], cwd=DOCS, check=False)
            if ended.returncode not in _DRAWN[command.split()[0]]:
                print(f"{page.name}: kvhma {command}: exit code {ended.returncode}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
