# SPDX-License-Identifier: Apache-2.0
"""The two processes of the demo, each with a cache and a NIXL agent. They talk through the parent's pipes."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvhma._kvhma import Transfer
from kvhma.cli.hand_off import HandOff
from kvhma.cli.scenario import Scenario, allocate
from kvhma.cli.subprocess import connect
from kvhma.errors import OracleError, TransferError
from kvhma.geometry import Geometry, Span
from kvhma.nixl import Agent, Peer
from kvhma.nixl.blocking import clear_host
from kvhma.oracle import MemoryReport, Request, check_memory, fill_source, fill_stale
from kvhma.planning import plan

_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The observations of D for one request.

    Attributes:
        counted: whether NIXL counted what it moved, which must equal the plan.
    """

    tokens: int
    blocks: int
    bytes: int
    descriptors: int
    seconds: float
    moved: int
    zeroed: int
    untouched: int
    counted: bool
    wrong: str | None


def prefill(pipe: Connection, scenario: Scenario) -> None:
    """Serve as P: hold the cache, fill it for each request, and keep it until D reports that it has read it."""
    geometry, regions, owner = allocate(scenario.model, scenario.num_blocks)
    with Agent("prefill") as agent:
        connect(pipe, agent, geometry)
        for index, request in enumerate(scenario.requests):
            _, spans = request.spans(geometry)
            fill_source(regions, geometry, spans, seed=scenario.seed + index)
            pipe.send(index)
            _await_notification(agent, f"done {index}".encode())
        pipe.recv()  # the memory must outlive D's agent
    del owner


def decode(pipe: Connection, scenario: Scenario, corrupt: bool) -> None:
    """Serve as D: plan, zero, read, and check every byte of the cache."""
    geometry, regions, owner = allocate(scenario.model, scenario.num_blocks)
    with Agent("decode") as agent:
        peer = connect(pipe, agent, geometry)
        planned = plan(geometry, peer.geometry)
        for index, request in enumerate(scenario.requests):
            seed = scenario.seed + index
            fill_stale(regions, seed=seed)
            pipe.recv()  # P has filled its cache
            start = time.perf_counter()
            _, remote_spans = request.spans(geometry)
            asked = Request(request.tokens, local_spans(request, geometry), remote_spans)
            transfer = planned.transfer(*asked)
            counted = _move(agent, peer, transfer, index)
            seconds = time.perf_counter() - start
            if corrupt and transfer.reads:
                at = ctypes.c_uint8.from_address(int(transfer.reads[0].local[0, 0]))
                at.value ^= 1
            report, wrong = MemoryReport(0, 0, 0, 0), None
            excess = transfer.excess_bytes
            try:
                report = check_memory(regions, geometry, [peer.geometry], asked, excess_bytes=excess, seed=seed)
            except OracleError as error:
                wrong = str(error)
            blocks = sum(len(span.ids) for span in asked.local_spans)
            counts = (request.tokens, blocks, transfer.bytes, transfer.descriptors)
            pipe.send(Outcome(*counts, seconds, report.moved, report.zeroed, report.untouched, counted, wrong))
    del owner


def local_spans(request: HandOff, geometry: Geometry) -> list[Span]:
    """Return the blocks that D fills, plus one block of each full group that is allocated for later tokens."""
    used = {block for table in request.local_tables for block in table}
    free = (block for block in range(1, geometry.layers[0].num_blocks) if block not in used)
    spans, _ = request.spans(geometry)
    return [
        Span(span.first, [*span.ids, next(free)]) if group.kind == "full" else span
        for group, span in zip(geometry.groups, spans, strict=True)
    ]


def _move(agent: Agent, peer: Peer, transfer: Transfer, index: int) -> bool:
    """Zero and read what a transfer lists, and raise if NIXL counts something else; return whether it counts."""
    clear_host(transfer.zero)
    counted = True
    for read in transfer.reads:
        moving = agent.read(peer, read.local, read.remote, f"done {index}".encode())
        if not moving.wait(_TIMEOUT_SECONDS):
            raise TransferError(f"request {index} did not end within {_TIMEOUT_SECONDS} s")
        measured = moving.telemetry
        if measured is None:
            counted = False
        elif (measured.descriptors, measured.nbytes) != (read.descriptors, read.bytes):
            raise TransferError(f"NIXL moved {measured}, planned were {read.descriptors}, {read.bytes} bytes")
    return counted


def _await_notification(agent: Agent, message: bytes) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if any(text == message for _, text in agent.notifications()):
            return
        time.sleep(0.002)
    raise TransferError(f"{message!r} did not arrive within {_TIMEOUT_SECONDS} s")
