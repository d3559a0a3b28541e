# SPDX-License-Identifier: Apache-2.0
"""What NIXL and UCX let a host do that reaches a TCP port of theirs, is on the path to it, or is read from.

They know neither peers nor secrets, and nothing in kvhma can prevent this. So docs/attacker.md says it. A test that
fails with a new UCX means that the page may promise more.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl", reason="needs NIXL; make dev installs it")

from kvhma.geometry import Region
from kvhma.nixl import encode_handshake
from kvhma.nixl.library import AgentOptions, open_nixl
from kvhma.nixl.ports import listening_sockets
from kvhma.vllm.wire.lease_board import BOARD_BYTES, OWNER_BYTES, board_region, owner_of
from support.boards import PAGE, WorkerProcess
from support.metadata import Metadata, moved
from support.waiting import HANG_SECONDS, until

VICTIM = 9
"""A block of P that belongs to some request."""

DESCRIPTORS = 128
"""Most descriptors of P where an attacker wants them all."""


@pytest.fixture(scope="module")
def tcp() -> Iterator[None]:
    """Agents use TCP on loopback, as they use it between hosts without RDMA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        patch.setenv("UCX_NET_DEVICES", "lo")
        yield


@pytest.fixture
def p(tcp: None) -> Iterator[WorkerProcess]:
    with contextlib.closing(WorkerProcess(1)) as worker:
        yield worker


def address_of(p: WorkerProcess, block: int) -> int:
    (caches,) = p.said.geometry.regions
    return caches.base + block * PAGE


class Attacker:
    """An attacker with NIXL, and without kvhma.

    Attributes:
        page: where it reads to, and writes from.
        peer: the agent that it is connected to.
    """

    def __init__(self, metadata: Metadata, name: str) -> None:
        """Connect to the agent that metadata of this name lead to."""
        self.page = np.zeros(PAGE, np.uint8)
        self._nixl = open_nixl(new_name(), AgentOptions())
        self._nixl.register_memory(np.array([(self.page.ctypes.data, PAGE, 0)], np.uint64), "DRAM")
        self.peer = new_name()
        self._nixl.add_remote_agent(metadata.with_name(name, self.peer).encode())

    def read(self, address: int, nbytes: int = PAGE) -> bytes:
        assert self._moves("READ", address, nbytes)
        return self.page[:nbytes].tobytes()

    def write(self, address: int, data: bytes) -> None:
        self.page[: len(data)] = np.frombuffer(data, np.uint8)
        assert self._moves("WRITE", address, len(data))

    def ends_in_error(self, address: int) -> bool:
        return not self._moves("READ", address, PAGE)

    def _moves(self, operation: str, address: int, nbytes: int) -> bool:
        rows = [np.array([(at, nbytes, 0)], np.uint64) for at in (self.page.ctypes.data, address)]
        own, remote = (self._nixl.get_xfer_descs(row, "DRAM") for row in rows)
        handle = self._nixl.initialize_xfer(operation, own, remote, self.peer, b"")
        if self._nixl.transfer(handle) == "PROC":
            try:
                until(lambda: self._nixl.check_xfer_state(handle) != "PROC")
            except Exception:
                return False  # NIXL says by an exception that the peer is gone
        return self._nixl.check_xfer_state(handle) == "DONE"


def new_name() -> str:
    return f"attacker-{os.urandom(8).hex()}"


def with_port(metadata: Metadata, old: int, new: int) -> Metadata:
    """Return metadata that lead to another port, which is at the end of the address of the transports."""
    at = metadata.before.rindex(old.to_bytes(2, "big"), 0, metadata.before.index(b"MemSection"))
    return Metadata(metadata.before[:at] + new.to_bytes(2, "big") + metadata.before[at + 2 :], metadata.regions)


def with_region(metadata: Metadata, region: Region) -> Metadata:
    """Return metadata whose only region is this one."""
    return Metadata(metadata.before, (moved(metadata.regions[0], region),))


def knows_p(p: WorkerProcess, region: Region | None = None) -> Attacker:
    """An attacker with P's metadata, maybe edited."""
    metadata = Metadata.parse(p.said.metadata)
    return Attacker(metadata if region is None else with_region(metadata, region), p.said.name)


def knows_the_port(p: WorkerProcess, region: Region) -> Attacker:
    """An attacker that has seen nothing of P: it makes metadata with a separate agent, and edits port and region."""
    before, name = listening_sockets(), new_name()
    form, memory = open_nixl(name, AgentOptions()), np.zeros(PAGE, np.uint8)
    form.register_memory(np.array([(memory.ctypes.data, PAGE, 0)], np.uint64), "DRAM")
    (own,) = listening_sockets() - before
    metadata = Metadata.parse(form.get_agent_metadata())
    return Attacker(with_region(with_port(metadata, own.port, p.ports[0]), region), name)


# --- who reaches the port ----------------------------------------------------------------------------------------


def test_metadata_give_all_of_the_caches(p: WorkerProcess) -> None:
    """An engine that had a secret until yesterday has the metadata, too."""
    attacker = knows_p(p)
    assert attacker.read(address_of(p, VICTIM)) == p.pages[VICTIM].tobytes()
    attacker.write(address_of(p, VICTIM), b"\x07" * PAGE)
    assert knows_p(p).read(address_of(p, VICTIM)) == b"\x07" * PAGE


