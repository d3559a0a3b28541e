# SPDX-License-Identifier: Apache-2.0
"""Cases: a pair of engines and a request in one file, with a byte-exact check.

docs/cases.md has the format. Input is bounded and checked, so a case from any origin is safe to load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from kvhma._kvhma import Transfer
from kvhma.errors import KvhmaError, OracleError, RequestError
from kvhma.geometry import Geometry, Span
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
    spans_of,
)
from kvhma.oracle.labels import by_source, parts_of, row_bytes
from kvhma.oracle.simulate import Oracle, Report
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, plan

__all__ = ["CASE_VERSION", "MAX_FILE_BYTES", "Case", "Expected", "Verdict", "check", "load", "save"]

CASE_VERSION = 1
"""Version of the format, the value of its ``kvhma_case`` key."""

MAX_FILE_BYTES = 1 << 24
"""Longer files are refused."""

TOO_LARGE = "too-large-to-simulate"
"""Code of the RequestError for a case above a limit."""

_MAX_CONTENT = 1 << 24
_MAX_MEMORY = 1 << 25
_MAX_LABELS = 1 << 26
"""Limits of a simulation: bytes of the request's blocks, bytes of all regions, and items of the global cache. Together
they keep a check below 2 GiB."""

Outcome: TypeAlias = Literal["right", "wrong", "refused"]


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectations of a case besides correct bytes: either `error`, or `runs` or `zero` or both.

    Attributes:
        error: a part of ``"ErrorClass: message"`` of the refusal.
        runs: the reads: source, local address, remote address, length; in any order.
        zero: the zeroed ranges: address, length; in any order.
    """

    error: str | None = None
    runs: tuple[tuple[int, int, int, int], ...] | None = None
    zero: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One D rank, the P ranks from which it reads, and a request.

    Attributes:
        local: the D rank.
        remotes: the P ranks.
        num_tokens: tokens that P computed.
        local_spans: D's blocks, by D's groups.
        remote_spans: P's blocks, by P's groups, for all sources; or a tuple of spans for each source.
        descriptor_bytes: as for `kvhma.plan`.
        expect: further expectations; None to check only the bytes.
    """

    local: Geometry
    remotes: tuple[Geometry, ...]
    num_tokens: int
    local_spans: Spans
    remote_spans: Spans | tuple[Spans, ...]
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    expect: Expected | None = None

    def __post_init__(self) -> None:
        """Convert ids to lists of int, because arrays neither compare nor serialise."""
        for name in ("local_spans", "remote_spans"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def to_json(self, *, indent: int | None = None) -> bytes:
        """Return the UTF-8 JSON form.

        Args:
            indent: spaces for each level; None for one line.
        """
        form: dict[str, Any] = {
            "kvhma_case": CASE_VERSION,
            "local": self.local.to_form(),
            "remote": [remote.to_form() for remote in self.remotes],
            "num_tokens": self.num_tokens,
            "local_spans": span_forms(self.local_spans),
            "remote_spans": span_forms(self.remote_spans),
            "descriptor_bytes": self.descriptor_bytes,
        }
        if self.expect is not None:
            found = {name: getattr(self.expect, name) for name in ("error", "runs", "zero")}
            form["expect"] = {name: value for name, value in found.items() if value is not None}
        return json.dumps(form, indent=indent).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Case:
        """Read the JSON form. Safe on any input.

        Args:
            data: UTF-8 text of at most `MAX_FILE_BYTES`.

        Returns:
            The case, not planned yet.

        Raises:
            RequestError: the case is invalid; the text says where.
        """
        required = ("kvhma_case", "local", "remote", "num_tokens", "local_spans", "remote_spans")
        if len(data) > MAX_FILE_BYTES:
            raise RequestError(f"more than {MAX_FILE_BYTES} bytes")
        form = fields_of(parse(data), "case", required, ("descriptor_bytes", "expect"))
        if (version := integer(form["kvhma_case"], "kvhma_case")) != CASE_VERSION:
            raise RequestError(f"kvhma_case is {version}, this build reads {CASE_VERSION}")
        descriptor_bytes = integer(form.get("descriptor_bytes", DEFAULT_DESCRIPTOR_BYTES), "descriptor_bytes")
        if not 0 <= descriptor_bytes <= 1 << 62:
            raise RequestError(f"descriptor_bytes is {descriptor_bytes}, has to be 0 to 2**62")
        return cls(
            local=geometry_of(form["local"], "local"),
            remotes=tuple(geometry_of(value, place) for place, value in items_of(form["remote"], "remote")),
            num_tokens=integer(form["num_tokens"], "num_tokens"),
            local_spans=spans_of(form["local_spans"], "local_spans"),
            remote_spans=rank_spans_of(form["remote_spans"], "remote_spans"),
            descriptor_bytes=descriptor_bytes,
            expect=_expected(form["expect"]) if "expect" in form else None,
        )


def load(path: Path) -> Case:
    """Read a case file.

    Args:
        path: the file.

    Returns:
        The case, not planned yet.

    Raises:
        RequestError: it is too long, or not a case.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        # One byte more than the limit, so that an endless file is refused too.
        return Case.from_json(file.read(MAX_FILE_BYTES + 1))


