# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: when each came, how long it was, and which beginnings it shares with others. They hold no text.

A file says itself which form it has, by the fields of its first row. What fits no form is refused with its line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from kvhma.errors import RequestError
from kvhma.replay.columns import BLOCK_TOKENS, MAX_TOKENS, SESSION_BITS, Columns, Paths, Row, Trace
from kvhma.replay.logs import Spans, is_log, read_log

__all__ = ["Paths", "Trace", "read_trace"]

_MAX_LINE = 1 << 26
"""Limit of the bytes of a line."""
_CHUNK = 1 << 20
"""Bytes of lines that are read at once, and one line more."""
_MAX_LENGTHS = 1 << 28
"""Limit of the bytes of a file of lengths."""

_Line: TypeAlias = tuple[int, bytes]
"""A line with its number."""
_Add: TypeAlias = Callable[[int, Mapping[str, Any]], None]
"""Adds a line to columns, from its number and its fields."""


def read_trace(
    path: Path, progress: Callable[[int], object] = lambda nbytes: None, lengths: Path | None = None
) -> Trace:
    """Read a trace: JSON lines of several forms, a table, vLLM's log or spans; docs/replay.md has all.

    Args:
        path: the file.
        progress: called with the number of bytes read so far.
        lengths: of RAGPulse's components, as a JSON object. Default: ``ragpulse_lengths.json`` beside the file.

    Raises:
        RequestError: the file has no known form, or a line is wrong; the text names line and field.
    """
    try:
        with path.open("rb") as file:
            lines = _Lines(path, file, progress)
            first = next(lines, None)
            if first is None:
                raise RequestError(f"{path}: no requests")
            if first[1].lstrip().startswith(b"{"):
                return _read_json(path, first, lines, lengths)
            return _read_table(path, first, lines)
    except OSError as error:
        raise RequestError(f"{error.filename or path}: {error.strerror or error}") from error


class _Lines(Iterator[_Line]):
    """The lines that are not empty, with their numbers.

    Attributes:
        take: reads lines of a text at once, from a place in it; returns their bytes and their number.
    """

    def __init__(self, path: Path, file: BinaryIO, progress: Callable[[int], object]) -> None:
        self.take: Callable[[bytes, int], tuple[int, int]] = lambda text, at: (0, 0)
        self._lines = self._read(path, file, progress)

    def __next__(self) -> _Line:
        return next(self._lines)

    def _read(self, path: Path, file: BinaryIO, progress: Callable[[int], object]) -> Iterator[_Line]:
        number = 0
        while text := file.read(_CHUNK):
            text += file.readline(_MAX_LINE + 1)
            at = 0
            while at < len(text):
                nbytes, count = self.take(text, at)
                at, number = at + nbytes, number + count
                if line := text[at : text.find(b"\n", at) + 1 or len(text)]:
                    at, number = at + len(line), number + 1
                    if len(line) > _MAX_LINE:
                        raise RequestError(f"{path}, line {number}: more than {_MAX_LINE:,} bytes")
                    if line.strip():
                        yield number, line
            progress(file.tell())


