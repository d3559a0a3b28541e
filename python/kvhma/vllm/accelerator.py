# SPDX-License-Identifier: Apache-2.0
"""The accelerator that a worker's caches are on: work on it is ordered, and no thread waits for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kvhma.errors import GeometryError
from kvhma.vllm.cache_device import HOST, CacheDevice

_HIGH_PRIORITY = -1
"""What the connector launches is short, and loads wait for it: it goes before what the engine's streams still hold."""


class Accelerator(CacheDevice):
    """A device of torch's, and a stream of the connector's own on it.

    Blocks that were just allocated may still be written by the steps before. What is written to them after comes after
    an event on the engine's stream, so neither a thread nor the device waits for anything else::

        engine's stream   ... step k-1 |mark| step k ................. | step k+1 ...
        own stream                          '-> zero |done
        loading thread                launches        sees it and posts the reads; posts others meanwhile
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        """Make the stream; the calling thread is the engine's."""
        self._device = device
        self._stream = torch.Stream(device, priority=_HIGH_PRIORITY)

    def choose(self) -> None:
        """See :class:`CacheDevice`.

        A thread begins on device 0 and without a context. UCX looks for one in the thread that connects or posts, and
        leaves out the transports between devices if there is none. torch does not choose what seems to be chosen, so it
        takes an operation to have a context, on device 0 too.
        """
        torch.accelerator.set_device_index(self._device)
        torch.zeros(1, device=self._device)

    def mark(self) -> torch.Event:
        """See :class:`CacheDevice`."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def launch(self, work: Callable[[], None], after: torch.Event | None) -> torch.Event:
        """Launch work on the connector's own stream; return the event after it.

        What `work` has launched before it raised is waited for: nobody would know of it.

        Args:
            work: what launches, on torch's current stream.
            after: what the device has to have done before; None if nothing.
        """
        if after is not None:
            self._stream.wait_event(after)
        # vLLM may have made its tensors in inference mode, and such a tensor is written in that mode only.
        with self._stream, torch.inference_mode():
            try:
                work()
            except BaseException:
                self._stream.record_event().synchronize()
                raise
        return self._stream.record_event()


def device_of(tensors: Iterable[torch.Tensor]) -> CacheDevice:
    """Return the device that all of some tensors are on; host memory if there are none.

    Raises:
        GeometryError: they are on several.
    """
    devices = sorted({tensor.device for tensor in tensors}, key=str)
    if len(devices) > 1:
        raise GeometryError(f"the caches of a worker are on {devices[0]} and on {devices[1]}")
    return Accelerator(devices[0]) if devices and devices[0].type != "cpu" else HOST
