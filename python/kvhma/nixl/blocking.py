# SPDX-License-Identifier: Apache-2.0
"""Runs all transfers of a request in one call: clear, read from every source, wait."""

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
    """Load a request's cache: zero what no token fills, read from all sources at once, and wait for all reads.

    When it returns, every byte of the request's blocks has the sources' content or zero. It waits, so call it from a
    thread that may wait. An engine that computes in the meantime uses :meth:`Agent.read` and polls.

    Args:
        agent: the agent that registered the local memory.
        peers: for each source of the plan the peer that holds it; None if nothing is read from it.
        transfer: the plan's result for the request, see :meth:`kvhma.Plan.transfer`.
        clear: zeroes local ranges (rows of address, length and device) before it returns. None for host memory, which
            is cleared here. For a device use :func:`kvhma.tensors.clear`.
        memory: kind of the local memory.
        timeout: seconds for all reads together.

    Raises:
        RequestError: a source with reads has no peer; local memory is not registered; or `clear` is missing for device
            memory. Nothing was cleared or read.
        PeerLostError: a peer is gone. No read is in flight any more.
        TransferError: a read failed, and no read is in flight any more. Or reads did not end in time and still write;
            :meth:`Agent.poll` returns each of them when it has ended. Do not use its blocks before that.
    """
    sources = _sources(peers, transfer)
    _check_local(agent, transfer, memory)
    if clear is not None:
        clear(transfer.zero)
    elif memory == "DRAM":
        clear_host(transfer.zero)
    elif len(transfer.zero):
        raise RequestError(
            f"clear is missing for memory {memory!r}: pass a function that clears {len(transfer.zero)} ranges"
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
            raise RequestError(f"source {read.source} is read from, but peers has no peer for it")
        found.append(peer)
    return found


def _check_local(agent: Agent, transfer: Transfer, memory: Memory) -> None:
    """Refuse to write outside the agent's memory: NIXL would refuse such a read, but zeroing has no such check."""
    for address, length, device in transfer.zero.tolist():
        region = Region(address, length, memory, device)
        if not agent.covers(region):
            raise RequestError(f"{region} of the transfer is not registered with agent {agent.name!r}")


def clear_host(rows: NDArray[np.uint64]) -> None:
    """Zero ranges of host memory: shape (n, 3), address, length in bytes, device."""
    for address, length, _ in rows.tolist():
        ctypes.memset(address, 0, length)


def _wait(handles: Sequence[TransferHandle], deadline: float, timeout: float, error: KvhmaError | None) -> None:
    """Wait until no read is in flight, even after an error; raise the first error."""
    while running := [handle for handle in handles if not handle.finished]:
        errors = [error, *map(_poll, running)]
        error = next((found for found in errors if found is not None), None)
        if any(handle.finished for handle in running):
            continue
        if time.monotonic() > deadline and (late := sum(handle.abort() for handle in running)):
            raise TransferError(f"{late} reads still write after {timeout} s; keep their blocks") from error
        time.sleep(_POLL_SECONDS)
    if error is not None:
        raise error


def _poll(handle: TransferHandle) -> KvhmaError | None:
    """Poll a read; return the error with which it has ended."""
    try:
        handle.poll()
    except KvhmaError as error:
        return error
    return None
