# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: when each came, how long it was, and which beginnings it shares with others. They hold no text.

A file says itself which form it has, by the fields of its first row. What fits no form is refused with its line.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import RequestError

MAX_TOKENS = 1 << 24
"""Limit of the tokens of a request."""
_MAX_LINE = 1 << 26
"""Limit of the bytes of a line."""
_MAX_UNIT = 1 << 16
"""Limit of the tokens that an identity stands for."""
_SESSION_BITS = 32
"""An identity that counts within a session is below 2 to this power."""
_GRID_MILLISECONDS = 1000
"""A common step of all arrivals that is shorter is a clock, not a grid."""
_LEAST_STEPS = 10
"""Fewer steps show no grid."""


class Paths(NamedTuple):
    """Beginnings of prompts. Equal nodes are equal tokens with equal tokens before them.

    Attributes:
        nodes: int64, of all prompts, one prompt after the other.
        ends: uint32, tokens of the prompt up to the end of each node.
        offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
    """

    nodes: NDArray[np.int64]
    ends: NDArray[np.uint32]
    offsets: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        form: what the file is.
        seconds: float64 of shape (n,), since the first arrival.
        prompts: int64 of shape (n,), tokens.
        answers: int64 of shape (n,), tokens.
        sessions: int64 of shape (n,), numbers of sessions; None if the file has none.
        paths: identities; None if the file has none.
        notes: what a reader of the figures has to know of the file.
    """

    form: str
    seconds: NDArray[np.float64]
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    sessions: NDArray[np.int64] | None
    paths: Paths | None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.seconds)


class _Row(NamedTuple):
    seconds: float
    prompt: int
    answer: int
    session: str | None = None
    ids: list[int] | None = None
    """Identities of units, each with all tokens before it."""


def read_trace(path: Path, progress: Callable[[int], object] = lambda nbytes: None) -> Trace:
    """Read a trace: Mooncake's and SGLang's JSON lines, runs of identities, RAGPulse, Azure's and BurstGPT's CSV.

    Args:
        path: the file.
        progress: called with the number of bytes read so far.

    Raises:
        RequestError: the file has no known form, or a line is wrong; the text names line and field.
    """
    try:
        with path.open("rb") as file:
            lines = _lines(path, file, progress)
            first = next(lines, None)
            if first is None:
                raise RequestError(f"{path}: no requests")
            if first[1].lstrip().startswith(b"{"):
                return _read_json(path, first, lines)
            return _read_csv(path, first, lines)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from error


def _lines(path: Path, file: BinaryIO, progress: Callable[[int], object]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers."""
    number = 0
    while line := file.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise RequestError(f"{path}, line {number}: more than {_MAX_LINE:,} bytes")
        if number % 4096 == 0:
            progress(file.tell())
        if line.strip():
            yield number, line