def save(case: Case, path: Path) -> None:
    """Write a case file in a readable form.

    Args:
        case: the case.
        path: the file, which is replaced.
    """
    path.write_bytes(case.to_json(indent=1) + b"\n")


# --- Checking -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a case.

    Attributes:
        outcome: ``right``; ``wrong``: bytes, counts or expectations differ; ``refused``: the plan or the request was
            refused unexpectedly.
        text: why, unless right.
        code: short name of the error or of the unmet expectation; empty if right.
        field: the field with the error, if there is such a field.
        report: the effect of the transfer on D's memory, if it was right.
        bytes: bytes moved.
        descriptors: descriptors moved.
    """

    outcome: Outcome
    text: str = ""
    code: str = ""
    field: str = ""
    report: Report | None = None
    bytes: int = 0
    descriptors: int = 0


def check(case: Case) -> Verdict:
    """Plan a case, and verify the transfer with the byte oracle.

    Args:
        case: the case to plan.

    Returns:
        Whether the case is right, and why not.

    Raises:
        RequestError: the case cannot be simulated: it is too large (see `kvhma.oracle.part`), or its ranks do not share
            one global cache.
    """
    refuse_large(case)
    try:
        transfer = plan(case.local, case.remotes, descriptor_bytes=case.descriptor_bytes).transfer(
            case.num_tokens, case.local_spans, case.remote_spans
        )
    except KvhmaError as error:
        return of_refusal(case.expect, error)
    try:
        report = Oracle(case.local, case.remotes).check(case.num_tokens, case.local_spans, case.remote_spans, transfer)
    except OracleError as error:
        return Verdict("wrong", str(error), error.code)
    except ValueError as error:
        raise RequestError(f"cannot be simulated: {error}") from error
    problems = dict(_problems(case, transfer, report))
    if problems:
        return Verdict("wrong", "\n".join(problems.values()), next(iter(problems)))
    return Verdict("right", report=report, bytes=transfer.bytes, descriptors=transfer.descriptors)


def of_refusal(expect: Expected | None, error: KvhmaError) -> Verdict:
    """Return the verdict for a refused plan or request."""
    text = f"{type(error).__name__}: {error}"
    if expect is None:
        return Verdict("refused", text, error.code, error.field)
    if expect.error is not None and expect.error in text:
        return Verdict("right", text)
    wanted = "runs" if expect.error is None else f"error {expect.error!r}"
    return Verdict("wrong", f"expected {wanted}, refused with {text}", error.code, error.field)


def _problems(case: Case, transfer: Transfer, report: Report) -> Iterator[tuple[str, str]]:
    """Yield the faults of a transfer that moves the right bytes: a short name and a sentence each."""
    expect = case.expect or Expected()
    if report.mergeable:
        yield "mergeable", f"{report.mergeable} descriptors could have been one with their neighbour"
    if report.excess and not case.descriptor_bytes:
        yield "excess", f"{report.excess} bytes after the last token were moved, descriptor_bytes is 0"
    if expect.error is not None:
        yield "accepted", f"expected error {expect.error!r}, was accepted"
    found: dict[str, list[tuple[int, ...]]] = {
        "runs": [
            (read.source, to[0], start[0], to[1])
            for read in transfer.reads
            for to, start in zip(read.local.tolist(), read.remote.tolist(), strict=True)
        ],
        "zero": [(address, length) for address, length, _ in transfer.zero.tolist()],
    }
    for name, rows in found.items():
        wanted = getattr(expect, name)
        if wanted is not None and sorted(wanted) != sorted(rows):
            yield name, _difference(name, wanted, rows)


def _difference(name: str, wanted: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]) -> str:
    missing, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    text = f"{name}: {len(found)} instead of {len(wanted)}"
    if missing:
        text += f", without {list(missing[0])}"
    return f"{text}, but with {list(more[0])}" if more else text


def refuse_large(case: Case) -> None:
    """Refuse a case that would take too much memory, in exact arithmetic: every number may be hostile."""
    try:
        sources = by_source(case.remote_spans, len(case.remotes))
    except ValueError as error:
        raise RequestError(str(error)) from error
    sides = [(case.local, case.local_spans), *zip(case.remotes, sources, strict=True)]
    for what, value, limit in (
        ("bytes in the request's blocks", sum(_block_bytes(*side) for side in sides), _MAX_CONTENT),
        ("bytes in all regions", sum(region.bytes for rank, _ in sides for region in rank.regions), _MAX_MEMORY),
        ("bytes of all ranks between the first block and the last", _labels(sides), _MAX_LABELS),
    ):
        if value > limit:
            text = f"too large to simulate: {value:,} {what}, at most {limit:,}"
            raise RequestError(text, code=TOO_LARGE, value=value, expected=limit)


def _block_bytes(geometry: Geometry, spans: Sequence[Span]) -> int:
    """Return the bytes of a request's blocks on a rank, counting at least one block of each layer."""
    total = 0
    for layer in geometry.layers:
        count = len(spans[layer.group].ids) if layer.group < len(spans) else 0
        total += max(1, count) * geometry.groups[layer.group].ratio * layer.page.nbytes
    return total


