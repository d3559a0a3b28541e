# SPDX-License-Identifier: Apache-2.0
"""KvhmaWorker with real agents and a real listener, but no engine: what it reads, reports and waits for."""

import itertools
import time

import numpy as np
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make e2e runs it")
pytest.importorskip("torch")

from kvhma.geometry import Span
from kvhma.nixl import Agent
from kvhma.vllm.memory import DeviceMemory
from kvhma.vllm.metadata import Load, StepMetadata, WorkerReport
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.client import Client
from kvhma.vllm.wire.messages import Renew
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, new_nonce
from kvhma.vllm.wire.server import Listener
from kvhma.vllm.worker import preconnect
from kvhma.vllm.worker.worker import KvhmaWorker
from support.engines.engine import free_port
from support.flat import flat_geometry, labelled
from support.identity import EXTRA, IDENTITY

PAGE = 4096
PAGES = 64


class Prefill:
    """What P is to D: memory, an agent, a table of leases and a listener."""

    numbers = itertools.count()

    def __init__(self, address: Address, instance: int | None = None) -> None:
        self.address = address
        self.instance = new_nonce() if instance is None else instance
        self.memory = labelled(PAGES, seed=next(self.numbers))
        self.geometry = flat_geometry(self.memory)
        self.agent = Agent(f"P{next(self.numbers)}")
        self.agent.register(self.geometry)
        self.leases = LeaseTable(30.0)
        hellos = {(0, 0): self.agent.handshake_payload(self.geometry, EXTRA)}
        self.listener = Listener(
            address, engine_id="p", incarnation_id=self.instance, hellos=hellos, leases=self.leases
        )

    def remote(self, name: str, blocks: list[int], hold: LeaseKey | None = None) -> PrefillParams:
        return PrefillParams(
            address=self.address,
            engine_id="p",
            incarnation_id=self.instance,
            lease_key=hold or self.leases.add(name),
            lease=30.0,
            num_tokens=len(blocks),
            prompt="0" * 32,
            spans=(Span(0, blocks),),
            tp_size=1,
        )

    def close(self) -> None:
        self.listener.close()
        self.agent.close()


class Decode:
    """A worker over memory of its own."""

    def __init__(self, **settings: object) -> None:
        self.memory = np.zeros(PAGES * PAGE, dtype=np.uint8)
        geometry = flat_geometry(self.memory)
        agent = Agent(f"D{next(Prefill.numbers)}")
        agent.register(geometry)
        self.worker = KvhmaWorker(
            Settings.read({"handshake_timeout": 2, **settings}),
            "d",
            IDENTITY,
            geometry,
            agent,
            DeviceMemory(geometry, {}),
        )

    def start(self, **loads: tuple[PrefillParams, list[int]]) -> None:
        self.worker.start_loads(StepMetadata([load(name, *of) for name, of in loads.items()]))

    def ended(self, *names: str) -> dict[str, str]:
        """Wait until loads have ended, each once; return the causes of those that failed."""
        end = time.monotonic() + 20
        received: list[str] = []
        causes: dict[str, str] = {}
        while len(received) < len(names):
            assert time.monotonic() < end, received
            some, report = self.worker.collect(idle=True)
            received += some
            causes |= {name: failure.cause for name, failure in report.failures.items()}
        assert sorted(received) == sorted(names)
        return causes

    def pages(self, blocks: list[int]) -> np.ndarray:
        return self.memory.reshape(PAGES, PAGE)[blocks]


def load(name: str, remote: PrefillParams, blocks: list[int]) -> Load:
    return Load(name, remote, new_nonce(), remote.num_tokens, 0, (Span(0, blocks),))


@pytest.fixture
def p():
    made = Prefill(Address("127.0.0.1", free_port()))
    yield made
    made.close()


@pytest.fixture
def d():
    made = Decode()
    yield made
    made.worker.close()


def test_loads_of_a_step_are_read_and_reported_once(p, d, monkeypatch):
    questions = []
    send = Client.send
    monkeypatch.setattr(Client, "send", lambda self, question: (questions.append(question), send(self, question)))
    moves = {"a": ([1, 2, 3], [7, 6, 5]), "b": ([9], [20]), "c": ([30, 40, 50, 60], [10, 11, 12, 13])}
    for step in range(2):
        d.memory[:] = 0
        d.start(**{name: (p.remote(name, theirs), ours) for name, (theirs, ours) in moves.items()})
        assert d.ended(*moves) == {}
        expected = np.zeros((PAGES, PAGE), np.uint8)
        for theirs, ours in moves.values():
            expected[ours] = p.memory.reshape(PAGES, PAGE)[theirs]
        assert np.array_equal(d.pages(list(range(PAGES))), expected), step
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    claims = [len(question.claims) for question in questions if isinstance(question, Renew)]
    assert sum(claims) == 6
    stats = d.worker.take_stats()
    assert stats is not None
    assert stats.data["group_bytes"] == {"0 opaque": 2 * 8 * PAGE} == {"0 opaque": sum(stats.data["bytes"])}
    assert stats.data["group_descriptors"] == {"0 opaque": sum(stats.data["selected_descriptors"])}
    assert len(stats.data["load_seconds"]) == 6
    assert stats.data["handshakes"] == 1


