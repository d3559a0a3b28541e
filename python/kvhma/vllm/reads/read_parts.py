# SPDX-License-Identifier: Apache-2.0
"""The parts of a read: rows that one transfer reads from one source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Read
from kvhma.nixl.transfer import Telemetry
from kvhma.permute import PermutedRead

PART_BYTES = 64 << 20
"""Most bytes of one source in one transfer. After a lost connection, completed parts are not read again."""


class TransferInFlight(Protocol):
    """A transfer in flight; :class:`kvhma.nixl.TransferHandle` says what the attributes are."""

    @property
    def telemetry(self) -> Telemetry | None:
        """What was measured."""

    @property
    def finished(self) -> bool:
        """Whether nothing writes to its destination any more."""

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            TransferError: it has ended without success.
        """


@dataclass(eq=False)
class ReadPart:
    """Rows that one transfer reads from one source.

    Attributes:
        source: index of the source in the plan.
        local: rows to write, of shape (n, 3): address, length in bytes, device.
        remote: rows to read, of the same shape.
        handle: of the transfer; None before the part is posted, and after the transfer was lost.
        is_lost: whether the transfer was lost with its connection, and the part was not posted again.
    """

    source: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    handle: TransferInFlight | None = None
    is_lost: bool = False

    @property
    def in_flight(self) -> bool:
        """Whether its transfer has not ended."""
        return self.handle is not None and not self.handle.finished

    def is_same(self, part: ReadPart) -> bool:
        """Whether both parts read the same bytes of the same source to the same place."""
        pairs = ((self.local, part.local), (self.remote, part.remote))
        return self.source == part.source and all(np.array_equal(own, compared) for own, compared in pairs)


def parts_of(reads: Iterable[Read | PermutedRead], nbytes: int) -> list[ReadPart]:
    """Cut the reads of a load, `nbytes` in all, into parts of :data:`PART_BYTES`. It never cuts a row."""
    if nbytes <= PART_BYTES:  # nearly every load
        return [ReadPart(read.source, read.local, read.remote) for read in reads]
    parts = []
    for read in reads:
        #   bytes before each row   0 .... 40 .... 70 .... 130 MiB     rows of a part begin within the same 64 MiB
        before = np.cumsum(read.local[:, 1]) - read.local[:, 1]
        cuts = np.flatnonzero(np.diff(before // np.uint64(PART_BYTES))) + 1
        parts += [
            ReadPart(read.source, local, remote)
            for local, remote in zip(np.split(read.local, cuts), np.split(read.remote, cuts), strict=True)
        ]
    return parts
