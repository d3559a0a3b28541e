# SPDX-License-Identifier: Apache-2.0
"""Print the lowest version of each package that a user of kvhma may have, one `name==version` a line.

`make supply-chain` passes the lines to pip-audit: the newest version of a package has few known holes, the lowest that
kvhma accepts may have many.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[1]
HOSTS = ("torch", "vllm")
"""Packages whose version the operator chooses before kvhma is installed. docs/supply-chain.md names their holes."""
FLOOR = re.compile(r"([a-z][\w-]*)>=(\d+(?:\.\d+){0,2})(?:,|$)")


def floors(project: dict[str, Any]) -> Iterator[str]:
    """Yield the lowest version of each dependency, with or without an extra, in the form of its releases."""
    for wanted in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        if (found := FLOOR.match(wanted)) is None:
            sys.exit(f"{wanted!r} in pyproject.toml has no lowest version")
        name, version = found.groups()
        if name not in HOSTS:
            yield f"{name}=={version}{'.0' * (2 - version.count('.'))}"


if __name__ == "__main__":
    print(*floors(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]), sep="\n")
