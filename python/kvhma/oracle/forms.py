# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON of cases and traces: values of any origin, checked one by one.

Every error is a RequestError that says where it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Geometry, Span

Spans: TypeAlias = "tuple[Span, ...]"
"""The spans of a rank, by group."""


def parse(data: bytes | str) -> object:
    """Read JSON without repeated fields."""
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    form = dict(pairs)
    if len(form) != len(pairs):
        raise ValueError("a field is given twice")
    return form


def fields_of(value: object, place: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return an object with the required fields, and no fields besides them and the optional fields."""
    if not isinstance(value, dict):
        raise RequestError(f"{place} is {kind_of(value)}, not an object")
    for name in required:
        if name not in value:
            raise RequestError(f"{place}: field {name!r} is missing")
    for name in value:
        if name not in required and name not in optional:
            raise RequestError(f"{place}: unknown field {name[:80]!r}")
    return value


def items_of(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield the entries of a list, each with its place."""
    if not isinstance(value, list):
        raise RequestError(f"{place} is {kind_of(value)}, not a list")
    for index, entry in enumerate(value):
        yield f"{place}[{index}]", entry


def integer(value: object, place: str) -> int:
    """Return an integer; true and false are not accepted."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{place} is {kind_of(value)}, not an integer")
    return value


def kind_of(value: object) -> str:
    """Name the type of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a float"}
    return names.get(type(value), "null")


def geometry_of(value: object, place: str) -> Geometry:
    """Return a geometry from its JSON form."""
    if not isinstance(value, dict):
        raise RequestError(f"{place} is {kind_of(value)}, not an object")
    try:
        return Geometry.from_json(json.dumps(value))
    except (KvhmaError, RecursionError) as error:
        raise RequestError(f"{place}: {error}") from error


def spans_of(value: object, place: str) -> Spans:
    """Return the spans of a rank."""
    return tuple(_span(entry, at) for at, entry in items_of(value, place))


def _span(value: object, place: str) -> Span:
    form = fields_of(value, place, ("first", "ids"))
    ids = [integer(entry, at) for at, entry in items_of(form["ids"], f"{place}.ids")]
    return Span(integer(form["first"], f"{place}.first"), ids)


def rank_spans_of(value: object, place: str) -> Spans | tuple[Spans, ...]:
    """Return spans for all ranks, or spans of each rank."""
    if any(isinstance(entry, list) for _, entry in items_of(value, place)):
        return tuple(spans_of(entry, at) for at, entry in items_of(value, place))
    return spans_of(value, place)


def plain(spans: Sequence[Any]) -> tuple[Any, ...]:
    """Return spans, or spans of each source, with ids as lists of int."""
    return tuple(
        Span(int(entry.first), [int(block) for block in entry.ids]) if isinstance(entry, Span) else plain(entry)
        for entry in spans
    )


def span_forms(spans: Sequence[Any]) -> list[object]:
    """Return the JSON form of spans, or of spans of each source."""
    return [
        {"first": entry.first, "ids": list(entry.ids)} if isinstance(entry, Span) else span_forms(entry)
        for entry in spans
    ]
