# SPDX-License-Identifier: Apache-2.0
"""An agent's own memory for the first reads of a connection."""

from __future__ import annotations

import numpy as np

from kvhma.geometry import Region
from kvhma.nixl.peer import Peer

_BYTES = 1 << 16
"""So many that nothing else that the process receives meanwhile looks like them."""


class Scratch:
    """A few bytes of host memory, and of a device if reads go into one.

    Attributes:
        host: host memory.
        device: memory of a device; None without a device.
    """

    def __init__(self) -> None:
        """Allocate the host memory."""
        self._bytes = np.zeros(_BYTES, dtype=np.uint8)
        self.host = Region(self._bytes.ctypes.data, _BYTES)
        self.device: Region | None = None

    def for_read(self, peer: Peer) -> tuple[Region, Region, int] | None:
        """Return destination, source at a peer, and bytes of a small read; None if the peer has no such memory."""
        # Not every transport reads device memory into host memory.
        readable = (region for region in peer.geometry.regions if self.device is not None or region.memory == "DRAM")
        region = next(readable, None)
        if region is None:
            return None
        own = self.device or self.host
        return own, region, min(region.bytes, own.bytes, _BYTES)
