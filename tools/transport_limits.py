# SPDX-License-Identifier: Apache-2.0
"""Measure how many entries transports take in one transfer, and whether they join neighbours.

    python tools/transport_limits.py             # prints the table of docs/descriptors.md
    python tools/transport_limits.py POSIX ...   # only these transports

Each transport has a separate process with both ends, which reads entries of 64 bytes, and stops at the first transfer
that is refused. Install `nixl`; for Mooncake `mooncake-transfer-engine-non-cuda`, libibverbs1, libnl-route-3-200 and
libnuma1. A transport that is not installed has its reason in its row.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.subprocess import bytes_geometry, process, receive
from kvhma.errors import KvhmaError, TransferError
from kvhma.nixl import Agent, AgentOptions
from kvhma.nixl.library import open_nixl

ENTRY = 64
COUNTS = [1 << power for power in range(6, 18)]
SECONDS = 60.0
Rows = NDArray[np.uint64]


class Moved(NamedTuple):
    """What a transport reports of a transfer: descriptors that it posted, and polls until it was done; 0 if unknown."""

    descriptors: int = 0
    polls: int = 0


@dataclass(frozen=True)
class Link:
    """Both ends of a transport: addresses of destination and source, device of the source, and a read."""

    local: int
    remote: int
    device: int
    read: Callable[[Rows, Rows], Moved]


class Found(NamedTuple):
    """The largest transfer that arrived, the first that was refused and why, and what the transport reported."""

    arrived: int = 0
    refused: str = ""
    moved: Moved = Moved()


@contextmanager
def nixl_agents(target: NDArray[np.uint8], source: NDArray[np.uint8], backend: str) -> Iterator[Link]:
    """Connect two of kvhma's agents."""
    options = AgentOptions(backends=(backend,))
    with Agent("limits-source", options) as owner, Agent("limits-target", options) as reader:
        owner.register(bytes_geometry(source))
        reader.register(bytes_geometry(target))
        peer = reader.connect(owner.handshake_payload(bytes_geometry(source)))

        def read(local: Rows, remote: Rows) -> Moved:
            handle = reader.read(peer, local, remote)
            if not handle.wait(SECONDS):
                raise TransferError(f"still running after {SECONDS:.0f} s")
            return Moved(handle.telemetry.descriptors if handle.telemetry else 0)

        yield Link(target.ctypes.data, source.ctypes.data, 0, read)


@contextmanager
def ucx(target: NDArray[np.uint8], source: NDArray[np.uint8], transports: str) -> Iterator[Link]:
    """Connect two agents over some of UCX's transports."""
    os.environ["UCX_TLS"] = transports
    with nixl_agents(target, source, "UCX") as link:
        yield link


@contextmanager
def posix(target: NDArray[np.uint8], source: NDArray[np.uint8], _: str) -> Iterator[Link]:
    """Read a file with NIXL's POSIX backend."""
    nixl: Any = open_nixl("limits", AgentOptions(backends=("POSIX",)))
    with tempfile.TemporaryFile() as file:
        file.write(source.tobytes())
        file.flush()
        nixl.register_memory(np.array([[target.ctypes.data, target.nbytes, 0]], np.uint64), "DRAM")
        nixl.register_memory(nixl.get_reg_descs([(0, source.nbytes, file.fileno(), "")], "FILE"))

        def read(local: Rows, remote: Rows) -> Moved:
            descriptors = nixl.get_xfer_descs(local, "DRAM"), nixl.get_xfer_descs(remote, "FILE")
            handle = nixl.initialize_xfer("READ", *descriptors, "limits", b"")
            polls, state = 0, nixl.transfer(handle)
            while state == "PROC":
                polls, state = polls + 1, nixl.check_xfer_state(handle)
            count = nixl.get_xfer_telemetry(handle).descCount
            handle.release()
            return Moved(count, polls)

        yield Link(target.ctypes.data, 0, file.fileno(), read)


