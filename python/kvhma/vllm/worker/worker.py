# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in a worker's process: it registers caches, and reads those of others.

The engine's thread only hands over and collects; threads of our own shake hands, plan, post and poll.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from kvhma._kvhma import Plan, Transfer
from kvhma.errors import (
    HandshakeError,
    HandshakeTimeoutError,
    KvhmaError,
    LeaseEndedError,
    LeaseUnknownError,
    PeerLostError,
    RequestError,
    TransferError,
    UnsupportedPairError,
)
from kvhma.geometry import Geometry, Span
from kvhma.nixl import Agent, TransferHandle
from kvhma.vllm.identity import ModelIdentity
from kvhma.vllm.memory import Memory
from kvhma.vllm.metadata import Failure, Load, StepMetadata, WorkerReport
from kvhma.vllm.settings import Settings
from kvhma.vllm.stats import TransferStats
from kvhma.vllm.wire.params import Address, LeaseClaim
from kvhma.vllm.worker.lease import Lease, claim_all
from kvhma.vllm.worker.prefill_engines import PrefillEngine, PrefillEngines

logger = logging.getLogger("vllm.kvhma")

_NAP_SECONDS = 5e-4
_ANSWER_SECONDS = 1e-3
_PATIENCE_SECONDS = 2e-3
_MOST_SECONDS = 1e-2
"""How long a step waits until one more load has been read, and for all of them."""

_HANDSHAKES = 3
"""Handshakes that a load waits for; an engine that is lost after each of them will not answer it."""

_MEET_SECONDS = 2.0
_AVOID_SECONDS = 60.0
"""How often engines are looked for, and how long one that cannot be read from is left alone."""

_ORDERS_AT_ONCE = 32

_BEHIND = 1 << 20
"""Blocks behind the last one of any request."""


@dataclass(eq=False)
class QueuedLoad:
    """A load that the scheduler ordered, when that was, and how many handshakes it has waited for."""

    load: Load
    since: float
    handshakes: int = 0


@dataclass(eq=False)
class ActiveLoad:
    """A load whose reads are under way."""

    load: Load
    ordered: float
    source: PrefillEngine
    lease: Lease
    planned: Transfer | None = None
    transfers: list[TransferHandle] = field(default_factory=list)
    posted: float = 0.0
    post_seconds: float = 0.0
    ended: float | None = None
    error: Exception | None = None


