# SPDX-License-Identifier: Apache-2.0
"""A device that this machine does not have, for `kvhma.vllm.device.accelerator` and what uses it.

Its tensors report that device and are in host memory. Its streams run in order in a dedicated thread, and only as far
as tests allow; launched work is done then, not before. It replaces `torch` in modules that launch work, and
`nixl_agent`, and records each call with its thread.
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
"""A stream other than the one that a thread begins with."""


class OnDevice(torch.Tensor):
    """A tensor in host memory that reports being on the device.

    Attributes:
        simulated: on whose streams copies from, to and within such tensors are launched; None if they are done at once.
    """

    device = DEVICE
    is_cuda = True
    simulated: SimulatedDevice | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.simulated is not None and func in _COPIES:
            return cls.simulated.launch_copy(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


_COPIES = (torch.Tensor.copy_, torch.Tensor.index_copy_, torch.Tensor.index_select)


def plain(value: Any) -> Any:
    """Return the same memory as an ordinary tensor; anything else as it is."""
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that reports being on the device."""
    return tensor.as_subclass(OnDevice)


@dataclass(frozen=True)
class Call:
    """A call that a thread made to the device or to NIXL."""

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
    """Work in order; `ready` decides whether the next item may begin."""

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
    """The device, and the replacement of `torch` where work is launched on it.

    Attributes:
        calls: all calls, in order.
        engine: the stream of the engine's thread; other threads have a default stream each.
        pinned: pinned memory of the host.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.pinned: list[torch.UntypedStorage] = []
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
        """A thread's first call, which creates its context."""
        assert device == DEVICE == self.local.device
        self.note("first operation")

    def empty(self, *shape: int, pin_memory: bool, **more: Any) -> torch.Tensor:
        """Memory that counts as pinned, without a driver that could pin it."""
        made = torch.empty(*shape, **more)
        if pin_memory:
            self.pinned.append(made.untyped_storage())
        return made

    def launch_copy(self, func: Any, args: Any, more: dict[str, Any]) -> torch.Tensor:
        """Launch a copy on the current stream. With memory that is not pinned the copy would wait for the stream."""
        on_host = [one for one in args if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice)]
        pinned = {storage.data_ptr() for storage in self.pinned}
        assert all(one.untyped_storage().data_ptr() in pinned for one in on_host), "memory that is not pinned"
        assert not on_host or more.get("non_blocking"), "a copy that is waited for"
        stream, found = self.current(), args[0]
        self.note(func.__name__, stream)
        if func is torch.Tensor.index_select:
            tensor, dimension, indices = args
            found = on_device(plain(tensor).new_empty((len(indices), *tensor.shape[1:])))
            stream.put(lambda: plain(found).copy_(plain(tensor).index_select(dimension, plain(indices))))
        else:
            stream.put(lambda: func(*map(plain, args), **more))
        return found

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
                    _, work = stream.queue[0]
                    with torch.inference_mode():  # as it was launched
                        work()
                    stream.queue.popleft()

    def idle(self) -> None:
        """Wait until all launched work is done."""
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
