# SPDX-License-Identifier: Apache-2.0
"""``kvhma audit``: checks byte by byte what a connector did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvhma.cli.format import output_options, plural, print_json, printable, size, watched
from kvhma.errors import RequestError
from kvhma.oracle import cases, traces
from kvhma.oracle.audit import Judged, judge, ranks_of
from kvhma.oracle.smallest import answered, smallest, trace_of
from kvhma.oracle.traced_memory import RankTrace

_EXIT = {"right": 0, "wrong": 1, "refused": 2, "unreadable": 2}
_WORST = ("wrong", "unreadable", "refused", "right")
_NUMBERS = ("wrong", "missing", "extra", "unheld", "stale", "idle", "needed", "bytes", "descriptors", "joined")


@dataclass(frozen=True, slots=True)
class _Files:
    """Where to write the smallest request that shows the fault; None if the option is not given."""

    case: Path | None
    trace: Path | None


@click.command()
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--case", type=click.Path(path_type=Path), help="Write the smallest case that is wrong, with its answer.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the smallest trace that is wrong.")
@output_options
def audit(files: tuple[Path, ...], case: Path | None, trace: Path | None, as_json: bool, quiet: bool) -> None:
    """Judge traces of any connector, byte by byte.

    Every byte that D's next step reads must be the byte of its layer, head and token. The check uses no planner.
    docs/audit.md has the format of a trace.

    Exit code 0: all are right. 1: bytes of D are wrong or missing, or others were written. 2: a file is not a trace,
    is too large to simulate, or the connector has refused. With -q only what is not right is named.
    """
    rows = []
    shown: tuple[str, RankTrace] | None = None
    for path in watched("auditing", files, quiet):
        found, worst = _rows(path)
        rows += found
        shown = shown or worst
    if as_json:
        print_json({"kvhma_audit": 1, "verdict": _verdict(rows), "results": rows})
    else:
        for row in rows:
            if not quiet or row["verdict"] != "right":
                _print(row)
    if shown is not None:
        _show(*shown, _Files(case, trace), quiet or as_json)
    raise SystemExit(_EXIT[_verdict(rows)])


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    found = {row["verdict"] for row in rows}
    return next((word for word in _WORST if word in found), "right")


def _rows(path: Path) -> tuple[list[dict[str, Any]], tuple[str, RankTrace] | None]:
    """Judge a file: a row for each request and rank of D, and the first wrong request."""
    name = click.format_filename(path)
    rows: list[dict[str, Any]] = []
    wrong = None
    try:
        trace = traces.load(path)
        for traced in ranks_of(trace):
            found = judge(traced)
            rows.append({"trace": name, "request": traced.name, "rank": traced.rank, **_form(found)})
            if wrong is None and found.outcome == "wrong":
                wrong = trace.connector, traced
    except RequestError as error:
        rows.append({"trace": name, "verdict": "unreadable", "text": str(error)})
    except OSError as error:
        rows.append({"trace": name, "verdict": "unreadable", "text": error.strerror or str(error)})
    return rows, wrong


def _form(found: Judged) -> dict[str, Any]:
    form: dict[str, Any] = {"verdict": found.outcome, "text": found.refusal}
    if found.outcome == "refused":
        return form
    form |= {name: getattr(found, name) for name in _NUMBERS}
    form["planned"] = asdict(found.planned) if found.planned else None
    form["causes"] = [asdict(cause) | {"text": str(cause)} for cause in found.causes]
    return form


def _print(row: dict[str, Any]) -> None:
    where = printable(row["trace"])
    if "request" in row:
        where += f" {printable(row['request'])} D{row['rank']}"
    text = printable(row["text"])
    if "bytes" in row:
        planned = row["planned"]
        own = f"{planned['descriptors']:,}, {size(planned['bytes'])}"
        own = f"refuses: {printable(planned['refusal'])}" if planned["refusal"] else own
        text = f"{plural(row['descriptors'], 'descriptor')}, {size(row['bytes'])}; kvhma {own}"
    click.echo(f"{row['verdict']:<10} {where}: {text}")
    for cause in row.get("causes", ()):
        click.echo(f"           {printable(cause['text'])}")


def _show(connector: str, traced: RankTrace, files: _Files, quiet: bool) -> None:
    """Write the smallest request that shows the fault."""
    if not any((files.case, files.trace)):
        return
    small = smallest(traced)
    if files.case is not None:
        cases.save(answered(small.case), files.case)
    if files.trace is not None:
        traces.save(trace_of(small, connector), files.trace)
    if not quiet:
        written = ", ".join(click.format_filename(path) for path in (files.case, files.trace) if path)
        what = f"{plural(small.case.num_tokens, 'token')}, {plural(len(small.case.local.layers), 'layer')}"
        click.echo(f"smallest: {what}: {written}")