class KvhmaWorker:
    """Reads what the scheduler orders, and reports each order exactly once."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        identity: ModelIdentity,
        geometry: Geometry,
        agent: Agent,
        memory: Memory,
    ) -> None:
        """Take over an agent with which the geometry's regions are registered, and start the threads."""
        self._settings = settings
        self._geometry = geometry
        self._agent = agent
        self._memory = memory
        self._peers = PrefillEngines(agent, geometry, identity, settings, engine_id, self._shook)
        self._orders: queue.SimpleQueue[QueuedLoad | None] = queue.SimpleQueue()
        self._moving: deque[ActiveLoad] = deque()
        self._has_moving = threading.Event()
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._under_way = 0
        self._ordered = False
        self._read = 0
        self._received: list[str] = []
        self._told = WorkerReport()
        self._stats = TransferStats()
        self._closed = threading.Event()
        # More than one thread that loads would only wait for each other, and for vLLM's: most of a load is Python.
        self._threads = [
            threading.Thread(target=self._load_all, name="kvhma-load", daemon=True),
            threading.Thread(target=self._poll_all, name="kvhma-poll", daemon=True),
        ]
        if settings.prefill_engines:
            self._threads.append(threading.Thread(target=self._meet_all, name="kvhma-meet", daemon=True))
        for thread in self._threads:
            thread.start()

    # --- the engine's thread -------------------------------------------------------------------------------

    def order(self, metadata: StepMetadata) -> None:
        """Take the orders of a step."""
        self._ordered = bool(metadata.loads)
        with self._lock:
            self._under_way += len(metadata.refusals) + len(metadata.loads)
        for request_id, text in metadata.refusals.items():
            self._fail(request_id, Failure("refused", text, passing=False))
        now = time.monotonic()
        for load in metadata.loads:
            self._orders.put(QueuedLoad(load, now))

    def collect(self, *, idle: bool) -> tuple[set[str], WorkerReport]:
        """Return the requests whose loads have ended, each once, and what the scheduler has to know of them.

        Small loads end with the step that ordered them, or just after it, so wait for those while one ends after the
        other. Loads that take longer cost one patience, and not in every step, unless a step is `idle`, with nothing
        to compute: the engine would only ask again.
        """
        with self._reported:
            if self._ordered or idle:
                self._ordered = False
                deadline = time.monotonic() + _MOST_SECONDS
                read = -1
                while self._under_way and self._read > read and time.monotonic() < deadline:
                    read = self._read
                    self._reported.wait_for(lambda: not self._under_way, _PATIENCE_SECONDS)
            received, self._received = set(self._received), []
            report, self._told = self._told, WorkerReport()
        return received, report

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, TransferStats()
        return stats

    def close(self) -> None:
        """Wait for what is in flight and stop; the caches may be freed afterwards."""
        self._closed.set()
        self._orders.put(None)
        self._has_moving.set()
        for thread in self._threads:
            thread.join(timeout=self._settings.handshake_timeout + 1)
        self._peers.close()
        try:
            self._agent.close()
        except TransferError as error:
            logger.warning("kvhma: %s", error)

    # --- the thread that loads -----------------------------------------------------------------------------

    def _load_all(self) -> None:
        while (orders := self._next_orders()) and not self._closed.is_set():
            claimed = [moving for source, those in self._with_sources(orders) for moving in self._claim(source, those)]
            waiting: list[ActiveLoad] = []
            for moving in claimed:
                self._begin(moving)
                # A transport that copies inline is done by now, and P has answered for the first ones.
                waiting = [one for one in (*waiting, moving) if not self._advance(one)]
            self._moving.extend(waiting)
            self._has_moving.set()
            for moving in claimed:
                self._count_groups(moving.load, moving.source.plan)

    def _next_orders(self) -> list[QueuedLoad]:
        """Wait for an order and return it with those behind it; none at the end."""
        orders = []
        order = self._orders.get()
        while order is not None:
            orders.append(order)
            if len(orders) == _ORDERS_AT_ONCE:
                break
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
        return orders

    def _with_sources(self, orders: list[QueuedLoad]) -> list[tuple[PrefillEngine, list[QueuedLoad]]]:
        """Return the orders by engine, those without a known engine later, after a handshake."""
        found: dict[int, tuple[PrefillEngine, list[QueuedLoad]]] = {}
        for order in orders:
            try:
                source = self._peers.borrow(order.load.remote.incarnation, partial(self._met, order))
            except Exception as error:
                self._fail(order.load.request_id, explain(error))
                continue
            if source is not None:
                found.setdefault(id(source), (source, []))[1].append(order)
        return list(found.values())

    def _claim(self, source: PrefillEngine, orders: list[QueuedLoad]) -> list[ActiveLoad]:
        """Claim what some loads read from one engine. It answers while they are planned and posted."""
        claims = [LeaseClaim(order.load.remote.lease_key, order.load.reader) for order in orders]
        try:
            leases = claim_all(
                source.lines,
                claims,
                timeout=self._settings.handshake_timeout,
                margin=self._settings.clock_margin,
            )
        except Exception as error:
            for order in orders:
                self._peers.give_back(source)
                self._fail(order.load.request_id, explain(error))
            return []
        return [ActiveLoad(order.load, order.since, source, lease) for order, lease in zip(orders, leases, strict=True)]

    def _met(self, order: QueuedLoad, error: KvhmaError | None) -> None:
        order.handshakes += 1
        if error is None and order.handshakes > _HANDSHAKES:
            error = PeerLostError(f"{order.load.remote.address} was lost after each of {_HANDSHAKES} handshakes")
        if error is None:
            self._orders.put(order)
        else:
            self._fail(order.load.request_id, explain(error))

    def _begin(self, moving: ActiveLoad) -> None:
        """Plan a load and post its reads. What goes wrong is told once those that were posted have ended."""
        load, source = moving.load, moving.source
        started = time.monotonic()
        try:
            planned = source.plan.transfer(load.num_tokens, list(load.spans), list(load.remote.spans))
            moving.planned = planned
            self._memory.zero(planned.zero)
            started = time.monotonic()
            for read in planned.reads:
                peer = source.peers[read.source]
                if peer is None:
                    raise RequestError(f"source {read.source} is not connected")
                transfer = self._agent.read(
                    peer,
                    read.local,
                    read.remote,
                    local_memory=self._memory.kind,
                    remote_memory=peer.geometry.regions[0].memory,
                )
                moving.transfers.append(transfer)
        except Exception as error:
            moving.error = error
        moving.posted = time.monotonic()
        moving.post_seconds = moving.posted - started

    def _count_groups(self, load: Load, plan: Plan) -> None:
        # The plan joins neighbours of all groups, so what one of them costs is planned by itself.
        nothing = [Span(first + len(ids) + _BEHIND, []) for first, ids in load.spans]
        rows = []
        try:
            for index, group in enumerate(self._geometry.groups):
                spans = [*nothing[:index], load.spans[index], *nothing[index + 1 :]]
                alone = plan.transfer(load.num_tokens, spans, list(load.remote.spans))
                rows.append((f"{index} {group.kind}", alone.bytes, alone.descriptors))
        except Exception:
            logger.debug("kvhma: groups of %s were not counted", load.request_id, exc_info=True)
        with self._lock:
            for row in rows:
                self._stats.add("groups", row[0], bytes=row[1], descriptors=row[2])

    # --- the thread that polls -----------------------------------------------------------------------------

    def _poll_all(self) -> None:
        while not self._closed.is_set() or self._moving:
            if not self._moving:
                self._has_moving.wait()
                self._has_moving.clear()
                continue
            for _ in range(len(self._moving)):
                moving = self._moving.popleft()
                if not self._advance(moving):
                    self._moving.append(moving)
            # A copy: the thread that loads adds to it.
            left = list(self._moving)
            sockets = {moving.lease.socket for moving in left} - {None}
            if sockets and all(moving.ended is not None for moving in left):  # P's answers end the wait
                zmq.select(list(sockets), [], [], _ANSWER_SECONDS)
            elif left:
                time.sleep(_NAP_SECONDS)

    def _advance(self, moving: ActiveLoad) -> bool:
        """Make progress; return whether a load has ended and was reported."""
        try:
            return self._poll(moving)
        except Exception as error:
            self._fail(moving.load.request_id, explain(error))
            return True

    def _poll(self, moving: ActiveLoad) -> bool:
        for transfer in moving.transfers:
            try:
                transfer.poll()
            except Exception as error:
                moving.error = moving.error or error
        if not all(transfer.finished for transfer in moving.transfers):
            return False
        if moving.ended is None:
            moving.ended = time.monotonic()
            self._read += 1  # two threads may lose one: all that a step asks is whether it grows
        if moving.error is None:
            try:
                if not moving.lease.covers(moving.ended):
                    return False
            except Exception as error:
                moving.error = error
        self._end(moving, moving.ended)
        return True

    def _end(self, moving: ActiveLoad, ended: float) -> None:
        try:
            if moving.error is None:
                self._memory.copy_in(moving.load.spans)
        except Exception as error:
            moving.error = error
        moving.lease.close()
        self._peers.give_back(moving.source)
        with self._lock:
            self._stats.count("late_checks", moving.lease.fences)
        if moving.error is not None or moving.planned is None:
            self._fail(moving.load.request_id, explain(moving.error or RuntimeError("a load without a plan")))
            return
        numbers = self._numbers(moving, moving.planned, ended)
        logger.debug("kvhma: loaded %s from %s: %s", moving.load.request_id, moving.load.remote.engine_id, numbers)
        with self._lock:
            self._stats.record(**numbers)
            self._stats.add(
                "ranks",
                str(self._geometry.tp_rank),
                bytes=numbers["bytes"],
                descriptors=numbers["selected_descriptors"],
                seconds=numbers["transfer_seconds"],
            )
            if tokens := first_filled_tokens(self._geometry, moving.load.spans, moving.planned.first_tokens):
                self._told.first_tokens[moving.load.request_id] = tokens
            self._report(moving.load.request_id)

    def _numbers(self, moving: ActiveLoad, planned: Transfer, ended: float) -> dict[str, float]:
        load = moving.load
        windows = [
            max(0, span.first * group.block_size - load.cached)
            for group, span in zip(self._geometry.groups, load.spans, strict=True)
            if group.kind in ("sliding", "chunked")
        ]
        posted = [transfer.telemetry.descriptors for transfer in moving.transfers if transfer.telemetry is not None]
        return {
            "load_seconds": time.monotonic() - moving.ordered,
            "post_seconds": moving.post_seconds,
            "transfer_seconds": ended - moving.posted + moving.post_seconds,
            "bytes": planned.bytes,
            "selected_descriptors": planned.descriptors,
            "posted_descriptors": sum(posted),
            "zeroed_bytes": int(planned.zero[:, 1].sum()),
            "tokens_loaded": load.num_tokens - load.cached,
            "tokens_cached": load.cached,
            "tokens_clipped": sum(windows),
        }

    # --- the thread that meets -----------------------------------------------------------------------------

    def _meet_all(self) -> None:
        """Know the engines that will be read from, in each of their lives, before a request waits for that."""
        avoided: dict[Address, float] = {}

        def met(address: Address, error: KvhmaError | None) -> None:
            if error is not None:
                if not explain(error).passing:
                    avoided[address] = time.monotonic() + _AVOID_SECONDS
                logger.warning("kvhma: %s of prefill_engines: %s", address, error)

        while True:
            for address in self._settings.prefill_engines:
                if avoided.get(address, 0.0) > time.monotonic() or self._closed.is_set():
                    continue
                try:
                    self._peers.meet(address, partial(met, address))
                except KvhmaError as error:
                    logger.debug("kvhma: %s of prefill_engines: %s", address, error)
                except Exception:
                    logger.exception(
                        "kvhma: meeting %s of prefill_engines met an error of the connector's own", address
                    )
            if self._closed.wait(_MEET_SECONDS):
                return

    # --- reports -------------------------------------------------------------------------------------------

    def _fail(self, request_id: str, failure: Failure) -> None:
        logger.warning("kvhma: the load of %s failed (%s): %s", request_id, failure.cause, failure.text)
        with self._lock:
            self._stats.count(f"failed_{failure.cause}")
            self._told.failures[request_id] = failure
            self._report(request_id)

    def _report(self, request_id: str) -> None:
        self._under_way -= 1
        self._received.append(request_id)
        if not self._under_way:
            self._reported.notify()

    def _shook(self, seconds: float) -> None:
        with self._lock:
            self._stats.count("handshakes")
            self._stats.data["handshake_seconds"].append(seconds)


