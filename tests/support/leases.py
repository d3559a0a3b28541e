# SPDX-License-Identifier: Apache-2.0
"""The leases that a table has ended, and a clock for tables."""

from __future__ import annotations

from kvhma.vllm.holds.lease_table import LeaseEnd, LeaseTable


class Clock:
    """The ``time`` module of code that reads the monotonic clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def ended(table: LeaseTable) -> dict[LeaseEnd, list[str]]:
    """Take the leases that have ended; return the names of the requests by why they ended."""
    return {why: [key.request_id for key, *_ in leases] for why, leases in table.drain_ended().items()}
