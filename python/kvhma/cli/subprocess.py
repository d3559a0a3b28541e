# SPDX-License-Identifier: Apache-2.0
"""Processes that the command line starts, and the pipes to them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import KvhmaError, PeerLostError, TransferError
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region

if TYPE_CHECKING:  # only some commands need NIXL
    from kvhma.nixl import Agent, Peer

TIMEOUT_SECONDS = 120.0


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Connection]:
    """Run a function in a separate process; its first argument is a pipe, then come the given arguments."""
    # Inherited: otherwise the library announces every agent.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    # NIXL has threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    worker = context.Process(target=_run, args=(child_end, target, arguments), daemon=True)
    worker.start()
    child_end.close()
    try:
        yield parent_end
    finally:
        parent_end.close()  # a worker that waits for the other one's message ends
        worker.join(timeout=10)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _run(pipe: Connection, target: Any, arguments: tuple[Any, ...]) -> None:
    """Run the function; send its error through the pipe."""
    # The library logs to standard output, which is for results.
    os.dup2(2, 1)
    with suppress(EOFError, ConnectionError):  # the command has ended, as when the other process failed
        try:
            target(pipe, *arguments)
        except (KvhmaError, ImportError) as error:
            pipe.send(error if isinstance(error, KvhmaError) else TransferError(str(error)))
        except Exception as error:  # of a broken installation, or of a transport
            pipe.send(TransferError(f"{type(error).__name__}: {error}"))


def receive(pipe: Connection, name: str, seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return the next message of a process.

    Raises:
        PeerLostError: the process ended, or sent nothing in time.
        KvhmaError: the message is an error.
    """
    try:
        if pipe.poll(seconds):
            message = pipe.recv()
            if isinstance(message, KvhmaError):
                raise message
            return message
    except (EOFError, ConnectionError):
        raise PeerLostError(f"the {name} process ended early; its output says why") from None
    raise PeerLostError(f"the {name} process said nothing for {seconds:.0f} s")


def introduce(p: Connection, d: Connection) -> None:
    """Exchange the handshakes with which the processes of P and D begin. Errors as for `receive`."""
    hello = receive(p, "prefill")
    p.send(receive(d, "decode"))
    d.send(hello)


def connect(pipe: Connection, agent: Agent, geometry: Geometry) -> Peer:
    """Send the handshake of this process, and connect to the other process with its handshake."""
    agent.register(geometry)
    pipe.send(agent.handshake_payload(geometry))
    return agent.connect(pipe.recv())


def bytes_geometry(memory: NDArray[np.uint8]) -> Geometry:
    """Return a geometry of plain bytes, uint8 ``(n,)``, to be registered."""
    page = Page((Part("bytes", "uint8", 1, 0, (Axis("bytes", len(memory), 1),)),))
    layer = Layer("bytes", 0, 0, 0, 1, len(memory), page)
    return Geometry((Region(memory.ctypes.data, len(memory)),), (Group("opaque", 1),), (layer,), null_block=None)
