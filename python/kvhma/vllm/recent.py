# SPDX-License-Identifier: Apache-2.0
"""What was seen last, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Recent(OrderedDict[KeyT, ValueT]):
    """Remembers the values of at most `limit` keys: those that were noted last."""

    def __init__(self, limit: int) -> None:
        """Start empty."""
        super().__init__()
        self._limit = limit

    def note(self, key: KeyT, value: ValueT) -> None:
        """Remember a value; forget the key that was noted longest ago if there are too many."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
