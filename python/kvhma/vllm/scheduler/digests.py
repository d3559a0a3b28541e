# SPDX-License-Identifier: Apache-2.0
"""Digests of what blocks hold, in the scheduler's process: which requests are summed, and whether a load is right.

P   request ends -> its workers sum the blocks -> the sum of all ranks is kept with the lease
D   its workers read, sum, ask P for its sum -> both reach the scheduler -> it compares -> the load ends, or fails
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from kvhma.digests import ContentDigest, Difference, differences
from kvhma.errors import UnsupportedPairError
from kvhma.vllm.metadata import DigestOrder, Failure, LoadDigest, WorkerReport, join_ranks
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.wire.messages import MAX_CONTENT_BYTES
from kvhma.vllm.wire.params import LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.peer_log import logger

_NAMED = 8
"""Differences that a text names."""

_WAITING = 4096
"""Requests whose digests some ranks have not reported yet; the oldest are forgotten."""


class PrefillDigests:
    """P's part: chooses finished requests, and keeps what all ranks have summed with the lease."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self._orders: list[DigestOrder] = []
        self._wait_until = 0.0
        self._sums: dict[LeaseKey, tuple[ContentDigest, int] | None] = {}

    def choose_request(self, remote: PrefillParams) -> PrefillParams:
        """Return the parameters of a request that has ended, with a seed if it is summed."""
        share = self._context.settings.content_digests
        if not share or random.random() >= share:  # noqa: S311
            return remote
        chosen = remote._replace(content_seed=random_id())
        self._orders.append(DigestOrder(remote.lease_key, chosen.content_seed or 0, remote.num_tokens, remote.spans))
        self._sums[remote.lease_key] = None
        self._wait_until = time.monotonic() + self._context.settings.handshake_timeout
        if len(self._sums) > _WAITING:
            del self._sums[next(iter(self._sums))]
        return chosen

    @property
    def is_waiting(self) -> bool:
        """Whether workers have to be told of requests, or to tell what they have summed. D does not ask for longer."""
        return bool(self._sums) and time.monotonic() < self._wait_until

    def on_lease_ended(self, key: LeaseKey) -> None:
        """Forget a request that is not kept any more."""
        self._sums.pop(key, None)

    def take_orders(self) -> list[DigestOrder]:
        """Return the requests whose blocks the workers have to sum."""
        orders, self._orders = self._orders, []
        return orders

    def on_worker_results(self, report: WorkerReport) -> None:
        """Take what some ranks have summed."""
        for key, sums in report.prefill_digests.items():
            if key not in self._sums:
                continue
            known = self._sums[key]
            total, ranks = sums if known is None else join_ranks(known, sums)
            self._sums[key] = total, ranks
            if ranks == self._context.engine.workers:
                del self._sums[key]
                content = total.to_bytes()
                if len(content) > MAX_CONTENT_BYTES:
                    logger.warning("kvhma: the digest of %s has %d bytes, too many", key.request_id, len(content))
                else:
                    self._context.leases.note_content(key, content)


class DecodeDigests:
    """D's part: adds what the ranks have read, and compares it with what P holds."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without loads."""
        self._context = context
        self._sums: dict[str, LoadDigest] = {}

    def discard_sums(self, request_id: str) -> None:
        """Forget what ranks have read: the request is loaded anew, or not at all."""
        self._sums.pop(request_id, None)

    def verdicts(self, report: WorkerReport) -> dict[str, Failure | None]:
        """Take what some ranks have read; return what is known of loads by now, see `StepMetadata`."""
        found: dict[str, Failure | None] = {}
        for request_id, digest in report.digests.items():
            known = self._sums.get(request_id)
            total = digest if known is None else known.joined(digest)
            self._sums[request_id] = total
            if total.ranks == self._context.engine.workers:
                del self._sums[request_id]
                found[request_id] = self._compare_sums(total)
        # Where one rank has failed, the others have nothing to wait for.
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
