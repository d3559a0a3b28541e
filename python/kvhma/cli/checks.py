# SPDX-License-Identifier: Apache-2.0
"""A row of the output of ``kvhma doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "note", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check.

    Attributes:
        name: what was checked.
        state: the result; ``note`` is information and no fault.
        found: what the check found.
        fix: command or setting that helps; empty if nothing has to be done.
    """

    name: str
    state: State
    found: str
    fix: str = ""
