# SPDX-License-Identifier: Apache-2.0
"""Content digests: P's worker sums the blocks that its scheduler names, D's worker what a load has read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from kvhma.digests import ContentDigest, content_digest
from kvhma.errors import DigestError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.vllm.device.memory import Memory
from kvhma.vllm.metadata import DigestOrder, LoadDigest, ReadCommand
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.telemetry.stats import StatsCollector
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.digest_form import read_digest

ResultT = TypeVar("ResultT")

logger = logging.getLogger("vllm.kvhma")

_ASK_AGAIN_SECONDS = 0.01
"""Pause before D asks P again for a digest. P has it a step or two after the request's last step."""


class Summing:
    """Sums blocks of a worker, where its registered memory is. Safe to use from several threads."""

    def __init__(self, geometry: Geometry, memory: Memory, cp_tp_size: int, stats: StatsCollector) -> None:
        """Own nothing of this."""
        self.geometry = geometry
        self._memory = memory
        self._cp_tp_size = cp_tp_size
        self._stats = stats

    def start(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Sum in a separate thread, after the device work that the calling thread has launched."""
        device = self._memory.device
        after = device.mark()

        def run() -> ResultT:
            results: list[ResultT] = []
            device.launch(lambda: results.append(work()), after)
            return results[0]

        return in_thread("kvhma-digests", device.chosen(run))

    def check(self) -> None:
        """Refuse caches that no load could be compared with.

        Raises:
            GeometryError: an axis other than the heads may repeat, or a layer is in no storage of the caches.
        """
        self._sums(1, [Span(0, [])] * len(self.geometry.groups), 0)

    def digest(self, num_tokens: int, spans: Sequence[Span], seed: int, **counting: Any) -> ContentDigest:
        """Sum some blocks: :func:`kvhma.digests.content_digest`."""
        started = time.monotonic()
        digest = self._sums(num_tokens, spans, seed, **counting)
        self._stats.record(digest_seconds=time.monotonic() - started)
        return digest

    def _sums(self, num_tokens: int, spans: Sequence[Span], seed: int, **counting: Any) -> ContentDigest:
        def content(region: int, offset: int) -> torch.Tensor:
            return self._memory.from_address(self.geometry.regions[region].base + offset)

        more = {"cp_tp_size": self._cp_tp_size, **counting}
        return content_digest(self.geometry, content, num_tokens, spans, seed, **more)


class PrefillSums:
    """P's part: sums blocks of finished requests in separate threads, which the engine does not wait for."""

    def __init__(self, summing: Summing, results: LoadResults) -> None:
        """Start with nothing to sum."""
        self._summing = summing
        self._results = results
        self._running: list[Future[None]] = []

    def start(self, orders: Sequence[DigestOrder]) -> None:
        """Sum the blocks of some requests."""
        if orders:
            self._running = [future for future in self._running if not future.done()]
            self._running.append(self._summing.start(lambda: self._sum(orders)))

    def close(self, timeout: float) -> None:
        """Wait until no thread reads the caches any more."""
        wait(self._running, timeout)

    def _sum(self, orders: Sequence[DigestOrder]) -> None:
        for order in orders:
            try:
                digest = self._summing.digest(order.num_tokens, order.spans, order.seed)
                self._results.note_prefill_digest(order.key, digest)
            except Exception:  # D times out without the digest
                logger.exception("kvhma: cannot sum the blocks of %s", order.key.request_id)


class LoadSums:
    """D's part: the digest of what a load has read, summed in a separate thread, and P's digest."""

    def __init__(self, load: ReadCommand, decode: Future[ContentDigest], timeout: float) -> None:
        """Wait for both digests.

        Args:
            load: its reads have ended.
            decode: the digest of what was read.
            timeout: seconds to wait for P's digest.
        """
        self._load = load
        self._future = decode
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
            digest = read_digest(content)
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
        return LoadDigest(self._load.remote.content_seed or 0, self._prefill, self._future.result())


def sums_of(
    summing: Summing, load: ReadCommand, places: Sequence[Span], first_tokens: Sequence[int], peers: Iterable[Geometry]
) -> Future[ContentDigest]:
    """Begin to sum a load's blocks: in each group the tokens that this load and earlier pieces have moved.

    Args:
        summing: of this worker.
        load: its reads have ended.
        places: that it was read into.
        first_tokens: of the transfer, by group.
        peers: that it was read from; layers that they do not have do not count.
    """
    moved = list(first_tokens)
    groups = summing.geometry.groups
    for index, (held, span) in enumerate(zip(load.held, load.spans, strict=bool(load.held))):
        if len(held.ids) > len(span.ids):
            moved[index] = held.first * groups[index].block_size
    names = {layer.name for geometry in peers for layer in geometry.layers}
    spans, seed = list(load.held or places), load.remote.content_seed or 0
    return summing.start(lambda: summing.digest(load.num_tokens, spans, seed, first_tokens=moved, names=names))
