# SPDX-License-Identifier: Apache-2.0
"""Digests of block contents, in the scheduler's process: which requests get a digest, and whether a load is right.

* P: a request ends -> its workers sum the blocks -> the lease stores the sum of all ranks.
* D: the workers read, sum, and ask P for its sum -> the scheduler compares both -> the load ends, or fails.
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
"""At most so many differences are listed in a message."""

_WAITING = 4096
"""At most so many requests wait for the sums of all ranks; the oldest is evicted for a new one."""


class PrefillDigests:
    """P's part: chooses finished requests, and stores the sum of all ranks with the lease."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self._orders: list[DigestOrder] = []
        self._wait_until = 0.0
        self._sums: dict[LeaseKey, tuple[ContentDigest, int] | None] = {}

    def choose_request(self, remote: PrefillParams) -> PrefillParams:
        """Return the parameters of a request that has ended, with a seed if it gets a digest."""
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
        """Whether workers still have to sum or to report. After this time D asks no more."""
        return bool(self._sums) and time.monotonic() < self._wait_until

    def on_lease_ended(self, key: LeaseKey) -> None:
        """Discard the sums of a request that P no longer holds."""
        self._sums.pop(key, None)

    def take_orders(self) -> list[DigestOrder]:
        """Return the requests whose blocks the workers must sum."""
        orders, self._orders = self._orders, []
        return orders

    def on_worker_results(self, report: WorkerReport) -> None:
        """Add the sums of some ranks."""
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
                    logger.warning(
                        "kvhma: discarding the digest of %s: it has %d bytes, at most %d are sent",
                        key.request_id,
                        len(content),
                        MAX_CONTENT_BYTES,
                    )
                else:
                    self._context.leases.note_content(key, content)


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