def test_the_port_alone_is_enough(p: WorkerProcess) -> None:
    """UCX checks no key over TCP.

    The board is at the same address in each worker. For other memory the attacker has to guess.
    """
    board = Region(board_region(0).base, BOARD_BYTES)
    attacker = knows_the_port(p, board)
    assert attacker.read(board.base, OWNER_BYTES) == owner_of(p.said.public_key)
    attacker.write(board.base, b"forged".ljust(OWNER_BYTES))
    assert knows_p(p).read(board.base, OWNER_BYTES) == b"forged".ljust(OWNER_BYTES)


def test_memory_that_was_never_registered(p: WorkerProcess) -> None:
    """The worker's key, as an example. The secret is in the same process."""
    attacker = knows_p(p, Region(p.private_at, len(p.private)))
    assert attacker.read(p.private_at, len(p.private)) == p.private


def test_an_address_that_p_does_not_have_ends_p(p: WorkerProcess) -> None:
    nowhere = Region(1 << 12, PAGE)
    assert knows_p(p, nowhere).ends_in_error(nowhere.base)
    assert p.process.wait(HANG_SECONDS) == -signal.SIGSEGV


def test_a_message_with_a_wrong_bit_ends_p(p: WorkerProcess) -> None:
    """The first bytes of an honest connection, with one bit changed: no need to know UCX."""
    with relayed(p) as relay:
        relay.attacker.read(address_of(p, VICTIM))
    honest, chance = bytes(relay.seen[0]), random.Random(1)

    def send() -> None:
        changed = bytearray(honest)
        changed[chance.randrange(8, len(changed))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", p.ports[0])) as raw:
            raw.sendall(changed)
            raw.shutdown(socket.SHUT_WR)

    until(lambda: p.process.poll() is not None, send)
    assert p.process.returncode < 0


def test_bytes_that_are_not_ucxs_harm_nobody(p: WorkerProcess) -> None:
    chance = random.Random(1)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", p.ports[0])) as raw:
            raw.sendall(chance.randbytes(chance.randrange(300)))
    assert knows_p(p).read(address_of(p, VICTIM)) == p.pages[VICTIM].tobytes()


def test_idle_connections_close_the_port_for_ever(p: WorkerProcess) -> None:
    """P's descriptors are used up, and UCX does not listen any more, also when they are free again."""
    resource.prlimit(p.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    with contextlib.ExitStack() as stack:

        def is_closed() -> bool:
            try:
                stack.enter_context(socket.create_connection(("127.0.0.1", p.ports[0])))
            except ConnectionRefusedError:
                return True
            return False

        assert not is_closed()
        until(is_closed)
    until(lambda: len(list(Path(f"/proc/{p.process.pid}/fd").iterdir())) < DESCRIPTORS // 2)
    with pytest.raises(Exception, match="NIXL_ERR_BACKEND"):
        knows_p(p)
    assert p.process.poll() is None


def test_the_ports_can_be_few(tcp: None) -> None:
    """So that a rule of a firewall can name them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TCP_PORT_RANGE", "21000-21099")
        with contextlib.closing(WorkerProcess(1)) as p:
            assert p.ports
            assert all(21000 <= port < 21100 for port in p.ports)


# --- who is on the path ------------------------------------------------------------------------------------------


class Relay:
    """Between a decode engine and P.

    Attributes:
        seen: all bytes to P, and all bytes from P.
        attacker: in the part of the decode engine.
    """

    def __init__(self, p: WorkerProcess, server: socket.socket, change: Callable[[bytes], bytes]) -> None:
        self.seen = bytearray(), bytearray()
        self._port, self._server, self._change = p.ports[0], server, change
        self._ends = [server]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        metadata = with_port(Metadata.parse(p.said.metadata), self._port, server.getsockname()[1])
        self.attacker = Attacker(metadata, p.said.name)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        for end in self._ends:
            end.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += near, far
                for source, target, seen in ((near, far, self.seen[0]), (far, near, self.seen[1])):
                    self._start(self._pass_on, source, target, seen)

    def _pass_on(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                seen += data
                target.sendall(self._change(data))


@contextlib.contextmanager
def relayed(p: WorkerProcess, change: Callable[[bytes], bytes] = bytes) -> Iterator[Relay]:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.closing(Relay(p, server, change)) as relay:
        yield relay


def test_what_is_read_is_on_the_path_as_it_is(p: WorkerProcess) -> None:
    with relayed(p) as relay:
        relay.attacker.read(address_of(p, VICTIM))
    assert p.pages[VICTIM].tobytes()[:1000] in relay.seen[1]


def test_what_is_changed_on_the_path_is_read_without_an_error(p: WorkerProcess) -> None:
    """Content digests find it: tests/connector/test_digests.py."""
    page = p.pages[VICTIM].tobytes()
    with relayed(p, lambda data: data.replace(page[:8], bytes(8))) as relay:
        assert relay.attacker.read(address_of(p, VICTIM)) == bytes(8) + page[8:]


# --- who is read from --------------------------------------------------------------------------------------------


def test_metadata_can_end_the_engine_that_reads_them(p: WorkerProcess) -> None:
    """UCX takes the kind of memory in a region's key for an index. kvhma passes keys on: only UCX knows their form."""
    metadata = Metadata.parse(p.said.metadata)
    for key, code in ((bytes(8), 0), (bytes(8) + b"\x40", -signal.SIGSEGV)):
        edited = Metadata(metadata.before, (metadata.regions[0][:24] + key, *metadata.regions[1:]))
        identity = encode_handshake(
            edited.encode(), p.said.geometry, name=p.said.name, incarnation=7, public_key=p.said.public_key
        )
        text = "import sys; from kvhma.nixl import Agent; Agent('D').connect(sys.stdin.buffer.read(), warm_up=False)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        d = subprocess.run([sys.executable, "-c", text], input=identity, env=environment, check=False)
        assert d.returncode == code