def test_one_load_of_a_step_fails_alone(p, d):
    d.start(
        held=(p.remote("held", [1, 2]), [1, 2]),
        unknown=(p.remote("unknown", [3], LeaseKey("unknown", 1)), [3]),
        outside=(p.remote("outside", [PAGES]), [4]),
        last=(p.remote("last", [5]), [5]),
    )
    assert d.ended("held", "unknown", "outside", "last") == {"unknown": "expired", "outside": "request"}
    assert np.array_equal(d.pages([1, 2, 5]), p.memory.reshape(PAGES, PAGE)[[1, 2, 5]])
    assert not d.pages([4]).any()
    # What failed keeps no connection busy, and the engine can be read from again.
    d.start(again=(p.remote("again", [6]), [6]))
    assert d.ended("again") == {}


def test_an_engine_that_does_not_answer_fails_its_own_loads(p):
    d = Decode(handshake_timeout=0.3)
    try:
        silent = PrefillParams(
            Address("127.0.0.1", free_port()), "x", 1, LeaseKey("s", 1), 30.0, 1, "", (Span(0, [1]),), 1
        )
        d.start(silent=(silent, [1]), good=(p.remote("good", [2]), [2]))
        assert d.ended("silent", "good") == {"silent": "handshake"}
    finally:
        d.worker.close()


def test_a_lease_that_nobody_speaks_of_may_be_tried_again(p):
    d = Decode(handshake_timeout=0.3)
    try:
        d.start(first=(p.remote("first", [1]), [1]))
        assert d.ended("first") == {}
        second = p.remote("second", [2])
        p.listener.close()
        d.start(second=(second, [2]))
        end = time.monotonic() + 20
        failures = {}
        while not failures:
            assert time.monotonic() < end
            failures = d.worker.collect(idle=True)[1].failures
        assert (failures["second"].cause, failures["second"].passing) == ("expired", True)
    finally:
        d.worker.close()


def test_a_step_waits_for_loads_that_it_ordered_and_an_idle_one_for_all(p, d, monkeypatch):
    waits = []
    wait_for = d.worker._results._all_reported.wait_for
    monkeypatch.setattr(d.worker._results._all_reported, "wait_for", lambda *a: (waits.append(a[1]), wait_for(*a)))
    silent = PrefillParams(Address("127.0.0.1", free_port()), "x", 1, LeaseKey("s", 1), 30.0, 1, "", (Span(0, [1]),), 1)
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    assert not waits, "there is nothing to wait for"
    d.start(silent=(silent, [1]))
    assert d.worker.collect(idle=False) == (set(), WorkerReport())
    assert len(waits) == 1, "nothing was read meanwhile"
    assert d.worker.collect(idle=False) == (set(), WorkerReport())
    assert len(waits) == 1, "one wait for each load, not one for each step"
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    assert len(waits) == 2
    assert d.ended("silent") == {"silent": "handshake"}
    d.worker.start_loads(StepMetadata(refusals={"r": "no"}))
    waits.clear()
    assert d.ended("r") == {"r": "refused"}
    assert not waits


def test_engines_of_the_setting_are_known_in_each_of_their_incarnations(p, monkeypatch):
    monkeypatch.setattr(preconnect, "_INTERVAL_SECONDS", 0.05)
    address, nobody = p.address, Address("127.0.0.1", free_port())
    d = Decode(prefill_engines=[str(nobody), str(address)], handshake_timeout=0.3)
    try:
        wait_for_handshake(d)
        p.listener.close()
        second = Prefill(address)
        try:
            wait_for_handshake(d)
            d.start(a=(second.remote("a", [3]), [4]))
            assert d.ended("a") == {}
            assert np.array_equal(d.pages([4]), second.memory.reshape(PAGES, PAGE)[[3]])
            stats = d.worker.take_stats()
            assert stats is not None
            assert stats.data["handshakes"] == 0, "both were made before"
            # By another of its addresses it is the same engine.
            elsewhere = second.remote("b", [5])
            object.__setattr__(elsewhere, "address", Address("localhost", address.port))
            d.start(b=(elsewhere, [6]))
            assert d.ended("b") == {}
            assert d.worker.take_stats().data["handshakes"] == 0
        finally:
            second.close()
    finally:
        d.worker.close()


def test_who_claims_to_be_another_engine_is_read_only_by_those_who_name_its_address(p, d):
    impostor = Prefill(Address("127.0.0.1", free_port()), p.instance)
    try:
        d.start(theirs=(impostor.remote("theirs", [1]), [1]))
        assert d.ended("theirs") == {}
        d.start(ours=(p.remote("ours", [2]), [2]))
        assert d.ended("ours") == {}
        assert np.array_equal(d.pages([1]), impostor.memory.reshape(PAGES, PAGE)[[1]])
        assert np.array_equal(d.pages([2]), p.memory.reshape(PAGES, PAGE)[[2]])
    finally:
        impostor.close()


def wait_for_handshake(d: Decode) -> None:
    """Wait until one handshake has been made since the last call, and no other one."""
    end = time.monotonic() + 20
    while (stats := d.worker.take_stats()) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (stats.data["handshakes"], len(stats.data["handshake_seconds"])) == (1, 1)
