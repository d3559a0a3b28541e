# SPDX-License-Identifier: Apache-2.0
"""The link of `make faults` loses, reorders and duplicates packets, and TCP gets over it."""

from __future__ import annotations

import ctypes
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.link import Fault, Link, NoLink
from support.waiting import HANG_SECONDS

DATA = random.Random(1).randbytes(100_000)


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        made = Link(seed=7)
    except NoLink as error:
        pytest.skip(str(error))
    with made:
        yield made


def tcp_socket(namespace: str) -> socket.socket:
    """A socket of a namespace; its thread, which has moved there, ends."""

    def make() -> socket.socket:
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert libc.setns(handle, 0x40000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNET
        os.close(handle)
        made = socket.socket()
        made.settimeout(HANG_SECONDS)
        return made

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(make).result()


@pytest.fixture
def pair(link: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from D's namespace to P's."""
    p, d = (tcp_socket(namespace) for namespace in link.namespaces)
    with p, d:
        p.bind((link.addresses[0], 0))
        p.listen()
        d.connect(p.getsockname())
        accepted, _ = p.accept()
        with accepted:
            accepted.settimeout(HANG_SECONDS)
            yield accepted, d


def received(end: socket.socket) -> bytes:
    """Everything until the other end has closed its side."""
    got = bytearray()
    while part := end.recv(1 << 16):
        got += part
    return bytes(got)


def send(end: socket.socket, data: bytes) -> None:
    end.sendall(data)
    end.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        (Fault(loss=0.05), "lost"),
        (Fault(reorder=0.3), "late"),
        (Fault(loss=0.02, delay=0.02, reorder=0.1, duplicate=0.1, rate=1_000_000), "lost"),
    ],
    ids=["loss", "reorder", "all"],
)
def test_tcp_arrives_whole(fault: Fault, count: str, link: Link, pair: tuple[socket.socket, socket.socket]) -> None:
    link.set(fault)
    with ThreadPoolExecutor(4) as threads:
        for end in pair:
            threads.submit(send, end, DATA)
        assert [future.result() for future in [threads.submit(received, end) for end in pair]] == [DATA, DATA]
    assert all(way[count] > 0 for way in link.counts()), link.counts()


def test_a_reset_ends_a_connection_within_a_message(link: Link, pair: tuple[socket.socket, socket.socket]) -> None:
    p, d = pair
    d.sendall(b"begun")
    assert p.recv(100) == b"begun"
    link.set(Fault(reset=1), (1,))
    d.sendall(DATA[:1000])
    with pytest.raises(ConnectionResetError):
        p.recv(100)
    # And its sender, once its kernel has sent the rest again.
    link.set(Fault())
    with pytest.raises(ConnectionResetError):
        d.recv(100)
    assert link.counts()[1]["reset"] > 0
