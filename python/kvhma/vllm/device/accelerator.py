# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a worker's caches. The connector orders its work there, and no thread waits for all work."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kvhma.errors import GeometryError
from kvhma.vllm.device.cache_device import HOST, CacheDevice

_HIGH_PRIORITY = -1
"""The connector's work is short, and loads wait for it, so it runs before queued work of the engine's streams."""


class Accelerator(CacheDevice):
    """A torch device, and the connector's own stream on it.

    Earlier steps may still write to newly allocated blocks. So the connector's work waits for an event on the engine's
    stream, and neither a thread nor the device waits for anything else::

        engine's stream   ... step k-1 |mark| step k ................. | step k+1 ...
        own stream                          '-> zero |done
        kvhma-reads                   launches        sees it and posts the reads; posts others meanwhile
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        """Make the stream; the engine's thread calls this."""
        self._device = device
        self._stream = torch.Stream(device, priority=_HIGH_PRIORITY)

    def choose(self) -> None:
        """See :class:`CacheDevice`.

        A thread begins on device 0 and without a context. UCX looks for a context in the thread that connects or posts;
        without a context it skips the transports between devices. torch creates the context with the first operation,
        not with the choice of a device.
        """
        torch.accelerator.set_device_index(self._device)
        torch.zeros(1, device=self._device)

    def mark(self) -> torch.Event:
        """See :class:`CacheDevice`."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def launch(self, work: Callable[[], None], after: torch.Event | None) -> torch.Event:
        """Launch work on the connector's stream; return the event after it.

        If `work` raises, it waits for what `work` has launched, because the caller gets no event.

        Args:
            work: launches on torch's current stream.
            after: device work that has to end before; None without any.
        """
        if after is not None:
            self._stream.wait_event(after)
        # vLLM may have made its tensors in inference mode, and these can only be written in that mode.
        with self._stream, torch.inference_mode():
            try:
                work()
            except BaseException:
                self._stream.record_event().synchronize()
                raise
        return self._stream.record_event()


def device_of(tensors: Iterable[torch.Tensor]) -> CacheDevice:
    """Return the device of all tensors; host memory without tensors.

    Raises:
        GeometryError: they are on several devices.
    """
    devices = sorted({tensor.device for tensor in tensors}, key=str)
    if len(devices) > 1:
        raise GeometryError(f"the caches of a worker are on {devices[0]} and on {devices[1]}")
    return Accelerator(devices[0]) if devices and devices[0].type != "cpu" else HOST
