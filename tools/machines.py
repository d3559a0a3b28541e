# SPDX-License-Identifier: Apache-2.0
"""The state machine of a load, as tables of docs/state-machines.md.

    python tools/machines.py    # writes the tables of the page anew

They are made from the table that the connector runs, so the page cannot differ from it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marks import put

from kvhma.vllm.loads import load_machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "state-machines.md"

Table = Mapping[tuple[Any, Any], tuple[Any, Sequence[Any]]]


def drawn(table: Table) -> str:
    """Return a machine as Markdown: what each state waits for, transitions, and the meaning of events and effects."""
    states = list(dict.fromkeys([state for state, _ in table] + [state for state, _ in table.values()]))
    rows = ["| state | waits for | event → next state: effects |", "|---|---|---|"]
    for state in states:
        moves = [
            f"{event.name} → {following.name}" + "".join(f", {effect.name}" for effect in effects)
            for (at, event), (following, effects) in table.items()
            if at is state
        ]
        rows.append(f"| **{state.name}** | {state.value} | {'<br>'.join(moves)} |")
    return "\n".join(rows)


def named(kind: str, members: Iterable[enum.Enum]) -> str:
    """Return what the members of an enumeration mean, as Markdown."""
    return "\n".join([f"| {kind} | what it is |", "|---|---|", *(f"| {one.name} | {one.value} |" for one in members)])


def filled(page: str) -> str:
    """Return the page with the current tables.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name, text in {
        "loads": drawn(load_machine.TABLE),
        "load events": named("event", load_machine.LoadEvent),
        "load effects": named("effect", load_machine.LoadEffect),
    }.items():
        page = put(page, name, "tools/machines.py", text)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
