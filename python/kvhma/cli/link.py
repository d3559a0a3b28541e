# SPDX-License-Identifier: Apache-2.0
"""The two processes of ``kvhma bench link``: one holds memory, the other reads it in blocks and measures the time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.subprocess import bytes_geometry, connect, introduce, process, receive
from kvhma.costs import Link
from kvhma.errors import TransferError

if TYPE_CHECKING:  # NIXL may not be installed
    from kvhma.nixl import Agent, Peer

BUDGET = 64 << 20
"""Largest size of a read, in bytes."""
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement.

    Attributes:
        block: bytes of a block.
        blocks: blocks that were read.
        descriptors: copies of the read: one per block if they are spaced, one in total if they touch.
        seconds: time of the read from making it until all bytes arrived; the best of the repeats.
    """

    block: int
    blocks: int
    descriptors: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes that were read."""
        return self.block * self.blocks


def blocks_of(block: int, limit: int) -> int:
    """Return how many blocks of a size a read has."""
    return max(1, min(limit, BUDGET // block))


def measure(sizes: Sequence[int], limit: int, repeats: int, backend: str) -> Iterator[Point]:
    """Start both processes and yield each measurement when it is done.

    Args:
        sizes: bytes of a block.
        limit: largest number of blocks of a read.
        repeats: how often each read is done.
        backend: NIXL's backend.

    Raises:
        PeerLostError: a process ended early.
        TransferError: NIXL refused, or a byte is wrong.
    """
    memory = 2 * max(blocks_of(size, limit) * size for size in sizes)
    with process(_hold, memory, backend) as p, process(_read, memory, list(sizes), limit, repeats, backend) as d:
        introduce(p, d)
        for _ in range(2 * len(sizes)):
            yield receive(d, "decode")
        p.send(None)


def fit(points: Sequence[Point], source: str) -> Link:
    """Fit the cost model to measurements, by relative error.

    Args:
        points: at least two, with different bytes per descriptor.
        source: a text that says where the constants come from.
    """
    rows = np.array([[point.descriptors, point.bytes] for point in points], dtype=float)
    seconds = np.array([point.seconds for point in points])
    found, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(points)), rcond=None)
    each, per_byte = (float(value) for value in found)
    if per_byte <= 0 or each <= 0:
        # One of the two constants explains all of the time: use the point where that constant weighs most.
        per_byte = min(float(s / n) for s, n in zip(seconds, rows[:, 1], strict=True))
        rest = [max(float(s - n * per_byte) / float(c), 1e-9) for s, (c, n) in zip(seconds, rows, strict=True)]
        each = float(np.median(rest))
    return Link(each, 1 / per_byte, source)


def _pattern(length: int) -> NDArray[np.uint8]:
    """Return bytes in which no two blocks are equal."""
    words = np.arange(-(-length // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:length].copy()


def _agent(name: str, backend: str) -> Agent:
    from kvhma.nixl import Agent, AgentOptions

    return Agent(name, AgentOptions(backends=(backend,)))


def _hold(pipe: Connection, nbytes: int, backend: str) -> None:
    memory = _pattern(nbytes)
    with _agent("link-prefill", backend) as agent:
        connect(pipe, agent, bytes_geometry(memory))
        while not pipe.poll(0.01):  # until D has read everything
            agent.notifications()


def _read(pipe: Connection, nbytes: int, sizes: list[int], limit: int, repeats: int, backend: str) -> None:
    expected = _pattern(nbytes)
    memory = np.zeros(nbytes, dtype=np.uint8)
    with _agent("link-decode", backend) as agent:
        peer = connect(pipe, agent, bytes_geometry(memory))
        starts = (memory.ctypes.data, peer.geometry.regions[0].base)
        for size, spaced in product(sizes, (True, False)):
            count = blocks_of(size, limit)
            rows = _rows(size, count, spaced)
            local, remote = (rows + np.array([start, 0, 0], np.uint64) for start in starts)
            times = [_seconds(agent, peer, local, remote) for _ in range(repeats + 1)]
            for at, length, _ in rows.tolist():
                if not np.array_equal(memory[at : at + length], expected[at : at + length]):
                    raise TransferError(f"a block of {size} bytes at {at} arrived with wrong bytes")
            pipe.send(Point(size, count, len(rows), min(times[1:])))


def _seconds(agent: Agent, peer: Peer, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> float:
    begin = time.perf_counter()
    if not agent.read(peer, local, remote, b"").wait(_TIMEOUT_SECONDS):
        nbytes = int(local[:, 1].sum())
        raise TransferError(f"{nbytes} bytes in {len(local)} descriptors did not arrive in {_TIMEOUT_SECONDS} s")
    return time.perf_counter() - begin


def _rows(size: int, count: int, spaced: bool) -> NDArray[np.uint64]:
    """Return offset, length and device of the read: blocks with gaps of their length, or one run."""
    if not spaced:
        return np.array([[0, size * count, 0]], dtype=np.uint64)
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(2 * size)
    rows[:, 1] = size
    return rows
