# SPDX-License-Identifier: Apache-2.0
"""P and D without engines: real memory, agents and connections, a worker, and a listener with a table of leases."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from kvhma.geometry import Span
from kvhma.nixl import Agent, key_hash
from kvhma.vllm.config.rooms import WITHOUT_SETTING
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.device.memory import DeviceMemory
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.metadata import ReadCommand, StepMetadata
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.telemetry.stats import TransferStats
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.worker import KvhmaWorker
from support.boards import board_of
from support.counted import Counted
from support.engines.engine import free_port
from support.flat import flat_geometry, labelled
from support.identity import IDENTITY
from support.waiting import until

PAGE = 4096
PAGES = 64
DIGEST = b"d" * 16


class Panic(BaseException):
    """As PyO3 raises one for a panic of Rust: not an Exception."""


class Prefill:
    """P as D sees it: memory, an agent, a table of leases, a listener, and a lease board that no scheduler opened."""

    numbers = itertools.count()

    def __init__(self, address: Address | None = None, instance: int | None = None) -> None:
        self.address = address or Address("127.0.0.1", free_port())
        self.instance = random_id() if instance is None else instance
        self.memory = labelled(PAGES, seed=next(self.numbers))
        self.geometry = flat_geometry(self.memory)
        private_key, public_key = new_agent_key()
        self.agent = Agent(f"P{next(self.numbers)}-{key_hash(public_key)}", public_key=public_key)
        self.agent.register(self.geometry)
        self.leases = LeaseTable(30.0)
        self.board, extra = board_of(self.agent, public_key)
        self.hellos = {(0, 0): (self.agent.handshake_payload(self.geometry, extra), private_key)}
        self.listen()

    def listen(self) -> None:
        self.listener = Listener(
            self.address,
            LocalEngine("p", self.instance, self.hellos),
            leases=self.leases,
            secrets=Secrets(),
            counters=Counted(),
        )

    def lease_for(self, seconds: float) -> None:
        """Begin again, with leases that end after some seconds."""
        self.listener.close()
        self.leases = LeaseTable(seconds)
        self.listen()

    def remote(self, name: str, blocks: list[int], *, held: bool = True, lease: float = 30.0) -> PrefillParams:
        key = LeaseKey(name, random_id())
        if held:
            self.leases.hold(key, DIGEST, blocks)
        return params(self.address, key, blocks, instance=self.instance, lease=lease)

    def loads(self, **blocks: list[int]) -> dict[str, tuple[PrefillParams, list[int]]]:
        """Hold blocks for requests, which D reads into blocks of the same numbers."""
        return {name: (self.remote(name, ids), ids) for name, ids in blocks.items()}

    def pages(self, blocks: list[int] | slice) -> np.ndarray:
        return self.memory.reshape(PAGES, PAGE)[blocks]

    def close(self) -> None:
        self.listener.close()
        self.agent.close()
        self.board.close()


def params(
    address: Address, key: LeaseKey, blocks: list[int], *, instance: int = 1, lease: float = 30.0
) -> PrefillParams:
    return PrefillParams(
        address=address,
        engine_id="p",
        incarnation_id=instance,
        lease_key=key,
        lease=lease,
        num_tokens=len(blocks),
        prompt="0" * 32,
        spans=(Span(0, blocks),),
        tp_size=1,
        digest=DIGEST,
    )


def load(name: str, remote: PrefillParams, blocks: list[int]) -> ReadCommand:
    return ReadCommand(name, remote, random_id(), remote.num_tokens, 0, (Span(0, blocks),), None)


class Decode:
    """A worker over separate memory; with `slots` it reads into a pool in host memory first."""

    def __init__(self, *, may_wait: bool = True, slots: tuple[int, int] | None = None, **settings: object) -> None:
        self.memory = np.zeros(PAGES * PAGE, dtype=np.uint8)
        geometry = flat_geometry(self.memory)
        blocks = DeviceMemory(geometry, {})
        if slots is not None:  # an option, whose folder may be absent
            pytest.importorskip("kvhma.vllm.options.staging")
            from kvhma.vllm.options.staging.pool import StagingPool
            from kvhma.vllm.options.staging.slots import SlotRanges

            blocks = StagingPool(geometry, {"layer.0": torch.from_numpy(self.memory)}, SlotRanges.of(*slots))
            geometry = blocks.geometry
        agent = Agent(f"D{next(Prefill.numbers)}")
        agent.register(geometry)
        read = Settings.read({"handshake_timeout": 5, **settings})
        options = (*WITHOUT_SETTING, "spans")
        context = WorkerContext(read, Secrets(), "d", IDENTITY, geometry, agent, may_wait=may_wait, options=options)
        self.worker = KvhmaWorker(context, blocks)
        self.worker.be_ready()

    def start(self, **loads: tuple[PrefillParams, list[int]]) -> None:
        """Start loads."""
        self.worker.start_loads(StepMetadata([load(name, *of) for name, of in loads.items()]))

    def ended(self, *names: str) -> dict[str, str]:
        """Wait until loads have ended, each once; return the causes of the failures."""
        received: list[str] = []
        causes: dict[str, str] = {}

        def collect() -> None:
            some, report = self.worker.collect(idle=True)
            received.extend(some)
            causes.update({name: failure.cause for name, failure in report.failures.items()})

        until(lambda: len(received) >= len(names), collect)
        assert sorted(received) == sorted(names)
        return causes

    def reads(self, p: Prefill, **blocks: list[int]) -> None:
        """Read P's blocks of requests into blocks of the same numbers, and check the bytes."""
        self.start(**p.loads(**blocks))
        self.has_read(p, **blocks)

    def has_read(self, p: Prefill, **blocks: list[int]) -> None:
        """Wait for loads of P's blocks into blocks of the same numbers, and check the bytes."""
        assert self.ended(*blocks) == {}
        for ids in blocks.values():
            assert np.array_equal(self.pages(ids), p.pages(ids))

    def pages(self, blocks: list[int] | slice) -> np.ndarray:
        return self.memory.reshape(PAGES, PAGE)[blocks]

    def close(self) -> None:
        self.worker.close()


def counted(d: Decode, name: str, loads: int) -> TransferStats:
    """The worker's counts; a load is measured after it was reported."""
    total = TransferStats()
    until(lambda: len(total.aggregate(d.worker.take_stats() or TransferStats()).data.get(name, ())) >= loads)
    return total


class HeldRead:
    """A read that ends when its test ends it."""

    def __init__(self, handle, go_on: threading.Event) -> None:
        self._handle = handle
        self._go_on = go_on
        self._polled = False

    @property
    def finished(self) -> bool:
        return self._go_on.is_set() and self._polled and self._handle.finished

    def __getattr__(self, name: str):
        return getattr(self._handle, name)

    def poll(self):
        self._polled = True
        return self._handle.poll() if self._go_on.is_set() else "running"


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep reads from ending until the event is set."""
    go_on, read = threading.Event(), Agent.read
    monkeypatch.setattr(Agent, "read", lambda *args, **more: HeldRead(read(*args, **more), go_on))
    return go_on


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    """Record the names of the threads that call a function."""
    names: list[str] = []
    function = getattr(owner, name)

    def recorded(*args, **more):
        names.append(threading.current_thread().name)
        return function(*args, **more)

    monkeypatch.setattr(owner, name, recorded)
    return names
