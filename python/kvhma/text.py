# SPDX-License-Identifier: Apache-2.0
"""Makes untrusted text fit for an error text or a log: one line of printable characters, bounded."""

from __future__ import annotations

from itertools import islice

_QUOTED = 60
"""Limit of characters of a quoted value."""

_DEPTH = 3
"""Depth of nested containers that is shown in such a quotation."""


def quote(value: object) -> str:
    """Return a text for a value of any type and size: at most 60 ASCII characters and an ellipsis."""
    text = ascii(_beginning(value, _DEPTH))
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def one_line(text: str, limit: int = 2000) -> str:
    """Return the first `limit` characters of a text, with a question mark for each that is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _beginning(value: object, depth: int) -> object:
    """Return a value with the same beginning whose text takes little time, even for an untrusted peer's value."""
    if isinstance(value, (str, bytes)):
        return value[: _QUOTED + 1]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge integer"
    if not isinstance(value, (dict, list, tuple)):
        return value
    if not depth:
        return "..."
    # An entry has at least three characters, so more entries than this are cut in any case.
    limit = _QUOTED // 3 + 1
    if isinstance(value, dict):
        return {_beginning(key, 0): _beginning(entry, depth - 1) for key, entry in islice(value.items(), limit)}
    entries = [_beginning(entry, depth - 1) for entry in islice(value, limit)]
    return tuple(entries) if isinstance(value, tuple) else entries