def _labels(sides: Sequence[tuple[Geometry, Sequence[Span]]]) -> int:
    """Return the bytes of all ranks' items from the first token of any block to the last token."""
    low, high = [], [1]
    rows: dict[tuple[str, str, bool], int] = {}
    for geometry, spans in sides:
        for layer, part in parts_of(geometry):
            key = (layer.name, part.name, geometry.groups[layer.group].kind == "ssm")
            rows[key] = max(rows.get(key, 0), row_bytes(part))
        for group, span in zip(geometry.groups, spans, strict=False):
            if group.kind != "ssm" and len(span.ids):
                turn = group.block_size * group.cp_size
                low.append(span.first * turn)
                high.append((span.first + len(span.ids)) * turn)
    tokens = max(high) - min(low, default=0)
    return sum(size * (1 if is_state else tokens) for (_, _, is_state), size in rows.items())


# --- Reading -------------------------------------------------------------------------------------------


def _expected(value: object) -> Expected:
    form = fields_of(value, "expect", (), ("error", "runs", "zero"))
    if not form or ("error" in form and len(form) > 1):
        raise RequestError("expect has either 'error', or 'runs', 'zero' or both")
    if "error" in form and not isinstance(form["error"], str):
        raise RequestError(f"expect.error is {kind_of(form['error'])}, not a string")
    return Expected(
        error=form.get("error"),
        runs=cast("tuple[tuple[int, int, int, int], ...] | None", _rows(form, "runs", 4)),
        zero=cast("tuple[tuple[int, int], ...] | None", _rows(form, "zero", 2)),
    )


def _rows(form: dict[str, Any], name: str, width: int) -> tuple[tuple[int, ...], ...] | None:
    if name not in form:
        return None
    rows = []
    for place, entry in items_of(form[name], f"expect.{name}"):
        row = tuple(integer(number, at) for at, number in items_of(entry, place))
        if len(row) != width:
            raise RequestError(f"{place} has {len(row)} numbers, expected {width}")
        rows.append(row)
    return tuple(rows)
