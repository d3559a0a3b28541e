# SPDX-License-Identifier: Apache-2.0
"""What others sent, as it may stand in an error text or a log: one line of printable characters, bounded."""

from __future__ import annotations

from itertools import islice

_QUOTED = 60
"""Characters of a quoted value."""

_DEPTH = 3
"""Nested containers that are looked into for a quotation of this length."""


def quote(value: object) -> str:
    """Return a value of any type and size as it can stand in a message: at most 60 ASCII characters and an ellipsis."""
    text = ascii(_beginning(value, _DEPTH))
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def one_line(text: str, limit: int = 2000) -> str:
    """Return the first `limit` characters of a text, with a question mark for each that is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _beginning(value: object, depth: int) -> object:
    """Return a value that begins as this one does, and whose text takes little time whatever a stranger sent."""
    if isinstance(value, (str, bytes)):
        return value[: _QUOTED + 1]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge integer"
    if not isinstance(value, (dict, list, tuple)):
        return value
    if not depth:
        return "..."
    # An entry has three characters at least: of this many the text is cut in any case.
    most = _QUOTED // 3 + 1
    if isinstance(value, dict):
        return {_beginning(key, 0): _beginning(entry, depth - 1) for key, entry in islice(value.items(), most)}
    entries = [_beginning(entry, depth - 1) for entry in islice(value, most)]
    return tuple(entries) if isinstance(value, tuple) else entries