@contextmanager
def mooncake(target: NDArray[np.uint8], source: NDArray[np.uint8], protocol: str) -> Iterator[Link]:
    """Connect two engines of Mooncake."""
    from mooncake.engine import TransferEngine

    owner, reader = TransferEngine(), TransferEngine()
    for engine, memory in ((owner, source), (reader, target)):
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, ""):
            raise TransferError("the engine does not start")
        engine.register_memory(memory.ctypes.data, memory.nbytes)
    name = f"127.0.0.1:{owner.get_rpc_port()}"

    def read(local: Rows, remote: Rows) -> Moved:
        lists = (rows[:, column].tolist() for rows, column in ((local, 0), (remote, 0), (local, 1)))
        if code := reader.batch_transfer_sync_read(name, *lists):
            raise TransferError(f"returns {code}")
        return Moved()

    yield Link(target.ctypes.data, source.ctypes.data, 0, read)


TRANSPORTS: dict[str, tuple[Any, str]] = {
    "UCX, TCP": (ucx, "tcp"),
    "UCX, shared memory": (ucx, "sm,tcp"),
    "LIBFABRIC": (nixl_agents, "LIBFABRIC"),
    "POSIX": (posix, ""),
    "Mooncake, TCP": (mooncake, "tcp"),
}
"""By name: what connects both ends, and its argument."""


def probe(pipe: Connection, name: str) -> None:
    """Read more and more entries, first with gaps, then touching ones; send what was found of each."""
    connect, argument = TRANSPORTS[name]
    source = np.random.default_rng(0).integers(0, 256, COUNTS[-1] * 2 * ENTRY, np.uint8)
    target = np.zeros_like(source)
    with connect(target, source, argument) as link:
        pipe.send([search(link, target, source, step) for step in (2 * ENTRY, ENTRY)])
        # A refused transfer may still write, so the memory stays until the process is gone.
        with suppress(EOFError):
            pipe.recv()
        os._exit(0)


def search(link: Link, target: NDArray[np.uint8], source: NDArray[np.uint8], step: int) -> Found:
    """Read entries that are `step` bytes apart, more each time, until a transfer is refused or wrong."""
    found = Found()
    for count in COUNTS:
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(step)
        local, remote = np.zeros((count, 3), np.uint64), np.zeros((count, 3), np.uint64)
        local[:, 0], remote[:, 0] = offsets + np.uint64(link.local), offsets + np.uint64(link.remote)
        local[:, 1] = remote[:, 1] = ENTRY
        remote[:, 2] = link.device
        target[:] = 0
        try:
            moved = link.read(local, remote)
        except Exception as error:  # the answer is any error of a transport
            return Found(found.arrived, f"{count:,}: {error}", found.moved)
        rows = [memory[: count * step].reshape(count, step)[:, :ENTRY] for memory in (target, source)]
        if not np.array_equal(*rows):
            return Found(found.arrived, f"{count:,}: wrong bytes", found.moved)
        found = Found(count, "", moved)
    return found


def line(name: str) -> str:
    """Measure a transport; return its row."""
    try:
        with process(probe, name) as pipe:
            apart, touching = receive(pipe, name)
    except KvhmaError as error:
        return f"| {name} | not measured: {error} | | |"
    most = f"{apart.arrived:,}" + ("" if apart.refused else " and more")
    polls = f"{apart.arrived / apart.moved.polls:.0f}" if apart.moved.polls else "–"
    return f"| {name} | {most} | {apart.refused or '–'} | {joins(apart, touching)} | {polls} |"


def joins(apart: Found, touching: Found) -> str:
    """Whether touching entries are joined: by what was posted, or else by the limit, which then holds for fewer."""
    if posted := touching.moved.descriptors:
        return "yes" if posted < touching.arrived else "no"
    if apart.refused:
        return "yes" if touching.arrived > apart.arrived else "no"
    return "not known"


def main(names: list[str]) -> None:
    """Print the table."""
    print("| transport | entries that arrived | first refused transfer | joins neighbours | entries a poll |")
    print("|---|---|---|---|---|")
    for name in names or TRANSPORTS:
        print(line(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