class _Columns:
    """Collects rows, and makes a trace of them."""

    def __init__(self, path: Path, form: str, *, in_sessions: bool = False) -> None:
        self._path, self._form, self._in_sessions = path, form, in_sessions
        self._seconds, self._lengths = array("d"), (array("q"), array("q"))
        self._names: dict[str, int] = {}
        self._has = (False, False)
        self._sessions = array("q")
        self.ids, self.counts = array("q"), array("q")

    def add(self, line: int, row: _Row) -> None:
        for field, value, low in (("prompt", row.prompt, 1), ("answer", row.answer, 0)):
            if not low <= value <= MAX_TOKENS:
                expected = f"{low} to {MAX_TOKENS}"
                raise RequestError(f"{self._path}, line {line}: {field} of {value} tokens: must be {expected}")
        has = (row.session is not None, row.ids is not None)
        if has != self._has and self._seconds:
            raise RequestError(f"{self._path}, line {line}: session or identities: all requests have them, or none has")
        self._has = has
        if not np.isfinite(row.seconds):
            raise RequestError(f"{self._path}, line {line}: time {row.seconds}: must be a number")
        self._seconds.append(row.seconds)
        self._lengths[0].append(row.prompt)
        self._lengths[1].append(row.answer)
        if row.session is not None:
            self._sessions.append(self._names.setdefault(row.session, len(self._names)))
        if row.ids is not None:
            self.ids.extend(row.ids)
            self.counts.append(len(row.ids))

    def trace(self) -> Trace:
        if not self._seconds:
            raise RequestError(f"{self._path}: no requests")
        seconds = np.array(self._seconds)
        prompts, answers = (np.array(column) for column in self._lengths)
        order = np.argsort(seconds, kind="stable")
        notes = (
            [] if (order[1:] > order[:-1]).all() else ["lines were not in the order of their times, and were sorted"]
        )
        sessions = np.array(self._sessions)[order] if self._sessions else None
        paths = None
        if self.counts:
            paths, note = self._paths(prompts, order)
            notes.append(note)
        seconds = seconds[order] - seconds.min()
        if (step := grid_of(seconds)) is not None:
            notes.append(f"arrivals are on a grid of {step:g} s: no rate of a shorter window means anything")
        return Trace(self._form, seconds, prompts[order], answers[order], sessions, paths, tuple(notes))

    def _paths(self, prompts: NDArray[np.int64], order: NDArray[np.intp]) -> tuple[Paths, str]:
        """Find how many tokens an identity stands for, from the numbers of identities; order them as requests."""
        counts = np.array(self.counts)
        for unit in (1 << power for power in range(_MAX_UNIT.bit_length())):
            for is_whole, expected in ((False, -(-prompts // unit)), (True, prompts // unit)):
                if np.array_equal(counts, expected):
                    return self._ordered(prompts, counts, order, unit), (
                        f"an identity stands for {unit} tokens"
                        + (", and the last tokens have none" if is_whole else ", the last one for fewer")
                    )
        raise RequestError(
            f"{self._path}: hash_ids: no power of two up to {_MAX_UNIT:,} explains the numbers of identities, "
            f"{counts[0]} for the {prompts[0]} tokens of the first prompt"
        )

    def _ordered(
        self, prompts: NDArray[np.int64], counts: NDArray[np.int64], order: NDArray[np.intp], unit: int
    ) -> Paths:
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        offsets = np.concatenate([[0], np.cumsum(counts[order])])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts[order])
        nodes = np.frombuffer(self.ids, np.int64)[np.repeat(starts[order], counts[order]) + within]
        if self._in_sessions:
            nodes = nodes + (np.repeat(np.array(self._sessions)[order], counts[order]) << _SESSION_BITS)
        ends = np.minimum((within + 1) * unit, np.repeat(prompts[order], counts[order]))
        return Paths(nodes, ends.astype(np.uint32), offsets.astype(np.uint64))


def grid_of(seconds: NDArray[np.float64]) -> float | None:
    """Return the step of the grid of all arrivals, up to 2 ms; None if there is no grid of a second or more."""
    milliseconds = np.unique(np.rint(seconds * 1e3).astype(np.int64))
    steps = np.diff(milliseconds)
    if len(steps) < _LEAST_STEPS:
        return None
    for step in (np.gcd.reduce(steps), np.rint(np.median(steps))):
        if step >= _GRID_MILLISECONDS and (np.abs(steps - np.rint(steps / step) * step) <= 2).all():
            return float(step) / 1e3
    return None


def _number(value: Any, kind: type) -> Any:
    """Return a number that may be written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    number = kind(value)
    if isinstance(value, float) and number != value:
        raise ValueError("must be an integer")
    return number


def _read_json(path: Path, first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]) -> Trace:
    form = _parsed(path, *first)
    known = [(name, read) for name, (is_it, read) in _JSON.items() if is_it(form)]
    if not known:
        raise RequestError(
            f"{path}, line {first[0]}: fields {sorted(form)[:12]}: a trace has timestamp, input_length, output_length, "
            "and hash_ids, hash_id_runs or none"
        )
    name, read = known[0]
    columns = _Columns(path, name, in_sessions=read is _runs)
    columns.add(first[0], _row(path, first[0], form, read))
    for number, line in lines:
        columns.add(number, _row(path, number, _parsed(path, number, line), read))
    return columns.trace()


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        form = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(form, dict):
        raise RequestError(f"{path}, line {number}: must be an object")
    return form


def _row(path: Path, number: int, form: Mapping[str, Any], read: Callable[[Mapping[str, Any]], _Row]) -> _Row:
    try:
        return read(form)
    except KeyError as error:
        raise RequestError(f"{path}, line {number}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"{path}, line {number}: {error}") from error


def _field(form: Mapping[str, Any], name: str, kind: type = int) -> Any:
    try:
        return _number(form[name], kind)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} {form[name]!a}: {error}") from error


def _session(form: Mapping[str, Any]) -> str | None:
    found = form.get("session", form.get("session_id"))
    return None if found is None else str(found)


def _timed(form: Mapping[str, Any], per_second: float, ids: list[int] | None = None) -> _Row:
    """Return a row whose timestamp has `per_second` units in a second."""
    seconds = _field(form, "timestamp", float) / per_second
    return _Row(seconds, _field(form, "input_length"), _field(form, "output_length"), _session(form), ids)


def _check_ids(name: str, ids: Any) -> None:
    if not isinstance(ids, list) or not all(type(number) is int and 0 <= number < 1 << 63 for number in ids):
        raise ValueError(f"{name}: must be a list of integers of 0 to 2^63 - 1")


def _mooncake(form: Mapping[str, Any]) -> _Row:
    ids = form.get("hash_ids")
    if ids is not None:
        _check_ids("hash_ids", ids)
    return _timed(form, 1e3, ids)


def _runs(form: Mapping[str, Any]) -> _Row:
    """Return a row whose identities count within its session."""
    ids: list[int] = []
    for run in form["hash_id_runs"]:
        _check_ids("hash_id_runs", run)
        if len(run) != 2 or not run[0] <= run[1] < 1 << _SESSION_BITS or len(ids) + run[1] - run[0] > MAX_TOKENS:
            raise ValueError(f"hash_id_runs {run!a}: must be a first and a last identity")
        ids += range(run[0], run[1] + 1)
    return _timed(form, 1e3, ids)._replace(session=str(form["session"]))


def _ragpulse(form: Mapping[str, Any]) -> _Row:
    """Return a row without identities: those of components, whose lengths are in other files, say nothing of blocks."""
    return _timed(form, 1.0)


_JSON: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], _Row]]] = {
    "runs of identities": (lambda form: "hash_id_runs" in form, _runs),
    "RAGPulse": (lambda form: isinstance(form.get("hash_ids"), dict), _ragpulse),
    "Mooncake": (lambda form: {"timestamp", "input_length", "output_length"} <= form.keys(), _mooncake),
}
"""Forms of JSON lines: whether a first line has it, and what reads its lines. The first form that fits counts."""


def _azure(form: Mapping[str, str]) -> _Row:
    day, _, fraction = form["TIMESTAMP"].strip().partition(".")
    if fraction and not fraction.isdecimal():
        raise ValueError(f"TIMESTAMP {form['TIMESTAMP']!a}: must be a date and a time")
    seconds = datetime.fromisoformat(f"{day}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return _Row(seconds, _field(form, "ContextTokens"), _field(form, "GeneratedTokens"))


def _burst_gpt(form: Mapping[str, str]) -> _Row:
    session = form.get("Session ID") or None
    tokens = _field(form, "Request tokens"), _field(form, "Response tokens")
    return _Row(_field(form, "Timestamp", float), *tokens, session)


_CSV: dict[str, tuple[set[str], Callable[[Mapping[str, str]], _Row]]] = {
    "Azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    "BurstGPT": ({"Timestamp", "Request tokens", "Response tokens"}, _burst_gpt),
}
"""Forms of tables: columns that one has, and what reads its rows."""


def _read_csv(path: Path, first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]) -> Trace:
    header = next(csv.reader([first[1].decode("utf-8-sig", "replace").strip()]), [])
    known = [(name, read) for name, (fields, read) in _CSV.items() if fields <= set(header)]
    if not known:
        tables = " or ".join(", ".join(sorted(fields)) for fields, _ in _CSV.values())
        raise RequestError(f"{path}, line {first[0]}: columns {header[:12]}: a table has {tables}")
    name, read = known[0]
    columns = _Columns(path, name)
    for number, line in lines:
        cells = next(csv.reader([line.decode("utf-8", "replace").strip()]), [])
        if len(cells) != len(header):
            raise RequestError(f"{path}, line {number}: {len(cells)} cells, {len(header)} columns")
        columns.add(number, _row(path, number, dict(zip(header, cells, strict=True)), read))
    return columns.trace()
