# SPDX-License-Identifier: Apache-2.0
"""Bytes in flight from a peer: bounded if they come over TCP, in pieces that overlap; every byte right, in order."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections import Counter

import numpy as np
import pytest

from kvhma.errors import PeerLostError, RequestError, TransferError
from kvhma.nixl import Agent, Telemetry, agent, window
from kvhma.nixl.ports import came_by_tcp, received_bytes
from kvhma.nixl.window import ReadWindow, cut_rows
from support.fake_nixl import ERRORS, FakeNet, FakeNixl
from support.flat import flat_geometry, labelled, rows_of
from support.tries import RUNS
from support.waiting import until

WINDOW, PIECE = 4096, 2048
SIZE = 1 << 16


class Watched(FakeNixl):
    """Notes what is in flight from each peer, and in which order it was posted."""

    def __init__(self, name: str, net: FakeNet) -> None:
        super().__init__(name, net)
        self.in_flight: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_pieces = 0
        self.order: list[tuple[int, int]] = []
        """Local address and bytes of each posted row."""
        self._posted: set[object] = set()
        self._lock = threading.Lock()

    def transfer(self, handle):
        with self._lock:
            self._posted.add(handle)
            self.most_pieces = max(self.most_pieces, len(self._posted))
            self.in_flight[handle.peer] += sum(nbytes for _, _, nbytes in handle.pairs)
            self.most[handle.peer] = max(self.most[handle.peer], self.in_flight[handle.peer])
            self.order += [(local, nbytes) for local, _, nbytes in handle.pairs]
        return super().transfer(handle)

    def _drive(self, method, handle):
        try:
            return super()._drive(method, handle)
        finally:
            with self._lock:
                if handle.ended and handle in self._posted:
                    self._posted.remove(handle)
                    self.in_flight[handle.peer] -= sum(nbytes for _, _, nbytes in handle.pairs)


class World:
    """D, and some P's whose bytes come over TCP."""

    def __init__(self, peers=("P",), polls=3):
        self.net = FakeNet()
        self.target = np.zeros(SIZE, np.uint8)
        self.nixl = Watched("D", self.net)
        self.agent = Agent("D", nixl=self.nixl)
        self.agent.register(flat_geometry(self.target))
        self.sources = {name: labelled(SIZE // 4096, seed=seed) for seed, name in enumerate(peers, 1)}
        self.owners = {name: Agent(name, nixl=FakeNixl(name, self.net)) for name in peers}
        self.peers = {name: self.connect(name) for name in peers}
        self.net.polls = polls
        self.nixl.order.clear()
        self.nixl.most.clear()

    def connect(self, name):
        geometry = flat_geometry(self.sources[name])
        self.owners[name].register(geometry)
        peer = self.agent.connect(self.owners[name].handshake_payload(geometry))
        peer.window = ReadWindow()
        return peer

    def read(self, local, remote, name="P", notif=b""):
        """Read rows (offset, bytes) of a peer into others."""
        own, peers = (
            np.array([(array.ctypes.data + at, nbytes, 0) for at, nbytes in rows], np.uint64)
            for array, rows in ((self.target, local), (self.sources[name], remote))
        )
        return self.agent.read(self.peers[name], own, peers, notif)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(window, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(window, "LEAST_WINDOW_BYTES", WINDOW)


def random_reads(rng, count):
    """Reads of rows of random lengths: local and remote rows (offset, bytes), no local byte twice."""
    lengths = [
        rng.choice((1, 7, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, WINDOW + 9)) for _ in range(rng.randint(4, 14))
    ]
    starts = [0, *itertools.accumulate(lengths)]
    rows = [
        ((start, nbytes), (rng.randrange(SIZE - nbytes), nbytes))
        for start, nbytes in zip(starts, lengths, strict=False)
    ]
    rng.shuffle(rows)
    cuts = sorted(rng.sample(range(1, len(rows)), count - 1))
    return [rows[start:end] for start, end in itertools.pairwise([0, *cuts, len(rows)])]


def expected(world, reads, name="P"):
    target = np.zeros(SIZE, np.uint8)
    for (at, nbytes), (there, _) in itertools.chain(*reads):
        target[at : at + nbytes] = world.sources[name][there : there + nbytes]
    return target


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_bound_holds_and_pieces_overlap_in_order(seed):
    rng = random.Random(seed)
    world = World(polls=rng.randint(1, 4))
    reads = random_reads(rng, rng.randint(1, 4))
    total = sum(nbytes for (_, nbytes), _ in itertools.chain(*reads))
    running = [world.read(*zip(*rows, strict=True)) for rows in reads]
    while running:
        transfer = rng.choice(running)
        if transfer.poll() == "done":
            running.remove(transfer)
    assert world.nixl.most["P"] <= WINDOW
    if total >= 2 * WINDOW:
        assert world.nixl.most["P"] > WINDOW - PIECE, "no room is left that a piece would fit in"
        assert world.nixl.most_pieces > 1
    assert (world.target == expected(world, reads)).all()
    # What was posted, put together, is what was asked for, in this order.
    base = world.target.ctypes.data
    asked = [base + at + byte for (at, nbytes), _ in itertools.chain(*reads) for byte in range(nbytes)]
    posted = [local + byte for local, nbytes in world.nixl.order for byte in range(nbytes)]
    assert posted == asked
    assert world.nixl.released_in_flight == 0


@pytest.mark.parametrize("nbytes", [WINDOW, 4 * WINDOW], ids=["posted whole", "with pieces left"])
def test_a_later_read_may_be_waited_for_first(nbytes):
    """The read before it, which has all the room and the turn, is not polled."""
    world = World()
    first = world.read([(0, nbytes)], [(0, nbytes)])
    later = world.read([(nbytes, nbytes)], [(nbytes, nbytes)])
    assert later.wait(10.0)
    assert first.wait(10.0)
    assert (world.target[: 2 * nbytes] == world.sources["P"][: 2 * nbytes]).all()
    assert world.nixl.most["P"] <= WINDOW


def test_less_is_asked_for_while_pieces_take_long(monkeypatch):
    piece = WINDOW // 4
    monkeypatch.setattr(window, "LEAST_WINDOW_BYTES", 2 * piece)
    room, read = ReadWindow(), object()
    room.enter(read)

    def fits():
        pieces = 0
        while room.take_room(read, piece):
            pieces += 1
        return pieces

    fast, slow = window.PIECE_SECONDS / 2, window.PIECE_SECONDS * 2
    held = fits()
    seen = [held]
    for seconds in [slow] * 20 + [fast] * 20 + [slow] * 20:
        room.return_room(piece, seconds)
        held += fits() - 1
        seen.append(held)
    assert (seen[0], seen[20], seen[40], seen[60]) == (4, 2, 4, 2), "between the two bounds"
    assert seen[20:41] == sorted(seen[20:41])
    assert seen[40:] == sorted(seen[40:], reverse=True)
    assert room.piece_bytes == piece
    room.leave(read)
    for _ in range(20):  # small reads say nothing: the window is not full
        room.return_room(piece, fast)
        room.enter(read)
        assert room.take_room(read, piece)
        room.leave(read)
    room.enter(read)
    assert fits() == 0


def test_a_piece_that_was_cut_for_a_larger_window_is_in_flight_alone(monkeypatch):
    monkeypatch.setattr(window, "LEAST_WINDOW_BYTES", WINDOW // 4)
    room, read = ReadWindow(), object()
    nbytes = room.piece_bytes
    room.enter(read)
    assert room.take_room(read, nbytes)
    for _ in range(3):
        room.return_room(nbytes, window.PIECE_SECONDS * 2)
        assert room.take_room(read, nbytes)
        assert not room.take_room(read, 1)
    assert room.piece_bytes == WINDOW // 8


def test_each_peer_has_a_window_of_its_own():
    world = World(("P", "Q"))
    rows = [(0, 3 * WINDOW)]
    running = [world.read(rows, rows, "P"), world.read([(4 * WINDOW, 3 * WINDOW)], rows, "Q")]
    assert world.nixl.in_flight == {"P": WINDOW, "Q": WINDOW}
    until(lambda: all(transfer.finished for transfer in running), lambda: [transfer.poll() for transfer in running])
    assert world.nixl.most == {"P": WINDOW, "Q": WINDOW}
    assert (world.target[: 3 * WINDOW] == world.sources["P"][: 3 * WINDOW]).all()
    assert (world.target[4 * WINDOW : 7 * WINDOW] == world.sources["Q"][: 3 * WINDOW]).all()


def test_without_tcp_a_read_is_posted_at_once():
    world = World()
    world.peers["P"].window = None
    transfer = world.read([(0, 3 * WINDOW)], [(9, 3 * WINDOW)])
    assert (world.nixl.in_flight["P"], world.nixl.order) == (3 * WINDOW, [(world.target.ctypes.data, 3 * WINDOW)])
    assert transfer.wait(10)
    assert (world.target[: 3 * WINDOW] == world.sources["P"][9 : 9 + 3 * WINDOW]).all()


def test_telemetry_and_message_are_those_of_the_whole_read():
    world = World(polls=1)
    transfer = world.read([(0, 6 * PIECE)], [(5, 6 * PIECE)], notif=b"r1")
    received = []
    while transfer.poll() == "running":
        received += world.owners["P"].notifications()
    assert received == [], "P frees what it was read from"
    assert transfer.telemetry == Telemetry(6, 6 * PIECE)
    assert world.owners["P"].notifications() == [("D", b"r1")]


def test_a_message_that_cannot_be_sent_is_an_error():
    world = World(polls=1)
    transfer = world.read([(0, 2 * PIECE)], [(0, 2 * PIECE)], notif=b"r1")
    world.net.fail["send_notif"] = [ERRORS["nixlBackendError"]("no")]
    with pytest.raises(TransferError, match="cannot notify 'P'"):
        transfer.wait(10)
    assert transfer.finished


def test_a_lost_peer_posts_no_more_and_what_is_in_flight_ends_first():
    world = World(("P", "Q"), polls=2)
    rows = [(0, 3 * WINDOW)]
    first, second = world.read(rows, rows), world.read([(3 * WINDOW, PIECE)], [(0, PIECE)])
    posted = len(world.nixl.order)
    world.net.kill("P")
    for transfer in (first, second):
        with pytest.raises(PeerLostError):
            transfer.wait(10)
        assert transfer.finished
    assert len(world.nixl.order) == posted, "nothing more of a lost peer is asked for"
    assert world.nixl.in_flight["P"] == 0
    assert world.agent.in_flight() == 0
    with pytest.raises(PeerLostError):
        world.read(rows, rows)
    # P comes back: what was lost is read again, within the bound.
    world.owners["P"] = Agent("P", nixl=FakeNixl("P", world.net))
    world.peers["P"] = world.connect("P")
    assert world.read(rows, rows).wait(10)
    assert (world.target[: 3 * WINDOW] == world.sources["P"][: 3 * WINDOW]).all()
    assert world.nixl.most["P"] <= WINDOW
    assert world.nixl.released_in_flight == 0


def test_a_piece_that_fails_ends_its_read_after_the_others_and_lets_the_next_one_go():
    world = World(polls=1)
    rows = [(0, 2 * WINDOW)]
    first, second = world.read(rows, rows), world.read([(2 * WINDOW, WINDOW)], [(7, WINDOW)])
    world.net.fail["check_xfer_state"] = [ERRORS["nixlBackendError"]("broken")]
    with pytest.raises(TransferError, match="lost"):
        until(lambda: first.poll() == "done", lambda: None)
    assert second.wait(10)
    assert (world.target[2 * WINDOW : 3 * WINDOW] == world.sources["P"][7 : 7 + WINDOW]).all()
    assert world.nixl.released_in_flight == 0


@pytest.mark.parametrize("how", ["disconnected", "closed"])
def test_what_is_not_posted_by_the_end_of_the_connection_never_is(how):
    world = World(polls=1)
    transfer = world.read([(0, 3 * WINDOW)], [(0, 3 * WINDOW)])
    if how == "closed":
        world.agent.close()
    else:
        world.agent.disconnect(world.peers["P"])
    assert sum(nbytes for _, nbytes in world.nixl.order) == WINDOW
    with pytest.raises(TransferError, match=how):
        transfer.poll()
    assert world.nixl.released_in_flight == 0


def test_an_aborted_read_goes_on():
    world = World(polls=1)
    transfer = world.read([(0, 3 * WINDOW)], [(1, 3 * WINDOW)])
    assert transfer.abort()
    assert until(world.agent.poll, lambda: None) == [transfer]
    assert (world.target[: 3 * WINDOW] == world.sources["P"][1 : 1 + 3 * WINDOW]).all()


def test_refusals_start_nothing():
    world = World()
    for local, remote in (
        ([(0, 2 * WINDOW)], [(0, WINDOW)]),  # cut alike, their sums would hide it
        ([(0, 2**40)], [(0, 2**40)]),  # some 2**30 pieces
        ([(0, WINDOW), (SIZE - PIECE, 2 * PIECE)], [(0, WINDOW), (0, 2 * PIECE)]),
    ):
        with pytest.raises(RequestError):
            world.read(local, remote)
    assert (world.nixl.order, world.agent.in_flight()) == ([], 0)
    assert world.read([(0, PIECE)], [(0, PIECE)]).wait(10), "no refused read waits before it"


def test_threads_share_a_window():
    world = World(polls=2)
    part = SIZE // 8

    def read(start):
        rows = [(start, part)]
        transfer = world.read(rows, rows)
        until(lambda: transfer.poll() == "done", lambda: None)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, SIZE, part)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.nixl.most["P"] <= WINDOW
    assert (world.target == world.sources["P"]).all()


def test_rows_are_cut_alike_on_both_sides():
    local, remote = (
        np.array([(base, 700, 3), (base + 5000, 0, 3), (base + 9000, 2048, 4)], np.uint64) for base in (10**6, 2**63)
    )
    pieces = cut_rows(local, remote, 1024)
    assert [own.tolist() for own, _ in pieces] == [
        [[10**6, 700, 3], [10**6 + 9000, 324, 4]],
        [[10**6 + 9324, 1024, 4]],
        [[10**6 + 10348, 700, 4]],
    ]
    for own, there in pieces:
        assert (there[:, 0] - own[:, 0] == 2**63 - 10**6).all()
        assert (there[:, 1:] == own[:, 1:]).all()
        assert own.flags.c_contiguous
        assert there.flags.c_contiguous
    small = rows_of(np.zeros(8192, np.uint8), [0, 1], 100)
    ((own, there),) = cut_rows(small, small, 1024)
    assert (own == small).all()
    assert (there == small).all()


# --- whether it is TCP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "tcp"),
    [
        ({4: 10, 7: 10**9}, {4: 1009, 7: 10**9}, False),
        ({4: 10, 7: 10**9}, {4: 1010, 7: 10**9}, True),
        ({}, {4: 1000}, True),  # a connection that is new
        ({}, {}, False),
        ({4: 10**9}, {5: 20}, False),
        ({4: 0}, {4: 0}, True),  # a kernel that does not count
        (None, {4: 10}, True),
        ({4: 10}, None, True),
    ],
)
def test_bytes_that_a_connection_has_received(before, after, tcp):
    assert came_by_tcp(1000, before, after) is tcp


def test_the_kernel_counts_what_a_connection_receives():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = received_bytes()
            sender.sendall(bytes(5000))
            until(lambda: len(receiver.recv(5000, socket.MSG_PEEK)) == 5000)
            after = received_bytes()
            assert after[receiver.fileno()] - before[receiver.fileno()] == 5000
            assert after[sender.fileno()] == before[sender.fileno()] == 0
            assert came_by_tcp(5000, before, after)
            assert not came_by_tcp(5001, before, after)


@pytest.mark.parametrize("tcp", [True, False])
def test_the_second_read_of_a_connection_decides(monkeypatch, tcp):
    """The first one sets it up, which takes long, and others may receive much meanwhile."""
    monkeypatch.setattr(window, "WINDOW_BYTES", 8192)
    world = World(polls=0)
    counts = itertools.count(1)

    def received():
        # So many reads have been posted. What a connection has received grows with each, if it is TCP.
        return {4: 10 + world.nixl.calls["transfer"] * 4096 * tcp, 5: next(counts)}

    monkeypatch.setattr(agent, "received_bytes", received)
    world.nixl.calls["transfer"] = 0
    other = labelled(1)
    owner = Agent("R", nixl=FakeNixl("R", world.net))
    owner.register(flat_geometry(other))
    peer = world.agent.connect(owner.handshake_payload(flat_geometry(other)), warm_up=False)
    assert peer.window is not None, "bounded as long as it is unknown"
    world.agent.warm_up(peer)
    assert world.nixl.calls["transfer"] == 2
    assert (peer.window is not None) is tcp
