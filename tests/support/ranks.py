# SPDX-License-Identifier: Apache-2.0
"""Ranks of two engines, each a process with real memory and a NIXL agent. They live as long as a test file."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.nixl import Agent, Peer, TransferHandle
from kvhma.oracle import MemoryReport, Request, check_memory, fill_source, fill_stale
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES

SECONDS = 60.0
"""No answer takes longer; nearly all take milliseconds."""

ENCODINGS = ("direct", "strided", "written")
"""Descriptors of each request; ids into prepared views; ids into the same views, written out row by row."""

Memory = list[NDArray[np.uint8]]


@dataclass(frozen=True)
class Order:
    """What a rank of D is to fetch.

    Attributes:
        payloads: of the ranks of P, in the order of the plan.
        num_tokens: tokens that P computed.
        local: D's spans.
        remote: P's spans, for all sources or for each.
        descriptor_bytes: as for `kvhma.plan`.
        seed: that the sources were filled with.
    """

    payloads: tuple[bytes, ...]
    num_tokens: int
    local: Sequence[kvhma.Span]
    remote: Sequence[kvhma.Span] | Sequence[Sequence[kvhma.Span]]
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    seed: int = 0


@dataclass(frozen=True)
class Count:
    """Descriptors and bytes of one read, as planned or as NIXL measured them."""

    descriptors: int
    nbytes: int


@dataclass(frozen=True)
class Moved:
    """What one encoding of an order did, with the right bytes: an error is raised otherwise.

    Attributes:
        planned: for each source that something is read from.
        measured: the same, by NIXL's telemetry.
        excess_bytes: bytes of tokens after the request's end, as the plan counts them.
        report: what the oracle saw.
    """

    planned: dict[int, Count]
    measured: dict[int, Count | None]
    excess_bytes: int
    report: MemoryReport

    @property
    def bytes(self) -> int:
        return sum(count.nbytes for count in self.planned.values())

    @property
    def descriptors(self) -> int:
        return sum(count.descriptors for count in self.planned.values())


Fetched = dict[str, Moved | str]
"""By encoding: what was moved, or why the plan has no views."""


class _Rank:
    """The side of the process."""

    def __init__(self, name: str) -> None:
        self.name = name
        # One agent for all orders: each agent has its own threads and connections.
        self.agent: Agent | None = None
        # Registered memory has to outlive the agent, and new memory must not overlap memory that is registered.
        self.kept: list[Memory] = []

    def place(self, text: bytes) -> bytes:
        """Give a geometry memory; return the handshake payload with its real addresses."""
        if self.agent is None:
            self.agent = Agent(self.name)
            self.takes_strided = self.agent.strided
        sketch = kvhma.Geometry.from_json(text)
        self.memory = [np.empty(region.bytes, np.uint8) for region in sketch.regions]
        self.kept.append(self.memory)
        regions = tuple(
            replace(region, base=part.ctypes.data, memory="DRAM", device=0)
            for region, part in zip(sketch.regions, self.memory, strict=True)
        )
        self.geometry = replace(sketch, regions=regions)
        self.agent.register(self.geometry)
        return self.agent.handshake_payload(self.geometry)

    def fill(self, spans: Sequence[kvhma.Span], seed: int) -> None:
        fill_source(self.memory, self.geometry, spans, seed=seed)

    def fetch(self, order: Order) -> Fetched:
        """Read what an order requests, in each encoding, and check every byte."""
        assert self.agent is not None
        peers = [self.agent.connect(payload) for payload in order.payloads]
        remotes = [peer.geometry for peer in peers]
        plan = kvhma.plan(self.geometry, remotes, descriptor_bytes=order.descriptor_bytes)
        request = order.num_tokens, order.local, order.remote
        fill_stale(self.memory, seed=order.seed)
        # Filling with stale bytes takes longer than copying.
        stale = [part.copy() for part in self.memory]
        found: Fetched = {}
        for encoding in ENCODINGS:
            for ours, before in zip(self.memory, stale, strict=True):
                ours[:] = before
            self.agent.strided = self.takes_strided and encoding == "strided"
            moved: kvhma.Transfer | kvhma.Transfer[np.int32]
            try:
                if encoding == "direct":
                    moved = plan.transfer(*request)
                    measured = _move(moved, _direct(self.agent, peers))
                else:
                    moved = plan.ids(*request)
                    with _prepared(self.agent, peers, plan) as start:
                        measured = _move(moved, start)
            except UnsupportedPairError as error:
                found[encoding] = str(error)
                continue
            excess = moved.excess_bytes
            asked = Request(*request)
            report = check_memory(self.memory, self.geometry, remotes, asked, excess_bytes=excess, seed=order.seed)
            planned = {read.source: Count(read.descriptors, read.bytes) for read in moved.reads}
            found[encoding] = Moved(planned, measured, excess, report)
        return found

    def close(self) -> None:
        """Release everything, so that the next geometry gets a new agent and free memory."""
        if self.agent is not None:
            self.agent.close()
        self.agent = None
        self.memory = []
        self.kept.clear()


def _move(moved: Any, start: Callable[[Any], TransferHandle]) -> dict[int, Count | None]:
    """Zero, then read from all sources at once; return what NIXL measured."""
    for address, nbytes, _ in moved.zero.tolist():
        ctypes.memset(address, 0, nbytes)
    running = {read.source: start(read) for read in moved.reads}
    measured = {}
    for source, transfer in running.items():
        if not transfer.wait(SECONDS / 2):
            raise TimeoutError(f"the read from source {source} does not end")
        told = transfer.telemetry
        measured[source] = None if told is None else Count(told.descriptors, told.nbytes)
    return measured


def _direct(agent: Agent, peers: Sequence[Peer]) -> Callable[[Any], TransferHandle]:
    return lambda read: agent.read(peers[read.source], read.local, read.remote)


@contextlib.contextmanager
def _prepared(agent: Agent, peers: Sequence[Peer], plan: kvhma.Plan) -> Iterator[Callable[[Any], TransferHandle]]:
    lists = {}
    for source in plan.sources:
        views = plan.views(source)
        lists[source] = agent.prepare(None, views[0]), agent.prepare(peers[source], views[1])
    try:
        yield lambda read: agent.read_ids(lists[read.source][0], read.local, lists[read.source][1], read.remote)
    finally:
        for ours, theirs in lists.values():
            ours.release()
            theirs.release()


def serve(pipe: Connection, name: str) -> None:
    """Execute the parent's commands until it closes the connection."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    rank = _Rank(name)
    with contextlib.suppress(EOFError):
        while (order := pipe.recv()) is not None:
            what, arguments = order
            try:
                answer = True, getattr(rank, what)(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    rank.close()


class Rank:
    """A rank as the test sees it. Ranks can work at the same time: send to all first, then receive from all."""

    def __init__(self, name: str) -> None:
        self.name = name
        # NIXL has threads, which a forked process would not survive.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, what: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the receive reports
            self._pipe.send((what, arguments))

    def hear(self) -> tuple[bool, Any]:
        """Return whether the first command succeeded, and its answer or the error."""
        try:
            if self._pipe.poll(SECONDS):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            return False, "the process has ended"
        self._process.kill()  # its late answer must not be read as the next one
        return False, f"no answer in {SECONDS} s"

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._pipe.close()
        self._process.close()


def _answers(ranks: Iterable[Rank]) -> list[Any]:
    """Receive from all ranks, so that no answer is left in a pipe, then fail if one rank did."""
    heard = [(rank.name, *rank.hear()) for rank in ranks]
    for name, good, answer in heard:
        assert good, f"rank {name}: {answer}"
    return [answer for _, _, answer in heard]


class Ranks:
    """Ranks of P and D."""

    def __init__(self, count: int) -> None:
        """Start `count` ranks of each engine. They start concurrently, and have no agents yet."""
        self._p = [Rank(f"P{at}") for at in range(count)]
        self._d = [Rank(f"D{at}") for at in range(count)]
        self._awake: set[Rank] = set()

    def hand_off(
        self,
        prefill: Sequence[kvhma.Geometry],
        prefill_spans: Sequence[Sequence[kvhma.Span]],
        decode: Sequence[kvhma.Geometry],
        decode_spans: Sequence[Sequence[kvhma.Span]],
        num_tokens: int,
        **more: Any,
    ) -> list[Fetched]:
        """Move one request to every rank of D, and return each rank's report.

        Args:
            prefill: the ranks of P.
            prefill_spans: for each of them its spans.
            decode: the ranks of D.
            decode_spans: for each of them its spans.
            num_tokens: tokens that P computed.
            more: other fields of :class:`Order`.

        Raises:
            AssertionError: a rank failed, or a byte of it was wrong.
        """
        p, d = self._p[: len(prefill)], self._d[: len(decode)]
        # An idle agent still has its threads and connections.
        self._close(self._awake - {*p, *d})
        self._awake |= {*p, *d}
        for rank, geometry in [*zip(p, prefill, strict=True), *zip(d, decode, strict=True)]:
            rank.tell("place", geometry.to_json())
        payloads = tuple(_answers([*p, *d])[: len(p)])
        seed = more.get("seed", 0)
        for rank, spans in zip(p, prefill_spans, strict=True):
            rank.tell("fill", spans, seed)
        _answers(p)
        for rank, spans in zip(d, decode_spans, strict=True):
            rank.tell("fetch", Order(payloads, num_tokens, spans, prefill_spans, **more))
        return _answers(d)

    def forget(self) -> None:
        """Close all agents and free all memory."""
        self._close(self._awake)

    def _close(self, ranks: set[Rank]) -> None:
        self._awake = self._awake - ranks
        for rank in ranks:
            rank.tell("close")
        _answers(ranks)

    def end(self) -> None:
        for rank in [*self._d, *self._p]:
            rank.end()


@contextlib.contextmanager
def ranks_of_two_engines(count: int = 1) -> Iterator[Ranks]:
    """Start this many ranks of each engine, and stop them at the end."""
    ranks = Ranks(count)
    try:
        yield ranks
    finally:
        ranks.end()
