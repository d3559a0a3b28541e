# SPDX-License-Identifier: Apache-2.0
"""Content digests: P's worker sums the blocks that its scheduler names, D's worker what a load has read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from kvhma._kvhma import Plan, Transfer
from kvhma.digests import ContentDigest, Counting, content_digest
from kvhma.errors import DigestError, RequestError, SettingsError
from kvhma.geometry import Geometry, Span
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.metadata import DigestOrder, LoadDigest, ReadCommand
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.threads import in_thread

logger = logging.getLogger("vllm.kvhma")

_ASK_AGAIN_SECONDS = 0.01
"""Pause before D asks P again for a digest. P has it a step or two after the request's last step."""


def check_digests(settings: Settings, geometry: Geometry, cp_tp_size: int) -> None:
    """Check that the caches can be summed, if the settings ask for digests.

    Raises:
        SettingsError: the caches are not in host memory.
        GeometryError: a layer's shard is not the equal share of its rank.
    """
    if not settings.content_digests:
        return
    memories = {region.memory for region in geometry.regions}
    if memories != {"DRAM"}:
        raise SettingsError(
            f"kv_connector_extra_config: content_digests is {settings.content_digests}, expected off: the caches are "
            f"in {' and '.join(sorted(memories))}, and digests need host memory (DRAM); see kv_buffer_device"
        )
    nothing = [Span(0, []) for _ in geometry.groups]
    content_digest(geometry, 1, nothing, 0, Counting(cp_tp_size=cp_tp_size))


class PrefillSums:
    """P's part: sums blocks of finished requests in separate threads, which the engine does not wait for."""

    def __init__(self, geometry: Geometry, results: LoadResults, cp_tp_size: int) -> None:
        """Start with nothing to sum."""
        self._geometry = geometry
        self._results = results
        self._counting = Counting(cp_tp_size=cp_tp_size)
        self._running: list[Future[None]] = []

    def start(self, orders: Sequence[DigestOrder]) -> None:
        """Sum the blocks of some requests."""
        if orders:
            self._running = [future for future in self._running if not future.done()]
            self._running.append(in_thread("kvhma-digests", lambda: self._sum(orders)))

    def close(self, timeout: float) -> None:
        """Wait until no thread reads the caches any more."""
        wait(self._running, timeout)

    def _sum(self, orders: Sequence[DigestOrder]) -> None:
        for order in orders:
            try:
                started = time.monotonic()
                digest = content_digest(self._geometry, order.num_tokens, list(order.spans), order.seed, self._counting)
                self._results.note_prefill_digest(order.key, digest)
                self._results.stats.record(digest_seconds=time.monotonic() - started)
            except BaseException:  # a panic in Rust is no Exception; D times out without the digest
                logger.exception("kvhma: cannot sum the blocks of %s", order.key.request_id)


class LoadSums:
    """D's part: the digest of what a load has read, summed in a separate thread, and P's digest."""

    def __init__(self, load: ReadCommand, seed: int, sums: Callable[[], ContentDigest], timeout: float) -> None:
        """Begin to sum what a load has read.

        Args:
            load: its reads have ended.
            seed: of the digest.
            sums: returns the digest.
            timeout: seconds to wait for P's digest.
        """
        self._load = load
        self._seed = seed
        self._future: Future[ContentDigest] = in_thread("kvhma-digests", sums)
        self._prefill: ContentDigest | None = None
        self._deadline = time.monotonic() + timeout
        self._ask_at = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether D may ask P now."""
        return time.monotonic() >= self._ask_at

    def take_prefill_digest(self, content: bytes | None) -> bool:
        """Take P's digest, if the answer has it; return whether P's digest is here. If not, ask P again.

        Raises:
            DigestError: P has not sent it in time.
            RequestError: `content` is not a digest, or is a digest of other tokens.
        """
        if self._prefill is None and content is not None:
            digest = ContentDigest.from_bytes(content)
            if digest.num_tokens != self._load.remote.num_tokens:
                expected = f"P's digest is of {digest.num_tokens} tokens, expected {self._load.remote.num_tokens}"
                raise RequestError(expected)
            self._prefill = digest
        if self._prefill is not None:
            return True
        self.check_deadline()
        self._ask_at = time.monotonic() + _ASK_AGAIN_SECONDS
        return False

    def check_deadline(self) -> None:
        """Refuse the load if P's digest is late, also while P does not answer.

        Raises:
            DigestError: P has not sent it in time.
        """
        if self._prefill is None and time.monotonic() > self._deadline:
            name = self._load.remote.lease_key.request_id
            raise DigestError(f"P has announced a digest of {name!r} and does not have it: see its log")

    @property
    def is_running(self) -> bool:
        """Whether the thread still reads the caches."""
        return not self._future.done()

    def result(self) -> LoadDigest | None:
        """Return both digests; None while one is missing.

        Raises:
            KvhmaError: the blocks cannot be summed.
        """
        if self._prefill is None or not self._future.done():
            return None
        return LoadDigest(self._seed, self._prefill, self._future.result())


def sums_of(
    plan: Plan, transfer: Transfer, load: ReadCommand, places: Sequence[Span], geometry: Geometry, cp_tp_size: int
) -> Callable[[], ContentDigest]:
    """Return a function that sums a load's blocks: in each group the tokens that this load and earlier pieces moved."""
    first_tokens = list(transfer.first_tokens)
    for index, (held, span) in enumerate(zip(load.held, load.spans, strict=bool(load.held))):
        if len(held.ids) > len(span.ids):
            first_tokens[index] = held.first * geometry.groups[index].block_size
    counting = Counting(tuple(first_tokens), cp_tp_size)
    seed = load.remote.content_seed or 0
    return lambda: content_digest(plan, load.num_tokens, list(load.held or places), seed, counting)
