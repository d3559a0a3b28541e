# SPDX-License-Identifier: Apache-2.0
"""What a listener may store: the model of docs/security-bounds.md, and a listener in a separate process to measure it.

The model has a number of bytes for each place in which the listener stores something for peers, measured with CPython
3.11 and OpenSSL 3.0, with room above. The numbers of places are the bounds of the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.options.tickets import offers
from kvhma.vllm.options.tickets.messages import MAX_PROGRESS_BYTES
from kvhma.vllm.peers import connections as bounds
from kvhma.vllm.peers import server
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.proofs import ProofKey
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.listening import PRIVATE_KEY, answers, resident
from support.waiting import until

KIB, MIB = 1 << 10, 1 << 20

CONNECTION_BYTES = 7 * KIB // 4
HANDSHAKE_BYTES = 256 * KIB
"""OpenSSL's: the state, a record, and a message of up to 128 KiB that is not complete."""

TLS_BYTES = 40 * KIB
"""OpenSSL's for an open connection: the state, and a record of 16 KiB that is not complete or not sent."""

WAITING_BYTES = 12 * KIB
"""A question about 16 tickets, and its places in the listener's tables."""

ANSWERED_BYTES = 6 * MIB
"""A question of 1 MiB, what is read from it, and the lists that are made of its claims."""

TICKET_BYTES = 384
KEY_BYTES = 512


class Place(NamedTuple):
    """A place where a listener stores something for peers: how many there may be, and bytes of each."""

    what: str
    who: str
    number: int
    each: int

    @property
    def bytes(self) -> int:
        return self.number * self.each


@dataclass(frozen=True)
class Limits:
    """The bounds of a listener; by default those of the code."""

    connections: int = bounds.MAX_CONNECTIONS
    handshakes: int = bounds.MAX_HANDSHAKES
    unfinished: int = bounds.MAX_UNFINISHED_BYTES
    reply: int = MAX_PROGRESS_BYTES
    tickets: int = offers.MAX_TICKETS

    def set(self) -> None:
        """Bound the listeners of this process."""
        bounds.MAX_CONNECTIONS = self.connections
        bounds.MAX_HANDSHAKES = self.handshakes
        bounds.MAX_UNFINISHED_BYTES = self.unfinished
        offers.MAX_TICKETS = self.tickets

    def places(self, *, secret: bool = True) -> list[Place]:
        """Return the model. With a secret, peers without it reach the first two places only."""
        shakes = self.handshakes if secret else 0
        opened = self.connections - shakes
        keys = ProofKey().shared.cache_parameters()["maxsize"]
        assert keys is not None
        return [
            Place("a connection", "any host", self.connections, CONNECTION_BYTES),
            *([Place("TLS in its handshake", "any host", shakes, HANDSHAKE_BYTES)] if secret else []),
            *([Place("TLS of an open connection", "engines", opened, TLS_BYTES)] if secret else []),
            Place("a question that waits for progress", "engines", opened, WAITING_BYTES),
            Place("unfinished questions and replies", "engines", 1, self.unfinished),
            Place("the question that is answered", "engines", 1, ANSWERED_BYTES),
            Place("its reply: block ids, text, message, frame", "engines", 4, self.reply),
            Place("a ticket that was cancelled early", "engines", self.tickets, TICKET_BYTES),
            Place("a key for proofs", "engines", keys, KEY_BYTES),
        ]

    def most(self, *, secret: bool = True) -> int:
        """Return the sum of the model."""
        return sum(place.bytes for place in self.places(secret=secret))


def page_rows() -> list[str]:
    """Return the rows of the table in docs/security-bounds.md."""
    limits = Limits()
    plain = {place.what: place.bytes for place in limits.places(secret=False)}
    rows = []
    for place in limits.places():
        each = f"{place.each // MIB} MiB" if place.each >= MIB else f"{place.each / KIB:.3g} KiB"
        most = f"{place.bytes / MIB:.3g} | {plain.get(place.what, 0) / MIB:.3g}"
        rows.append(f"| {place.what} | {place.who} | {place.number:,} | {each} | {most} |")
    sums = f"{limits.most() / MIB:.0f} | {limits.most(secret=False) / MIB:.0f}"
    return [*rows, f"| **sum** | | | | {sums} |"]


SECRET = b"s" * 32


class Process:
    """A listener in a separate process, without deadlines.

    Attributes:
        at: its address.
        secrets: its secrets.
    """

    def __init__(self, limits: Limits, *, secret: bool, identity: int, follows: int) -> None:
        self.at = Address("127.0.0.1", free_port())
        self.secrets = Secrets([SECRET] if secret else [])
        asked = {"port": self.at.port, "secret": secret, "identity": identity, "follows": follows}
        words = [sys.executable, "-m", "support.listener_memory", json.dumps(asked | asdict(limits))]
        # The C library then counts every object of Python, and nothing that a thread keeps to use again.
        counted = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
        environment = os.environ | counted | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.state()
        for _ in range(2):
            answers(self.at, self.secrets)

    def state(self, what: str = "") -> Any:
        """Return what the process stores now; first do `what`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@contextlib.contextmanager
def process(limits: Limits, *, secret: bool = True, identity: int = 3, follows: int = 0) -> Iterator[Process]:
    """A process whose worker identity has some bytes, and whose request of `TICKET` has a text of some bytes."""
    made = Process(limits, secret=secret, identity=identity, follows=follows)
    with contextlib.closing(made):
        yield made


TICKET = b"t" * 16


class _Found(bounds.Connections):
    """Connections that the process finds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        global _found
        _found = self


_found: _Found


class _Allocated(ctypes.Structure):
    """``mallinfo2`` of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "top")
    )


def _state(counted: Counted, mallinfo: Any) -> dict[str, Any]:
    found = mallinfo()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "allocated": found.used + found.hblkhd,
        "resident": resident(),
        "peak": int(peak.split()[1]) * KIB,
        "connections": len(_found._all()),
        "handshakes": len(_found._handshakes),
        "waiting": len(_found._waits_for),
        "unfinished": _found._unfinished_bytes,
        "refused": counted.by_label("side_channel_refused"),
    }


def _main(port: int, secret: bool, identity: int, follows: int, **limits: int) -> None:
    logging.disable()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    Limits(**limits).set()
    bounds._SWEEP_SECONDS = 1e6  # it closes no connection that is late
    server.Connections = _Found
    counted, tickets, at = Counted(), offers.TicketTable(1e6), Address("127.0.0.1", port)
    if follows:
        tickets.open_ticket(TICKET, "followed", Incarnation(at, "p", 1, 1, 1), 2, 1 << 30, "")
        half = range(10**6, 10**6 + follows // 8, 2)  # "1000000," is eight letters
        tickets.settle_tokens(TICKET, 1 << 30, {group: (1, list(half)) for group in (0, 1)})
    listener = server.Listener(
        at,
        server.LocalEngine("p", 258, {(0, 0): (bytes(identity), PRIVATE_KEY), (0, 1): (b"one", PRIVATE_KEY)}),
        leases=LeaseTable(1e6),
        secrets=Secrets([SECRET] if secret else []),
        counters=counted,
        handlers=offers.answer_questions(tickets),
    )
    until(lambda: "_found" in globals())
    # So that the system takes little of a reply for a peer that takes nothing.
    listener._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    for line in sys.stdin:
        if line.strip() == "forget the peak":
            Path("/proc/self/clear_refs").write_text("5")
        print(json.dumps(_state(counted, mallinfo)), flush=True)


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
