# SPDX-License-Identifier: Apache-2.0
"""P in a separate process that is slow, is stopped, or dies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvhma.errors import PeerLostError, TransferError
from kvhma.nixl import Agent, Peer
from kvhma.nixl.arrays import row_of
from kvhma.nixl.library import make_descriptors
from support.flat import flat_geometry, labelled, rows_of
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.nixl
PAGE = 4096
PAGES = 64
ALL = list(range(PAGES))


class Reader:
    """The D side."""

    def __init__(self) -> None:
        self.target = np.zeros(PAGES * PAGE, np.uint8)
        self.geometry = flat_geometry(self.target)
        self.agent = Agent("D")
        self.agent.register(self.geometry)

    def read(self, peer: Peer, blocks, notif=b""):
        """Read blocks of the peer into blocks of the same ids."""
        base = peer.geometry.regions[0].base
        remote = np.array([(base + block * PAGE, PAGE, 0) for block in blocks], np.uint64)
        return self.agent.read(peer, rows_of(self.target, blocks), remote, notif)

    def has(self, worker, blocks) -> bool:
        pages = labelled(PAGES, seed=worker.seed).reshape(PAGES, PAGE)
        return bool((self.target.reshape(PAGES, PAGE)[blocks] == pages[blocks]).all())


@pytest.fixture
def reader() -> Iterator[Reader]:
    """Made at first use, which has to come after the environment is set."""
    reader = Reader()
    yield reader
    reader.agent.close()


def dies(call):
    """Call until the peer is found dead."""

    def error():
        try:
            call()
        except PeerLostError as exc:
            return exc
        return None

    return until(error)


def hang(reader, peer, worker, count):
    """Stop the worker and return transfers from it that are in flight until it continues or dies."""
    assert reader.read(peer, [0], b"first").wait(HANG_SECONDS)
    assert worker.notifications(1) == [["D", "first"]]
    worker.pause()
    hanging = []
    # A transport that copies inline may finish some: even their notification does not need the other process.
    for _ in range(100):
        transfer = reader.read(peer, ALL, b"hanging")
        if not transfer.wait(0.05):
            hanging.append(transfer)
        if len(hanging) == count:
            return hanging
    raise TimeoutError("every transfer finishes")


def test_bytes_and_notification(transport, start_worker, reader):
    worker = start_worker(**transport)
    peer = reader.agent.connect(worker.payload, expect="P")
    assert worker.notifications(1, 0.2) == []  # the warm-up has been dropped
    transfer = reader.read(peer, ALL, b"r1")
    assert transfer.wait(HANG_SECONDS)
    assert reader.has(worker, ALL)
    assert worker.notifications(1) == [["D", "r1"]]
    reader.agent.notify(peer, b"r2")
    assert worker.notifications(1) == [["D", "r2"]]


@pytest.mark.parametrize("transport", ["default"], indirect=True)
def test_prewarming_saves_the_first_peer_on_both_sides(transport, start_worker):
    # Counted in bytes read from files: UCX looks into /proc and /sys for each kind of connection that is new to it.

    def reads(pid: int | str) -> int:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    def first_peer(*, prewarmed: bool) -> tuple[int, int]:
        worker = start_worker(**transport, **({"PREWARM": "1"} if prewarmed else {}))
        with Agent(f"D {prewarmed}") as agent:
            if prewarmed:
                agent.prewarm_transport()
            pids = "self", worker.process.pid
            before = [reads(pid) for pid in pids]
            peer = agent.connect(worker.payload)
            at_d, at_p = (reads(pid) - count for pid, count in zip(pids, before, strict=True))
            agent.disconnect(peer)
            return at_d, at_p

    plain, ready = first_peer(prewarmed=False), first_peer(prewarmed=True)
    print(f"bytes read at D and P: {plain}, after prewarming {ready}")
    assert plain[0] > 10 * ready[0]
    assert plain[1] > 10 * ready[1]


def test_the_notification_leaves_only_by_a_poll(tcp, start_worker, reader):
    worker = start_worker(**tcp)
    (transfer,) = hang(reader, reader.agent.connect(worker.payload), worker, 1)
    worker.go_on()
    assert worker.notifications(1, 0.5) == []
    assert reader.has(worker, ALL)  # everything has arrived, but was not polled
    assert transfer.wait(HANG_SECONDS)
    assert worker.notifications(1) == [["D", "hanging"]]


def test_an_aborted_transfer_stays_until_it_has_landed(tcp, start_worker, reader):
    worker = start_worker(**tcp)
    peer = reader.agent.connect(worker.payload)
    (transfer,) = hang(reader, peer, worker, 1)
    assert transfer.abort()
    for _ in range(100):
        assert reader.agent.poll() == []
        time.sleep(0.001)
    assert not transfer.finished
    assert not reader.has(worker, [PAGES - 1])
    worker.go_on()
    reaped = until(reader.agent.poll)
    assert reaped == [transfer]
    assert transfer.finished
    assert reader.has(worker, ALL)
    assert worker.notifications(1) == [["D", "hanging"]]


def test_nothing_is_taken_down_under_a_transfer(tcp, start_worker, reader):
    worker = start_worker(**tcp)
    peer = reader.agent.connect(worker.payload)
    (transfer,) = hang(reader, peer, worker, 1)
    with pytest.raises(TransferError, match="1 transfers still in flight"):
        reader.agent.disconnect(peer, timeout=0.1)
    with pytest.raises(TransferError, match="1 transfers still in flight"):
        reader.agent.close(timeout=0.1)
    assert not transfer.finished
    worker.go_on()
    reader.agent.close(timeout=HANG_SECONDS)
    assert transfer.poll() == "done"
    assert reader.has(worker, ALL)


def test_a_peer_that_died_before(transport, start_worker, reader):
    worker = start_worker(**transport)
    peer = reader.agent.connect(worker.payload)
    worker.kill()
    error = dies(lambda: reader.read(peer, [1, 2]).wait(HANG_SECONDS))
    assert type(error.__cause__).__name__ == "nixlRemoteDisconnectError"
    check_lost_and_back(reader, peer, start_worker, transport)


def test_a_peer_that_dies_during(transport, start_worker, reader):
    worker = start_worker(**transport)
    peer = reader.agent.connect(worker.payload)
    first, second, aborted = hang(reader, peer, worker, 3)
    aborted.abort()
    worker.kill()
    for transfer in (first, second):
        with pytest.raises(PeerLostError):
            transfer.wait(HANG_SECONDS)
        assert transfer.finished
    reaped = until(reader.agent.poll)
    assert reaped == [aborted]
    check_lost_and_back(reader, peer, start_worker, transport)


def test_a_peer_that_died_after(start_worker, reader):
    worker = start_worker()
    peer = reader.agent.connect(worker.payload)
    transfer = reader.read(peer, ALL)
    assert transfer.wait(HANG_SECONDS)
    worker.kill()
    assert transfer.poll() == "done"
    assert reader.has(worker, ALL)
    error = dies(lambda: reader.agent.notify(peer, b"are you there"))
    assert "'P'" in str(error)
    check_lost_and_back(reader, peer, start_worker, {})


def check_lost_and_back(reader, peer, start_worker, transport):
    """A lost peer refuses everything at once; another process under its name is a peer again."""
    for call in (
        lambda: reader.read(peer, [1]),
        lambda: reader.agent.notify(peer, b"x"),
        lambda: reader.agent.prepare(peer, np.array([(PAGE, 8, 0, 8, 1)], np.uint64)),
    ):
        with pytest.raises(PeerLostError, match="connect again"):
            call()
    second = start_worker(seed=2, **transport)
    again = reader.agent.connect(second.payload)
    assert again.payload.incarnation != peer.payload.incarnation
    reader.target[:] = 0
    assert reader.read(again, ALL, b"back").wait(HANG_SECONDS)
    assert reader.has(second, ALL)
    assert second.notifications(1) == [["D", "back"]]


def sockets() -> set[str]:
    """Connections, and what listens for them, of this process; those of earlier tests may still close."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(entry.readlink()))
    return {name for name in found if name.startswith("socket:")}


