# SPDX-License-Identifier: Apache-2.0
"""Traces: the steps of a connector for some requests, as JSON lines. docs/audit.md has the format.

Input is bounded and checked, so a trace from any origin is safe to load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.oracle.forms import (
    Spans,
    fields_of,
    geometry_of,
    integer,
    items_of,
    kind_of,
    parse,
    plain,
    rank_spans_of,
    span_forms,
)
from kvhma.oracle.labels import by_source

TRACE_VERSION = 1
"""Version of the format, the value of its ``kvhma_trace`` key."""

MAX_FILE_BYTES = 1 << 26
"""Longer files are refused."""

MAX_ROWS = 1 << 20
"""Limit of rows of all steps of a trace."""

_MAX_RANKS = 64
_MAX_REQUESTS = 256
_MAX_NUMBER = 1 << 32
_MAX_ADDRESS = (1 << 64) - 1

Rows: TypeAlias = "NDArray[np.uint64]"

Doing: TypeAlias = Literal["transfer", "rearrange", "zero"]
_WIDTHS: dict[Doing, int] = {"transfer": 3, "rearrange": 3, "zero": 2}


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the memory of a D rank.

    Attributes:
        doing: ``transfer``: bytes of a P rank were written; ``rearrange``: bytes of D itself; ``zero``: zeros.
        source: index of the P rank of a transfer, else 0.
        rows: uint64 ``(n, 3)``: address that is read, address that is written, bytes; for zeros ``(n, 2)``: address,
            bytes.
    """

    doing: Doing
    source: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request and its steps.

    Attributes:
        name: of the request.
        num_tokens: number of tokens before the first token that D computes itself.
        remote_tokens: tokens that P has computed.
        local_spans: D's blocks to fill, by D's groups; or a tuple of spans for each rank.
        remote_spans: P's blocks, by P's groups; or a tuple of spans for each rank.
        cached_spans: D's blocks that were filled before. Empty if unknown; then D has everything before the blocks to
            fill.
        steps: by D's rank, in their order.
        refusals: by D's rank, why the request was refused.
    """

    name: str
    num_tokens: int
    remote_tokens: int
    local_spans: Spans | tuple[Spans, ...]
    remote_spans: Spans | tuple[Spans, ...]
    cached_spans: Spans | tuple[Spans, ...] = ()
    steps: dict[int, list[Step]] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert ids to lists of int, because arrays neither compare nor serialise."""
        for name in ("local_spans", "remote_spans", "cached_spans"):
            object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Two engines, and the steps of a connector for requests between them.

    Attributes:
        local: geometries of D's ranks.
        remote: geometries of P's ranks.
        requests: in the order of the file.
        connector: the connector's name.
        one_pool: whether a block of D belongs to one request in all groups. Memory of its id that no layer of its group
            uses may then hold anything.
    """

    local: tuple[Geometry, ...]
    remote: tuple[Geometry, ...]
    requests: tuple[TracedRequest, ...]
    connector: str = ""
    one_pool: bool = False

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the file, without line ends."""
        head: dict[str, Any] = {"kvhma_trace": TRACE_VERSION, "connector": self.connector, "one_pool": self.one_pool}
        head |= {
            name: [rank.to_form() for rank in ranks] for name, ranks in (("local", self.local), ("remote", self.remote))
        }
        yield json.dumps(head)
        for request in self.requests:
            yield from _request_lines(request)

    @classmethod
    def from_lines(cls, lines: Iterable[str | bytes]) -> Trace:
        """Read the lines of a file. Safe on any input.

        Raises:
            RequestError: the trace is invalid; the text has the line.
        """
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        head = next(numbered, None)
        if head is None:
            raise RequestError("not a trace: the file is empty")
        return _Reader(head[1]).read(numbered)


def load(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        RequestError: it is too long, or not a trace.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"more than {MAX_FILE_BYTES} bytes")
    return Trace.from_lines(data.split(b"\n"))


def save(trace: Trace, path: Path) -> None:
    """Write a trace file."""
    path.write_text("".join(f"{line}\n" for line in trace.to_lines()), encoding="utf-8")


def _request_lines(request: TracedRequest) -> Iterator[str]:
    form: dict[str, Any] = {"request": request.name, "num_tokens": request.num_tokens}
    if request.remote_tokens != request.num_tokens:
        form["remote_tokens"] = request.remote_tokens
    for name in ("local_spans", "remote_spans", "cached_spans"):
        if spans := getattr(request, name):
            form[name] = span_forms(spans)
    yield json.dumps(form)
    for rank, steps in request.steps.items():
        for step in steps:
            about: dict[str, Any] = {step.doing: request.name, "rank": rank}
            if step.doing == "transfer":
                about["source"] = step.source
            yield json.dumps(about | {"rows": step.rows.tolist()})
    for rank, text in request.refusals.items():
        yield json.dumps({"refuse": request.name, "rank": rank, "error": text})


