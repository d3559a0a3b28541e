# SPDX-License-Identifier: Apache-2.0
"""Names that have a better one in the field are not used for classes, functions, variables or files.

    python tools/words.py    # prints where they are, and what the thing is called; exit code 1 if there are any

Whole identifiers only, and only those without another good use in the folder that is named with them.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from layers import ROOT, plain_rust

WORDS = {
    "python/kvhma rust/core rust/py": {
        "ours mine here": "local",
        "theirs there": "remote",
        "orphans": "unsourced",
        "seal sealed": "digest",
        "rehearse rehearsed": "prewarm_transport",
        "give_back": "release",
        "shook": "on_handshake",
    },
    "python/kvhma/vllm": {
        "Hold": "LeaseKey",
        "Claim": "LeaseClaim",
        "Ledger": "LeaseTable",
        "Courier": "LeaseRenewer",
        "_Inquiry": "LeaseQuestion",
        "fence fences fenced": "LeaseQuestion",
        "strike_off": "drain_ended",
        "let_go": "release",
        "Life": "Incarnation",
        "Lines": "ClientPool",
        "Desk": "LeaseService",
        "Roster": "EngineInfo",
        "Peers": "PrefillEngines",
        "Source": "PrefillEngine",
        "borrow": "acquire",
        "meet": "preconnect",
        "Order": "QueuedLoad",
        "Moving": "ActiveLoad",
        "Pull": "PendingLoad",
        "Stage": "LoadState",
        "WorkerHalf": "KvhmaWorker",
        "SchedulerHalf": "KvhmaScheduler",
        "_deciding": "_scheduler",
        "Direct": "DeviceMemory",
        "Staged HostStaging": "StagingPool",
        "leaving": "copy_out",
        "arrived": "copy_in",
        "Place": "RankInfo",
        "Remote": "PrefillParams",
    },
    "python/kvhma/torch": {
        "Lot lot": "BufferPlan",
        "Plot plot plots": "LayerPlacement",
        "Pool": "BufferShape",
        "Key": "PageClass",
    },
    "rust/core/src": {
        "Lane": "PageBases",
        "LanePart Share": "PartSlice",
        "Link": "GroupPair",
        "Row": "CopyTemplate",
        "Feed": "(GroupPair, cut)",
        "Family": "StridePair",
        "Tokens": "TokenCut",
        "Cuts ByCut": "PairsByCut",
        "Reach": "TokenRange",
        "Checked": "CheckedRequest",
        "Room": "a name by its use",
        "touched touched_start": "first_kept_token",
        "stretches": "runs",
    },
}
"""What a name is called in these folders."""
FILES = {
    "python/kvhma/cli": {
        "rivals": "compare",
        "facts": "summary",
        "fixes": "remedies",
        "sides": "engine_options",
        "show": "format",
        "pair": "subprocess",
    },
    "python/kvhma/vllm": {"compat": "engine_config", "content": "layer_parts"},
}
"""What a file is called there: names that are good ones inside of a file."""


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every identifier of a file with its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        for row, line in enumerate(plain_rust(text).splitlines(), 1):
            yield from ((row, name) for name in re.findall(r"[^\W\d]\w*", line))
    else:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string


def main(root: Path = ROOT) -> int:
    """Print each name that has a better one, once a line."""
    found: set[tuple[str, int, str]] = set()
    for folders in WORDS.keys() | FILES.keys():
        better, files = (
            {name: instead for many, instead in tables.get(folders, {}).items() for name in many.split()}
            for tables in (WORDS, FILES)
        )
        for path in (path for folder in folders.split() for path in (root / folder).rglob("*")):
            if path.suffix not in (".py", ".pyi", ".rs"):
                continue
            file = path.relative_to(root).as_posix()
            stem = (better | files).get(path.stem)
            if stem:
                found.add((file, 1, f"the file {path.stem} is called {stem}"))
            found |= {(file, line, f"{name} is called {better[name]}") for line, name in names(path) if name in better}
    for file, line, reason in sorted(found):
        print(f"{file}:{line}: {reason}")
    print(f"{len(found)} names that have a better one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
