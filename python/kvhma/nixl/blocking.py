# SPDX-License-Identifier: Apache-2.0
"""All that a plan says of a request, in one call: clear, read from every source, wait."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Transfer
from kvhma.errors import KvhmaError, RequestError, TransferError
from kvhma.geometry import Memory, Region
from kvhma.nixl.agent import Agent
from kvhma.nixl.peer import Peer
from kvhma.nixl.transfer import TransferHandle

Clear: TypeAlias = Callable[[NDArray[np.uint64]], None]

_POLL_SECONDS = 2e-4


def load(
    agent: Agent,
    peers: Sequence[Peer | None],
    transfer: Transfer,
    *,
    clear: Clear | None = None,
    memory: Memory = "DRAM",
    timeout: float = 30.0,
) -> None:
    """Bring a request's cache here: zero what no token fills, read from all sources at once, wait for all.

    When it returns, every byte of the request's blocks is what the sources have, or zero. It waits, so call it from a
    thread that may; an engine that computes meanwhile uses :meth:`Agent.read` and polls.

    Args:
        agent: with which the local memory is registered.
        peers: for each source of the plan the peer that holds it; None where nothing is read.
        transfer: what the plan says of the request, :meth:`kvhma.Plan.transfer`.
        clear: zeroes local ranges, rows of address, length and device; done when it returns. None for host memory,
            which is cleared here. For a device :func:`kvhma.tensors.clear` does it.
        memory: kind of the local memory.
        timeout: seconds that the reads may take, together.

    Raises:
        RequestError: no peer for a source that is read, local memory that is not registered, or no `clear` for memory
            of a device. Nothing was cleared or read.
        PeerLostError: a peer is gone. No read is under way any more.
        TransferError: a read failed, and none is under way any more; or reads did not end in time: they still write,
            and :meth:`Agent.poll` returns each when it has ended. Its blocks must not be used before.
    """
    sources = _sources(peers, transfer)
    _check_local(agent, transfer, memory)
    if clear is not None:
        clear(transfer.zero)
    elif memory == "DRAM":
        _clear_host(transfer.zero)
    elif len(transfer.zero):
        raise RequestError(
            f"clear is None and memory is {memory!r}: who owns it has to clear {len(transfer.zero)} ranges"
        )
    deadline = time.monotonic() + timeout
    handles: list[TransferHandle] = []
    error: KvhmaError | None = None
    for peer, read in zip(sources, transfer.reads, strict=True):
        try:
            kind = peer.geometry.regions[0].memory
            handles.append(agent.read(peer, read.local, read.remote, local_memory=memory, remote_memory=kind))
        except KvhmaError as raised:
            error = raised
            break
    _wait(handles, deadline, timeout, error)


def _sources(peers: Sequence[Peer | None], transfer: Transfer) -> list[Peer]:
    found = []
    for read in transfer.reads:
        peer = peers[read.source] if read.source < len(peers) else None
        if peer is None:
            raise RequestError(f"source {read.source} is read from, and peers has none for it")
        found.append(peer)
    return found


def _check_local(agent: Agent, transfer: Transfer, memory: Memory) -> None:
    """Refuse to write where the agent has nothing: NIXL would refuse a read there, but nobody a zero."""
    for address, length, device in transfer.zero.tolist():
        region = Region(address, length, memory, device)
        if not agent.covers(region):
            raise RequestError(f"{region} of the transfer is not registered with agent {agent.name!r}")


def _clear_host(rows: NDArray[np.uint64]) -> None:
    for address, length, _ in rows.tolist():
        ctypes.memset(address, 0, length)


def _wait(handles: Sequence[TransferHandle], deadline: float, timeout: float, error: KvhmaError | None) -> None:
    """Wait until no read is under way, whatever became of the others; raise the first error."""
    while running := [handle for handle in handles if not handle.finished]:
        for handle in running:
            try:
                handle.poll()
            except KvhmaError as raised:
                error = error or raised
        if not any(handle.finished for handle in running):
            if time.monotonic() > deadline:
                late = sum(handle.abort() for handle in running)
                if late:
                    raise TransferError(f"{late} reads still write after {timeout} s; keep their blocks") from error
            time.sleep(_POLL_SECONDS)
    if error is not None:
        raise error