def _number(value: Any, kind: type) -> Any:
    """Return a number that may be written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    number = kind(value)
    if isinstance(value, float) and number != value:
        raise ValueError("must be an integer")
    return number


def _read_json(path: Path, first: _Line, lines: _Lines, lengths: Path | None) -> Trace:
    form = _parsed(path, *first)
    if is_log(form):
        columns = Columns(path, "vLLM's log")
        read_log(columns, chain([first], lines))
        return columns.trace()
    for name, (is_it, reader) in _JSON.items():
        if is_it(form):
            columns = Columns(path, name)
            if reader is _mooncake:
                lines.take = columns.add_plain
            rest = ((number, _parsed(path, number, line)) for number, line in lines)
            _add_all(path, chain([(first[0], form)], rest), reader(columns, lengths))
            return columns.trace()
    raise RequestError(
        f"{path}, line {first[0]}: fields {sorted(form)[:12]}: a trace has timestamp, input_length, output_length, "
        "and hash_ids, hash_id_runs or none"
    )


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        form = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(form, dict):
        raise RequestError(f"{path}, line {number}: must be an object")
    return form


def _add_all(path: Path, forms: Iterable[tuple[int, Mapping[str, Any]]], add: _Add) -> None:
    for number, form in forms:
        try:
            add(number, form)
        except RequestError:
            raise
        except KeyError as error:
            raise RequestError(f"{path}, line {number}: {error.args[0]} is missing") from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RequestError(f"{path}, line {number}: {error}") from error


def _field(form: Mapping[str, Any], name: str, kind: type = int) -> Any:
    try:
        return _number(form[name], kind)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} {form[name]!a}: {error}") from error


def _session(form: Mapping[str, Any]) -> str | None:
    found = form.get("session", form.get("session_id"))
    return None if found is None else str(found)


def _timed(form: Mapping[str, Any], per_second: float, ids: list[int] | None = None) -> Row:
    """Return a row whose timestamp has `per_second` units in a second."""
    seconds = _field(form, "timestamp", float) / per_second
    return Row(seconds, _field(form, "input_length"), _field(form, "output_length"), _session(form), ids)


def _check_ids(name: str, ids: Any) -> None:
    if not isinstance(ids, list) or set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) < 1 << 63):
        raise ValueError(f"{name}: must be a list of integers of 0 to 2^63 - 1")


def _mooncake(columns: Columns, lengths: Path | None) -> _Add:
    def add(line: int, form: Mapping[str, Any]) -> None:
        ids = form.get("hash_ids")
        if ids is not None:
            _check_ids("hash_ids", ids)
        columns.add(line, _timed(form, 1e3, ids))

    return add


def _runs(columns: Columns, lengths: Path | None) -> _Add:
    """Read rows whose identities count within their session."""

    def add(line: int, form: Mapping[str, Any]) -> None:
        ids: list[int] = []
        for run in form["hash_id_runs"]:
            _check_ids("hash_id_runs", run)
            if len(run) != 2 or not run[0] <= run[1] < 1 << SESSION_BITS or len(ids) + run[1] - run[0] > MAX_TOKENS:
                raise ValueError(f"hash_id_runs {run!a}: must be a first and a last identity")
            ids += range(run[0], run[1] + 1)
        columns.add(line, _timed(form, 1e3, ids)._replace(session=str(form["session"])))

    columns.in_sessions = True
    return add


def _own(columns: Columns, lengths: Path | None) -> _Add:
    """Read what :class:`kvhma.replay.trace_file.TraceFile` writes; another header begins what another start wrote."""

    def add(line: int, form: Mapping[str, Any]) -> None:
        if "kvhma_requests" in form:
            header = (form["kvhma_requests"], form["block_tokens"])
            if header != (1, BLOCK_TOKENS):
                raise ValueError(f"kvhma_requests and block_tokens are {header}, expected {(1, BLOCK_TOKENS)}")
            return
        ids, prompt = form.get("hash_ids", []), _field(form, "input_length")
        _check_ids("hash_ids", ids)
        if ids and len(ids) != prompt // BLOCK_TOKENS:
            raise ValueError(f"hash_ids: {len(ids)} for {prompt} tokens, expected {prompt // BLOCK_TOKENS}")
        answer = None if form["output_length"] is None else _field(form, "output_length")
        session = _session(form) or f"line {line}"
        columns.add(line, Row(_field(form, "timestamp", float) / 1e3, prompt, answer, session, ids))

    columns.unit = BLOCK_TOKENS
    return add


def _ragpulse(columns: Columns, lengths: Path | None) -> _Add:
    """Read rows whose prompts are of components. A node is a component with all before it, if their lengths are known.

    The rest of a prompt has no identity.
    """
    found = lengths or columns.path.with_name("ragpulse_lengths.json")
    if lengths is None and not found.is_file():
        columns.notes.append(f"no identities: they are of components, whose lengths are not in {found.name}")
        return lambda line, form: columns.add(line, _timed(form, 1.0))
    tokens_of = _component_lengths(found)
    columns.notes.append(f"identities are of components, of the lengths in {found.name}; the rest of a prompt has none")
    nodes: dict[tuple[int, int], int] = {}

    def add(line: int, form: Mapping[str, Any]) -> None:
        ids, ends, node, end = [], [], -1, 0
        for component in chain.from_iterable(form["hash_ids"].get(part, ()) for part in _COMPONENTS):
            if str(component) not in tokens_of:
                raise ValueError(f"hash_ids: {found.name} has no length of component {component!a}")
            node = nodes.setdefault((node, component), len(nodes))
            end += tokens_of[str(component)]
            ids.append(node)
            ends.append(end)
        row = _timed(form, 1.0, ids)
        if end > row.prompt:
            raise ValueError(f"hash_ids: components of {end} tokens, input_length {row.prompt}")
        columns.add(line, row._replace(ends=ends))

    return add


_COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""Parts of RAGPulse's prompts, in their order."""


