# SPDX-License-Identifier: Apache-2.0
"""A listener for tests, well-behaved and hostile ends of its connections, and their cost in this process."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    AskEngineInfo,
    AskWorkerIdentity,
    EngineInfo,
    Handler,
    LeaseState,
    Outcome,
    Question,
    SignedWorkerIdentity,
)
from kvhma.vllm.wire.params import Address, LeaseClaim
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.waiting import HANG_SECONDS

HELLO = b"zero" * 10_000
PRIVATE_KEY = bytes(range(32))
NONCE = b"0123456789abcdef"


class AnyLease:
    """Answers that it holds every request; raises the exception that a test sets."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.claims: list[LeaseClaim] = []

    def renew(self, claims: list[LeaseClaim]) -> list[LeaseState]:
        if self.error is not None:
            raise self.error
        self.claims = claims
        return [LeaseState.HELD] * len(claims)

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        if self.error is not None:
            raise self.error
        self.claims = claims


@contextlib.contextmanager
def listening(
    *,
    secrets: Secrets | None = None,
    leases: AnyLease | None = None,
    at: Address | None = None,
    handlers: Mapping[type[Question], Handler] = MappingProxyType({}),
) -> Iterator[Listener]:
    """A listener at a free port of this machine, which must still answer at the end.

    Its address is `at`, its counters are `counted`.
    """
    address = at or Address("127.0.0.1", free_port())
    secrets = secrets or Secrets()
    engine = LocalEngine("p", 258, {(0, 0): (HELLO, PRIVATE_KEY), (0, 1): (b"one", PRIVATE_KEY)})
    counted = Counted()
    listener = Listener(
        address,
        engine,
        leases=AnyLease() if leases is None else leases,
        secrets=secrets,
        counters=counted,
        handlers=handlers,
    )
    listener.at, listener.counted = address, counted
    try:
        answers(address, secrets)  # now its thread has opened what it needs
        yield listener
        if not listener._stopping:
            answers(address, secrets)
    finally:
        listener.close()


def errors(listener: Listener) -> int:
    """How many errors the listener itself raised."""
    numbers = listener.counted.numbers
    return numbers["thread_restarts:kvhma-listener"] + numbers["side_channel_refused:error"]


def answers(address: Address, secrets: Secrets | None = None) -> None:
    """Check that a good question is answered, over a new connection."""
    with Client(address, 5, secrets or Secrets()) as client:
        is_answered(client)


def is_answered(client: Client) -> None:
    info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
    assert (info.engine_id, int.from_bytes(info.incarnation_id, "big"), info.ranks) == ("p", 258, [(0, 0), (0, 1)])
    assert client.ask(AskWorkerIdentity(0, 1, NONCE), SignedWorkerIdentity).data == b"one"


def connect(address: Address, source: str | None = None) -> socket.socket:
    """A client's connection, from another address of this machine if wanted."""
    found = socket.socket()
    found.settimeout(10)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source is not None:
        found.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        found.bind((source, 0))
    found.connect((address.host, address.port))
    return found


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def said(raw: socket.socket) -> bytes:
    """The message of the next frame; empty if the connection has ended."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while len(received) < 4 or len(received) < 4 + struct.unpack_from("<I", received)[0]:
            data = raw.recv(1 << 20)
            if not data:
                return b""
            received += data
    return received[4:]


def received(raw: socket.socket, nbytes: int) -> bool:
    """Whether so many more bytes come, before the connection ends."""
    while nbytes > 0 and (data := raw.recv(min(nbytes, 1 << 20))):
        nbytes -= len(data)
    return nbytes == 0


def problem(data: bytes) -> str:
    """The text of a problem."""
    found = msgspec.msgpack.decode(data)
    assert found["type"] == "problem", found
    return found["text"]


def has_ended(raw: socket.socket, seconds: float) -> bool:
    """Whether the peer ends a connection in time, after any number of bytes."""
    raw.settimeout(seconds)
    try:
        while raw.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def hostile(serve: Callable[[socket.socket], None], connections: int = 1) -> Iterator[Address]:
    """The address of a server that treats each connection as `serve` does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            for _ in range(connections):
                with contextlib.suppress(OSError):
                    accepted, _ = server.accept()
                    with accepted:
                        serve(accepted)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield Address("127.0.0.1", server.getsockname()[1])
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def pass_on(raw: socket.socket, address: Address, seen: bytearray | None = None) -> None:
    """Copy all bytes of a connection to an address and back, as one on the path does that sees them."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if seen is not None:
                    seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with connect(address) as onward:
        back = threading.Thread(target=copy, args=(onward, raw))
        back.start()
        copy(raw, onward)
        back.join()


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
