# SPDX-License-Identifier: Apache-2.0
"""The agent with the fake library: life cycle, failures, threads. tests/nixl has the same with the real one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvhma.errors import (
    AddressOverflowError,
    HandshakeError,
    KvhmaError,
    PeerLostError,
    RequestError,
    TransferError,
)
from kvhma.geometry import Geometry, Region
from kvhma.nixl import WARM_UP, Agent, AgentOptions, Telemetry, decode_handshake, encode_handshake
from support.fake_nixl import ERRORS, FakeNet, FakeNixl
from support.flat import flat_geometry, labelled, rows_of, views_of

PAGE = 4096
PAGES = 16


class World:
    """Two workers, P with random bytes and D with zeros."""

    def __init__(self, polls=0, strided=True, telemetry=True):
        self.net = FakeNet()
        self.source = labelled(PAGES)
        self.target = np.zeros(PAGES * PAGE, np.uint8)
        self.p_nixl = FakeNixl("P", self.net)
        self.d_nixl = FakeNixl("D", self.net, strided=strided, telemetry=telemetry)
        self.p = Agent("P", nixl=self.p_nixl)
        self.d = Agent("D", AgentOptions(strided=strided), nixl=self.d_nixl)
        self.p_geometry = flat_geometry(self.source)
        self.d_geometry = flat_geometry(self.target)
        self.p.register(self.p_geometry)
        self.d.register(self.d_geometry)
        self.peer = self.d.connect(self.p.handshake_payload(self.p_geometry))
        self.net.polls = polls
        self.d_nixl.calls.clear()

    def read(self, local_blocks, remote_blocks, notif=b""):
        return self.d.read(self.peer, rows_of(self.target, local_blocks), rows_of(self.source, remote_blocks), notif)

    def page(self, array, block):
        return array[block * PAGE : (block + 1) * PAGE].tobytes()

    def restart_p(self):
        self.p_nixl = FakeNixl("P", self.net)
        self.p = Agent("P", nixl=self.p_nixl)
        self.p.register(self.p_geometry)
        return self.p.handshake_payload(self.p_geometry)


@pytest.fixture
def world():
    return World()


def int32(*values):
    return np.array(values, np.int32)


# --- registration -----------------------------------------------------------------------------------------------


def test_a_region_inside_another_is_covered(world):
    inner = flat_geometry(world.target[PAGE : 3 * PAGE])
    world.d.register(inner)
    assert "register_memory" not in world.d_nixl.calls
    assert decode_handshake(world.d.handshake_payload(inner)).geometry == inner
    whole = np.zeros(8 * PAGE, np.uint8)
    world.d.register(flat_geometry(whole[PAGE : 3 * PAGE], whole))
    assert world.d_nixl.calls["register_memory"] == 1


@pytest.mark.parametrize(("start", "end"), [(2, 6), (0, 3), (0, 8)])
def test_a_region_across_the_end_of_another_is_refused(start, end):
    whole = np.zeros(8 * PAGE, np.uint8)
    agent = Agent("A", nixl=FakeNixl("A", FakeNet()))
    agent.register(flat_geometry(whole[PAGE : 4 * PAGE]))
    with pytest.raises(RequestError, match="overlaps"):
        agent.register(flat_geometry(whole[start * PAGE : end * PAGE]))


def test_an_agent_that_was_given_its_nixl_cannot_prewarm():
    with pytest.raises(RequestError, match="'A' was given its NIXL"):
        Agent("A", nixl=FakeNixl("A", FakeNet())).prewarm_transport()


def test_a_refused_registration_is_a_transfer_error(world):
    world.net.fail["register_memory"] = [ERRORS["nixlBackendError"]("no memory")]
    with pytest.raises(TransferError, match="cannot register Region") as info:
        world.d.register(flat_geometry(np.zeros(PAGE, np.uint8)))
    assert type(info.value.__cause__).__name__ == "nixlBackendError"


def test_a_payload_needs_registered_memory(world):
    with pytest.raises(RequestError, match="not registered"):
        world.p.handshake_payload(flat_geometry(np.zeros(PAGE, np.uint8)))


# --- handshake --------------------------------------------------------------------------------------------------


def test_connecting_warms_up_without_notifications(world):
    assert world.p_nixl.inbox == [("D", WARM_UP)]
    assert world.p.notifications() == []
    assert (world.peer.name, world.peer.payload.incarnation) == ("P", world.p.incarnation)
    assert world.peer.geometry == world.p_geometry


def test_a_caller_may_read_before_the_warm_up(world):
    """For example to check whose memory it is."""
    world.p_nixl.inbox.clear()
    peer = world.d.connect(world.p.handshake_payload(world.p_geometry, b"anew"), warm_up=False)
    assert ("transfer" in world.d_nixl.calls, world.p_nixl.inbox) == (False, [])
    world.d.warm_up(peer)
    assert (world.d_nixl.calls["transfer"], world.p_nixl.inbox) == (2, [("D", WARM_UP)])


def test_the_same_payload_is_the_same_peer(world):
    payload = world.p.handshake_payload(world.p_geometry, b"clock")
    peer = world.d.connect(payload)
    assert peer is not world.peer
    assert peer.payload.extra == b"clock"
    assert world.d.connect(payload) is peer
    with pytest.raises(PeerLostError, match="disconnected"):
        world.read([1], [1])


def test_an_unexpected_name(world):
    with pytest.raises(HandshakeError, match="from 'P', expected 'Q'"):
        world.d.connect(world.p.handshake_payload(world.p_geometry), expect="Q")
    with pytest.raises(HandshakeError, match="this agent's own name"):
        world.p.connect(world.p.handshake_payload(world.p_geometry))


def test_the_name_nixl_finds_in_the_metadata_counts(world, monkeypatch):
    # With a form of metadata that cannot be inspected beforehand.
    monkeypatch.setattr(world.d, "_knows_metadata", False)
    monkeypatch.setattr(FakeNixl, "get_agent_metadata", lambda self: b"?" + id(self).to_bytes(8, "little"))
    FakeNixl("R", world.net)
    for known, name in (("P", "Q"), ("R", "Q")):
        metadata = world.net.agents[known].get_agent_metadata()
        with pytest.raises(HandshakeError, match=f"is of agent '{known}'"):
            world.d.connect(encode_handshake(metadata, world.p_geometry, name=name, incarnation=1))
    assert list(world.d_nixl.remotes) == ["P"]


@pytest.mark.parametrize("name", ["nixlMismatchError", "nixlBackendError", "nixlNotAllowedError"])
def test_metadata_nixl_refuses(world, name):
    world.net.fail["add_remote_agent"] = [ERRORS[name]("no")]
    with pytest.raises(KvhmaError, match="cannot add") as info:
        world.p.connect(world.d.handshake_payload(world.d_geometry))
    assert isinstance(info.value, TransferError if name == "nixlBackendError" else HandshakeError)
    assert world.p.connect(world.d.handshake_payload(world.d_geometry)).name == "D"


def test_a_warm_peer_is_left_alone(world):
    """Another handshake over it must not end the reads of the first one, if P just stalls."""
    world.d.warm_up(world.peer, timeout=0)
    assert "transfer" not in world.d_nixl.calls
    assert world.peer.gone is None


@pytest.mark.parametrize("method", ["transfer", "check_xfer_state", "initialize_xfer"])
def test_a_peer_dies_before_the_warm_up(world, method):
    world.net.polls = 1
    world.net.fail[method] = [ERRORS["nixlRemoteDisconnectError"]("gone")]
    payload = world.d.handshake_payload(world.d_geometry)
    with pytest.raises(PeerLostError, match="'D'"):
        world.p.connect(payload)
    assert "D" not in world.p_nixl.remotes
    assert world.p.connect(payload).gone is None


def test_a_peer_that_does_not_answer(world):
    world.net.polls = 10**9
    payload = world.d.handshake_payload(world.d_geometry)
    for _ in range(2):
        with pytest.raises(TransferError, match=r"'D': (no answer in|1 transfers still in flight after) 0.01 s"):
            world.p.connect(payload, timeout=0.01)
    (warm_up,) = world.p._in_flight.running()
    assert world.p_nixl.released_in_flight == 0
    warm_up._posted[0].handle.left, world.net.polls = 1, 0
    assert world.p.connect(payload, timeout=1).gone is None


@pytest.mark.parametrize("remote_memory", ["VRAM", "DRAM"])
def test_warm_up_reads_into_device_memory(remote_memory):
    net, scratch, source = FakeNet(), np.zeros(PAGE, np.uint8), labelled(1)
    d = Agent("D", nixl=FakeNixl("D", net))
    d.register_scratch(Region(scratch.ctypes.data, 64, "VRAM", 1))
    p = Agent("P", nixl=FakeNixl("P", net))
    region = Region(source.ctypes.data, PAGE, remote_memory, 3 if remote_memory == "VRAM" else 0)
    geometry = Geometry((region,), (), ())
    p.register(geometry)
    d.connect(p.handshake_payload(geometry))
    assert np.array_equal(scratch[:64], source[:64])
    assert not scratch[64:].any()


def test_scratch_beside_registered_memory(world):
    with pytest.raises(RequestError, match="overlaps registered memory"):
        world.d.register_scratch(Region(world.target.ctypes.data - 8, 64))


def test_a_peer_with_device_memory_is_only_notified(world):
    device = FakeNixl("G", world.net)
    agent = Agent("G", nixl=device)
    geometry = _with_region(world.p_geometry, memory="VRAM", device=1)
    agent.register(geometry)
    world.d.connect(agent.handshake_payload(geometry))
    assert "transfer" not in world.d_nixl.calls
    assert device.inbox == [("D", WARM_UP)]


# --- transfers --------------------------------------------------------------------------------------------------


def test_an_empty_read_only_notifies(world):
    nothing = np.empty((0, 3), np.uint64)
    transfer = world.d.read(world.peer, nothing, nothing, b"skip")
    assert transfer.poll() == "done"
    assert transfer.finished
    assert not transfer.abort()
    assert transfer.telemetry == Telemetry(0, 0)
    assert world.p.notifications() == [("D", b"skip")]
    local = world.d.prepare(None, views_of(world.target))
    remote = world.d.prepare(world.peer, views_of(world.source))
    assert world.d.read_ids(local, int32(), remote, int32()).wait(0)
    assert world.p.notifications() == []
    assert "transfer" not in world.d_nixl.calls
    world.net.kill("P")
    with pytest.raises(PeerLostError):
        world.d.read(world.peer, nothing, nothing, b"skip")


def test_nothing_starts_if_the_arrays_do_not_fit(world):
    local_rows, remote_rows = rows_of(world.target, [1, 2]), rows_of(world.source, [1, 2])
    local = world.d.prepare(None, views_of(world.target))
    remote = world.d.prepare(world.peer, views_of(world.source))
    outside = np.zeros(PAGE, np.uint8)
    shorter = local_rows.copy()
    shorter[0, 1] = 8
    bad = [
        lambda: world.d.read(world.peer, local_rows, remote_rows[:1]),
        lambda: world.d.read(world.peer, local_rows.astype(np.int64), remote_rows),
        lambda: world.d.read(world.peer, shorter, remote_rows),
        lambda: world.d.read(world.peer, rows_of(outside, [0, 0]), remote_rows),
        lambda: world.d.read(world.peer, local_rows, rows_of(world.source, [PAGES, 0])),
        lambda: world.d.read(world.peer, local_rows, remote_rows, local_memory="HBM"),
        lambda: world.d.read_ids(local, int32(1), remote, int32(1, 2)),
        lambda: world.d.read_ids(local, int32(PAGES), remote, int32(1)),
        lambda: world.d.read_ids(local, int32(-1), remote, int32(1)),
        lambda: world.d.read_ids(local, np.array([1]), remote, int32(1)),
        lambda: world.d.read_ids(remote, int32(1), local, int32(1)),
        lambda: world.d.read_ids(local, int32(1), local, int32(1)),
        lambda: world.d.prepare(None, views_of(outside)),
        lambda: world.d.prepare(world.peer, views_of(outside)),
        lambda: world.d.prepare(None, np.empty((0, 5), np.uint64)),
        lambda: world.d.prepare(None, local_rows),
    ]
    for call in bad:
        with pytest.raises(RequestError):
            call()
    wraps = local_rows.copy()
    wraps[1, 1] = 2**64 - PAGE
    with pytest.raises(AddressOverflowError):
        world.d.read(world.peer, wraps, remote_rows)
    assert "transfer" not in world.d_nixl.calls
    assert not world.d._in_flight.running()
    assert not world.target.any()


def test_a_prepared_read_in_flight_is_not_posted():
    world = World(polls=2)
    read = world.d.prepare_read(world.peer, rows_of(world.target, [3]), rows_of(world.source, [5]))
    handle = read.post()
    with pytest.raises(RequestError, match="posted again before it had ended"):
        read.post()
    read.release()  # in flight: with its peer
    while handle.poll() == "running":
        pass
    assert read.post().wait(1)
    read.release()
    read.release()
    with pytest.raises(RequestError, match="was released"):
        read.post()


@pytest.mark.parametrize("how", ["disconnected", "lost", "closed"])
def test_a_prepared_read_ends_with_its_peer(how):
    world = World(polls=1)
    read = world.d.prepare_read(world.peer, rows_of(world.target, [3]), rows_of(world.source, [5]))
    handle = read._handle
    read.post()
    if how == "lost":
        world.net.kill("P")
        with pytest.raises(PeerLostError):
            read._last.poll()
    if how == "closed":
        world.d.close()
    else:
        world.d.disconnect(world.peer)
    assert handle.released
    assert world.d_nixl.released_in_flight == 0
    with pytest.raises(TransferError if how == "closed" else PeerLostError):
        read.post()


def test_what_cannot_be_read_cannot_be_prepared_either(world):
    here, there = rows_of(world.target, [3]), rows_of(world.source, [5])
    unregistered = np.zeros(PAGE, np.uint8)
    outside = rows_of(unregistered, [0])
    for rows in (
        (outside, there),
        (here, outside),
        (here[:0], there[:0]),
        (here, there[:0]),
        (here.astype(np.int64), there),
    ):
        with pytest.raises(RequestError):
            world.d.prepare_read(world.peer, *rows)
    world.net.kill("P")
    with pytest.raises(PeerLostError):
        world.d.prepare_read(world.peer, here, there).post()


def test_none_for_descriptors_is_an_error(world, monkeypatch):
    monkeypatch.setattr(FakeNixl, "get_xfer_descs", lambda self, rows, memory: None)
    with pytest.raises(RequestError, match="NIXL makes no descriptors"):
        world.read([1], [1])


def test_a_released_or_foreign_list_is_refused(world):
    local = world.d.prepare(None, views_of(world.target))
    remote = world.d.prepare(world.peer, views_of(world.source))
    foreign = world.p.prepare(None, views_of(world.source))
    with pytest.raises(RequestError, match="another agent"):
        world.d.read_ids(foreign, int32(1), remote, int32(1))
    local.release()
    local.release()
    with pytest.raises(RequestError, match="released"):
        world.d.read_ids(local, int32(1), remote, int32(1))


def test_telemetry_that_is_off_does_not_fail(world):
    world = World(telemetry=False)
    assert world.read([1], [1]).telemetry is None
    assert world.read([1], [1]).telemetry is None
    assert "get_xfer_telemetry" not in world.d_nixl.calls  # not asked again after the warm-up


# --- release discipline -----------------------------------------------------------------------------------------


def test_waiting_is_bounded():
    world = World(polls=10**6)
    transfer = world.read([1], [2])
    assert transfer.wait(0.02) is False
    assert transfer.wait(0) is False
    assert not transfer.finished


def test_a_transfer_without_references_is_kept():
    world = World(polls=3)
    world.read([1], [2])
    assert len(world.d._in_flight.running()) == 1
    world.d.close()
    assert world.page(world.target, 1) == world.page(world.source, 2)
    assert world.d_nixl.released_in_flight == 0


def test_close_waits_and_then_gives_everything_back():
    world = World(polls=5)
    local = world.d.prepare(None, views_of(world.target))
    world.d.prepare(world.peer, views_of(world.source))
    transfer = world.read([1], [2])
    with world.d:
        pass
    assert transfer.poll() == "done"
    assert (world.d_nixl.registered, world.d_nixl.remotes, world.d_nixl.released_in_flight) == ([], {}, 0)
    assert local._handle is None
    world.d.close()
    for call in (
        lambda: world.read([1], [2]),
        lambda: world.d.prepare(None, views_of(world.target)),
        lambda: world.d.register(world.d_geometry),
        lambda: world.d.handshake_payload(world.d_geometry),
        lambda: world.d.connect(world.p.handshake_payload(world.p_geometry)),
        lambda: world.d.notify(world.peer, b"x"),
        world.d.notifications,
    ):
        with pytest.raises((TransferError, RequestError)):
            call()


def test_close_refuses_while_something_is_in_flight():
    world = World(polls=10**9)
    transfer = world.read([1], [2])
    assert world.d.in_flight() == 1
    for _ in range(2):
        with pytest.raises(TransferError, match=r"agent 'D': 1 transfers still in flight after 0.01 s"):
            world.d.close(timeout=0.01)
    assert world.d_nixl.registered
    assert world.d_nixl.released_in_flight == 0
    with pytest.raises(TransferError, match="closed"):
        world.read([1], [2])
    transfer._posted[0].handle.left = 1
    assert world.d.in_flight() == 0
    assert transfer.finished
    world.d.close(timeout=1)
    assert not world.d_nixl.registered


# --- failures ---------------------------------------------------------------------------------------------------


def test_nixl_forgetting_a_peer_by_itself_is_a_lost_peer():
    world = World(polls=2)
    transfer = world.read([1], [2])
    world.d_nixl.remotes.pop("P")
    with pytest.raises(PeerLostError):
        transfer.wait(1)
    world.d.connect(world.p.handshake_payload(world.p_geometry))


@pytest.mark.parametrize("method", ["transfer", "check_xfer_state"])
def test_other_failures_lose_the_transfer_and_not_the_peer(method):
    world = World(polls=1)
    world.net.fail[method] = [ERRORS["nixlBackendError"]("broken")]
    with pytest.raises(TransferError, match=r"broken \(nixlBackendError\)") as info:
        world.read([1], [2]).wait(1)
    assert not isinstance(info.value, PeerLostError)
    assert not world.d._in_flight.running()
    assert world.read([1], [2]).wait(1)


def test_an_error_state_without_an_exception(monkeypatch):
    world = World(polls=1)
    monkeypatch.setattr(FakeNixl, "check_xfer_state", lambda self, handle: "ERR")
    with pytest.raises(TransferError, match="NIXL reports ERR"):
        world.read([1], [2]).wait(1)


def test_a_restarted_peer_replaces_itself_after_its_transfers_ended():
    world = World(polls=10**9)
    transfer = world.read([1], [2])
    payload = world.restart_p()
    world.net.polls = 0
    # The old incarnation is gone, which the poll inside connect finds out.
    peer = world.d.connect(payload)
    assert transfer.finished
    assert peer is not world.peer
    assert world.peer.gone
    with pytest.raises(PeerLostError):
        transfer.poll()


# --- threads and imports ----------------------------------------------------------------------------------------


def test_nixl_is_imported_only_by_making_an_agent():
    code = (
        "import sys, kvhma.nixl\n"
        "assert not any(name.partition('.')[0].startswith('nixl') for name in sys.modules), sorted(sys.modules)\n"
        "sys.modules['nixl'] = None\n"
        "try: kvhma.nixl.Agent('A')\n"
        "except ImportError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install --no-deps nixl nixl-cu12" in done.stdout


def test_regions_of_different_memory_do_not_cover_each_other():
    nixl = FakeNixl("A", FakeNet())
    agent = Agent("A", nixl=nixl)
    base = flat_geometry(np.zeros(2 * PAGE, np.uint8))
    agent.register(base)
    agent.register(_with_region(base, memory="VRAM", device=0))
    agent.register(_with_region(base, memory="VRAM", device=1))
    assert len(nixl.registered) == 1 + 3  # the first is for warming up


def _with_region(geometry: Geometry, **changes) -> Geometry:
    old = geometry.regions[0]
    region = Region(**{"base": old.base, "bytes": old.bytes, **changes})
    return Geometry((region,), geometry.groups, geometry.layers)
