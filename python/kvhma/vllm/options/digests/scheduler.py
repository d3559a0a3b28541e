# SPDX-License-Identifier: Apache-2.0
"""Digests in the scheduler's process: P chooses requests, and D compares what its ranks have loaded.

* P's workers sum the blocks of a request that has ended. The lease stores the sum of all ranks, for D's question.
* D's workers read, sum, and ask P for its sum. The load ends, or fails, once the scheduler has compared both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhma.digests import ContentDigest, Difference, differences
from kvhma.errors import DigestError, KvhmaError, UnsupportedPairError
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.options.digests.sums import NAME, DigestOrder, RankSums, ReportedSums, StepDigests, write_digest
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.wire.messages import MAX_CONTENT_BYTES
from kvhma.vllm.wire.params import LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvhma.vllm.scheduler import KvhmaScheduler

_WAITING = 4096
"""At most so many requests wait for the sums of all ranks; the oldest is evicted for a new one."""

_NAMED = 8
"""At most so many differences are listed in a message."""


class Room(SchedulerDoor):
    """Adds the sums of the ranks: P's for its readers, D's to compare them with P's."""

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without requests."""
        self._context = core.context
        self._loads = core.decode.pending
        self._step = StepDigests([], {})
        self._prefills: dict[LeaseKey, RankSums | None] = {}
        self._wait_until = 0.0
        self._sums: dict[str, RankSums] = {}
        """Of loads that some ranks have summed."""

    def on_hand_off(self, request: Request, remote: PrefillParams) -> PrefillParams:
        """Return the parameters of a request that has ended, with a seed if it gets a digest."""
        if random.random() >= self._context.settings.content_digests:  # noqa: S311
            return remote
        seed = random_id()
        self._step.orders.append(DigestOrder(remote.lease_key, seed, remote.num_tokens, remote.spans))
        self._prefills[remote.lease_key] = None
        self._wait_until = time.monotonic() + self._context.settings.replies_timeout
        if len(self._prefills) > _WAITING:
            del self._prefills[next(iter(self._prefills))]
        return remote._replace(content_seed=seed)

    def on_lease_ended(self, key: LeaseKey) -> None:
        """Discard the sums of a request that P no longer holds."""
        self._prefills.pop(key, None)

    def needs_step(self) -> bool:
        """Return whether workers still have to sum or to report. After this time D asks no more."""
        return bool(self._prefills) and time.monotonic() < self._wait_until

    def must_hold_until_reported(self, remote: PrefillParams) -> bool:
        """Return whether P makes a digest: D asks for it after the read."""
        return remote.content_seed is not None

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Add what the workers have to sum, and the verdicts on what they have loaded."""
        if self._step.orders or self._step.verdicts:
            metadata.extras[NAME], self._step = self._step, StepDigests([], {})
        return False

    def on_results(self, report: WorkerReport) -> None:
        """Add the sums of some ranks. A rank that has failed fails the load, so no other rank must wait for it."""
        self._step.verdicts.update((name, None) for name in report.failures if self._sums.pop(name, None))
        sums: ReportedSums = report.extras.get(NAME, ReportedSums())
        for key, of_ranks in sums.items():
            if isinstance(key, LeaseKey):
                self._add_prefill(key, of_ranks)
            else:
                self._add_load(key, of_ranks)

    def _add_prefill(self, key: LeaseKey, sums: RankSums) -> None:
        if key not in self._prefills:
            return
        known = self._prefills[key]
        self._prefills[key] = total = sums if known is None else known.joined(sums)
        if total.ranks < self._context.engine.workers:
            return
        del self._prefills[key]
        content = write_digest(total.digest)
        if len(content) > MAX_CONTENT_BYTES:
            logger.warning(
                "kvhma: discarding the digest of %s: it has %d bytes, at most %d are sent",
                key.request_id,
                len(content),
                MAX_CONTENT_BYTES,
            )
        else:
            self._context.leases.note_content(key, content)

    def _add_load(self, request_id: str, sums: RankSums) -> None:
        load = self._loads.get(request_id)
        if load is None or load.attempt is None or load.attempt.rank_failed or load.remote is None:
            self._step.verdicts[request_id] = None
            return
        known = self._sums.get(request_id)
        self._sums[request_id] = total = sums if known is None else known.joined(sums)
        if total.ranks == self._context.engine.workers:
            del self._sums[request_id]
            self._step.verdicts[request_id] = self._compare(total, load.remote.content_seed or 0)

    def _compare(self, sums: RankSums, seed: int) -> KvhmaError | None:
        stats, prefill = self._context.stats, sums.prefill or ContentDigest(sums.digest.num_tokens, 1, {}, {})
        try:
            found, tokens = differences(prefill, sums.digest, seed)
        except UnsupportedPairError as error:
            stats.count("content_digests", label="incomparable")
            return error
        stats.count("digest_tokens", tokens)
        stats.count("content_digests", label="mismatch" if found else "match")
        return DigestError(f"what was loaded is not what P holds: {_listed(found)}") if found else None


def _listed(found: Sequence[Difference]) -> str:
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(map(str, found[:_NAMED])) + more
