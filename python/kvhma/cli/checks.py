# SPDX-License-Identifier: Apache-2.0
"""One line of what ``kvhma doctor`` has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "note", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: how it is; ``note`` is worth knowing and no fault.
        found: what there is.
        fix: command or setting that helps, empty where nothing has to be done.
    """

    name: str
    state: State
    found: str
    fix: str = ""
