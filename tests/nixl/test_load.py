# SPDX-License-Identifier: Apache-2.0
"""``kvhma.nixl.load``: one call loads a request's cache, or raises an error after which nothing writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nixl", reason="needs NIXL")

from kvhma import Geometry, Span, plan
from kvhma.errors import KvhmaError, PeerLostError, RequestError, TransferError
from kvhma.models import models
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.nixl import Agent, Peer, load
from kvhma.nixl.blocking import _wait

pytestmark = pytest.mark.nixl

KNOWN = models()["gemma-3-4b"]
MODEL = replace(KNOWN, layers=KNOWN.layers[:6], kv_heads=4, head_dim=16, query_heads=None)
BLOCKS, TOKENS = 16, 20
"""Tokens end inside of the second block, whose rest is zeroed."""


class Rank:
    """A rank's memory, with bytes that no other rank has, and its agent."""

    def __init__(self, name: str, rank: int, size: int, seed: int) -> None:
        options = LayoutOptions(num_blocks=BLOCKS, tp_rank=rank, tp_size=size, region_align=1, base=1 << 20)
        nbytes = sum(region.bytes for region in layout(MODEL, options).regions)
        self.memory = np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
        self.geometry: Geometry = layout(MODEL, replace(options, base=self.memory.ctypes.data))
        self.agent = Agent(name)
        self.agent.register(self.geometry)

    def bytes_at(self, address: int, length: int) -> np.ndarray:
        start = address - self.memory.ctypes.data
        assert 0 <= start <= len(self.memory) - length
        return self.memory[start : start + length]


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank, Rank]]:
    """Two ranks of P and one of D."""
    made = Rank("p-0", 0, 2, 1), Rank("p-1", 1, 2, 2), Rank("d-0", 0, 1, 3)
    yield made
    for one in reversed(made):
        one.agent.close()


def moved(p0: Rank, p1: Rank, d: Rank) -> tuple[list[Peer | None], Any]:
    peers: list[Peer | None] = [d.agent.connect(one.agent.handshake_payload(one.geometry)) for one in (p0, p1)]
    spans = [Span(0, [1 + 2 * index, 2 + 2 * index]) for index in range(len(d.geometry.groups))]
    transfer = plan(d.geometry, [p0.geometry, p1.geometry], descriptor_bytes=0).transfer(TOKENS, spans, spans)
    assert len(transfer.reads) == 2
    assert len(transfer.zero)
    return peers, transfer


def test_what_is_read_is_there_and_the_rest_is_zero(ranks: tuple[Rank, Rank, Rank]) -> None:
    """Each byte of D is P's where a row names it, zero where there is no token, and unchanged elsewhere."""
    p0, p1, d = ranks
    peers, transfer = moved(*ranks)
    expected = d.memory.copy()
    base = d.memory.ctypes.data
    for read in transfer.reads:
        for (to, length, _), (start, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            expected[to - base : to - base + length] = (p0, p1)[read.source].bytes_at(start, length)
    for address, length, _ in transfer.zero.tolist():
        expected[address - base : address - base + length] = 0
    load(d.agent, peers, transfer)
    assert np.array_equal(d.memory, expected)
    assert (expected == 0).sum() == transfer.zero[:, 1].sum()


def test_what_is_wrong_is_said_before_anything_is_written(ranks: tuple[Rank, Rank, Rank]) -> None:
    d = ranks[2]
    peers, transfer = moved(*ranks)
    before = d.memory.copy()
    for wrong in ([peers[0], None], [peers[0]], []):
        with pytest.raises(RequestError, match=r"source \d is read from, but peers has no peer"):
            load(d.agent, wrong, transfer)
    with Agent("other") as unregistered, pytest.raises(RequestError, match="is not registered with agent 'other'"):
        load(unregistered, peers, transfer)
    with pytest.raises(RequestError, match="is not registered"):
        load(d.agent, peers, transfer, memory="VRAM")
    assert np.array_equal(d.memory, before)


def test_who_owns_a_device_clears_it(ranks: tuple[Rank, Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows of the transfer, before any read; without a function that can clear, nothing is read."""
    peers, transfer = moved(*ranks)
    agent, order = ranks[2].agent, []
    monkeypatch.setattr(agent, "covers", lambda region: True)
    read = agent.read
    monkeypatch.setattr(agent, "read", lambda *args, **more: (order.append("read"), read(*args))[1])
    with pytest.raises(RequestError, match="clear is missing for memory 'VRAM'"):
        load(agent, peers, transfer, memory="VRAM")
    assert not order
    load(agent, peers, transfer, memory="VRAM", clear=lambda rows: order.append(rows))
    assert order[1:] == ["read", "read"]
    assert np.array_equal(order[0], transfer.zero)


def test_a_peer_that_is_gone(ranks: tuple[Rank, Rank, Rank]) -> None:
    """The error is raised once the other source's read has ended."""
    peers, transfer = moved(*ranks)
    d = ranks[2]
    d.agent.disconnect(peers[1])
    with pytest.raises(PeerLostError, match="p-1"):
        load(d.agent, peers, transfer)
    assert d.agent._in_flight.running() == []


class Handle:
    """A read that ends after some polls, with success or failure."""

    def __init__(self, polls: int, error: KvhmaError | None = None) -> None:
        self.left, self.error, self.aborted = polls, error, False

    @property
    def finished(self) -> bool:
        return self.left <= 0

    def poll(self) -> str:
        self.left -= 1
        if self.finished and self.error is not None:
            raise self.error
        return "done" if self.finished else "running"

    def abort(self) -> bool:
        self.aborted = True
        return not self.finished


def test_all_reads_end_before_the_first_error_is_raised() -> None:
    first, second = TransferError("first"), TransferError("second")
    handles = [Handle(9), Handle(3, first), Handle(5, second), Handle(1)]
    with pytest.raises(TransferError, match="first"):
        _wait(handles, time.monotonic() + 10, 10, None)  # type: ignore[arg-type]
    assert all(handle.finished for handle in handles)


def test_a_read_that_does_not_end_is_handed_over(ranks: tuple[Rank, Rank, Rank]) -> None:
    """The error reports that it still writes, and the agent continues to poll it."""
    handles = [Handle(1), Handle(1 << 40), Handle(1 << 40)]
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"2 reads still write after 0\.05 s; keep their blocks"):
        _wait(handles, began + 0.05, 0.05, None)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.05
    assert [handle.aborted for handle in handles] == [False, True, True]
