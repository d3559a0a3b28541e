# SPDX-License-Identifier: Apache-2.0
"""The leases that a table has ended."""

from __future__ import annotations

from kvhma.vllm.holds.lease_table import LeaseEnd, LeaseTable


def ended(table: LeaseTable) -> dict[LeaseEnd, list[str]]:
    """Take the leases that have ended; return the names of the requests by why they ended."""
    return {why: [key.request_id for key, _ in leases] for why, leases in table.drain_ended().items()}
