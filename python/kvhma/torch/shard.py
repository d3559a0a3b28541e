# SPDX-License-Identifier: Apache-2.0
"""The range of an axis that one rank holds, and the checks all specs share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The half-open range of an axis that a rank holds.

    Attributes:
        extent: size of the axis over all ranks.
        start: first index of this rank.
        length: indices of this rank; None for all that are left.
    """

    extent: int
    start: int = 0
    length: int | None = None

    @property
    def held(self) -> int:
        """Indices of this rank."""
        return self.extent - self.start if self.length is None else self.length

    def problem(self, field: str) -> str | None:
        """Return what is wrong with it, or None."""
        for name, value in (("extent", self.extent), ("start", self.start), ("length", self.length or 0)):
            if not isinstance(value, int):
                return f"{field}: {name} {value!r}: must be an integer"
        if self.start < 0 or self.held < 1 or self.start + self.held > self.extent:
            return f"{field} {self.start}..{self.start + self.held}: must be a range within the extent {self.extent}"
        return None


def not_positive(**sizes: int) -> str | None:
    """Return what is wrong with the first size that is no positive integer, or None."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            return f"{name} {value!r}: must be an integer of at least 1"
    return None


def bad_page(page_bytes: int | None, nbytes: int, align: int) -> str | None:
    """Return what is wrong with the padded bytes of a block that holds `nbytes`, or None."""
    if page_bytes is not None and (not isinstance(page_bytes, int) or page_bytes < nbytes):
        return f"page_bytes {page_bytes!r}: a block holds {nbytes} bytes"
    padded = nbytes if page_bytes is None else page_bytes
    if padded % align:
        return f"page of {padded} bytes: must be a multiple of its items' {align} bytes; set page_bytes"
    return None