def _component_lengths(path: Path) -> dict[str, int]:
    if path.stat().st_size > _MAX_LENGTHS:
        raise RequestError(f"{path}: more than {_MAX_LENGTHS:,} bytes")
    try:
        form = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from error
    if not isinstance(form, dict) or not all(
        type(value) is int and 0 <= value <= MAX_TOKENS for value in form.values()
    ):
        raise RequestError(f"{path}: must be an object of components and their tokens")
    return form


_JSON: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Columns, Path | None], _Add]]] = {
    "kvhma": (lambda form: "kvhma_requests" in form, _own),
    "OpenTelemetry": (lambda form: "resourceSpans" in form, lambda columns, lengths: Spans(columns).add),
    "runs of identities": (lambda form: "hash_id_runs" in form, _runs),
    "RAGPulse": (lambda form: isinstance(form.get("hash_ids"), dict), _ragpulse),
    "Mooncake": (lambda form: {"timestamp", "input_length", "output_length"} <= form.keys(), _mooncake),
}
"""Forms of JSON lines: whether a first line has it, and what adds its lines. The first form that fits counts."""


def _azure(form: Mapping[str, str]) -> Row:
    day, _, fraction = form["TIMESTAMP"].strip().partition(".")
    if fraction and not fraction.isdecimal():
        raise ValueError(f"TIMESTAMP {form['TIMESTAMP']!a}: must be a date and a time")
    seconds = datetime.fromisoformat(f"{day}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return Row(seconds, _field(form, "ContextTokens"), _field(form, "GeneratedTokens"))


def _burst_gpt(form: Mapping[str, str]) -> Row:
    session = form.get("Session ID") or None
    tokens = _field(form, "Request tokens"), _field(form, "Response tokens")
    return Row(_field(form, "Timestamp", float), *tokens, session)


_CSV: dict[str, tuple[set[str], Callable[[Mapping[str, str]], Row]]] = {
    "Azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    "BurstGPT": ({"Timestamp", "Request tokens", "Response tokens"}, _burst_gpt),
}
"""Forms of tables: columns that one has, and what reads its rows."""


def _read_table(path: Path, first: _Line, lines: Iterator[_Line]) -> Trace:
    header = next(csv.reader([first[1].decode("utf-8-sig", "replace").strip()]), [])
    known = [(name, read) for name, (fields, read) in _CSV.items() if fields <= set(header)]
    if not known:
        columns = Columns(path, "vLLM's log")
        read_log(columns, chain([first], lines))
        if not len(columns):
            tables = " or ".join(", ".join(sorted(fields)) for fields, _ in _CSV.values())
            text = f"columns {header[:12]}: a table has {tables}; and no line is of vLLM's request log"
            raise RequestError(f"{path}, line {first[0]}: {text}")
        return columns.trace()
    name, read = known[0]
    columns = Columns(path, name)

    def rows() -> Iterator[tuple[int, dict[str, str]]]:
        for number, line in lines:
            cells = next(csv.reader([line.decode("utf-8", "replace").strip()]), [])
            if len(cells) != len(header):
                raise RequestError(f"{path}, line {number}: {len(cells)} cells, {len(header)} columns")
            yield number, dict(zip(header, cells, strict=True))

    _add_all(path, rows(), lambda number, form: columns.add(number, read(form)))
    return columns.trace()