def first_filled_tokens(geometry: Geometry, spans: Sequence[Span], first_tokens: Sequence[int]) -> dict[int, int]:
    """Return the first filled token of each group whose blocks begin before it, by index of the group.

    A window or a chunk may begin inside a block of D that holds older tokens too, which P has let go of.

    Args:
        geometry: D's.
        spans: D's blocks of a load, for each group.
        first_tokens: of the transfer that filled them.
    """
    groups = enumerate(zip(geometry.groups, spans, first_tokens, strict=True))
    return {
        index: token
        for index, (group, span, token) in groups
        if len(span.ids) and token > span.first * group.block_size * group.cp_size
    }


_CAUSES: tuple[tuple[type[Exception], str, bool], ...] = (
    (LeaseUnknownError, "expired", True),
    (LeaseEndedError, "expired", False),
    (PeerLostError, "peer_lost", True),
    (HandshakeTimeoutError, "handshake", True),
    (HandshakeError, "handshake", False),
    (UnsupportedPairError, "unsupported", False),
    (TransferError, "transfer", True),
    (KvhmaError, "request", False),
)


def explain(error: Exception) -> Failure:
    """Return why a load failed, from what was raised."""
    for kind, cause, passing in _CAUSES:
        if isinstance(error, kind):
            return Failure(cause, str(error), passing)
    logger.error("kvhma: a load met an error of the connector's own", exc_info=error)
    return Failure("internal", f"{type(error).__name__}: {error}", passing=False)
