# SPDX-License-Identifier: Apache-2.0
"""Memory of an agent's own that connections are warmed up with."""

from __future__ import annotations

import numpy as np

from kvhma.geometry import Region
from kvhma.nixl.peer import Peer

_BYTES = 4096


class Scratch:
    """A few bytes of host memory, and of a device if reads go into one.

    Attributes:
        host: host memory.
        device: memory of a device; None if there is none.
    """

    def __init__(self) -> None:
        """Allocate the host's."""
        self._bytes = np.zeros(_BYTES, dtype=np.uint8)
        self.host = Region(self._bytes.ctypes.data, _BYTES)
        self.device: Region | None = None

    def for_read(self, peer: Peer) -> tuple[Region, Region, int] | None:
        """Return where to read to, where of a peer to read from, and how many bytes; None if nothing can be read."""
        # Not every transport reads device memory into host memory.
        readable = (one for one in peer.geometry.regions if self.device is not None or one.memory == "DRAM")
        region = next(readable, None)
        if region is None:
            return None
        own = self.device or self.host
        return own, region, min(region.bytes, own.bytes, _BYTES)
