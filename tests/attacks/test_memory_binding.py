# SPDX-License-Identifier: Apache-2.0
"""Whose memory D reads: an engine that signs with its own key must not lead D to the memory of another engine's worker.

P and the attacker are processes with real agents. D is a worker in the test's process. NIXL's metadata of P is public
without a secret, so the attacker has it. It signs a worker identity with its own key and P's metadata, edited or not,
and answers that it holds every request.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.geometry import Geometry, Region
from kvhma.nixl import HandshakePayload, encode_handshake, key_hash
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds.lease_boards import LeaseBoards
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.peers.board_reader import BoardMemory
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire.lease_board import BOARD_PLACES, BoardFile, board_region, owner_of
from kvhma.vllm.wire.params import Address, LeaseKey, random_id
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from support.boards import WorkerProcess, names_place
from support.counted import Counted
from support.engines.engine import free_port
from support.identity import EXTRA
from support.listening import AnyLease
from support.metadata import Metadata, moved
from support.waiting import until
from support.workers import DIGEST, PAGE, PAGES, Decode, params

SECRET_BLOCK = 9
"""A block of another request at P."""


class Worker(WorkerProcess):
    """A worker in another process, and its scheduler in this process."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.leases = LeaseTable(30.0)

    def open_board(self) -> None:
        """Let its scheduler open its board."""
        file = BoardFile(self.path, owner_of(self.said.public_key))
        self.leases.show_on_boards(LeaseBoards([file]))


@pytest.fixture(scope="module", params=["default", "tcp"])
def transport(request):
    """One that copies from the other process by itself, and one that asks the other process."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tcp":
            patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def p(transport):
    made = Worker(1)
    made.open_board()
    yield made
    made.close()


@pytest.fixture(scope="module")
def attacker(transport):
    """Another worker, whose key the attacker has."""
    made = Worker(2)
    yield made
    made.close()


@pytest.fixture
def d(transport):
    made = Decode()
    yield made
    made.worker.close()


@dataclass
class Key:
    """The attacker's key and the name that comes from it."""

    private: bytes
    public: bytes

    @classmethod
    def new(cls) -> Key:
        return cls(*new_agent_key())

    @property
    def name(self) -> str:
        return f"E-{key_hash(self.public)}"


def forged(
    said: HandshakePayload,
    key: Key,
    *,
    metadata: Metadata | None = None,
    extra: bytes | None = None,
    geometry: Geometry | None = None,
) -> bytes:
    """The identity of a worker under the attacker's name, signed with the attacker's key."""
    metadata = metadata or Metadata.parse(said.metadata)
    return encode_handshake(
        metadata.with_name(said.name, key.name).encode(),
        geometry or said.geometry,
        name=key.name,
        incarnation=7,
        extra=said.extra if extra is None else extra,
        public_key=key.public,
    )


def loads_from(d: Decode, hello: bytes, private: bytes, leases=None, key: LeaseKey | None = None) -> Failure | None:
    """Load block 9 of an engine with this identity; return how the load failed, or None."""
    at, instance, name = Address("127.0.0.1", free_port()), random_id(), f"r{random_id()}"
    engine = LocalEngine("p", instance, {(0, 0): (hello, private)})
    listener = Listener(at, engine, leases=leases or AnyLease(), secrets=Secrets(), counters=Counted())
    found: list[Failure | None] = []

    def collect() -> None:
        received, report = d.worker.collect(idle=True)
        found.extend(report.failures.get(one) for one in received)

    try:
        d.start(**{name: (params(at, key or LeaseKey(name, 1), [SECRET_BLOCK], instance=instance), [2])})
        until(lambda: found, collect)
    finally:
        listener.close()
    return found[0]


def is_honest_load(d: Decode, p: Worker) -> bool:
    """Whether D can load from P itself, which also shows that P's process lives."""
    d.memory[:] = 0
    key = LeaseKey("honest", random_id())
    p.leases.hold(key, DIGEST, [SECRET_BLOCK])
    assert loads_from(d, p.hello, p.private, p.leases, key) is None
    return np.array_equal(d.pages([2])[0], p.pages[SECRET_BLOCK])


def refused(d: Decode, p: Worker, failure: Failure | None, text: str = "is not that worker's") -> None:
    """Check that nothing of P was read, and that P was not harmed."""
    assert failure is not None, "D has read another worker's memory"
    assert (failure.cause, failure.transient) == ("handshake", False), failure.text
    assert text in failure.text
    assert not d.memory.any()
    assert is_honest_load(d, p)


@pytest.mark.parametrize("on_board", [False, True])
def test_metadata_of_another_worker_is_refused(p, d, on_board):
    """With the key of a request that is on P's board, or without; P's board is there in both."""
    victims = LeaseKey("victim", 5)
    if on_board:
        p.leases.hold(victims, DIGEST, [SECRET_BLOCK])
    key = Key.new()
    failure = loads_from(d, forged(p.said, key), key.private, key=victims if on_board else None)
    refused(d, p, failure)
    for part in (key.name, owner_of(p.said.public_key).hex(), owner_of(key.public).hex()):
        assert part in failure.text


def test_a_board_of_the_attackers_does_not_stand_in_for_ps(p, attacker, d):
    """The attacker has a board at the same place of its process, and its metadata beside P's."""
    key = Key(attacker.private, attacker.said.public_key)
    own, ps = Metadata.parse(attacker.said.metadata), Metadata.parse(p.said.metadata)
    joined = Metadata(ps.before, tuple(sorted({*ps.regions, *own.regions})))
    refused(d, p, loads_from(d, forged(p.said, key, metadata=joined), key.private))