class _Reader:
    """Reads a trace line by line; the first line has the engines.

    Args:
        head: the first line.
    """

    def __init__(self, head: str | bytes) -> None:
        """Read the engines."""
        place = "line 1"
        form = fields_of(_line(place, head), place, ("kvhma_trace", "local", "remote"), ("connector", "one_pool"))
        if (version := integer(form["kvhma_trace"], f"{place}: kvhma_trace")) != TRACE_VERSION:
            raise RequestError(f"kvhma_trace is {version}, this build reads {TRACE_VERSION}")
        self._local, self._remote = (_ranks(form[name], name) for name in ("local", "remote"))
        self._connector = _text(form.get("connector", ""), f"{place}: connector")
        self._one_pool = form.get("one_pool", False)
        if not isinstance(self._one_pool, bool):
            raise RequestError(f"{place}: one_pool is {kind_of(self._one_pool)}, not a boolean")
        self._requests: dict[str, TracedRequest] = {}
        self._rows = 0

    def read(self, lines: Iterable[tuple[int, str | bytes]]) -> Trace:
        for number, line in lines:
            place = f"line {number}"
            form = _line(place, line)
            if not isinstance(form, dict):
                raise RequestError(f"{place} is {kind_of(form)}, not an object")
            if "request" in form:
                self._add_request(form, place)
            elif "refuse" in form:
                self._add_refusal(form, place)
            else:
                self._add_step(form, place)
        return Trace(self._local, self._remote, tuple(self._requests.values()), self._connector, self._one_pool)

    def _add_request(self, form: dict[str, Any], place: str) -> None:
        required = ("request", "num_tokens", "local_spans", "remote_spans")
        fields_of(form, place, required, ("remote_tokens", "cached_spans"))
        name = _text(form["request"], f"{place}: request")
        if name in self._requests:
            raise RequestError(f"{place}: request {name!r} is given twice")
        if len(self._requests) == _MAX_REQUESTS:
            raise RequestError(f"{place}: more than {_MAX_REQUESTS} requests")
        tokens = _natural(form["num_tokens"], f"{place}: num_tokens")
        remote_tokens = _natural(form.get("remote_tokens", tokens), f"{place}: remote_tokens")
        sides = (("local_spans", self._local), ("remote_spans", self._remote), ("cached_spans", self._local))
        local, remote, cached = (rank_spans_of(form.get(key, []), f"{place}: {key}") for key, _ in sides)
        for (key, ranks), spans in zip(sides, (local, remote, cached), strict=True):
            if spans or key != "cached_spans":
                _check_spans(spans, ranks, f"{place}: {key}")
        self._requests[name] = TracedRequest(name, tokens, remote_tokens, local, remote, cached)

    def _add_refusal(self, form: dict[str, Any], place: str) -> None:
        fields_of(form, place, ("refuse", "rank", "error"))
        request = self._request(form["refuse"], f"{place}: refuse")
        rank = _index(form["rank"], len(self._local), f"{place}: rank")
        request.refusals.setdefault(rank, _text(form["error"], f"{place}: error"))

    def _add_step(self, form: dict[str, Any], place: str) -> None:
        found = [name for name in _WIDTHS if name in form]
        if len(found) != 1:
            raise RequestError(f"{place}: has to be one of request, transfer, rearrange, zero and refuse")
        doing = found[0]
        source = ("source",) if doing == "transfer" else ()
        fields_of(form, place, (doing, "rank", *source, "rows"))
        request = self._request(form[doing], f"{place}: {doing}")
        rank = _index(form["rank"], len(self._local), f"{place}: rank")
        rows = self._rows_of(form["rows"], _WIDTHS[doing], f"{place}: rows")
        number = _index(form["source"], len(self._remote), f"{place}: source") if source else 0
        request.steps.setdefault(rank, []).append(Step(doing, number, rows))

    def _request(self, value: object, place: str) -> TracedRequest:
        name = _text(value, place)
        if name not in self._requests:
            raise RequestError(f"{place}: no request {name[:80]!r} before this line")
        return self._requests[name]

    def _rows_of(self, value: object, width: int, place: str) -> Rows:
        if isinstance(value, list):
            self._rows += len(value)
        if self._rows > MAX_ROWS:
            raise RequestError(f"{place}: more than {MAX_ROWS} rows in all")
        rows = []
        for at, row in items_of(value, place):
            numbers = [_natural(number, inner, _MAX_ADDRESS) for inner, number in items_of(row, at)]
            if len(numbers) != width:
                raise RequestError(f"{at} has {len(numbers)} numbers, expected {width}")
            rows.append(numbers)
        return np.array(rows, np.uint64).reshape(-1, width)


def _line(place: str, line: str | bytes) -> object:
    try:
        return parse(line)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


def _ranks(value: object, name: str) -> tuple[Geometry, ...]:
    found = list(items_of(value, f"line 1: {name}"))
    if not 0 < len(found) <= _MAX_RANKS:
        raise RequestError(f"line 1: {name} has {len(found)} ranks, has to have 1 to {_MAX_RANKS}")
    return tuple(geometry_of(form, place) for place, form in found)


def _check_spans(spans: Spans | tuple[Spans, ...], ranks: Sequence[Geometry], place: str) -> None:
    """Refuse spans of another number of ranks or groups, and ids that no layer has."""
    try:
        each = by_source(spans, len(ranks))
    except ValueError as error:
        raise RequestError(f"{place}: {error}") from None
    for rank, own in zip(ranks, each, strict=True):
        if len(own) != len(rank.groups):
            raise RequestError(f"{place}: {len(own)} spans for {len(rank.groups)} groups")
        for index, span in enumerate(own):
            ids = cast("Sequence[int]", span.ids)
            blocks = min((layer.num_blocks for layer in rank.layers if layer.group == index), default=_MAX_NUMBER)
            if not 0 <= span.first < 1 << 32 or any(not 0 <= block < blocks for block in ids):
                raise RequestError(
                    f"{place}[{index}]: a block id below 0 or from {blocks} on, or first is {span.first}"
                )


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise RequestError(f"{place} is {kind_of(value)}, not a string of at most 4096 characters")
    return value


def _natural(value: object, place: str, limit: int = _MAX_NUMBER) -> int:
    if not 0 <= (number := integer(value, place)) <= limit:
        raise RequestError(f"{place} is {number}, has to be 0 to {limit}")
    return number


def _index(value: object, count: int, place: str) -> int:
    if not 0 <= (number := integer(value, place)) < count:
        raise RequestError(f"{place} is {number}, there are {count}")
    return number
