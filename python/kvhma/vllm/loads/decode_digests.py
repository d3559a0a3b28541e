# SPDX-License-Identifier: Apache-2.0
"""Digests of block contents on D: has it loaded what P holds?

D's workers read, sum, and ask P for its sum -> this compares both -> the load ends, or fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvhma.digests import Difference, differences
from kvhma.errors import UnsupportedPairError
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.metadata import LoadDigest, WorkerReport

_NAMED = 8
"""At most so many differences are listed in a message."""


class DecodeDigests:
    """D's part: adds the sums of its ranks, and compares them with P's."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without loads."""
        self._context = context
        self._sums: dict[str, LoadDigest] = {}

    def discard_sums(self, request_id: str) -> None:
        """Discard the sums of a request: it is loaded again, or not at all."""
        self._sums.pop(request_id, None)

    def verdicts(self, report: WorkerReport) -> dict[str, Failure | None]:
        """Add the sums of some ranks; return the verdicts that are known by now, see `StepMetadata`."""
        found: dict[str, Failure | None] = {}
        for request_id, digest in report.digests.items():
            known = self._sums.get(request_id)
            total = digest if known is None else known.joined(digest)
            self._sums[request_id] = total
            if total.ranks == self._context.engine.workers:
                del self._sums[request_id]
                found[request_id] = self._compare_sums(total)
        # If a rank has failed, the other ranks must not wait for a verdict.
        return found | dict.fromkeys(report.failures)

    def _compare_sums(self, digest: LoadDigest) -> Failure | None:
        stats = self._context.stats
        try:
            found, tokens = differences(digest.prefill, digest.decode, digest.seed)
        except UnsupportedPairError as error:
            stats.count("content_digests", label="incomparable")
            return Failure("unsupported", str(error), transient=False)
        stats.count("digest_tokens", tokens)
        stats.count("content_digests", label="mismatch" if found else "match")
        if not found:
            return None
        return Failure("digest", f"what was loaded is not what P holds: {_listed(found)}", transient=True)


def _listed(found: Sequence[Difference]) -> str:
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(map(str, found[:_NAMED])) + more
