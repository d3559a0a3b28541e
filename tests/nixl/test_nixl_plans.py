# SPDX-License-Identifier: Apache-2.0
"""Plans of generated engines through real NIXL: every byte of D, and telemetry equal to the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.nixl import Agent, Peer
from kvhma.oracle import Request, check_memory, fill_source, fill_stale
from support.flat import flat_geometry
from support.generate import Case, generate
from support.recipe import draw
from support.waiting import HANG_SECONDS

pytestmark = pytest.mark.nixl
ARENA = 64 << 20
CASES = 16


class Worker:
    """An agent with one registered arena, from which every case cuts its regions."""

    def __init__(self, name: str) -> None:
        self.arena = np.zeros(ARENA, np.uint8)
        self.geometry = flat_geometry(self.arena)
        self.agent = Agent(name)
        self.agent.register(self.geometry)

    def place(self, geometry: kvhma.Geometry) -> tuple[kvhma.Geometry, list[NDArray[np.uint8]]]:
        """Move the regions of a geometry into the arena; they do not touch each other."""
        regions, memory, at = [], [], 0
        for region in geometry.regions:
            part = self.arena[at : at + region.bytes]
            assert part.size == region.bytes, "the arena is too small"
            memory.append(part)
            regions.append(replace(region, base=part.ctypes.data, memory="DRAM", device=0))
            at += region.bytes + 64
        return replace(geometry, regions=tuple(regions)), memory


@dataclass
class World:
    d: Worker
    sources: list[Worker]
    peers: list[Peer]

    def source(self, at: int) -> Worker:
        while len(self.sources) <= at:
            worker = Worker(f"P{len(self.sources)}")
            self.sources.append(worker)
            self.peers.append(self.d.agent.connect(worker.agent.handshake_payload(worker.geometry)))
        return self.sources[at]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(Worker("D"), [], [])
    yield world
    for worker in (world.d, *world.sources):
        worker.agent.close()


def placed(world: World, case: Case, seed: int) -> tuple[Case, list[NDArray[np.uint8]]]:
    local, memory = world.d.place(case.local)
    remotes = []
    for at, remote in enumerate(case.remotes):
        remote_placed, remote_memory = world.source(at).place(remote)
        fill_source(remote_memory, remote_placed, case.spans_of(at), seed=seed)
        remotes.append(remote_placed)
    return replace(case, local=local, remotes=tuple(remotes)), memory


def run(world: World, case: Case, memory: list[NDArray[np.uint8]], seed: int, moved, start) -> None:
    """Zero and read what a plan lists, then check every byte and the telemetry."""
    fill_stale(memory, seed=seed)
    for address, nbytes, _ in moved.zero.tolist():
        at = address - world.d.arena.ctypes.data
        world.d.arena[at : at + nbytes] = 0
    for read in moved.reads:
        transfer = start(read)
        assert transfer.wait(HANG_SECONDS)
        assert transfer.telemetry is not None
        assert (transfer.telemetry.descriptors, transfer.telemetry.nbytes) == (read.descriptors, read.bytes)
    request = (case.local, case.remotes, Request(case.num_tokens, case.local_spans, case.remote_spans))
    check_memory(memory, *request, excess_bytes=moved.excess_bytes, seed=seed)


def test_plans(world: World) -> None:
    agent = world.d.agent
    by_ids = 0
    for seed in range(CASES):
        case, memory = placed(world, generate(seed, draw(seed)), seed)
        request = (case.num_tokens, case.local_spans, case.remote_spans)
        plan = kvhma.plan(case.local, case.remotes)
        direct = plan.transfer(*request)
        run(world, case, memory, seed, direct, lambda r: agent.read(world.peers[r.source], r.local, r.remote))
        try:
            prepared = {}
            for source in plan.sources:
                local_views, remote_views = plan.views(source)
                peer = world.peers[source]
                prepared[source] = agent.prepare(None, local_views), agent.prepare(peer, remote_views)
            moved = plan.ids(*request)
        except UnsupportedPairError:
            continue

        def read_ids(read, prepared=prepared):
            local, remote = prepared[read.source]
            return agent.read_ids(local, read.local, remote, read.remote)

        run(world, case, memory, seed, moved, read_ids)
        by_ids += 1
        for local, remote in prepared.values():
            local.release()
            remote.release()
    assert by_ids > CASES // 4
