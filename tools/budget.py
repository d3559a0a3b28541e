# SPDX-License-Identifier: Apache-2.0
"""Print how many lines each room has, beside the recorded number; exit code 1 if a room has more.

python tools/budget.py --record    # records the lines of today: the commit says what more lines buy
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools/budget.json"
ROOMS = ("python/kvhma/*.py", "tests/*.py", "benches", "tools", "docs/*.md")


def main(arguments: list[str]) -> int:
    """Count the files that git knows."""
    lines = {}
    for room in ROOMS:
        names = subprocess.check_output(["git", "ls-files", "-z", room], cwd=ROOT, text=True).split("\0")
        paths = [ROOT / name for name in {*names} if name and (ROOT / name).is_file()]
        lines[room] = sum(path.read_bytes().count(b"\n") for path in paths)
    if arguments == ["--record"]:
        RECORD.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    for room, count in lines.items():
        print(f"{room}: {count:,} lines, {recorded[room]:,} recorded{' (more)' * (count > recorded[room])}")
    return int(any(count > recorded[room] for room, count in lines.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
