# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace as columns, and the beginnings that their prompts share."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import plain_rows, shared_paths
from kvhma.errors import RequestError

MAX_TOKENS = 1 << 24
"""Limit of the tokens of a request."""
MAX_REQUESTS = 1 << 25
MAX_IDENTITIES = 1 << 27
"""Limits of a trace, which bound the memory of a reader."""
_MAX_UNIT = 1 << 16
"""Limit of the tokens that an identity stands for."""
BLOCK_TOKENS = 64
"""Tokens that an identity of kvhma's form stands for."""
SESSION_BITS = 32
"""An identity that counts within a session is below 2 to this power."""
_GRID_MILLISECONDS = 1000
"""A common step of all arrivals that is shorter is a clock, not a grid."""
_LEAST_STEPS = 10
"""Fewer steps show no grid."""
_REQUESTS_AT_ONCE = 1 << 14
"""So no array of indices is as long as all nodes."""


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

    def shared(self) -> Paths:
        """Return the paths without nearly all nodes of a single prompt, which no prompt hits.

        They are the last ones of each prompt. A cache that evicts nothing has the same hits, and needs less memory.
        """
        return Paths(*shared_paths(*self))


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


class Row(NamedTuple):
    """A request of a file.

    Attributes:
        seconds: when it came.
        prompt: tokens.
        answer: tokens; None if the file does not say.
        session: name of its session; None if the file has none.
        ids: identities, each with all tokens before it; None if the file has none.
        ends: tokens of the prompt up to the end of each identity; None if each stands for equally many.
    """

    seconds: float
    prompt: int
    answer: int | None
    session: str | None = None
    ids: list[int] | None = None
    ends: list[int] | None = None


