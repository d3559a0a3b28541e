# SPDX-License-Identifier: Apache-2.0
"""Where a step runs: a device or host memory, and agents over memory there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvhma
from kvhma.geometry import Axis, Geometry, Group, Layer, Memory, Page, Part, Region
from kvhma.nixl import Agent, Peer, TransferHandle
from kvhma.vllm.device.accelerator import device_of

SECONDS = 20.0
"""No read takes longer."""

PAGE = 4096
_STEP_SECONDS = 0.01
_NUMBERS = itertools.count()


@dataclass
class Outcome:
    """The findings of a step: name and value, as words."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    file: Path | None = None
    """Has the findings as JSON after each `add`: a step that is killed leaves what it has found."""

    def add(self, what: str, found: object) -> None:
        self.facts.append((what, str(found)))
        if self.file is not None:
            self.file.write_text(json.dumps(self.facts))

    def time(self, what: str, seconds: float, nbytes: int = 0) -> None:
        """Add a time, and the rate at which so many bytes moved in it."""
        rate = f", {nbytes / seconds / 1e9:.2f} GB/s" if nbytes else ""
        self.add(what, f"{seconds * 1e3:.3f} ms{rate}")


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that can import this folder's package and kvhma."""
    folders = (Path(__file__).parents[1], Path(kvhma.__file__).parents[1], os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **more}


class Place:
    """A device, or host memory with less work."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_host = self.device.type == "cpu"
        self.memory: Memory = "DRAM" if self.is_host else "VRAM"
        self.index = self.device.index or 0
        if not self.is_host:
            torch.accelerator.set_device_index(self.device)

    def size(self, on_device: int, on_host: int) -> int:
        return on_host if self.is_host else on_device

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def labelled(self, nbytes: int, seed: int = 1) -> torch.Tensor:
        """Return random bytes."""
        numbers = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        return torch.from_numpy(numbers).to(self.device)

    def region(self, tensor: torch.Tensor) -> Region:
        return Region(tensor.data_ptr(), tensor.nbytes, self.memory, self.index)

    def geometry(self, tensor: torch.Tensor) -> Geometry:
        """Describe a tensor as a layer of opaque pages."""
        part = Part("bytes", "uint8", 1, 0, (Axis("bytes", PAGE, 1),))
        layer = Layer("layer", 0, 0, 0, tensor.nbytes // PAGE, PAGE, Page((part,)))
        return Geometry((self.region(tensor),), (Group("opaque", 1),), (layer,))

    def settle(self) -> None:
        """Wait for the device, as only a step may: measured work must have ended."""
        if not self.is_host:
            torch.accelerator.synchronize(self.device)


def rows_of(region: Region, pages: Sequence[int], nbytes: int = PAGE) -> NDArray[np.uint64]:
    """Return descriptors of the first bytes of some pages of a region."""
    rows = np.empty((len(pages), 3), np.uint64)
    rows[:, 0] = region.base + np.asarray(pages, dtype=np.uint64) * np.uint64(PAGE)
    rows[:, 1], rows[:, 2] = nbytes, region.device
    return rows


class Worker:
    """An agent over pages of memory; as a reader it warms connections up on the device."""

    def __init__(self, place: Place, content: torch.Tensor, *, scratch: bool = True) -> None:
        self.place, self.content = place, content
        self.agent = Agent(f"{os.getpid()}-{next(_NUMBERS)}")
        self.scratch = place.zeros(PAGE)
        if scratch and not place.is_host:
            self.agent.register_scratch(place.region(self.scratch))
        self.geometry = place.geometry(content)
        self.agent.register(self.geometry)

    def payload(self) -> bytes:
        return self.agent.handshake_payload(self.geometry)

    def read(self, peer: Peer, ours: Sequence[int], theirs: Sequence[int], nbytes: int = PAGE) -> TransferHandle:
        """Read the first bytes of a peer's pages into ours."""
        (region,) = peer.geometry.regions
        return self.agent.read(
            peer,
            rows_of(self.place.region(self.content), ours, nbytes),
            rows_of(region, theirs, nbytes),
            local_memory=self.place.memory,
            remote_memory=region.memory,
        )


@contextlib.contextmanager
def connected(place: Place, pages: int) -> Iterator[tuple[Worker, Worker, Peer]]:
    """Yield P with random bytes, D with zeros, and P as D knows it, all in this process."""
    p, d = Worker(place, place.labelled(pages * PAGE)), Worker(place, place.zeros(pages * PAGE))
    try:
        yield p, d, d.agent.connect(p.payload())
    finally:
        d.agent.close()
        p.agent.close()


class Owner:
    """A P in a separate process, with the random bytes of `Place.labelled`."""

    def __init__(self, place: Place, pages: int, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.owner", str(place.device), str(pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**variables),
        )
        assert self._process.stdout is not None
        self.payload = bytes.fromhex(self._process.stdout.readline().decode())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def in_fresh_thread(work: Callable[[], Any]) -> Any:
    """Call it in a new thread, as a handshake is."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def done(handle: TransferHandle) -> TransferHandle:
    """Wait for a read."""
    assert handle.wait(SECONDS), f"not read in {SECONDS} s"
    return handle


def device_object(place: Place) -> Any:
    """Return the device as the connector's threads have it."""
    return device_of([place.zeros(1)])


def wait(launched: torch.Event | None) -> None:
    """Wait as a loading thread does, but with shorter pauses."""
    while launched is not None and not launched.query():
        time.sleep(1e-5)


def busy(place: Place) -> Callable[[], object]:
    """Return what launches the work of about one step: a graph on a device, a pause on the host."""
    if place.is_host:
        return lambda: None
    side = torch.randn(4096, 4096, device=place.device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(side, side)

    multiply(3)
    place.settle()
    each = seconds_of(lambda: (multiply(20), place.settle())) / 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(max(1, round(_STEP_SECONDS / each)))
    return graph.replay
