# SPDX-License-Identifier: Apache-2.0
"""`python -m conformance`, with `tests` on the path: writes conformance/cases.jsonl.gz."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from conformance.suite import FILE, FOLDER, entries, packed, text


def runner() -> ModuleType:
    """Load the runner from the file that other projects use."""
    spec = importlib.util.spec_from_file_location("conformance_runner", FOLDER / "runner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def complete() -> bytes:
    """Return the lines of the file, with digests."""
    labels, found = runner(), []
    for entry in entries():
        if "runs" in entry["expect"]:
            entry["expect"]["digest"] = labels.digests(labels.expected(entry).after)
        found.append(entry)
    return text(found)


if __name__ == "__main__":
    data = packed(complete())
    Path(FILE).write_bytes(data)
    print(f"{FILE}: {len(data)} bytes")
