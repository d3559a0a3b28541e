# SPDX-License-Identifier: Apache-2.0
"""Digests in a worker's process: P sums the blocks that its scheduler names, D what a load has read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from kvhma.digests import ContentDigest, content_digest
from kvhma.errors import DigestError, RequestError
from kvhma.geometry import Span
from kvhma.vllm.device.memory import Memory
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.options.digests.sums import NAME, DigestOrder, RankSums, ReportedSums, StepDigests, read_digest
from kvhma.vllm.options.doors import WorkerDoor
from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.reads.active_read import ActiveRead, ReadState, required
from kvhma.vllm.reads.read_steps import wait_in
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.threads import in_thread

ResultT = TypeVar("ResultT")

logger = logging.getLogger("vllm.kvhma")

_ASK_AGAIN_SECONDS = 0.01
"""Pause before D asks P again for a digest. P has it a step or two after the request's last step."""


class Room(WorkerDoor):
    """Sums where the registered memory is, in separate threads that the engine does not wait for.

    Safe to use from several threads.
    """

    def __init__(self, context: WorkerContext, memory: Memory, results: LoadResults) -> None:
        """Start with nothing to sum.

        Raises:
            GeometryError: no load could be compared with these caches: an axis other than the heads may repeat, or a
                layer is in no storage of the caches.
        """
        self._geometry = context.geometry
        self._memory = memory
        self._cp_tp_size = context.cp_tp_size
        self._results = results
        self._timeout = context.settings.handshake_timeout
        # P's sums come with its steps, which take seconds if P is overloaded.
        self._digest_timeout = context.settings.replies_timeout
        self._lock = threading.Lock()
        self._sums = ReportedSums()
        self._verdicts: dict[str, Future[None]] = {}
        """Of loads that wait for one."""
        self._running: list[Future[None]] = []
        self._digest(1, [Span(0, [])] * len(self._geometry.groups), 0)

    def on_step(self, metadata: StepMetadata) -> None:
        """Sum the blocks of some of P's requests, and pass on the verdicts on loads."""
        step: StepDigests | None = metadata.extras.get(NAME)
        if step is None:
            return
        for request_id, error in step.verdicts.items():
            with self._lock:
                verdict = self._verdicts.pop(request_id, None)
            if verdict is not None and error is not None:
                verdict.set_exception(error)
            elif verdict is not None:
                verdict.set_result(None)
        if step.orders:
            self._running = [future for future in self._running if not future.done()]
            self._running.append(self._start(lambda: self._sum(step.orders)))

    def _sum(self, orders: Sequence[DigestOrder]) -> None:
        for order in orders:
            try:
                sums = RankSums(self._timed_digest(order.num_tokens, order.spans, order.seed))
                with self._lock:
                    self._sums[order.key] = sums
            except Exception:  # D times out without the digest
                logger.exception("kvhma: cannot sum the blocks of %s", order.key.request_id)

    def _start(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Sum in a separate thread, after the device work that the calling thread has launched."""
        device = self._memory.device
        after = device.mark()

        def run() -> ResultT:
            results: list[ResultT] = []
            device.launch(lambda: results.append(work()), after)
            return results[0]

        return in_thread("kvhma-digests", device.chosen(run))

    def _timed_digest(self, num_tokens: int, spans: Sequence[Span], seed: int, **counting: Any) -> ContentDigest:
        started = time.monotonic()
        digest = self._digest(num_tokens, spans, seed, **counting)
        self._results.stats.record(digest_seconds=time.monotonic() - started)
        return digest

    def _digest(self, num_tokens: int, spans: Sequence[Span], seed: int, **counting: Any) -> ContentDigest:
        def content(region: int, offset: int) -> torch.Tensor:
            return self._memory.from_address(self._geometry.regions[region].base + offset)

        more = {"cp_tp_size": self._cp_tp_size, **counting}
        return content_digest(self._geometry, content, num_tokens, spans, seed, **more)

    def _start_load(self, read: ActiveRead, seed: int) -> Future[ContentDigest]:
        """Begin to sum a load's blocks: in each group the tokens that this load and earlier pieces have moved."""
        load = read.command
        first_tokens = list(required(read.transfer).first_tokens)
        for index, (held, span) in enumerate(zip(load.held, load.spans, strict=bool(load.held))):
            if len(held.ids) > len(span.ids):
                first_tokens[index] = held.first * self._geometry.groups[index].block_size
        peers = (peer.geometry for peer in required(read.engine).peers if peer is not None)
        names = {layer.name for geometry in peers for layer in geometry.layers}  # other layers do not count
        counted: dict[str, Any] = {"first_tokens": first_tokens, "names": names}
        spans: Sequence[Span] = load.held or required(read.places)
        return self._start(lambda: self._timed_digest(load.num_tokens, spans, seed, **counted))

    def inspect(self, read: ActiveRead) -> Iterator[None]:
        """Sum what was read, and ask P for its digest."""
        seed = read.command.remote.content_seed
        if seed is None or read.command.piece:
            return
        read.state = ReadState.INSPECTING
        summing = self._start_load(read, seed)
        while not summing.done():  # also after an error of the read: the thread reads its places
            yield
        digest = summing.result()
        read.extras[NAME] = RankSums(digest, prefill=(yield from self._digest_of_p(read)))

    def _digest_of_p(self, read: ActiveRead) -> Generator[None, None, ContentDigest]:
        """Ask P until it has the digest.

        Raises:
            DigestError: P has not sent it in time.
            RequestError: P has sent something else.
        """
        engine, remote = required(read.engine), read.command.remote
        deadline, ask_at = time.monotonic() + self._digest_timeout, 0.0

        def is_late() -> bool:
            if time.monotonic() <= deadline:
                return False
            name = remote.lease_key.request_id
            raise DigestError(f"P has announced a digest of {name!r} and does not have it: see its log")

        def may_ask(_: ActiveRead) -> bool:
            return not is_late() and time.monotonic() >= ask_at and not (engine.question and engine.question.open)

        def is_answered(_: ActiveRead) -> bool:
            return question.poll() or is_late()

        while True:
            yield from wait_in(read, ReadState.INSPECTING, may_ask)
            claims = [remote.claim(read.command.reader)]
            question = LeaseQuestion(
                engine.side_channel, engine.numeric, claims, self._timeout, engine.proving, contents=True
            )
            engine.question, read.question = question, (question, 0)
            yield from wait_in(read, ReadState.ASKED, is_answered)
            question.check(0, remote.incarnation)
            if (content := question.content(0)) is not None:
                return _checked(content, remote.num_tokens)
            ask_at = time.monotonic() + _ASK_AGAIN_SECONDS

    def judge(self, read: ActiveRead) -> Iterator[None]:
        """Report the sums, and wait until the scheduler has compared those of all ranks.

        Raises:
            KvhmaError: D has not loaded what P holds.
        """
        if (sums := read.extras.get(NAME)) is None:
            return
        request_id = read.command.request_id
        verdict: Future[None] = Future()
        with self._lock:
            self._verdicts[request_id] = verdict
            self._sums[request_id] = sums
        self._results.need_step(request_id)
        yield from wait_in(read, ReadState.JUDGING, lambda _: verdict.done())
        verdict.result()

    def add_to_report(self, report: WorkerReport) -> None:
        """Add the sums since the last step."""
        with self._lock:
            sums, self._sums = self._sums, ReportedSums()
        if sums:
            report.extras[NAME] = sums

    def close(self, timeout: float) -> None:
        """Wait until no thread reads the caches any more."""
        wait(self._running, timeout)


def _checked(content: bytes, num_tokens: int) -> ContentDigest:
    digest = read_digest(content)
    if digest.num_tokens != num_tokens:
        raise RequestError(f"P's digest is of {digest.num_tokens} tokens, expected {num_tokens}")
    return digest
