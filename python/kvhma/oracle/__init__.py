# SPDX-License-Identifier: Apache-2.0
"""The byte oracle: verifies a transfer by simulating every byte of it, or by reading real memory."""

from kvhma.oracle.memory import Difference, MemoryReport, Request, check_memory, fill_source, fill_stale
from kvhma.oracle.simulate import Oracle, Report

__all__ = [
    "Difference",
    "MemoryReport",
    "Oracle",
    "Report",
    "Request",
    "check_memory",
    "fill_source",
    "fill_stale",
]
