# SPDX-License-Identifier: Apache-2.0
"""Loads that lose their connection to P: D keeps what it read, and reads the rest again only once P is back."""

import contextlib
import functools

import numpy as np
import pytest

from kvhma import plan
from kvhma.errors import PeerLostError, TransferError
from kvhma.nixl import Agent, window
from kvhma.nixl.window import ReadWindow
from kvhma.vllm.metadata import StepMetadata
from kvhma.vllm.peers import prefill_engines
from kvhma.vllm.reads import read_parts, read_steps
from kvhma.vllm.reads.read_parts import parts_of
from support.waiting import until
from support.workers import PAGE, PAGES, Decode, Prefill, counted, load

BLOCKS = [9, 3, 30, 12, 21, 6]
"""Blocks of P, and of D in this order: no two of them are neighbours, so that each is a row."""


@pytest.fixture
def tcp(monkeypatch):
    """Reads come over TCP, in pieces that end at no block, two of them at a time."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(window, "WINDOW_BYTES", PAGE)
    monkeypatch.setattr(window, "LEAST_WINDOW_BYTES", PAGE)
    return monkeypatch


@pytest.fixture
def p():
    with contextlib.closing(Prefill()) as made:
        yield made


@pytest.fixture
def d(monkeypatch):
    monkeypatch.setattr(read_parts, "PART_BYTES", PAGE)
    monkeypatch.setattr(prefill_engines, "make_plan", functools.partial(plan, max_descriptors=PAGES))
    with contextlib.closing(Decode()) as made:
        yield made


class LostRead:
    """A read whose connection is lost while it is in flight: nothing arrives, or only its first half."""

    finished = False

    def __init__(self, handle, error: TransferError, written: np.ndarray) -> None:
        self.handle = handle
        self.error = error
        self.written = written

    def poll(self):
        if self.handle.poll() == "running":
            return "running"
        self.written[:] = 0xEE
        self.finished = True
        if isinstance(self.error, PeerLostError):
            self.handle.peer.gone = str(self.error)
        raise self.error


class Reads:
    """Every read that D posts after its warm-up; the reads in `lost`, by number, are lost."""

    def __init__(self, monkeypatch, d: Decode) -> None:
        self.rows: list[tuple[int, int]] = []
        self.lost: dict[int, TransferError] = {}
        read = Agent.read

        def wrapped(agent, peer, local, remote, *args, **more):
            handle = read(agent, peer, local, remote, *args, **more)
            start = int(local[0][0]) - d.memory.ctypes.data
            if not 0 <= start < PAGES * PAGE:
                return handle
            number = len(self.rows)
            self.rows.append((start // PAGE, int(local[:, 1].sum())))
            if number not in self.lost:
                return handle
            return LostRead(handle, self.lost[number], d.memory[start : start + int(local[:, 1].sum())])

        monkeypatch.setattr(Agent, "read", wrapped)


@pytest.fixture
def reads(monkeypatch, d):
    return Reads(monkeypatch, d)


@pytest.mark.parametrize(
    ("lost", "handshakes"),
    [({2: PeerLostError("gone"), 4: PeerLostError("gone")}, 2), ({0: TransferError("NIXL reports ERR")}, 1)],
)
def test_only_what_was_lost_is_read_again(p, d, reads, lost, handshakes):
    reads.lost = lost
    d.reads(p, a=BLOCKS)
    first, again = reads.rows[: len(BLOCKS)], reads.rows[len(BLOCKS) :]
    assert sorted(first) == sorted((block, PAGE) for block in BLOCKS)
    assert again == [first[number] for number in lost]
    data = counted(d, "load_seconds", 1).data
    assert (data["resumed_loads"], data["reread_bytes"]) == (1, len(lost) * PAGE)
    assert data["handshakes"] == handshakes


def test_what_was_lost_is_read_again_within_the_bound(tcp, p, d, reads):
    taken, most = [0], [0]
    take, give_back = ReadWindow.take_room, ReadWindow.return_room

    def count_taken(window, read, nbytes):
        if has_room := take(window, read, nbytes):
            taken[0] += nbytes
            most[0] = max(most[0], taken[0])
        return has_room

    def count_returned(window, nbytes, seconds):
        taken[0] -= nbytes
        give_back(window, nbytes, seconds)

    tcp.setattr(ReadWindow, "take_room", count_taken)
    tcp.setattr(ReadWindow, "return_room", count_returned)
    reads.lost = {1: PeerLostError("gone"), 4: PeerLostError("gone")}
    d.reads(p, a=BLOCKS)
    first, again = reads.rows[: len(BLOCKS)], reads.rows[len(BLOCKS) :]
    # Pieces that were not posted before the loss are lost, too.
    assert {first[1], first[4]} <= set(again) < set(first)
    assert len(again) == len(set(again))
    assert (taken, most) == ([0], [PAGE])


def test_a_connection_that_is_lost_each_time_ends_the_load(p, d, reads):
    reads.lost = dict.fromkeys(range(99), PeerLostError("gone again"))
    d.start(**p.loads(a=BLOCKS))
    assert d.ended("a") == {"a": "peer_lost"}
    assert len(reads.rows) <= 3 * len(BLOCKS)
    reads.lost = {}
    d.reads(p, b=BLOCKS)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_p_that_does_not_come_back_or_is_another_one(p, d, reads, is_back):
    """Its blocks are gone: D reads nothing of the new P, and the error names the first cause."""
    d.reads(p, before=[1])
    reads.lost = {len(reads.rows) + 1: PeerLostError("cut off")}
    loads = p.loads(a=BLOCKS)
    p.listener.close()
    if is_back:
        p.instance += 1
        p.listen()
    d.start(**loads)
    failure = until(lambda: d.worker.collect(idle=True)[1].failures)["a"]
    assert failure.cause == "peer_lost"
    assert "cut off; and reconnecting: " in failure.text
    assert len(reads.rows) == 1 + len(BLOCKS)


def test_caches_that_lie_elsewhere_after_the_new_handshake(p, d, reads, monkeypatch):
    """The first half came from other addresses than the rest would."""
    reads.lost = {1: PeerLostError("cut off")}
    answers = iter((parts_of, lambda *of: parts_of(*of)[::-1]))
    monkeypatch.setattr(read_steps, "parts_of", lambda *of: next(answers)(*of))
    d.start(**p.loads(a=BLOCKS))
    assert d.ended("a") == {"a": "peer_lost"}
    assert len(reads.rows) == len(BLOCKS)


def test_a_piece_is_not_read_again(p, d, reads):
    """The last piece reads its blocks again."""
    reads.lost = {1: PeerLostError("cut off")}
    piece = load("a", p.remote("a", BLOCKS), BLOCKS)._replace(piece=1)
    d.worker.start_loads(StepMetadata([piece]))
    assert "cut off" in until(lambda: d.worker.collect(idle=True)[1].lost_pieces)["a"]
    assert len(reads.rows) == len(BLOCKS)
