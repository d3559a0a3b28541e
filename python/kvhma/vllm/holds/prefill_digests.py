# SPDX-License-Identifier: Apache-2.0
"""Digests of block contents on P: which requests get one, and the sum of all ranks.

A request ends -> P's workers sum its blocks -> the lease stores the sum of all ranks, for D's question.
"""

from __future__ import annotations

import random
import time

from kvhma.digests import ContentDigest
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.metadata import DigestOrder, WorkerReport, join_ranks
from kvhma.vllm.wire.digest_form import write_digest
from kvhma.vllm.wire.messages import MAX_CONTENT_BYTES
from kvhma.vllm.wire.params import LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.peer_log import logger

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
        self._wait_until = time.monotonic() + self._context.settings.replies_timeout
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
                content = write_digest(total)
                if len(content) > MAX_CONTENT_BYTES:
                    logger.warning(
                        "kvhma: discarding the digest of %s: it has %d bytes, at most %d are sent",
                        key.request_id,
                        len(content),
                        MAX_CONTENT_BYTES,
                    )
                else:
                    self._context.leases.note_content(key, content)
