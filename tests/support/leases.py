# SPDX-License-Identifier: Apache-2.0
"""What a lease table has let go of."""

from __future__ import annotations

from kvhma.vllm.scheduler.lease_table import LeaseEnd, LeaseTable


def ended(table: LeaseTable) -> dict[LeaseEnd, list[str]]:
    """Take what is not kept any more; return the names of the requests by why they ended."""
    return {why: [key.request_id for key, _ in leases] for why, leases in table.drain_ended().items()}