@pytest.mark.parametrize("place", [1, BOARD_PLACES - 1])
def test_a_region_that_was_edited_leads_to_zeros(p, d, place):
    """P has no board there. It has zeros."""
    metadata, key = Metadata.parse(p.said.metadata), Key.new()
    records = (*metadata.regions, moved(metadata.regions[0], board_region(place)))
    hello = forged(p.said, key, metadata=Metadata(metadata.before, records), extra=names_place(EXTRA, place))
    refused(d, p, loads_from(d, hello, key.private), "0" * 64)


def test_a_region_that_was_edited_is_not_read(p, d):
    """P's caches are said to be at addresses that P does not have. D reads the board first, which is P's."""
    elsewhere = Region(board_region(0).base - (1 << 40), PAGES * PAGE)
    metadata, key = Metadata.parse(p.said.metadata), Key.new()
    (caches,) = p.said.geometry.regions
    records = [record for record in metadata.regions if not record.startswith(caches.base.to_bytes(8, "little"))]
    records.append(moved(records[0], elsewhere))
    geometry = Geometry((elsewhere,), p.said.geometry.groups, p.said.geometry.layers)
    hello = forged(p.said, key, metadata=Metadata(metadata.before, tuple(records)), geometry=geometry)
    refused(d, p, loads_from(d, hello, key.private))


def test_a_region_of_p_in_the_attackers_metadata_leads_to_the_attacker(p, attacker, d):
    """Over TCP and CMA a connection leads to one process, with any regions: here to the attacker's own."""
    own, ps = Metadata.parse(attacker.said.metadata), Metadata.parse(p.said.metadata)
    joined = Metadata(own.before, (*own.regions, *ps.regions[1:]))
    key = Key(attacker.private, attacker.said.public_key)
    hello = forged(attacker.said, key, metadata=joined, geometry=p.said.geometry)
    failure = loads_from(d, hello, key.private)
    assert failure is not None, "the attacker's process does not have these addresses"
    assert not d.memory.any()
    assert is_honest_load(d, p)


def test_a_changed_key_of_the_transport_is_refused_by_it(p, d):
    metadata, key = Metadata.parse(p.said.metadata), Key.new()
    records = tuple(record[:24] + bytes(byte ^ 0xFF for byte in record[24:]) for record in metadata.regions)
    hello = forged(p.said, key, metadata=Metadata(metadata.before, records))
    assert loads_from(d, hello, key.private) is not None
    assert not d.memory.any()
    assert is_honest_load(d, p)


def test_an_engine_may_serve_any_bytes_of_its_own(d):
    """D reads from the engine that the parameters name, if it may read from there. Nothing says which bytes are right.

    So an attacker that names its engine decides what D's prefix cache has for that prompt.
    """
    with contextlib.closing(Worker(3)) as other:
        assert loads_from(d, other.hello, other.private) is None
        assert np.array_equal(d.pages([2])[0], other.pages[SECRET_BLOCK])


def test_who_can_write_to_a_board_is_believed(d):
    """The attacker puts the hash of its key on P's board. Over TCP it can: tests/attacks/test_transport_ports.py."""
    key = Key.new()
    with contextlib.closing(Worker(4)) as other:
        with Path(other.path).open("r+b") as board:
            board.write(owner_of(key.public))
        assert loads_from(d, forged(other.said, key), key.private) is None
        assert np.array_equal(d.pages([2])[0], other.pages[SECRET_BLOCK])


def test_a_board_of_an_earlier_life_is_refused(p, attacker, d):
    """A worker has a new key after each start. The old key with the memory of the new life is another worker's."""
    hello = forged(p.said, Key(attacker.private, attacker.said.public_key))
    refused(d, p, loads_from(d, hello, attacker.private))


def test_a_worker_that_names_a_board_that_it_did_not_register_is_refused(p, d):
    key = Key.new()
    failure = loads_from(d, forged(p.said, key, extra=names_place(EXTRA, 3)), key.private)
    refused(d, p, failure, "did not register the lease board that it names")


@pytest.mark.parametrize("place", [-1, BOARD_PLACES, 1 << 40])
def test_no_board_is_where_other_peers_choose_the_bytes(p, d, place):
    """P's caches may hold the hash of the attacker's key, if P has loaded from the attacker. No place leads there."""
    key = Key.new()
    refused(d, p, loads_from(d, forged(p.said, key, extra=names_place(EXTRA, place)), key.private), "$.place")


def test_a_worker_without_a_board_is_refused_without_a_secret(p, d):
    key = Key.new()
    failure = loads_from(d, forged(p.said, key, extra=EXTRA), key.private)
    refused(d, p, failure, "its log says why, or set secret_file at both engines")


def test_each_worker_that_is_read_is_checked_and_each_time(p, d):
    """An engine that D has forgotten is checked again, though its agent is still connected."""
    reads = []
    check = BoardMemory.checked_reader

    def noted(self, peer, timeout, **more):
        reads.append(peer)
        return check(self, peer, timeout, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoardMemory, "checked_reader", noted)
        assert is_honest_load(d, p)
        assert is_honest_load(d, p)
    assert len(reads) == 2
