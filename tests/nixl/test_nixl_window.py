# SPDX-License-Identifier: Apache-2.0
"""The bound of the bytes in flight, with real NIXL over TCP: kept, with pieces that overlap, and every byte right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvhma.errors import PeerLostError
from kvhma.nixl import Agent
from kvhma.nixl.window import LEAST_WINDOW_BYTES, WINDOW_BYTES
from support.flat import flat_geometry, labelled
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.nixl
PAGES = 4096
SIZE = PAGES * 4096
"""Four windows."""


class Counting:
    """Passes NIXL's calls on, and counts the bytes of what is in flight."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._bytes: dict[int, int] = {}
        self.posted: dict[int, int] = {}
        self.most = self.most_pieces = self.posts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nixl, name)

    def get_xfer_descs(self, rows, memory):
        self._last = int(rows[:, 1].sum())
        return self._nixl.get_xfer_descs(rows, memory)

    def initialize_xfer(self, *arguments):
        handle = self._nixl.initialize_xfer(*arguments)
        self._bytes[id(handle)] = self._last
        return handle

    def transfer(self, handle):
        self.posts += 1
        self.posted[id(handle)] = self._bytes[id(handle)]
        self.most = max(self.most, sum(self.posted.values()))
        self.most_pieces = max(self.most_pieces, len(self.posted))
        return self._note(handle, self._nixl.transfer(handle))

    def check_xfer_state(self, handle):
        try:
            return self._note(handle, self._nixl.check_xfer_state(handle))
        except Exception:
            self.posted.pop(id(handle))
            raise

    def _note(self, handle, status):
        if status != "PROC":
            self.posted.pop(id(handle))
        return status


class Reader:
    """D, whose calls of NIXL are counted."""

    def __init__(self) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        self.agent = Agent("D")
        self.agent.register(flat_geometry(self.memory))
        self.nixl = self.agent._session._nixl = Counting(self.agent._session._nixl)

    def connect(self, worker):
        self.peer = self.agent.connect(worker.payload, timeout=HANG_SECONDS)
        self.nixl.most = self.nixl.most_pieces = 0
        self.base = self.peer.geometry.regions[0].base

    def read(self, local, remote, nbytes):
        rows = [
            np.array([(base + at, nbytes, 0)], np.uint64)
            for base, at in ((self.memory.ctypes.data, local), (self.base, remote))
        ]
        return self.agent.read(self.peer, *rows)


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.agent.close(HANG_SECONDS)


def done(*transfers):
    until(lambda: all(transfer.poll() == "done" for transfer in transfers))


def test_the_transport_is_asked(transport, start_worker, reader):
    reader.connect(start_worker(pages=PAGES, **transport))
    assert (reader.peer.window is not None) is (transport == {"UCX_TLS": "tcp"})
    done(reader.read(0, 0, SIZE))
    assert (reader.memory == labelled(PAGES, seed=1)).all()
    if reader.peer.window is None:
        assert (reader.nixl.most, reader.nixl.most_pieces) == (SIZE, 1)
    else:
        assert LEAST_WINDOW_BYTES <= reader.nixl.most <= WINDOW_BYTES
        assert reader.nixl.most_pieces > 1


def test_loads_share_the_bound(tcp, start_worker, reader):
    worker = start_worker(pages=PAGES, **tcp)
    reader.connect(worker)
    worker.pause()
    # Pieces that do not end at the ends of rows, and a load that finds no room.
    half = SIZE // 2
    transfers = [reader.read(half, 12345, half - 7), reader.read(7, 3, half - 100)]
    assert LEAST_WINDOW_BYTES // 2 < sum(reader.nixl.posted.values()) <= WINDOW_BYTES
    assert [transfer.poll() for transfer in transfers] == ["running"] * 2
    worker.go_on()
    done(*transfers)
    source = labelled(PAGES, seed=1)
    assert (reader.memory[half:-7] == source[12345 : 12345 + half - 7]).all()
    assert (reader.memory[7 : half - 93] == source[3 : half - 97]).all()
    assert reader.nixl.most <= WINDOW_BYTES
    assert not reader.nixl.posted


def test_a_peer_that_dies_is_asked_for_no_more_and_read_again_when_it_is_back(tcp, start_worker, reader):
    worker = start_worker(pages=PAGES, **tcp)
    reader.connect(worker)
    worker.pause()
    transfer = reader.read(0, 0, SIZE)
    posts = reader.nixl.posts
    worker.kill()
    with pytest.raises(PeerLostError):
        until(lambda: transfer.poll() == "done")
    assert reader.nixl.posts == posts
    assert not reader.nixl.posted
    reader.connect(start_worker(pages=PAGES, seed=2, **tcp))
    done(reader.read(0, 0, SIZE))
    assert (reader.memory == labelled(PAGES, seed=2)).all()
    assert 0 < reader.nixl.most <= WINDOW_BYTES
