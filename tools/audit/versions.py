# SPDX-License-Identifier: Apache-2.0
"""Write the page of the differences between versions of vLLM, from the verdicts of `make audit`.

PYTHONPATH=tools python -m audit.versions .reports > benches/audit/results-versions.md
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HEAD = """\
# What was audited: versions of vLLM

For engineers who run another version. Written by `python -m audit.versions` from the verdicts of `make audit VLLM=..`;
[Audit](../../docs/audit.md) says how. Each version ran the same rows: {rows} of {connectors}. Rows that are not
named here have the same verdict, and as many descriptors and bytes.

| version | right | wrong | refused |
|---|---:|---:|---:|
"""

Found = dict[str, Any]


def read(folder: Path) -> dict[str, dict[str, Found]]:
    """Return by version the result of each row: the lines of ``VERSION/audit/verdicts.jsonl``."""
    found = {}
    for path in sorted(folder.glob("*/audit/verdicts.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found[path.parts[-3]] = {line["row"]: line for line in map(json.loads, lines)}
    return found


def page(found: dict[str, dict[str, Found]]) -> str:
    """Return the page."""
    names = [name for name in next(iter(found.values())) if all(name in rows for rows in found.values())]
    connectors = dict.fromkeys(name.split("/")[0] if name.count("/") == 5 else "pull" for name in names)
    text = HEAD.format(rows=len(names), connectors=" and ".join(connectors))
    for version, rows in found.items():
        counts = Counter(rows[name]["verdict"] for name in names)
        text += f"| {version} | {counts['right']} | {counts['wrong']} | {counts['refused']} |\n"
    text += "\n## What differs\n\n"
    text += f"| rows | for example | {' | '.join(found)} |\n|---:|---|{'---|' * len(found)}\n"
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in names:
        each = [rows[name] for rows in found.values()]
        if len({(one["verdict"], one["numbers"][0], one["numbers"][3]) for one in each}) > 1:
            alike[(name.rsplit("/", 4)[0], *map(_general, each))].append(name)
    for those in alike.values():
        cells = (_cell(rows[those[0]]) for rows in found.values())
        text += f"| {len(those)} | `{those[0]}` | {' | '.join(cells)} |\n"
    return text


def _general(one: Found) -> tuple[str, str]:
    return one["verdict"], re.sub(r"\d[\d,]*", "n", one["text"])


def _cell(one: Found) -> str:
    text = one["text"].replace("|", "\\|").removeprefix("wrong: ")
    text = re.sub(r"(model\.[\w./]+|\[[-\d, ]+\])", r"`\1`", text)  # long parts may be cut, as code
    numbers = f"{one['numbers'][0]} descriptors, {one['numbers'][3]} bytes" if one["numbers"][0] else ""
    return ": ".join(filter(None, (one["verdict"], text or numbers)))


if __name__ == "__main__":
    sys.stdout.write(page(read(Path(sys.argv[1]))))
