# SPDX-License-Identifier: Apache-2.0
"""Transfers between two real agents of one process: bytes, telemetry, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kvhma.errors import HandshakeError, PeerLostError, RequestError
from kvhma.lowlevel import expand_views
from kvhma.nixl import Agent, AgentOptions, Peer, encode_handshake
from support.fake_nixl import merge, runs_of_rows, runs_of_views
from support.flat import flat_geometry, labelled, rows_of
from support.waiting import until

pytestmark = pytest.mark.nixl
PAGE = 4096
PAGES = 256


@dataclass
class Pair:
    source: NDArray[np.uint8]
    target: NDArray[np.uint8]
    p: Agent
    d: Agent
    d_expanding: Agent
    peers: dict[Agent, Peer]

    def views(self, array, cuts):
        """Cut an array by rows of (first byte, length, stride, count)."""
        base = array.ctypes.data
        return np.array([(base + at, size, 0, stride, count) for at, size, stride, count in cuts], np.uint64)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    source, target = labelled(PAGES), np.zeros(PAGES * PAGE, np.uint8)
    p_geometry, d_geometry = flat_geometry(source), flat_geometry(target)
    with Agent("P") as p, Agent("D") as d, Agent("D3", AgentOptions(strided=False)) as d_expanding:
        p.register(p_geometry)
        peers = {}
        for agent in (d, d_expanding):
            agent.register(d_geometry)
            peers[agent] = agent.connect(p.handshake_payload(p_geometry), expect="P")
        yield Pair(source, target, p, d, d_expanding, peers)


@pytest.fixture(autouse=True)
def clean(pair):
    pair.target[:] = 0
    pair.p.notifications()


DENSE = [(0, PAGE, PAGE, PAGES)]
FOUR_LAYERS = [(layer * 64 * PAGE, PAGE, PAGE, 64) for layer in range(4)]
HALVES = [(0, PAGE // 2, PAGE, PAGES), (PAGE // 2, PAGE // 2, PAGE, PAGES)]
DENSE_HALVES = [(0, PAGE // 2, PAGE // 2, 2 * PAGES)]


def test_a_prepared_read_reads_what_is_there_by_then(pair):
    """Each post reads the current bytes, once NIXL has reported the end of the previous read."""
    peer = pair.peers[pair.d]
    read = pair.d.prepare_read(peer, rows_of(pair.target, [7]), rows_of(pair.source, [9]))
    page = pair.source.reshape(PAGES, PAGE)[9]
    before = page.copy()
    try:
        for number in range(200):
            page[:] = number
            assert read.post().wait(5)
            assert (pair.target.reshape(PAGES, PAGE)[7] == number).all()
    finally:
        page[:] = before
    assert pair.target.reshape(PAGES, PAGE)[[6, 8]].sum() == 0
    read.release()


def some_ids(seed: int, entries: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pairs of ids in runs of random length, with gaps, backward steps and no destination twice."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.choice(entries // 4, 12, replace=False)) * 4
    local_ids = np.concatenate([np.arange(start, start + rng.integers(1, 5)) for start in starts])
    remote_ids = np.concatenate(
        [[rng.integers(entries - 4) + np.arange(4)[: max(1, len(local_ids))]] for _ in starts]
    ).ravel()
    remote_ids = np.resize(remote_ids, len(local_ids))
    if seed % 2:
        local_ids, remote_ids = local_ids[::-1], remote_ids[::-1]
    return np.ascontiguousarray(local_ids, np.int32), np.ascontiguousarray(remote_ids, np.int32)


def expected_bytes(pair, local, local_ids, remote, remote_ids):
    """The right content of the target, entry by entry."""
    target = np.zeros_like(pair.target)
    local_rows, remote_rows = expand_views(local), expand_views(remote)
    for i, j in zip(local_ids.tolist(), remote_ids.tolist(), strict=True):
        at, size = int(local_rows[i, 0]) - pair.target.ctypes.data, int(local_rows[i, 1])
        start = int(remote_rows[j, 0]) - pair.source.ctypes.data
        target[at : at + size] = pair.source[start : start + size]
    return target


@pytest.mark.parametrize(
    ("local_cuts", "remote_cuts"),
    [
        (DENSE, DENSE),
        (FOUR_LAYERS, DENSE),
        (HALVES, HALVES),
        (HALVES, DENSE_HALVES),
        (DENSE_HALVES, DENSE_HALVES),
    ],
    ids=["dense", "layers", "halves", "halves-dense", "dense-halves"],
)
@pytest.mark.parametrize("seed", range(4))
def test_ids_with_strided_and_written_out_views(pair, local_cuts, remote_cuts, seed):
    local, remote = pair.views(pair.target, local_cuts), pair.views(pair.source, remote_cuts)
    entries = int(local[:, 4].sum())
    local_ids, remote_ids = some_ids(seed, entries)
    wanted = expected_bytes(pair, local, local_ids, remote, remote_ids)
    found = []
    for agent, peer in pair.peers.items():
        pair.target[:] = 0
        local_list, remote_list = agent.prepare(None, local), agent.prepare(peer, remote)
        transfer = agent.read_ids(local_list, local_ids, remote_list, remote_ids, b"ids")
        assert transfer.wait(10)
        assert (pair.target == wanted).all()
        found.append((transfer.telemetry.descriptors, transfer.telemetry.nbytes))
        local_list.release()
        remote_list.release()
    # Contiguous rows are one run only when they are written out.
    strided = merge(runs_of_views(local), local_ids, runs_of_views(remote), remote_ids)
    written = merge(runs_of_rows(expand_views(local)), local_ids, runs_of_rows(expand_views(remote)), remote_ids)
    nbytes = int(local[0, 1]) * len(local_ids)
    assert found == [(len(strided), nbytes), (len(written), nbytes)]
    assert len(written) <= len(strided)


def test_a_whole_dense_view_is_one_descriptor(pair):
    cuts = pair.views(pair.target, DENSE), pair.views(pair.source, DENSE)
    ids = np.arange(PAGES, dtype=np.int32)
    for agent, peer in pair.peers.items():
        transfer = agent.read_ids(agent.prepare(None, cuts[0]), ids, agent.prepare(peer, cuts[1]), ids)
        assert transfer.wait(10)
        assert (transfer.telemetry.descriptors, transfer.telemetry.nbytes) == (1, PAGES * PAGE)
        assert transfer.telemetry.transfer_us >= transfer.telemetry.post_us > 0
        assert (pair.target == pair.source).all()


def test_direct_reads_merge_nothing(pair):
    blocks = list(range(10, 30))
    peer = pair.peers[pair.d]
    transfer = pair.d.read(peer, rows_of(pair.target, blocks), rows_of(pair.source, blocks), b"direct")
    assert transfer.wait(10)
    assert (transfer.telemetry.descriptors, transfer.telemetry.nbytes) == (20, 20 * PAGE)
    assert (pair.target[10 * PAGE : 30 * PAGE] == pair.source[10 * PAGE : 30 * PAGE]).all()
    assert not pair.target[30 * PAGE :].any()


def test_direct_reads_of_unequal_rows(pair):
    base, other = pair.target.ctypes.data, pair.source.ctypes.data
    cuts = [(5, 1), (100, 4097), (70_000, 123_456)]
    local = np.array([(base + at, size, 0) for at, size in cuts], np.uint64)
    remote = np.array([(other + 7 + at, size, 0) for at, size in cuts], np.uint64)
    assert pair.d.read(pair.peers[pair.d], local, remote).wait(10)
    wanted = np.zeros_like(pair.target)
    for at, size in cuts:
        wanted[at : at + size] = pair.source[7 + at : 7 + at + size]
    assert (pair.target == wanted).all()


def wait_for_notifications(agent, count):
    news = []
    until(lambda: len(news) >= count, lambda: news.extend(agent.notifications()))
    return news


def test_an_empty_read_notifies(pair):
    nothing = np.empty((0, 3), np.uint64)
    transfer = pair.d.read(pair.peers[pair.d], nothing, nothing, b"nothing to read")
    assert transfer.poll() == "done"
    assert wait_for_notifications(pair.p, 1) == [("D", b"nothing to read")]


def test_registered_once(pair):
    before = pair.d._session.open().get_agent_metadata()
    pair.d.register(flat_geometry(pair.target))
    pair.d.register(flat_geometry(pair.target[PAGE : 4 * PAGE]))
    assert pair.d._session.open().get_agent_metadata() == before
    assert len(pair.d._memory.registrations) == 1 + 1  # the first is for warming up


def test_nixl_refuses_before_anything_is_posted(pair):
    d, peer = pair.d, pair.peers[pair.d]
    inside, outside = rows_of(pair.target, [0]), rows_of(np.zeros(PAGE, np.uint8), [0])
    remote_row, beyond = rows_of(pair.source, [0]), rows_of(pair.source, [PAGES])
    shorter = inside.copy()
    shorter[0, 1] = 8
    local = d.prepare(None, pair.views(pair.target, DENSE))
    remote = d.prepare(peer, pair.views(pair.source, DENSE))
    halves = d.prepare(peer, pair.views(pair.source, HALVES))

    def ids(*values):
        return np.array(values, np.int32)

    for call in (
        lambda: d.read(peer, outside, remote_row),
        lambda: d.read(peer, inside, beyond),
        lambda: d.read(peer, shorter, remote_row),
        lambda: d.read(peer, inside, remote_row, local_memory="VRAM"),
        lambda: d.read_ids(local, ids(PAGES), remote, ids(0)),
        lambda: d.read_ids(local, ids(0), remote, ids(-1)),
        lambda: d.read_ids(local, ids(0), halves, ids(0)),
        lambda: d.prepare(None, pair.views(pair.target, [(0, PAGE, PAGE, PAGES + 1)])),
        lambda: d.prepare(peer, pair.views(pair.source, [(PAGE, PAGE, PAGE, PAGES)])),
    ):
        with pytest.raises(RequestError) as info:
            call()
        assert type(info.value.__cause__).__name__ in {"nixlNotFoundError", "nixlInvalidParamError"}
    assert not d._in_flight.running()
    assert not pair.target.any()


def test_a_list_of_an_earlier_connection_is_lost(pair):
    d, peer = pair.d, pair.peers[pair.d]
    views = pair.views(pair.source, DENSE)
    local, old = d.prepare(None, pair.views(pair.target, DENSE)), d.prepare(peer, views)
    d.disconnect(peer)
    again = pair.peers[d] = d.connect(pair.p.handshake_payload(flat_geometry(pair.source)))
    one = np.array([1], np.int32)
    with pytest.raises(PeerLostError, match="connect again"):
        d.read_ids(local, one, old, one)
    assert d.read_ids(local, one, d.prepare(again, views), one).wait(10)
    assert (pair.target[PAGE : 2 * PAGE] == pair.source[PAGE : 2 * PAGE]).all()


def test_payloads_that_nixl_refuses(pair):
    geometry = flat_geometry(pair.source)
    metadata = pair.p._session.open().get_agent_metadata()
    stranger = b"nixlSerDes|Agent" + (1).to_bytes(8, "little") + b"Q|"
    for name, blob in (("Q", metadata), ("Q", b""), ("Q", b"nixlSerDes|"), ("Q", stranger), ("D", metadata)):
        with pytest.raises(HandshakeError):
            pair.d.connect(encode_handshake(blob, geometry, name=name, incarnation=1))
    assert pair.d.read(pair.peers[pair.d], rows_of(pair.target, [1]), rows_of(pair.source, [1])).wait(10)


def test_a_geometry_beyond_what_is_registered(pair):
    with Agent("S") as agent:
        agent.register(flat_geometry(pair.source[: 8 * PAGE]))
        metadata = agent._session.open().get_agent_metadata()
        payload = encode_handshake(metadata, flat_geometry(pair.source), name="S", incarnation=agent.incarnation)
        with pytest.raises(HandshakeError, match="'S' did not register Region"):
            pair.d.connect(payload)
        # Nothing of the failed attempt is left.
        peer = pair.d.connect(agent.handshake_payload(flat_geometry(pair.source[: 8 * PAGE])))
        assert pair.d.read(peer, rows_of(pair.target, [1]), rows_of(pair.source, [1])).wait(10)
        pair.d.disconnect(peer)


def test_many_threads(pair):
    """Readers, a poller, notifications and handshakes with another peer, all at once."""
    d, peer = pair.d, pair.peers[pair.d]
    local = d.prepare(None, pair.views(pair.target, DENSE))
    remote = d.prepare(peer, pair.views(pair.source, DENSE))
    failures: list[BaseException] = []
    share = PAGES // 4

    def work(first):
        try:
            for turn in range(share):
                ids = np.arange(first, first + turn + 1, dtype=np.int32)
                transfer = d.read_ids(local, ids, remote, ids, b"%d" % first)
                if turn % 3 == 0:
                    transfer.abort()
                assert transfer.wait(10)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, PAGES, share)]
    news = []
    with Agent("passer-by") as other:
        geometry = flat_geometry(pair.source)
        other.register(geometry)
        payload = other.handshake_payload(geometry)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            d.disconnect(d.connect(payload))
            d.poll()
            news += pair.p.notifications()
        for thread in threads:
            thread.join(10)
    assert not failures
    assert not d._in_flight.running()
    assert (pair.target == pair.source).all()
    news += wait_for_notifications(pair.p, PAGES - len(news))
    assert sorted(news) == sorted(("D", b"%d" % first) for first in range(0, PAGES, share) for _ in range(share))
