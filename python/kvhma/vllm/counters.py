# SPDX-License-Identifier: Apache-2.0
"""The interface for counting; in an engine it is :class:`kvhma.vllm.telemetry.stats.StatsCollector`."""

from __future__ import annotations

from typing import Protocol


class Counters(Protocol):
    """Counters and histograms by name. Safe to use from several threads."""

    def count(self, name: str, number: float = 1, *, label: str | None = None) -> None:
        """Add to a counter."""

    def record(self, **values: float) -> None:
        """Append to histograms."""