def knows(reader, peer) -> bool:
    """Whether NIXL still knows the memory of a peer."""
    nixl = reader.agent._session.open()
    region = peer.geometry.regions[0]
    return nixl.check_remote_metadata(peer.name, make_descriptors(nixl, row_of(region), region.memory))


def test_nothing_is_left_of_a_peer_that_ended(tcp, start_worker, reader):
    """`engine_ttl` relies on it: once a dead P is disconnected, no connection and no memory of it stay."""
    worker = start_worker()
    before = sockets()
    peer = reader.agent.connect(worker.payload)
    assert reader.read(peer, ALL, b"").wait(HANG_SECONDS)
    assert sockets() - before
    assert knows(reader, peer)
    worker.kill()
    reader.agent.disconnect(peer)
    assert not knows(reader, peer)
    until(lambda: sockets() <= before)


def test_a_peer_that_lives_is_unmapped_and_its_connection_stays_until_it_ends(tcp, start_worker, reader):
    """Why D disconnects an answering engine only if it is asked to: each new connection is one more (NIXL 1.5.1)."""
    worker = start_worker()
    before = sockets()
    counts = []
    for _ in range(3):
        peer = reader.agent.connect(worker.payload)
        assert knows(reader, peer)
        reader.agent.disconnect(peer)
        assert not knows(reader, peer)
        time.sleep(0.2)
        counts.append(len(sockets() - before))
    assert 0 < counts[0] < counts[1] < counts[2], "NIXL closes them now: engine_ttl can have upstream's default"
    worker.kill()
    until(lambda: sockets() <= before)


