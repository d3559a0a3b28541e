# SPDX-License-Identifier: Apache-2.0
"""What both halves of the oracle take, and what they say when a byte is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Difference:
    """One byte of D that does not hold what it must.

    Attributes:
        region: index of the region.
        offset: offset of the byte in the region.
        layer: layer that the byte belongs to, None for padding.
        part: part of the layer's page, None for padding.
        token: absolute token, None for padding, for state and outside of the request's blocks.
        expected: what the byte must hold, in words.
        found: what it holds, in words.
    """

    region: int
    offset: int
    layer: str | None
    part: str | None
    token: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        place = f"{self.layer}/{self.part}" if self.layer else "padding"
        token = "" if self.token is None else f" token {self.token}"
        where = f"region {self.region} at {self.offset} ({place}{token})"
        return f"{where}: expected {self.expected}, found {self.found}"


class ReadLike(Protocol):
    """What is read from one source; ``local`` and ``remote`` are uint64 ``(n, 3)``: address, length, device."""

    @property
    def source(self) -> int:
        """Index of the source."""

    @property
    def local(self) -> NDArray[np.uint64]:
        """Where to, sorted by address."""

    @property
    def remote(self) -> NDArray[np.uint64]:
        """Where from."""

    @property
    def bytes(self) -> int:
        """Sum of the lengths."""


class TransferLike(Protocol):
    """A transfer under test: ``kvhma.Transfer``, or anything of its shape."""

    @property
    def reads(self) -> Sequence[ReadLike]:
        """What to read, by source."""

    @property
    def zero(self) -> NDArray[np.uint64]:
        """Local ranges to zero before the read, uint64 ``(n, 3)``."""

    @property
    def bytes(self) -> int:
        """Bytes of all reads."""

    @property
    def descriptors(self) -> int:
        """Rows of all reads."""

    @property
    def excess_bytes(self) -> int:
        """Bytes of tokens at or after the token count that come along."""
