# SPDX-License-Identifier: Apache-2.0
"""Values of untrusted parameters: where each stands, in which form it is written, and what is refused.

The annotation of a field of a named tuple has all of that, and nothing else repeats it::

    port: Annotated[int, Key("remote_port", integer(1, 65535))]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

from kvhma.errors import RequestError
from kvhma.text import quote

_MAX_NAME = 512
_HEX_64 = re.compile(r"[0-9a-f]{16}", re.ASCII)
_HEX_128 = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Form(NamedTuple):
    """How a value is written.

    Attributes:
        expected: what a reader expects, for the text of a refusal.
        read: returns the value of what was written, and gets its name too; raises ValueError if it is something else.
        write: returns what is written of a value: only what JSON has.
    """

    expected: str
    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Key:
    """Where the parameters have a value.

    Attributes:
        name: its key, with the dictionary that has it: ``kvhma.tokens``.
        form: how it is written.
        sign: returns what the digest covers of an optional value; None for the value by its key, as new fields have it.
        short: its key without that dictionary.
        is_own: whether that dictionary is ``kvhma``.
    """

    name: str
    form: Form
    sign: Callable[[Any], Any] | None = None
    short: str = field(init=False)
    is_own: bool = field(init=False)

    def __post_init__(self) -> None:
        # Each request reads and writes thirty values.
        object.__setattr__(self, "short", self.name.rsplit(".", 1)[-1])
        object.__setattr__(self, "is_own", self.name.startswith("kvhma."))

    def signed(self, value: Any) -> Any:
        """Return what the digest covers of an optional value, as JSON has it."""
        return {self.short: value} if self.sign is None else self.sign(value)

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return the value from the dictionary that has it.

        Raises:
            RequestError: it is missing, or something else. The text has the key, the value and what was expected.
        """
        return read_value(self.form, values.get(self.short), self.name)


def read_values(keys: Mapping[str, Key], params: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of several keys, by field.

    Raises:
        RequestError: as of :meth:`Key.read`, for the first of them.
    """
    found = {}
    for field_name, key in keys.items():
        value = (own if key.is_own else params).get(key.short)
        try:
            found[field_name] = key.form.read(value, key.name)
        except RequestError:  # a ValueError too: of a part of the value
            raise
        except ValueError:
            raise _refusal(key.form, value, key.name) from None
    return found


def read_value(form: Form, value: Any, name: str) -> Any:
    """Return the value of what was written under `name`.

    Raises:
        RequestError: it is something else.
    """
    try:
        return form.read(value, name)
    except RequestError:  # a ValueError too: of a part of the value
        raise
    except ValueError:
        raise _refusal(form, value, name) from None


def _refusal(form: Form, value: Any, name: str) -> RequestError:
    return RequestError(f"kv_transfer_params: {name} is {quote(value)}, expected {form.expected}")


INLINE = "inline"
"""Marks a field whose value is a named tuple with keys."""


def keys_of(record: type[Any]) -> dict[str, Key]:
    """Return the keys of a named tuple, and of its inline fields, by field in their order."""
    keys: dict[str, Key] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        for marked in getattr(hint, "__metadata__", ()):
            keys |= keys_of(hint.__origin__) if marked == INLINE else {name: marked}
    return keys


def integer(low: int, high: int) -> Form:
    """Return the form of an integer, which routers may write as 387.0: protobuf's Struct and Lua only have floats."""

    def read(value: Any, name: str) -> int:
        whole = value.is_integer() if isinstance(value, float) else type(value) is int
        if not whole or not low <= value <= high:
            raise ValueError(name)
        return int(value)

    return Form(f"an integer in {low}..{high}", read)


def rows(record: type[Any], max_rows: int) -> Form:
    """Return the form of a list of 1..`max_rows` named tuples of one class, each written as a list of its fields."""
    columns = list(keys_of(record).values())
    names = ", ".join(key.name for key in columns)

    def read(value: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not 0 < len(value) <= max_rows:
            raise ValueError(name)
        found = []
        for row in value:
            if not isinstance(row, list) or len(row) != len(columns):
                raise RequestError(f"kv_transfer_params: {name} has {quote(row)}, expected [{names}]")
            cells = zip(columns, row, strict=True)
            found.append(record(*(read_value(key.form, cell, f"{name}.{key.name}") for key, cell in cells)))
        return tuple(found)

    return Form(f"a list of 1..{max_rows}", read, lambda value: [list(row) for row in value])


def _read_name(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(name)
    return value


def _read_seconds(value: Any, name: str) -> float:
    # nan is in no range
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.1 <= value <= 1e9:
        raise ValueError(name)
    return float(value)


def _matching(pattern: re.Pattern[str]) -> Callable[[Any, str], str]:
    def read(value: Any, name: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(name)
        return value

    return read


_read_hex_64 = _matching(_HEX_64)


def _read_id(value: Any, name: str) -> int:
    return int(_read_hex_64(value, name), 16)


def _instance(kind: type[Any]) -> Callable[[Any, str], Any]:
    def read(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise ValueError(name)
        return value

    return read


NAME = Form(f"1..{_MAX_NAME} printable characters", _read_name)
SECONDS = Form("seconds", _read_seconds)
RANDOM_ID = Form("16 hexadecimal digits", _read_id, "{:016x}".format)
HEX_DIGITS = Form("32 hexadecimal digits", _matching(_HEX_128))
FLAG = Form("true or false", _instance(bool))
STRING = Form("a string", _instance(str))