def test_a_restart_nobody_noticed(start_worker, reader):
    first = start_worker()
    old = reader.agent.connect(first.payload)
    first.kill()
    second = start_worker(seed=2)
    peer = reader.agent.connect(second.payload)
    assert reader.read(peer, ALL).wait(HANG_SECONDS)
    assert reader.has(second, ALL)
    with pytest.raises(PeerLostError):
        reader.read(old, [1])


def test_two_peers_fail_alone(tcp, start_worker, reader):
    p, q = start_worker("P", **tcp), start_worker("Q", seed=3, **tcp)
    to_p, to_q = reader.agent.connect(p.payload), reader.agent.connect(q.payload)
    (lost,), (kept,) = hang(reader, to_p, p, 1), hang(reader, to_q, q, 1)
    p.kill()
    with pytest.raises(PeerLostError):
        lost.wait(HANG_SECONDS)
    q.go_on()
    assert kept.wait(HANG_SECONDS)
    assert reader.has(q, ALL)
    assert to_q.gone is None


def test_a_payload_of_a_dead_process(tcp, start_worker, reader):
    worker = start_worker(**tcp)
    worker.kill()
    with pytest.raises(TransferError, match="cannot add 'P'"):
        reader.agent.connect(worker.payload)
    second = start_worker(seed=2, **tcp)
    assert reader.read(reader.agent.connect(second.payload), ALL).wait(HANG_SECONDS)
    assert reader.has(second, ALL)


def test_a_peer_that_hangs_does_not_hold_up_others(tcp, start_worker, reader):
    p, q = start_worker("P", **tcp), start_worker("Q", seed=3, **tcp)
    p.pause()
    errors = []

    def connect_to_p():
        try:
            reader.agent.connect(p.payload, timeout=1.5)
        except TransferError as exc:
            errors.append(str(exc))

    thread = threading.Thread(target=connect_to_p)
    thread.start()
    time.sleep(0.2)
    assert reader.read(reader.agent.connect(q.payload), ALL).wait(HANG_SECONDS)
    assert reader.has(q, ALL)
    assert not errors
    thread.join(HANG_SECONDS)
    assert errors == ["peer 'P': no answer in 1.5 s"]
    p.go_on()
    assert reader.read(reader.agent.connect(p.payload), ALL).wait(HANG_SECONDS)
    assert reader.has(p, ALL)
