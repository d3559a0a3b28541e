# SPDX-License-Identifier: Apache-2.0
"""Ranks of two engines, each with real memory and a NIXL agent. They live as long as a test file."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.nixl import Agent, Peer, TransferHandle
from kvhma.oracle import MemoryReport, Request, check_memory, fill_source, fill_stale
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.memory import Memory, empty, placed

SECONDS = 60.0
"""No answer takes longer; nearly all take milliseconds."""

ENCODINGS = ("direct", "strided", "written")
"""Descriptors of each request; ids into prepared views; ids into the same views, written out row by row."""


@dataclass(frozen=True)
class Count:
    """Descriptors and bytes of one read, as planned or as NIXL measured them."""

    descriptors: int
    nbytes: int


@dataclass(frozen=True)
class Moved:
    """What one encoding of a request did, with the right bytes: an error is raised otherwise.

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
    """A rank: memory, and an agent for all requests, since each agent has its own threads and connections."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.agent: Agent | None = None
        # Registered memory has to outlive the agent, and new memory must not overlap memory that is registered.
        self.kept: list[Memory] = []

    def place(self, sketch: kvhma.Geometry) -> bytes:
        """Give a geometry memory; return the handshake payload with its real addresses."""
        if self.agent is None:
            self.agent = Agent(self.name)
            self.takes_strided = self.agent.strided
        self.memory = empty(sketch)
        self.kept.append(self.memory)
        self.geometry = placed(sketch, (part.ctypes.data for part in self.memory))
        self.agent.register(self.geometry)
        return self.agent.handshake_payload(self.geometry)

    def fetch(self, payloads: Sequence[bytes], asked: Request, descriptor_bytes: int, seed: int) -> Fetched:
        """Read what a request needs, in each encoding, and check every byte."""
        assert self.agent is not None
        peers = [self.agent.connect(payload) for payload in payloads]
        remotes = [peer.geometry for peer in peers]
        plan = kvhma.plan(self.geometry, remotes, descriptor_bytes=descriptor_bytes)
        request = asked.num_tokens, asked.local_spans, asked.remote_spans
        fill_stale(self.memory, seed=seed)
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
            report = check_memory(self.memory, self.geometry, remotes, asked, excess_bytes=excess, seed=seed)
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


class Ranks:
    """Ranks of P and D. They have no agents until they are used."""

    def __init__(self, count: int) -> None:
        self._p = [_Rank(f"P{at}") for at in range(count)]
        self._d = [_Rank(f"D{at}") for at in range(count)]

    def hand_off(
        self,
        prefill: Sequence[kvhma.Geometry],
        prefill_spans: Sequence[Sequence[kvhma.Span]],
        decode: Sequence[kvhma.Geometry],
        decode_spans: Sequence[Sequence[kvhma.Span]],
        num_tokens: int,
        *,
        descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES,
        seed: int = 0,
    ) -> list[Fetched]:
        """Move one request to every rank of D, and return each rank's report.

        Args:
            prefill: the ranks of P.
            prefill_spans: for each of them its spans.
            decode: the ranks of D.
            decode_spans: for each of them its spans.
            num_tokens: tokens that P computed.
            descriptor_bytes: as for `kvhma.plan`.
            seed: of what the sources hold.

        Raises:
            OracleError: a byte was wrong.
        """
        payloads = []
        for rank, geometry, spans in zip(self._p, prefill, prefill_spans, strict=False):
            payloads.append(rank.place(geometry))
            fill_source(rank.memory, rank.geometry, spans, seed=seed)
        found = []
        for rank, geometry, local in zip(self._d, decode, decode_spans, strict=False):
            rank.place(geometry)
            asked = Request(num_tokens, local, prefill_spans)
            found.append(rank.fetch(payloads, asked, descriptor_bytes, seed))
        assert len(payloads) == len(prefill)
        assert len(found) == len(decode)
        return found

    def close(self) -> None:
        """Close all agents and free all memory."""
        for rank in [*self._d, *self._p]:
            rank.close()