class Columns:
    """Collects rows, and makes a trace of them.

    Attributes:
        path: the file.
        notes: what the trace's notes begin with.
        unit: tokens that an identity stands for; None to find it by the numbers of identities.
        in_sessions: whether identities count within a session.
    """

    def __init__(self, path: Path, form: str) -> None:
        """Start without rows of a file, of which `form` says what it is."""
        self.path, self._form = path, form
        self.notes: list[str] = []
        self.unit: int | None = None
        self.in_sessions = False
        self._seconds, self._prompts, self._answers = array("d"), array("q"), array("q")
        self._names: dict[str, int] = {}
        self._has = (False, False)
        self._sessions = array("q")
        self._merged = 0
        self._ids, self._ends, self._counts = array("q"), array("I"), array("q")

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._seconds)

    def add(self, line: int, row: Row) -> None:
        """Add a request.

        Raises:
            RequestError: it has wrong values, or there are too many; the text names the line.
        """
        for field, value, low in (("prompt", row.prompt, 1), ("answer", row.answer, 0)):
            if value is not None and not low <= value <= MAX_TOKENS:
                raise self.wrong(line, f"{field} of {value} tokens: must be {low} to {MAX_TOKENS}")
        has = (row.session is not None, row.ids is not None)
        if has != self._has and self._seconds:
            raise self.wrong(line, "session or identities: all requests have them, or none has")
        self._has = has
        if not np.isfinite(row.seconds):
            raise self.wrong(line, f"time {row.seconds}: must be a number")
        if len(self._seconds) == MAX_REQUESTS or len(self._ids) > MAX_IDENTITIES - MAX_TOKENS:
            raise self.wrong(line, f"a trace has at most {MAX_REQUESTS:,} requests and {MAX_IDENTITIES:,} identities")
        self._seconds.append(row.seconds)
        self._prompts.append(row.prompt)
        self._answers.append(-1 if row.answer is None else row.answer)
        if row.session is not None:
            self._sessions.append(self._names.setdefault(row.session, len(self._names)))
        if row.ids is not None:
            self._ids.extend(row.ids)
            self._counts.append(len(row.ids))
            self._ends.extend(row.ends or ())

    def add_plain(self, text: bytes, at: int) -> tuple[int, int]:
        """Add the plain rows of Mooncake's form that a text has from a place on; :meth:`add` refuses what is wrong.

        Returns:
            The bytes and the lines of these rows.
        """
        (times, prompts, answers, ids, counts), nbytes, lines = plain_rows(text, at, MAX_TOKENS)
        is_full = len(self) + len(times) > MAX_REQUESTS or len(self._ids) > MAX_IDENTITIES - MAX_TOKENS
        if is_full or self._has != (False, len(counts) > 0):
            return 0, 0
        self._seconds.frombytes((times / 1e3).tobytes())
        for column, values in zip(
            (self._prompts, self._answers, self._ids, self._counts), (prompts, answers, ids, counts), strict=True
        ):
            column.frombytes(values.tobytes())
        return nbytes, lines

    def add_answer(self, line: int, request: int, tokens: int) -> None:
        """Add tokens to the answer of the request with this number.

        Raises:
            RequestError: the answer is too long; the text names the line.
        """
        known = max(0, self._answers[request]) + tokens
        if known > MAX_TOKENS:
            raise self.wrong(line, f"answer of {known} tokens: must be 0 to {MAX_TOKENS}")
        self._answers[request] = known

    def merge(self, request: int, row: Row) -> None:
        """Note that a row is the request with this number once more: the first time and the longest answer count."""
        self._seconds[request] = min(self._seconds[request], row.seconds)
        self._answers[request] = max(self._answers[request], row.answer or 0)
        self._merged += 1

    def wrong(self, line: int, text: str) -> RequestError:
        """Return the error of a line."""
        return RequestError(f"{self.path}, line {line}: {text}")

    def trace(self) -> Trace:
        """Return the trace.

        Raises:
            RequestError: there are no rows, or the numbers of identities fit no unit.
        """
        if not self._seconds:
            raise RequestError(f"{self.path}: no requests")
        seconds, prompts, answers = map(np.array, (self._seconds, self._prompts, self._answers))
        order = np.argsort(seconds, kind="stable")
        notes = list(self.notes)
        if (order[1:] < order[:-1]).any():
            notes.append("lines were not in the order of their times, and were sorted")
        if self._merged:
            notes.append(f"{self._merged:,} rows are of a request that had one: the longest answer counts")
        if unknown := int((answers < 0).sum()):
            notes.append(f"{unknown:,} answers have no length in the file, and count as 0 tokens")
        sessions = np.array(self._sessions)[order] if self._sessions else None
        paths = None
        if self._counts:
            unit, note = self._found_unit(prompts)
            notes += note
            paths = self._paths(prompts, order, unit)
        seconds = seconds[order] - seconds.min()
        if (step := grid_of(seconds)) is not None:
            notes.append(f"arrivals are on a grid of {step:g} s: no rate of a shorter window means anything")
        return Trace(self._form, seconds, prompts[order], answers.clip(0)[order], sessions, paths, tuple(notes))

    def _found_unit(self, prompts: NDArray[np.int64]) -> tuple[int, list[str]]:
        """Find how many tokens an identity stands for, from the numbers of identities; and say it."""
        if self._ends:
            return 0, []
        if self.unit is not None:
            without = sum(count == 0 for count in self._counts)
            note = f"; {without:,} prompts have none" if without else ""
            return self.unit, [f"an identity stands for {self.unit} tokens, and the last tokens have none{note}"]
        counts = np.array(self._counts)
        for unit in (1 << power for power in range(_MAX_UNIT.bit_length())):
            for is_whole, expected in ((False, -(-prompts // unit)), (True, prompts // unit)):
                if np.array_equal(counts, expected):
                    last = "the last tokens have none" if is_whole else "the last one for fewer"
                    joint = ", and " if is_whole else ", "
                    return unit, [f"an identity stands for {unit} tokens{joint}{last}"]
        raise RequestError(
            f"{self.path}: hash_ids: no power of two up to {_MAX_UNIT:,} explains the numbers of identities, "
            f"{counts[0]} for the {prompts[0]} tokens of the first prompt"
        )

    def _paths(self, prompts: NDArray[np.int64], order: NDArray[np.intp], unit: int) -> Paths:
        """Return the identities in the order of the requests."""
        counts = np.array(self._counts)
        starts = np.cumsum(counts) - counts
        offsets = np.concatenate([[0], np.cumsum(counts[order])])
        ids, given_ends = np.frombuffer(self._ids, np.int64), np.array(self._ends, np.uint32)
        is_same = not self.in_sessions and bool((order[1:] > order[:-1]).all())
        nodes = ids if is_same else np.empty_like(ids)
        ends = np.empty(len(ids), np.uint32)
        for part in _slices(len(order), _REQUESTS_AT_ONCE):
            rows, each = order[part], counts[order[part]]
            to = slice(offsets[part.start], offsets[part.start] + each.sum())
            within = np.arange(to.stop - to.start) - np.repeat(np.cumsum(each) - each, each)
            index = np.repeat(starts[rows], each) + within
            if not is_same:
                nodes[to] = ids[index]
            if self.in_sessions:
                nodes[to] += np.repeat(np.array(self._sessions)[rows], each) << SESSION_BITS
            ends[to] = np.minimum((within + 1) * unit, np.repeat(prompts[rows], each)) if unit else given_ends[index]
        return Paths(nodes, ends, offsets.astype(np.uint64))


def _slices(number: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, number)) for begin in range(0, number, step))


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
