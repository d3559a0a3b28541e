# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/assets anew, by the commands that the pages themselves show.

    python tools/pictures.py    # in an environment with kvhma and its command line

A page shows a picture below the `kvhma map ... -o assets/NAME.svg` that made it; tests/unit/test_docs.py compares them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_KVHMA = "from kvhma.cli import main; main()"
_COMMAND = re.compile(r"^\$ kvhma (map .*-o assets/[\w.-]+)$", re.MULTILINE)


def main() -> int:
    """Run every command that draws into docs/assets."""
    for page in sorted(DOCS.glob("*.md")):
        for command in _COMMAND.findall(page.read_text(encoding="utf-8")):
            ended = subprocess.run([sys.executable, "-c", _KVHMA, *shlex.split(command)], cwd=DOCS, check=False)
            if ended.returncode:
                print(f"{page.name}: kvhma {command}: exit code {ended.returncode}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
