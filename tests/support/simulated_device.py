# SPDX-License-Identifier: Apache-2.0
"""A device that this machine does not have, for `kvhma.vllm.accelerator` and what uses it.

Tensors are on it that say so and lie in host memory. Its streams run in a thread of their own, in order, and only as
far as tests let them; what is launched is done then, not before. It takes the place of `torch` in modules that launch
something, and of `nixl_agent`, and records who asked what in which thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

DEVICE = torch.device("cuda", 1)
"""Not the one that a thread begins with."""


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on the device."""

    device = DEVICE
    is_cuda = True


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that says it is on the device."""
    return tensor.as_subclass(OnDevice)


@dataclass(frozen=True)
class Call:
    """What a thread asked of the device or of NIXL."""

    thread: str
    what: str
    of: Any = None


class Event:
    def __init__(self, simulated: SimulatedDevice) -> None:
        self._simulated = simulated
        self.is_recorded = False
        self.is_done = False

    def record(self, stream: Stream) -> None:
        self._simulated.note("record", (self, stream))
        self.is_recorded = True
        stream.put(lambda: setattr(self, "is_done", True))

    def query(self) -> bool:
        if self.is_done:
            self._simulated.note("done", self)
        return self.is_done

    def synchronize(self) -> None:
        self._simulated.note("wait for an event", self)
        while not self.is_done:
            time.sleep(1e-4)


class Stream:
    """Work in order; `ready` says whether the next piece may begin."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self._simulated = simulated
        self._outer: list[Stream] = []
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    def put(self, work: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, work))

    def wait_event(self, event: Event) -> None:
        self._simulated.note("wait", (self, event))
        # An event that was never recorded is nothing to wait for.
        self.put(lambda: None, (lambda: event.is_done) if event.is_recorded else lambda: True)

    def record_event(self) -> Event:
        event = Event(self._simulated)
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(self._simulated.current())
        self._simulated.local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._simulated.local.stream = self._outer.pop()


class Accelerators:
    """`torch.accelerator`."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self._simulated = simulated

    def set_device_index(self, device: torch.device) -> None:
        self._simulated.note("choose", device)
        self._simulated.local.device = device

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return self._simulated.current()

    def synchronize(self, device: object = None) -> None:
        self._simulated.note("synchronize", device)


class SimulatedDevice:
    """The device, and what stands for `torch` where something is launched on it.

    Attributes:
        calls: what was asked, in order.
        engine: the stream of the engine's thread; other threads have a default stream each.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.local = threading.local()
        self.accelerator = Accelerators(self)
        self.streams: list[Stream] = []
        self.engine = self._new_stream()
        self.local.stream, self.local.device = self.engine, DEVICE
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    # --- torch

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def Stream(self, device: torch.device, priority: int = 0) -> Stream:
        assert device == DEVICE
        assert priority <= 0
        return self._new_stream()

    def Event(self, device: torch.device) -> Event:
        assert device == DEVICE
        return Event(self)

    def zeros(self, count: int, *, device: torch.device) -> None:
        """As a thread does first, to have a context."""
        assert device == DEVICE == self.local.device
        self.note("first operation")

    def _foreach_zero_(self, tensors: list[torch.Tensor]) -> None:
        stream = self.current()
        self.note("zero", stream)
        assert torch.is_inference_mode_enabled()
        assert all(isinstance(tensor, OnDevice) for tensor in tensors)
        arrays = [tensor.as_subclass(torch.Tensor).numpy() for tensor in tensors]
        stream.put(lambda: [array.fill(0) for array in arrays])

    # --- the device

    def note(self, what: str, of: Any = None) -> None:
        self.calls.append(Call(threading.current_thread().name, what, of))

    def current(self) -> Stream:
        """Return the stream of the calling thread."""
        if not hasattr(self.local, "stream"):
            self.local.stream = self._new_stream()
        return self.local.stream

    def _new_stream(self) -> Stream:
        made = Stream(self)
        self.streams.append(made)
        return made

    def _run(self) -> None:
        while not self._closed.wait(1e-4):
            for stream in list(self.streams):
                while stream.queue and stream.queue[0][0]():
                    _, work = stream.queue.popleft()
                    work()

    def idle(self) -> None:
        """Wait until all that was launched is done."""
        while any(stream.queue for stream in self.streams):
            time.sleep(1e-4)


class HostMapped:
    """A `nixl_agent` for which device memory is host memory; the threads that call it are recorded."""

    def __init__(self, nixl: Any, simulated: SimulatedDevice) -> None:
        self._nixl = nixl
        self._simulated = simulated

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._nixl, name)
        if not callable(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            self._simulated.note(f"nixl.{name}", args)
            return found(*args, **more)

        return call

    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> Any:
        self._simulated.note("nixl.register_memory", (mem_type, reg_list))
        return self._nixl.register_memory(_on_host(reg_list, mem_type), "DRAM")

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> Any:
        self._simulated.note("nixl.get_xfer_descs", (mem_type, descs))
        return self._nixl.get_xfer_descs(_on_host(descs, mem_type), "DRAM")


def _on_host(rows: NDArray[np.uint64], mem_type: str) -> NDArray[np.uint64]:
    """Return rows as NIXL takes them for host memory: it knows one device of that."""
    assert mem_type == ("VRAM" if rows[0, 2] else "DRAM"), "device memory is that of device 1 here"
    mapped = rows.copy()
    mapped[:, 2] = 0
    return mapped
