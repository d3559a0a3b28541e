# SPDX-License-Identifier: Apache-2.0
"""``kvhma check``: plans the cases in files and verifies every byte with the oracle."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhma.cli.format import output_options, print_json, printable, watched
from kvhma.errors import RequestError
from kvhma.oracle.cases import TOO_LARGE, Case, Verdict, load
from kvhma.oracle.cases import check as check_case
from kvhma.oracle.part import Part, check_part

_EXIT = {"right": 0, "wrong": 1, "refused": 2, "unreadable": 2}


@click.command()
@click.argument("cases", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option(
    "--part",
    is_flag=True,
    help="Of a case that is too large: plan all of it, and check a layer of each sort and as many of the last tokens "
    "as fit.",
)
@output_options
def check(cases: tuple[Path, ...], part: bool, as_json: bool, quiet: bool) -> None:
    """Check case files, byte by byte.

    What a request moves is simulated, and every byte looked at. Cases of real engines are too large for that: see
    --part.

    Exit code 0: all are right. 1: a byte or a descriptor is wrong, or not what the case expects. 2: a file is not a
    case, is too large to simulate, or its request is refused without being expected to be. With -q only files that are
    not right are named.
    """
    rows = [_row(path, part) for path in watched("checking", cases, quiet)]
    if as_json:
        print_json({"kvhma_check": 1, "cases": rows})
    else:
        for row in rows:
            if not quiet or _EXIT[row["verdict"]]:
                click.echo(_line(row))
    raise SystemExit(max(_EXIT[row["verdict"]] for row in rows))


def _row(path: Path, may_be_part: bool) -> dict[str, Any]:
    name = click.format_filename(path)
    try:
        verdict, part = _verdict(load(path), may_be_part)
    except RequestError as error:
        text = f"{error}; --part checks what fits" if error.code == TOO_LARGE and not may_be_part else str(error)
        return {"case": name, "verdict": "unreadable", "text": text}
    except OSError as error:
        return {"case": name, "verdict": "unreadable", "text": error.strerror or str(error)}
    row: dict[str, Any] = {"case": name, "verdict": verdict.outcome, "text": verdict.text}
    if part is not None:
        row["part"] = {at: getattr(part, at) for at in ("layers", "of_layers", "tokens", "of_tokens")}
        row["text"] = f"of {part}: {verdict.text}" if verdict.text else f"of {part}"
    if verdict.report is not None:
        row |= {"descriptors": verdict.descriptors, "bytes": verdict.bytes, **asdict(verdict.report)}
    return row


def _verdict(case: Case, may_be_part: bool) -> tuple[Verdict, Part | None]:
    try:
        return check_case(case), None
    except RequestError as error:
        if error.code != TOO_LARGE or not may_be_part:
            raise
        return check_part(case)


def _line(row: dict[str, Any]) -> str:
    text = printable(row["text"])
    if "bytes" in row:
        of = f"{text}: " if text else ""
        text = (
            f"{of}{row['descriptors']:,} descriptors, {row['bytes']:,} bytes read ({row['excess']:,} after the last "
            f"token), {row['zeroed']:,} zeroed, {row['untouched']:,} untouched"
        )
    return f"{row['verdict']:<10} {printable(row['case'])}: {text}"
