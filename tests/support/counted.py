# SPDX-License-Identifier: Apache-2.0
"""Counters of a part of the connector."""

from __future__ import annotations

from collections import Counter


class Counted:
    """Counters by name and, where they have a label, by ``name:label``; the values of histograms."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.values: list[float] = []

    def count(self, name: str, number: float = 1, *, label: str | None = None) -> None:
        self.numbers[name if label is None else f"{name}:{label}"] += int(number)

    def record(self, **values: float) -> None:
        self.values += values.values()

    def by_label(self, name: str) -> dict[str, int]:
        """Return the numbers of one counter by label."""
        found = (key.partition(":") for key in self.numbers)
        return {label: self.numbers[f"{name}:{label}"] for counter, _, label in found if counter == name and label}
