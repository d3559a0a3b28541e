# SPDX-License-Identifier: Apache-2.0
"""Tables that a program writes into a page, between two comments that name the program."""

from __future__ import annotations

from typing import NamedTuple


class Marks(NamedTuple):
    """Where a program writes: between these two lines of a page, whose name is for errors."""

    page: str
    begin: str
    end: str

    def filled(self, page: str, text: str) -> str:
        """Return a page with another text between the marks.

        Raises:
            ValueError: the page has no such marks.
        """
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not (begin and end):
            raise ValueError(f"{self.page} has no line {self.begin!r} followed by {self.end!r}")
        return f"{before}{begin}\n{text}\n{end}{after}"
